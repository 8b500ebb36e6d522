"""CUDA graphs of a training step's forward and backward pass, each started by one call of the host.

Without them the host starts hundreds of kernels in a step, which takes longer than a GPU needs for small networks or
few images. torch.compile would record a graph for each block and direction, and those take the host half as long.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from objectives import DiffusionLoss

# The modes of torch.compile that ask for CUDA graphs, and the mode that compiles the blocks inside our graphs.
CUDA_GRAPHS = {"reduce-overhead": None, "max-autotune": "max-autotune-no-cudagraphs"}
WARMUP = 3      # passes before recording, which compile and choose kernels


class Recorded(nn.Module):
    """An objective whose passes are recorded once for each of its phases, and then replayed.

    It returns the same as the objective, with the same random numbers; buffers must be changed in place. A replay
    overwrites the last one's losses and terms and, without `copies`, its gradients. Gradients of several parts are
    added up, so they must be copies.
    """

    def __init__(self, objective: DiffusionLoss, copies: bool):
        super().__init__()
        self.objective, self.copies = objective, copies
        self.passes: dict[tuple, Passes] = {}
        self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()  # phases share memory

    def forward(self, x: Tensor, y: Tensor, **arrays: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        key = self.objective.phase, *arrays
        if key not in self.passes:
            self.passes[key] = Passes(self, {"x": x, "y": y, **arrays})
        passes = self.passes[key]
        return Replay.apply(passes, (x, y, *arrays.values()), *passes.trained), passes.terms


class Passes:
    """A forward and a backward pass of a recorded objective over inputs of fixed shapes, by name."""

    def __init__(self, recorded: Recorded, inputs: Mapping[str, Tensor]):
        device, objective, self.copies = inputs["x"].device, recorded.objective, recorded.copies
        self.inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        self.trained = [p for p in objective.parameters() if p.requires_grad]
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Checks this thread alone, as the one that reads data ahead may pin memory meanwhile.
        capture = partial(torch.cuda.graph, pool=recorded.pool, stream=recorded.stream,
                          capture_error_mode="thread_local")
        casts = torch.autocast(device.type, torch.get_autocast_dtype(device.type),
                               torch.is_autocast_enabled(device.type), cache_enabled=False)
        buffers = {buffer: buffer.clone() for buffer in objective.buffers()}
        with torch.random.fork_rng([device]), casts:
            recorded.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(recorded.stream):
                for _ in range(WARMUP):
                    torch.autograd.grad(objective(**self.inputs)[0].sum(), self.trained, allow_unused=True)
            torch.cuda.current_stream().wait_stream(recorded.stream)
            for buffer, before in buffers.items():  # undoes what the warm-up has counted in them
                buffer.copy_(before)
            with capture(self.forward):
                losses, terms = objective(**self.inputs)
            self.loss_gradients = torch.ones_like(losses)
            with capture(self.backward):
                self.gradients = torch.autograd.grad(losses, self.trained, self.loss_gradients, allow_unused=True)
        self.losses, self.terms = losses.detach(), {name: term.detach() for name, term in terms.items()}


class Replay(torch.autograd.Function):
    """Replays passes over other arguments: the forward one now, the backward one when autograd asks for gradients."""

    @staticmethod
    def forward(ctx: object, passes: Passes, arguments: tuple[Tensor, ...], *trained: Tensor) -> Tensor:
        ctx.passes = passes
        for place, argument in zip(passes.inputs.values(), arguments, strict=True):
            place.copy_(argument)
        passes.forward.replay()
        return passes.losses.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: object, loss_gradients: Tensor) -> tuple[Tensor | None, ...]:
        passes = ctx.passes
        passes.loss_gradients.copy_(loss_gradients)
        passes.backward.replay()
        hand_out = torch.Tensor.clone if passes.copies else torch.Tensor.detach
        return None, None, *(None if gradient is None else hand_out(gradient) for gradient in passes.gradients)


def record_passes(
    objective: DiffusionLoss, how: bool | str, device: torch.device, num_parts: int,
) -> nn.Module:
    """Returns the objective for `speed.replicate`: itself or, on a GPU with a mode of CUDA_GRAPHS, recorded."""
    if device.type != "cuda" or how not in CUDA_GRAPHS:
        return objective
    return Recorded(objective, copies=num_parts > 1)
