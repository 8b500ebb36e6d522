"""Other people's networks on a route: `from routed import routed, Route`. Needs torch alone."""

from routed.families import Blocks, Family
from routed.passes import routed
from routing_module import Route, Router

__all__ = ["Blocks", "Family", "Route", "Router", "routed"]
