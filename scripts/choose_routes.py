"""What the presets of routes= save, and which routes near the paper's reach a speed-up.

The FLOP ratio is dense over routed. Routes are ranked by the paper's ablations of DiT-B/2 after 400,000 steps.
Commands: configs/choose_routes.yaml, docs/routing.md.
"""

import sys
from collections.abc import Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dit import DiT, multiply_adds
from routing_module import Route, resolve_routes
from runtime.command import command
from runtime.schema import CONFIGS, Count, NonEmptyList, Settings, Tokens, as_text, refuse
from runtime.typed import read_yaml
from scripts.benchmark import PROGRAM, network_of, run_apart
from scripts.presentation import table
from training.settings import ModelSettings
from weights.records import build_network

# FID of B/2 after 400K steps without guidance (arXiv 2501.04765): by selection ratio, on the route 2→8; by the block
# where a route to block 8 starts; by the end of a route from block 0, counted from the depth 12. Ratio 0 is dense.
# In the tables of the last two, which are probably of 5,000 images, the dense network has 49.89.
BY_RATIO = {0.0: 43.47, 0.25: 26.50, 0.5: 21.34, 0.75: 49.29}
BY_START = {0: 33.58, 1: 28.21, 2: 28.02, 3: 33.58, 4: 35.69, 5: 45.05, 6: 50.71}
BY_END = {-8: 57.12, -4: 33.58, -2: 57.36}
# What lies next to the best of these, and covers at least half of the blocks.
STARTS, ENDS, RATIOS = (1, 2, 3), (-5, -4, -3), (0.5, 0.45, 0.4, 0.35, 0.3, 0.25)
WHY = f"""\
"FID lost" adds up what start, end and ratio cost in the paper's ablations of DiT-B/2 (12 blocks, 256 tokens) at 400K
steps, with straight lines between the numbers, against 2→(depth - 4) at 0.5. FID, lower is better:
* ratio, on the route 2→8: {", ".join(f"{ratio:g} → {fid:.2f}" for ratio, fid in BY_RATIO.items())};
* start, of a route to block 8: {", ".join(f"{start} → {fid:.2f}" for start, fid in BY_START.items())};
* end, of a route from block 0: {", ".join(f"depth - {-end} → {fid:.2f}" for end, fid in BY_END.items())}.
So the ranking is for B/2 at 400K steps; for other data, sizes and lengths of training it is a guess. XL/2 has 7.38 for
the route 2→24 (depth - 4) and 18.81 for one from about 4 to 18."""


class ChoiceSettings(Settings):
    """configs/choose_routes.yaml."""

    speedup: Annotated[float, Field(gt=1, le=1000)] | None
    tokens: NonEmptyList[Tokens]
    count: Count
    measure: bool
    benchmark: dict
    model: ModelSettings


@cache
def multiply_adds_of_block(net: DiT, ratio: float) -> int:
    """Counts the multiply-adds of a network whose route covers one block."""
    return sum(multiply_adds(net, (Route(0, 0, ratio),)))


def flop_ratio(net: DiT, routes: tuple[Route, ...]) -> float:
    """Returns the multiply-adds of a dense network over those with resolved `routes`, block by block."""
    dense = multiply_adds_of_block(net, 0.0)
    saved = sum((route.end_layer_idx - route.start_layer_idx + 1)
                * (dense - multiply_adds_of_block(net, route.selection_ratio)) for route in routes)
    return dense / (dense - saved)


def presets(depth: int) -> dict[str, tuple[Route, ...]]:
    """Reads the presets of routes=, for a network of `depth` blocks."""
    found = {}
    for path in sorted((CONFIGS / "presets" / "routes").glob("*.yaml")):
        found[path.stem] = resolve_routes([Route(**route) for route in read_yaml(path)["routes"]], depth)
    return found


def fid_lost(route: Route, depth: int) -> float:
    """Adds up what start, end and ratio of a route cost in FID by the paper's ablations, in points of B/2 at 400K."""
    values = (route.start_layer_idx, route.end_layer_idx - depth, route.selection_ratio)
    return sum(float(np.interp(value, list(table), list(table.values()))) - min(table.values())
               for value, table in zip(values, (BY_START, BY_END, BY_RATIO), strict=True))


def candidates(depth: int) -> list[Route]:
    """Lists the routes near the paper's in a network of `depth` blocks, the best by its ablations first."""
    routes = [Route(start, end + depth, ratio) for start, end, ratio in product(STARTS, ENDS, RATIOS)
              if 2 * (end + depth - start + 1) >= depth]
    return sorted(routes, key=lambda route: fid_lost(route, depth))


def step_ratio(cfg: ChoiceSettings, routes: tuple[Route, ...]) -> float:
    """Times training steps, dense and routed in turn; returns the median over rounds of dense over routed seconds."""
    network = cfg.model.model_dump(exclude={"name", "init", "routes"}, exclude_none=True)
    as_dicts = [", ".join(f"{key}: {as_text(value)}" for key, value in vars(route).items()) for route in routes]
    settings = ["mode=train", f"tokens={cfg.tokens[0]}",
                *(f"{key}={as_text(value)}" for key, value in {**network, **cfg.benchmark}.items()),
                f"routes=[{', '.join(f'{{{route}}}' for route in as_dicts)}]"]
    return run_apart([sys.executable, PROGRAM, *settings])["ratios"]["tread over dit"]


def check_settings(cfg: ChoiceSettings, cli_overrides: Mapping[str, str]) -> ChoiceSettings:
    """Returns the settings; raises ValueError for some that would change nothing."""
    refuse(cli_overrides, "model.routes", "model.selection", "model.l1_reg", "model.inverse",
           why="this command chooses routes")
    if not cfg.measure:
        refuse(cli_overrides, "benchmark", why="nothing is timed without measure=true")
    if cfg.speedup is None:
        refuse(cli_overrides, "count", why="all presets are listed without speedup=")
    return cfg


@command("choose_routes", ChoiceSettings, check=check_settings)
def main(cfg: ChoiceSettings) -> None:
    with torch.device("meta"):
        nets = [build_network(network_of(cfg.model, tokens) | {"routes": []}) for tokens in cfg.tokens]
    depth = len(nets[0].blocks)
    size = f"{cfg.model.backbone_type}, {depth} blocks"
    if cfg.speedup is None:
        chosen = dict(sorted(presets(depth).items(), key=lambda preset: flop_ratio(nets[0], preset[1])))
        print(f"{size}: the presets of train.py routes=…\n")
    else:
        found = candidates(depth)
        if not found:
            raise ValueError(f"{size}: no route from near block 2 to near depth - 4 covers half of the blocks. Set "
                             f"model.routes yourself, or use a deeper network.")
        reach = [route for route in found if flop_ratio(nets[0], (route,)) >= cfg.speedup]
        if reach:
            print(f"{size}: routes with a FLOP ratio of at least {cfg.speedup:g} at {cfg.tokens[0]} tokens, the best "
                  f"first\n")
        else:
            reach = [max(found, key=lambda route: flop_ratio(nets[0], (route,)))]
            print(f"{size}: no route near the paper's has a FLOP ratio of {cfg.speedup:g} at {cfg.tokens[0]} tokens. "
                  f"The largest is {flop_ratio(nets[0], (reach[0],)):.2f}:\n")
        chosen = {str(rank): (route,) for rank, route in enumerate(reach[: cfg.count], start=1)}
    rows = []
    for name, routes in chosen.items():
        row = {"routes=" if cfg.speedup is None else "": name, "route": ", ".join(map(str, routes))}
        row |= {f"FLOP ratio at {tokens}": f"{flop_ratio(net, routes):.2f}"
                for tokens, net in zip(cfg.tokens, nets, strict=True)}
        if cfg.speedup is not None:
            row["FID lost"] = f"{fid_lost(routes[0], depth):.1f}"
        if cfg.measure:
            row[f"measured at {cfg.tokens[0]}"] = f"{step_ratio(cfg, routes):.2f}"
        rows.append(row)
    print(table(rows[0], [row.values() for row in rows]))
    if cfg.measure:
        print("\nMeasured: seconds of a dense training step over a routed one's, in turns, the median of the rounds.")
    if cfg.speedup is not None:
        route = chosen["1"][0]
        print(f"\n{WHY}\n\nThe first one: 'model.routes=[{{selection_ratio: {route.selection_ratio}, "
              f"start_layer_idx: {route.start_layer_idx}, end_layer_idx: {route.end_layer_idx - depth}}}]'")


if __name__ == "__main__":
    main()
