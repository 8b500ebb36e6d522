"""Extractors of your own: `extractors/<name>.py` declares one function, and features=<name> scores by it.

It maps weights (a path or None), their expected SHA-256 (or None) and a device to a `scoring.features.Extractor`.
"""

BASE = None
