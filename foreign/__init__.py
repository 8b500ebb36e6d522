"""Other people's networks: routed from outside, and their weights."""
