"""Seeds -> images: how a network is drawn from, and what is written of it."""
