"""Images -> features -> scores against a reference, and the record of them."""
