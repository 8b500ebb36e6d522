"""CUDA graphs of a training step: its forward pass, its backward pass, and the update of the weights.

Without them the host starts hundreds of kernels in a step, which takes longer than a GPU needs for small networks or
few images. torch.compile would record a graph for each block and direction, and those take the host half as long.
"""

import math
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from objectives import DiffusionLoss
from training.optimizers import update_weights

Compile = bool | Literal["reduce-overhead"]     # whether blocks are compiled; the last one asks for CUDA graphs, too
WARMUP = 3              # passes before recording, which compile and choose kernels
STRETCH = 128 * 2**20   # bytes of gradients that are sent while the next ones are computed
MODE = "thread_local"   # of a capture's checks: the thread that reads data ahead may pin memory meanwhile


class Recorded(nn.Module):
    """An objective whose passes are recorded once for each of its phases, and then replayed.

    It returns the same as the objective, with the same random numbers; buffers must be changed in place. A replay
    overwrites the last one's losses and terms and, without `copies`, its gradients. Gradients of several parts are
    added up, so they must be copies.
    """

    def __init__(self, objective: DiffusionLoss, copies: bool):
        super().__init__()
        self.objective, self.copies, self.stream = objective, copies, torch.cuda.Stream()
        self.stretch = STRETCH if torch.distributed.is_initialized() else math.inf
        self.passes: dict[tuple[Hashable, ...], Passes] = {}
        self.num_begun = 0  # phases of the routes

    def forward(self, x: Tensor, y: Tensor, **arrays: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        num_begun = sum(start <= self.objective.step for start in self.objective.schedule.phases)
        if num_begun > self.num_begun:  # frees the memory of passes whose routes have ended before recording others
            self.passes, self.num_begun = {}, num_begun
            self.pool = torch.cuda.graph_pool_handle()  # which the passes from here on share
        key = self.objective.phase, *arrays
        if key not in self.passes:
            self.passes[key] = Passes(self, {"x": x, "y": y, **arrays})
        passes = self.passes[key]
        for recorded, argument in zip(passes.inputs.values(), (x, y, *arrays.values()), strict=True):
            recorded.copy_(argument)
        passes.forward.replay()
        losses = passes.losses
        for number in reversed(range(len(passes.backward))):
            losses = Replay.apply(passes, number, losses, *passes.backward[number][1])
        return losses, passes.terms


class Passes:
    """A forward and a backward pass of a recorded objective over inputs of fixed shapes, by name.

    `backward` has the graphs of the backward pass in order, each with the gradients that it computes, by weight.
    """

    def __init__(self, recorded: Recorded, inputs: Mapping[str, Tensor]):
        device, objective, self.copies = inputs["x"].device, recorded.objective, recorded.copies
        self.inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        weights = {name: p for name, p in objective.named_parameters() if p.requires_grad}
        # DDP keeps the autograd nodes of the weights, on the stream where it was built. A recording must not reach
        # them, so it differentiates leaves of its own in the same memory.
        leaves: dict[str, Tensor] = {name: nn.Parameter(p.detach()) for name, p in weights.items()}
        call = partial(torch.func.functional_call, objective, leaves, kwargs=self.inputs)
        casts = torch.autocast(device.type, torch.get_autocast_dtype(device.type),
                               torch.is_autocast_enabled(device.type), cache_enabled=False)
        buffers = {buffer: buffer.clone() for buffer in objective.buffers()}
        self.forward = torch.cuda.CUDAGraph()
        self.backward: list[tuple[torch.cuda.CUDAGraph, dict[nn.Parameter, Tensor]]] = []

        def begin_graph() -> None:
            self.backward.append((torch.cuda.CUDAGraph(), {}))
            self.backward[-1][0].capture_begin(recorded.pool, MODE)

        def keep(name: str, gradient: Tensor) -> None:
            """Adds a gradient to its graph as soon as it is computed; ends a graph that has enough of them."""
            graph, gradients = self.backward[-1]
            gradients[weights[name]] = gradient.detach()
            remaining.discard(name)
            if remaining and sum(g.nbytes for g in gradients.values()) >= recorded.stretch:
                graph.capture_end()
                begin_graph()

        # The backward pass runs on this thread, as a graph must end on the thread where it began.
        with torch.random.fork_rng([device]), casts, torch.autograd.set_multithreading_enabled(False):
            recorded.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(recorded.stream):
                for _ in range(WARMUP):
                    gradients = torch.autograd.grad(call()[0].sum(), list(leaves.values()), allow_unused=True)
            torch.cuda.current_stream().wait_stream(recorded.stream)
            remaining = {name for name, gradient in zip(leaves, gradients, strict=True) if gradient is not None}
            del gradients
            for buffer, before in buffers.items():  # undoes what the warm-up has counted in them
                buffer.copy_(before)
            with torch.cuda.graph(self.forward, recorded.pool, recorded.stream, MODE):
                losses, terms = call()
            self.losses, self.terms = losses.detach(), {name: term.detach() for name, term in terms.items()}
            self.loss_gradients = torch.ones_like(losses)
            trained = [leaves[name] for name in remaining]
            hooks = [leaves[name].register_hook(partial(keep, name)) for name in remaining]
            with torch.cuda.stream(recorded.stream):
                begin_graph()
                torch.autograd.grad(losses, trained, self.loss_gradients)
                self.backward[-1][0].capture_end()
        for hook in hooks:  # so that the last reference to these passes frees them
            hook.remove()


class Replay(torch.autograd.Function):
    """Replays a graph of a backward pass when autograd asks for its gradients; passes losses (B,) on unchanged.

    Of several in a row, autograd hands out the gradients of one, which DDP sends, before it calls the next.
    """

    @staticmethod
    def forward(ctx: Any, passes: Passes, number: int, losses: Tensor, *weights: Tensor) -> Tensor:
        ctx.passes, ctx.number = passes, number
        return losses.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradients: Tensor) -> tuple[Tensor | None, ...]:
        passes, (graph, gradients) = ctx.passes, ctx.passes.backward[ctx.number]
        if ctx.number == 0:
            passes.loss_gradients.copy_(loss_gradients)
        graph.replay()
        hand_out = torch.Tensor.clone if passes.copies else torch.Tensor.detach
        return None, None, loss_gradients, *map(hand_out, gradients.values())


class RecordedUpdate:
    """The update of the weights as a CUDA graph, for gradients that have the addresses of an earlier step's.

    With others, as in a first step and after DDP has rearranged its buckets, the update is not replayed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.rates = [torch.zeros((), device=group["params"][0].device) for group in optimizer.param_groups]
        self.graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]] | None] = {}

    def __call__(self, update: Callable[[], tuple[Tensor, Tensor]], gradients: list[Tensor]) -> tuple[Tensor, Tensor]:
        groups, addresses = self.optimizer.param_groups, tuple(map(Tensor.data_ptr, gradients))
        if addresses not in self.graphs:
            self.graphs[addresses] = None
            return update()
        recorded = self.graphs[addresses]
        if recorded is None:
            graph, settings = torch.cuda.CUDAGraph(), [dict(group) for group in groups]
            for group, rate in zip(groups, self.rates, strict=True):
                group.update(lr=rate, capturable=True)
            with torch.cuda.graph(graph, capture_error_mode=MODE):
                recorded = graph, update()
            self.graphs[addresses] = recorded
            for group, before in zip(groups, settings, strict=True):
                group.update(before)
        for group, rate in zip(groups, self.rates, strict=True):
            rate.fill_(group["lr"])
        graph, (grad_norm, skipped) = recorded
        graph.replay()
        return grad_norm.clone(), skipped.clone()


def record_passes(
    objective: DiffusionLoss, how: Compile, device: torch.device, num_parts: int,
) -> nn.Module:
    """Returns the objective for `speed.replicate`: itself or, on a GPU and if asked for, recorded."""
    if device.type != "cuda" or how != "reduce-overhead":
        return objective
    return Recorded(objective, copies=num_parts > 1)


def record_update(
    accelerator: Accelerator, optimizer: AcceleratedOptimizer, how: Compile, num_parts: int,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns `update_weights`; where passes are recorded, it replays AdamW's steps if gradients keep their place."""
    if (accelerator.device.type == "cuda" and how == "reduce-overhead" and num_parts == 1 and accelerator.scaler is None
            and isinstance(optimizer.optimizer, torch.optim.AdamW)):
        return partial(update_weights, replay=RecordedUpdate(optimizer))
    return update_weights
