"""Weights, inputs and random numbers that both sides of a comparison with published code evaluate, without our code."""

import math
import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def phase(i: float, k: float) -> float:
    # A chirp: 0.7·i alone would make every weight matrix of rank 2, and such a test would see little.
    return 0.7 * i + 1.3 * k + 0.001 * i * i


def wave(shape: tuple[int, ...], k: float = 0, amplitude: float = 1) -> Tensor:
    """Returns amplitude·sin(phase(i, k)) at flat index i, computed in float64 and cast to float32."""
    i = torch.arange(math.prod(shape), dtype=torch.float64)
    return (amplitude * torch.sin(phase(i, k))).reshape(shape).float()


def amplitude_of(weight: Tensor) -> float:
    return math.sqrt(2 / weight[0].numel()) if weight.ndim > 1 else 0.1


@torch.no_grad()
def fill(net: nn.Module) -> nn.Module:
    """Gives every weight but the fixed pos_embed its closed form; k is the key's place in alphabetical order."""
    weights = {key: weight for key, weight in net.state_dict().items() if key != "pos_embed"}
    for k, key in enumerate(sorted(weights)):
        weights[key].copy_(wave(weights[key].shape, k, amplitude_of(weights[key])))
    return net.eval()


@torch.no_grad()
def begin(net: nn.Module) -> nn.Module:
    """Fills a network and shrinks its weights, so that sixty steps move them by as much as their norm."""
    for key, weight in fill(net).state_dict().items():
        if key != "pos_embed":
            weight.mul_(0.35)
    return net


def checksum(x: Tensor) -> float:
    """Projects x on a wave: it moves when any value moves or two change places."""
    return (x.double() * wave(tuple(x.shape), 7).double()).sum().item()


# ---- training: the same data and the same random numbers -----------------------------------------------------------


def numbers(name: str, n: int, count: int, distribution: str) -> Tensor:
    """Returns `count` numbers, the n-th ones of their name; NumPy keeps the streams of RandomState as they are."""
    stream = np.random.RandomState(zlib.crc32(f"{name} {count} {n}".encode()))
    return torch.from_numpy((stream.random_sample if distribution == "rand" else stream.standard_normal)(count)).float()


def data_set(count: int = 64, shape: tuple[int, int, int] = (4, 8, 8), num_classes: int = 10) -> tuple[Tensor, Tensor]:
    """Returns latents (count, C, h, w), exact in float16, of deviation 0.5 around a mean of their class, and labels."""
    y = torch.arange(count) % num_classes
    x = 0.4 * numbers("latents", 0, count * math.prod(shape), "randn").view(count, *shape)
    return (x + 0.3 * wave((num_classes, *shape), 3)[y]).half().float(), y


def spread_of(x: Tensor) -> Tensor:
    """Returns standard deviations like latents x, for those that are stored as moments; exact in float16."""
    return (0.05 + 0.05 * wave(tuple(x.shape), 5).abs()).half().float()


def pictures(count: int = 64, side: int = 256) -> Tensor:
    """Returns images (count, 3, side, side) uint8, of 16 × 16 squares."""
    squares = (127.5 + 100 * wave((count, 3, 16, 16), 9)).to(torch.uint8)
    return F.interpolate(squares, (side, side))


class Encoder(nn.Module):
    """Makes tokens (B, 16, 24) of normalised images (B, 3, H, W), in the place of a vision network."""

    def forward(self, images: Tensor) -> Tensor:
        patches = F.unfold(F.adaptive_avg_pool2d(images.float(), 16), 4, stride=4)       # (B, 48, 16)
        return torch.tanh(patches.transpose(1, 2) @ wave((48, 24), 11))


class Replayed:
    """torch.rand, torch.randn and torch.randn_like, whose n-th numbers of a name are the same in whichever code asks.

    `names` are those of the functions that ask, and what the numbers are there; others get torch's own. A rank above 0
    has numbers of its own.
    """

    functions = ("rand", "randn", "randn_like")

    def __init__(self, names: Mapping[str, str]):
        self.names, self.calls, self.real = names, Counter(), {name: getattr(torch, name) for name in self.functions}

    def replace(self, setattr=setattr) -> None:
        for name in self.functions:
            setattr(torch, name, partial(self.draw, name))

    def draw(self, function: str, *arguments, dtype: torch.dtype | None = None, **rest) -> Tensor:
        name = self.names.get(sys._getframe(1).f_code.co_name)
        is_like = function == "randn_like"
        name = "noise" if name == "level" and is_like else name
        if name is None:
            return self.real[function](*arguments, dtype=dtype, **rest)
        n = self.calls[name]
        self.calls[name] += 1
        name = f"{name} of rank {rank}" if (rank := os.environ.get("RANK", "0")) != "0" else name
        distribution = "rand" if function == "rand" else "randn"
        shape = (arguments[0] if is_like else torch.empty(*arguments, device="meta")).shape
        dtype = dtype or (arguments[0].dtype if is_like else torch.float32)
        return numbers(name, n, math.prod(shape), distribution).view(shape).to(dtype)


def in_order(order: list[list[int]]) -> Callable:
    """Returns latents.loader._plan for global batches of these rows, each cut into equal parts for the ranks."""
    def plan(latents: object, batch_size: int, seed: int, rank: int, world: int, start: int) -> Iterator[tuple]:
        share = batch_size // world
        return ((np.array(ids[rank * share :][:share]), None) for ids in order)

    return plan


def values_of(weight: Tensor, count: int = 4) -> list[float]:
    """Returns a checksum of a weight, and some of its values at equal distances."""
    at = torch.linspace(0, weight.numel() - 1, min(count, weight.numel())).long()
    return [checksum(weight), *weight.detach().flatten()[at].tolist()]
