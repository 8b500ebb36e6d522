"""Weights and their records: checkpoints, files of other code, autoencoders -> networks to sample and decode with."""
