"""What `routed` is compared with: the dense network, whose attention does not see the routed tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from routed import Route, routed
from routed.nested import mapped
from routing_module import resolve_routes

BATCH, N = 3, 16
# A route of one block, one across the middle, where text may join the tokens, and one that begins behind it.
THREE = [Route(0, 0, 0.25), Route(1, 2, 0.5), Route(3, 3, 0.75)]


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Case:
    """A network, the inputs of a batch, and where in a sequence the n tokens are that may leave.

    None of it knows how `routed` works. In a sequence, they are the last but `behind`, or begin at `first`, which may
    be a place for each sample.
    """

    model: nn.Module
    inputs: dict[str, Any]
    blocks: list[nn.Module]
    n: int = N
    first: int | list[int] | None = None
    behind: int = 0

    def call(self, model: nn.Module | None = None, **inputs: Any) -> Tensor:
        out = (self.model if model is None else model)(**self.inputs | inputs)
        out = getattr(out, "sample", out)
        return torch.stack(out) if isinstance(out, list) else out

    def places(self, keep: Tensor, length: int) -> Tensor:
        """Spreads a mask (b, n) of the tokens over a sequence (b, length), whose other tokens are all kept."""
        first = max(0, length - self.n - self.behind)
        if self.first is not None and length != self.n + self.behind:
            first = self.first
        spread = torch.ones(len(keep), length, dtype=torch.bool)
        for b, row in enumerate(keep):
            place = first if isinstance(first, int) else first[b]
            spread[b, place:place + self.n] = row
        return spread


def streams(value: Any, n: int) -> list[Tensor]:
    """Lists the tensors (B, at least n, D) among the arguments of a block, or in what it returns."""
    if isinstance(value, Tensor):
        return [value] if value.ndim == 3 and value.shape[1] >= n else []
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [stream for part in parts for stream in streams(part, n)]


@contextmanager
def unseen(case: Case, routes: list[Route], ids_keep: list[Tensor]) -> Iterator[None]:
    """The dense network where no token sees those on a route, which behind it have the value they had before it."""
    real, keep, before, calls, hooks = F.scaled_dot_product_attention, None, None, 0, []

    def attend(query, key, value, attn_mask=None, **options):
        nonlocal calls
        if keep is not None and key.shape[-2] >= case.n:
            # some codes attend sample by sample
            rows = keep if len(key) == BATCH else keep[calls % BATCH][None]
            calls += len(key) != BATCH
            seen = case.places(rows, key.shape[-2])[:, None, None]
            if attn_mask is None or attn_mask.dtype == torch.bool:
                attn_mask = seen if attn_mask is None else seen & attn_mask
            else:
                attn_mask = attn_mask.masked_fill(~seen, -torch.inf)
        return real(query, key, value, attn_mask=attn_mask, **options)

    def start(ids, args, kwargs):
        nonlocal keep, before
        keep = torch.zeros(BATCH, case.n, dtype=torch.bool).scatter(1, ids, True)
        before = streams([args, kwargs], case.n)[0]

    def end(out):
        nonlocal keep
        x = streams(out, case.n)[0]
        left, were = (~case.places(torch.zeros_like(keep), length) for length in (x.shape[1], before.shape[1]))
        back = x.masked_scatter(left[..., None], before[were].to(x.dtype))
        back = torch.where(case.places(keep, x.shape[1])[..., None], x, back)
        keep = None
        return mapped(lambda part: back if part is x else part, out)

    for route, ids in zip(resolve_routes(routes, len(case.blocks)), ids_keep, strict=True):
        hooks.append(case.blocks[route.start_layer_idx].register_forward_pre_hook(
            lambda _, args, kwargs, ids=ids: start(ids, args, kwargs), with_kwargs=True))
        hooks.append(case.blocks[route.end_layer_idx].register_forward_hook(lambda _, args, out: end(out)))
    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = real
        for hook in hooks:
            hook.remove()


def assert_exact(case: Case, routes: list[Route] = THREE, tolerance: float = 1e-5, **options: Any) -> tuple:
    """All tokens and gradients are those of the oracle; returns the ids of kept tokens and the gradients."""
    with routed(case.model, routes, **options) as routing:
        out = case.call()
    assert options.get("ordered") or routing.trials
    assert all(row.deviation < 1e-5 < row.tolerance for row in routing.trials)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    found = gradients(case.model)
    with unseen(case, routes, routing.ids_keep):
        expected = case.call()
    assert (out - expected).abs().max() <= tolerance * max(1, float(expected.detach().abs().max()))
    (expected * weight).sum().backward()
    assert_close(found, gradients(case.model), 3 * tolerance)       # gradients are sums whose order differs
    return routing.ids_keep, found


def gradients(model: nn.Module) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 3e-5) -> None:
    """Compares gradients relative to the largest of the network, as rounding differs between processors."""
    assert a.keys() == b.keys()
    scale = max(1.0, *(float(gradient.abs().max()) for gradient in b.values()))
    for name in a:
        assert (a[name] - b[name]).abs().max() <= tolerance * scale, name


def is_routed(model: nn.Module) -> bool:
    return any("_routed" in vars(module) for module in model.modules())


def refused(model, routes, call=lambda: None, **options) -> str:
    """The message of the error that a network, its routes or a call of it raises."""
    with pytest.raises(ValueError) as error, routed(model, routes, **options):
        call()
    assert not is_routed(model)
    message = str(error.value)
    del error                   # torch ends a checkpoint that broke off when its frame is freed
    return message
