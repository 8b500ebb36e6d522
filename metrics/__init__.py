"""Metrics of your own: `metrics/<name>.py` declares one function, and metrics=[<name>] scores by it.

It maps the "pool" features of the images (N, D) and of the reference's images (M, D), float32, to a number.
"""

BASE = None
