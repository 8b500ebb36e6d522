"""Routes the tokens of other people's networks: `from routed import routed, Route`. Needs only torch."""

from routed.families import Blocks, Family
from routed.passes import probe, routed
from routed.trial import Trial
from routing_module import Route, Router

__all__ = ["Blocks", "Family", "Route", "Router", "Trial", "probe", "routed"]
