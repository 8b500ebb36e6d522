"""Commands of this project; a package, so that an installed one of the same name does not come first."""
