"""Weights and their records: checkpoints, LoRA, other code bases' files -> a network to sample."""
