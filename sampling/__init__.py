"""Seeds -> images: how a network is sampled, and what is written of it."""
