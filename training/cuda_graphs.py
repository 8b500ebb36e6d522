"""CUDA graphs of a training step's forward and backward pass, each of which the host starts by one call.

Without them the host starts hundreds of kernels in a step, which takes longer than a GPU needs for small networks or
few images. torch.compile would record a graph for each block and direction, and those take the host half as long.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from objectives import DiffusionLoss, Objective

# The modes of torch.compile that stand for them, and how blocks are compiled inside of ours.
CUDA_GRAPHS = {"reduce-overhead": None, "max-autotune": "max-autotune-no-cudagraphs"}
WARMUP = 3      # passes before recording, which compile and choose kernels


class Recorded(nn.Module):
    """An objective whose passes are recorded once for each of its phases, and then replayed.

    It returns what the objective does, with the same random numbers; buffers must be changed in place. A replay
    overwrites the losses, the terms and, without `copies`, the gradients of the last one. With several parts gradients
    add up, so they must be copies.
    """

    def __init__(self, objective: Objective | DiffusionLoss, copies: bool):
        super().__init__()
        self.objective, self.copies = objective, copies
        self.passes: dict[tuple, Passes] = {}
        self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()  # phases share activations

    def forward(self, x: Tensor, y: Tensor, **arrays: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        key = self.objective.phase, *arrays
        if key not in self.passes:
            self.passes[key] = Passes(self, {"x": x, "y": y, **arrays})
        passes = self.passes[key]
        return Replay.apply(passes, (x, y, *arrays.values()), *passes.trained), passes.terms


class Passes:
    """A forward and a backward pass of a recorded objective over arguments of given shapes, by name."""

    def __init__(self, recorded: Recorded, given: Mapping[str, Tensor]):
        device, objective, self.copies = given["x"].device, recorded.objective, recorded.copies
        self.given = {name: tensor.clone() for name, tensor in given.items()}
        self.trained = [p for p in objective.parameters() if p.requires_grad]
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # By thread, as another one may pin the memory of data that it has read ahead.
        capture = partial(torch.cuda.graph, pool=recorded.pool, stream=recorded.stream,
                          capture_error_mode="thread_local")
        casts = torch.autocast(device.type, torch.get_autocast_dtype(device.type),
                               torch.is_autocast_enabled(device.type), cache_enabled=False)
        buffers = {buffer: buffer.clone() for buffer in objective.buffers()}
        with torch.random.fork_rng([device]), casts:
            recorded.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(recorded.stream):
                for _ in range(WARMUP):
                    torch.autograd.grad(objective(**self.given)[0].sum(), self.trained, allow_unused=True)
            torch.cuda.current_stream().wait_stream(recorded.stream)
            for buffer, before in buffers.items():  # which passes of a warm-up may count
                buffer.copy_(before)
            with capture(self.forward):
                losses, terms = objective(**self.given)
            self.of_losses = torch.ones_like(losses)
            with capture(self.backward):
                self.gradients = torch.autograd.grad(losses, self.trained, self.of_losses, allow_unused=True)
        self.losses, self.terms = losses.detach(), {name: term.detach() for name, term in terms.items()}


class Replay(torch.autograd.Function):
    """Replays passes over other arguments: the forward one now, the backward one when autograd asks for gradients."""

    @staticmethod
    def forward(ctx: object, passes: Passes, arguments: tuple[Tensor, ...], *trained: Tensor) -> Tensor:
        ctx.passes = passes
        for given, argument in zip(passes.given.values(), arguments, strict=True):
            given.copy_(argument)
        passes.forward.replay()
        return passes.losses.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: object, of_losses: Tensor) -> tuple[Tensor | None, ...]:
        passes = ctx.passes
        passes.of_losses.copy_(of_losses)
        passes.backward.replay()
        own = torch.Tensor.clone if passes.copies else torch.Tensor.detach
        return None, None, *(None if gradient is None else own(gradient) for gradient in passes.gradients)


def record_passes(
    objective: Objective | DiffusionLoss, how: bool | str, device: torch.device, num_parts: int,
) -> nn.Module:
    """Returns the objective for `speed.replicate`: itself or, on a GPU in a mode of CUDA_GRAPHS, recorded."""
    if device.type != "cuda" or how not in CUDA_GRAPHS:
        return objective
    return Recorded(objective, copies=num_parts > 1)
