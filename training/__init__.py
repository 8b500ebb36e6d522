"""A training run: its settings, parts and folder; optimizers; what makes a step fast."""
