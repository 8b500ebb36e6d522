"""Diffusions of your own: `diffusions/<name>.py` declares one class, as `EDM` in edm.py and `RF` in rf.py are.

configs/diffusion/<name>.yaml has its name and settings, and diffusion=<name> trains with it.
"""

BASE = object
