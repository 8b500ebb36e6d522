"""Guidances of your own: `guidances/<name>.py` declares one dataclass below `guidance.Guidance`.

kind.name=<name> samples with it. It replaces `combine`; its settings are fields with kw_only=True.
"""

from guidance import Guidance

BASE = Guidance
