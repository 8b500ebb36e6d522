"""Other people's networks, routed from outside."""
