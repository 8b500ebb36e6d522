"""Token routing of TREAD (arXiv 2501.04765): a random share of the tokens skips a span of blocks and then rejoins."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise, product
from typing import Literal, get_args

import torch
from torch import Tensor

Selection = Literal["random", "grid"]     # how the kept tokens are chosen, see `Router`


@dataclass(frozen=True)
class Route:
    """A share of the tokens skips blocks start_layer_idx..end_layer_idx, both inclusive.

    Before block `start_layer_idx`, `selection_ratio` of the tokens are routed. After block `end_layer_idx` they rejoin
    at their positions with the value they had before block `return_from`. None means the start, so that they return
    unchanged. Negative indices count from the last block. In the recipe of the paper's first version x_T is 1, and a
    token rejoins as x_T · (its value before block 0) + x_D_last · (its value before block `return_from`). In a fraction
    `path_drop` of the samples, all tokens return as if they had been routed.
    """

    start_layer_idx: int
    end_layer_idx: int
    selection_ratio: float
    x_T: float = 0.0
    x_D_last: float = 1.0
    return_from: int | None = None
    path_drop: float = 0.0

    def __str__(self) -> str:
        back = "" if self.return_from is None else f", back from before block {self.return_from}"
        if (self.x_T, self.x_D_last) != (0, 1):
            back += f", back as {self.x_T:g}·x_T + {self.x_D_last:g}·x_D_last"
        if self.path_drop:
            back += f", path drop {self.path_drop}"
        return f"{self.start_layer_idx}→{self.end_layer_idx} at selection ratio {self.selection_ratio}{back}"

    @property
    def is_identity(self) -> bool:
        """True if tokens rejoin with the value they were routed with."""
        return (self.x_T, self.x_D_last, self.return_from) == (0, 1, None)

    def returning(self, before: Mapping[int, Tensor]) -> Tensor:
        """Returns the values (B, N, D) that tokens rejoin with; `before[i]` are all tokens before block i."""
        left = before[self.start_layer_idx if self.return_from is None else self.return_from]
        return left if (self.x_T, self.x_D_last) == (0, 1) else self.x_T * before[0] + self.x_D_last * left

    def draw_dropped(self, count: int, device: torch.device) -> tuple[Tensor, ...]:
        """Samples for `end_route` whether each path is dropped, (count,) bool; () without path drop."""
        return (torch.rand(count, device=device) < self.path_drop,) if self.path_drop else ()

    def plain(self) -> dict[str, float | None]:
        """Returns the route's keywords for a record, without those at their default."""
        return {part.name: value for part in fields(self) if (value := getattr(self, part.name)) != part.default}


def resolve_routes(routes: Iterable[Route], depth: int) -> tuple[Route, ...]:
    """Returns the routes in order of depth with non-negative indices, for a network of `depth` blocks.

    Raises ValueError, naming the route and the depth, for a route that leaves the network, runs backwards, overlaps
    another, has a selection ratio or path drop outside [0, 1), or returns from after its start or from inside another.
    """
    resolved = []
    for route in routes:
        start, end = (i + depth if i < 0 else i for i in (route.start_layer_idx, route.end_layer_idx))
        source = route.return_from
        source = source + depth if source is not None and source < 0 else source
        for is_right, rule in (
            (0 <= start < depth and 0 <= end < depth, f"leaves it: indices lie in [{-depth}, {depth - 1}]"),
            (start <= end, f"runs backwards, from block {start} to block {end}"),
            (source is None or 0 <= source <= start,
             f"has return_from={route.return_from}, which must be a block up to its start, {start}"),
            (0 <= route.selection_ratio < 1,
             f"has selection_ratio={route.selection_ratio}, a share of tokens, which must lie in [0, 1)"),
            (0 <= route.path_drop < 1,
             f"has path_drop={route.path_drop}, a share of samples, which must lie in [0, 1)"),
        ):
            if not is_right:
                raise ValueError(f"In a network with {depth} blocks, route {route} {rule}.")
        resolved.append(replace(route, start_layer_idx=start, end_layer_idx=end, return_from=source))
    resolved.sort(key=lambda route: route.start_layer_idx)
    for first, second in pairwise(resolved):
        if second.start_layer_idx <= first.end_layer_idx:
            raise ValueError(f"In a network with {depth} blocks, route {second} overlaps route {first}: "
                             f"start it at block {first.end_layer_idx + 1} or later.")
    for route, other in product(resolved, resolved):
        if route.return_from is not None and other.start_layer_idx < route.return_from <= other.end_layer_idx:
            raise ValueError(f"In a network with {depth} blocks, route {route} has return_from="
                             f"{route.return_from}, which lies inside route {other}, where some tokens are absent.")
    return tuple(resolved)


@dataclass(frozen=True)
class RouteSchedule:
    """The routes of each step of training, a function of (seed, step): the same on all ranks and after resuming.

    A run starts with `routes`, and each of `changes` replaces them from its step on. The selection ratio is 0 before
    step `dense_before` (on-ramp) and from step `dense_after` on (off-ramp), but path drop continues. A change to no
    routes has the same effect. With `selection_ratios` each step samples one of them for all its routes. Raises
    ValueError for changes that are not in order of their steps.
    """

    routes: tuple[Route, ...]
    dense_before: int | None = None
    dense_after: int | None = None
    selection_ratios: tuple[float, ...] = ()
    changes: tuple[tuple[int, tuple[Route, ...]], ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        self.phases  # noqa: B018, raises for a wrong order

    @cached_property
    def phases(self) -> dict[int, tuple[tuple[Route, ...], ...]]:
        """The routes that a step chooses from, by the first step of each phase."""
        def at_ratios(routes: tuple[Route, ...], *ratios: float) -> tuple[tuple[Route, ...], ...]:
            return tuple(tuple(replace(route, selection_ratio=ratio) for route in routes) for ratio in ratios)

        changes, latest = [(self.dense_before or 0, self.routes), *self.changes], self.routes
        phases = [(0, at_ratios(latest, 0.0))] if self.dense_before else []
        for start, routes in changes:
            latest = routes or at_ratios(latest, 0.0)[0]
            sampled = at_ratios(latest, *self.selection_ratios) if routes else ()
            phases.append((start, sampled or (latest,)))
        if self.dense_after is not None:
            phases.append((self.dense_after, at_ratios(latest, 0.0)))
        starts = [start for start, _ in phases]
        if any(later <= start for start, later in pairwise(starts)):
            raise ValueError(f"The routes change at steps {', '.join(map(str, starts[1:]))}: each change must come "
                             f"after the one before it. The order is dense_before, changes, dense_after.")
        return dict(phases)

    @property
    def every(self) -> tuple[tuple[Route, ...], ...]:
        """All routes that any step may use."""
        return tuple(routes for sampled in self.phases.values() for routes in sampled)

    def at(self, step: int) -> tuple[Route, ...]:
        """Returns the routes of a step, counted from 0."""
        sampled = self.phases[max(start for start in self.phases if start <= step)]
        number = int.from_bytes(hashlib.sha256(f"{self.seed} {step}".encode()).digest()[:8], "big")
        return sampled[number % len(sampled)]

    def counts(self, steps: int) -> Counter[tuple[Route, ...]]:
        """Counts how many of the first `steps` use each of the routes."""
        return Counter(map(self.at, range(steps)))

    def describe(self, start: int) -> str:
        """Names the routes of the phase that begins at step `start`, "none" if all tokens pass through every block."""
        sampled = [", ".join(str(route) for route in routes if route.selection_ratio or route.path_drop) or "none"
                   for routes in self.phases[start]]
        return " or ".join(sampled) + (", at random each step" if len(sampled) > 1 else "")

    def __str__(self) -> str:
        return "; ".join((f"from step {start} on " if start else "") + self.describe(start) for start in self.phases)


def stretches(active: Mapping[int, Route], depth: int) -> Iterator[tuple[range, int | None, Route | None]]:
    """Splits blocks 0 .. depth - 1, in order, into stretches on a route and stretches between routes.

    Yields the blocks of each stretch with the number and the route from `active`, or None and None between routes. A
    new stretch also begins at each block that a route returns from. If a route's selection ratio is 1, its stretch has
    no blocks. Raises ValueError for a route that `resolve_routes` has not resolved for `depth` blocks.
    """
    cuts, starting = {0, depth}, {}
    for r, route in active.items():
        start, end = route.start_layer_idx, route.end_layer_idx
        source = start if route.return_from is None else route.return_from
        if not 0 <= source <= start <= end < depth:
            raise ValueError(f"Route {route} is not resolved for a network of {depth} blocks: pass "
                             f"resolve_routes([route], {depth}), or the network's own net.routes.")
        cuts |= {source, start, end + 1}
        starting[start] = r, route
    for first, last in pairwise(sorted(cuts)):
        if first in starting:
            r, route = starting[first]
            yield range(first, first if route.selection_ratio == 1 else last), r, route
        else:
            yield range(first, last), None, None


@dataclass(eq=False)
class Router:
    """Chooses the tokens that are kept, extracts them, and puts them back. It has no parameters and no state.

    `selection` is "random", or "grid", which keeps one token of each 2 × 2 neighbours before it keeps a second of any.
    A subclass may have another `score`. Raises ValueError for other values.
    """

    selection: Selection = "random"

    def __post_init__(self) -> None:
        if self.selection not in get_args(Selection):
            raise ValueError(f"selection={self.selection} is none of {', '.join(get_args(Selection))}.")

    def check(self, routes: tuple[Route, ...], grid_size: float) -> None:
        """Raises ValueError if it cannot route a square grid of tokens on these routes."""
        if self.selection == "grid" and grid_size % 2:
            raise ValueError(f"selection=grid chooses among groups of 2 × 2 tokens of a square, and there are "
                             f"{grid_size**2:.0f} tokens: set selection=random, or another patch size or resolution.")

    def active_routes(self, routes: tuple[Route, ...], trained: tuple[Route, ...]) -> dict[int, Route]:
        """Returns the routes of a call that affect any token, by number; `trained` are the network's."""
        return {r: route for r, route in enumerate(routes) if route.selection_ratio > 0 or route.path_drop > 0}

    def get_mask(
        self, x: Tensor, selection_ratio: float | Fraction, noise: Tensor | None = None,
        keep_mask: Tensor | None = None,
    ) -> Tensor:
        """Samples the kept tokens of each sample without replacement, uniformly if selection is "random".

        x is (B, N, D); the result is ids_keep (B, K) int64 with K = N - int(N * selection_ratio), ascending, so that
        raster order is preserved. If all tokens are kept, nothing is sampled. `noise` (B, N) float32, uniform in [0,
        1), replaces new random numbers: the tokens with its K lowest values are kept. So with the same noise, a higher
        ratio keeps a subset of the tokens that a lower ratio keeps.
        Tokens where keep_mask (B, N) bool is True are always kept, as are those with negative noise (see `keep`).
        K does not change. Raises ValueError for a keep_mask on the CPU with more than K tokens in a sample. On a GPU
        the check would make the step wait, so there the surplus tokens are routed.
        """
        batch, num_tokens, _ = x.shape
        num_keep = num_tokens - int(num_tokens * selection_ratio)
        if num_keep == num_tokens:
            return torch.arange(num_tokens, device=x.device).expand(batch, -1)
        # float32 whatever the activations are: bfloat16 has 256 levels in [0, 1), and ties would favour some tokens.
        if noise is None:
            noise = torch.rand(batch, num_tokens, device=x.device, dtype=torch.float32)
        if keep_mask is not None:
            if torch.compiler.is_compiling():       # a compiled assertion does not wait
                assert keep_mask.sum(dim=1).max() <= num_keep, "keep_mask keeps more tokens than are kept: keep fewer."
            elif keep_mask.device.type == "cpu" and (most := int(keep_mask.sum(dim=1).max())) > num_keep:
                raise ValueError(f"keep_mask keeps {most} tokens of a sample, but at selection ratio {selection_ratio} "
                                 f"only {num_keep} of {num_tokens} are kept: lower the ratio to "
                                 f"{1 - most / num_tokens:.4g} or less, or keep fewer.")
            noise = self.keep(noise, keep_mask.to(noise.device, non_blocking=True))
        score = torch.where(noise < 0, noise * 1e30, self.score(x, noise))      # below every score
        return score.argsort(dim=1)[:, :num_keep].sort(dim=1).values

    def keep(self, noise: Tensor, keep_mask: Tensor) -> Tensor:
        """Lowers the noise of tokens that must be kept below 0, and so below the noise of all others."""
        return torch.where(keep_mask, noise - 1, noise)

    def score(self, x: Tensor, noise: Tensor) -> Tensor:
        """Returns a score for each token (B, N); the lowest are kept, after the tokens whose noise is negative."""
        return rank_in_group(noise) + noise if self.selection == "grid" else noise

    def start_route(self, x: Tensor, ids_keep: Tensor) -> Tensor:
        """Extracts the kept tokens: (B, N, D) and ids (B, K) to (B, K, D)."""
        return x.gather(1, ids_keep.unsqueeze(-1).expand(-1, -1, x.shape[-1]))

    def end_route(
        self, x_kept: Tensor, ids_keep: Tensor, original_x: Tensor, dropped: Tensor | None = None,
    ) -> Tensor:
        """Puts the kept tokens (B, K, D) back among the routed ones, whose values are those in original_x (B, N, D).

        In samples where `dropped` (B,) bool is True, all tokens have the values in original_x; it is for routes
        with path drop. The gradient of a routed token flows through this identity path.
        """
        x = original_x.scatter(1, ids_keep.unsqueeze(-1).expand(-1, -1, x_kept.shape[-1]), x_kept)
        return x if dropped is None else torch.where(dropped.view(-1, 1, 1), original_x, x)


def rank_in_group(noise: Tensor) -> Tensor:
    """Returns the rank of each token's noise (B, N) among the 2 × 2 tokens of its group in the square grid, 0 to 3."""
    half = math.isqrt(noise.shape[1]) // 2
    groups = noise.unflatten(1, (half, 2, half, 2)).transpose(2, 3).flatten(3)  # (B, N/4 as a grid, 4)
    ranks = groups.argsort(dim=-1).argsort(dim=-1)
    return ranks.unflatten(3, (2, 2)).transpose(2, 3).flatten(1)
