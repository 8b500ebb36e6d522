"""Routes the tokens of other people's networks: `from routed import routed, Route, Router`. Needs only torch."""

from routed.families import Blocks, Family, by_place, fewer, pairs
from routed.passes import Options, routed
from routed.trial import Trial
from routing_module import Route, Router

__all__ = ["Blocks", "Family", "Options", "Route", "Router", "Trial", "by_place", "fewer", "pairs", "routed"]
