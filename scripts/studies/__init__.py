"""Commands for one study or one machine."""
