"""Files of data that are damaged, lie, or mean harm, for every reader of them; what `scripts/fuzz.py` draws from."""

READERS = []
