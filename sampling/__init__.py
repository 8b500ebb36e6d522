"""Seeds -> images: how a network is sampled, and how images are written."""
