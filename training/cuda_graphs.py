"""CUDA graphs of a training step: its forward pass, its backward pass, and the update of the weights.

Without them the host starts hundreds of kernels in a step, which takes longer than a GPU needs for small networks or
few images. torch.compile would record a graph for each block and direction, and those take the host half as long.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from objectives import DiffusionLoss

# The modes of torch.compile that ask for CUDA graphs, and the mode that compiles the blocks inside our graphs.
CUDA_GRAPHS = {"reduce-overhead": None, "max-autotune": "max-autotune-no-cudagraphs"}
WARMUP = 3              # passes before recording, which compile and choose kernels
STRETCH = 128 * 2**20   # bytes of gradients, five of DDP's buckets, that are sent while the next ones are computed
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
        self.passes: dict[tuple, Passes] = {}
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
        losses = passes.replay_forward(x, y, *arrays.values())
        for stretch in reversed(passes.stretches):
            losses = Replay.apply(passes, stretch, losses, *stretch.gradients)
        return losses, passes.terms


class Passes:
    """A forward and a backward pass of a recorded objective over inputs of fixed shapes, by name."""

    def __init__(self, recorded: Recorded, inputs: Mapping[str, Tensor]):
        device, objective, self.copies = inputs["x"].device, recorded.objective, recorded.copies
        self.inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        weights = {name: p for name, p in objective.named_parameters() if p.requires_grad}
        # DDP keeps the autograd nodes of the weights, on the stream where it was built. A recording must not reach
        # them, so it differentiates leaves of its own in the same memory.
        leaves = {name: nn.Parameter(p.detach()) for name, p in weights.items()}
        call = partial(torch.func.functional_call, objective, leaves, kwargs=self.inputs)
        casts = torch.autocast(device.type, torch.get_autocast_dtype(device.type),
                               torch.is_autocast_enabled(device.type), cache_enabled=False)
        buffers = {buffer: buffer.clone() for buffer in objective.buffers()}
        # The backward pass runs on this thread, as a graph must end on the thread where it began.
        with torch.random.fork_rng([device]), casts, torch.autograd.set_multithreading_enabled(False):
            recorded.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(recorded.stream):
                for _ in range(WARMUP):
                    gradients = torch.autograd.grad(call()[0].sum(), list(leaves.values()), allow_unused=True)
            torch.cuda.current_stream().wait_stream(recorded.stream)
            trained = {name: leaf for (name, leaf), g in zip(leaves.items(), gradients, strict=True) if g is not None}
            del gradients
            for buffer, before in buffers.items():  # undoes what the warm-up has counted in them
                buffer.copy_(before)
            self.forward = torch.cuda.CUDAGraph()
            options = dict(pool=recorded.pool, capture_error_mode=MODE)
            with torch.cuda.graph(self.forward, stream=recorded.stream, **options):
                losses, terms = call()
            self.losses, self.terms = losses.detach(), {name: term.detach() for name, term in terms.items()}
            self.loss_gradients, self.stretches = torch.ones_like(losses), [Stretch()]

            def keep(name: str, gradient: Tensor) -> None:
                """Adds a gradient to the stretch as soon as it is recorded; ends a stretch that is long enough."""
                stretch = self.stretches[-1]
                stretch.gradients[weights[name]] = gradient.detach()
                if stretch.nbytes >= recorded.stretch and sum(len(s.gradients) for s in self.stretches) < len(trained):
                    stretch.graph.capture_end()
                    self.stretches.append(Stretch())
                    self.stretches[-1].graph.capture_begin(**options)

            hooks = [leaf.register_hook(partial(keep, name)) for name, leaf in trained.items()]
            with torch.cuda.stream(recorded.stream):
                self.stretches[0].graph.capture_begin(**options)
                torch.autograd.grad(losses, list(trained.values()), self.loss_gradients)
                self.stretches[-1].graph.capture_end()
        for hook in hooks:  # so that these passes are freed with their last reference
            hook.remove()

    def replay_forward(self, *arguments: Tensor) -> Tensor:
        for place, argument in zip(self.inputs.values(), arguments, strict=True):
            place.copy_(argument)
        self.forward.replay()
        return self.losses


class Stretch:
    """A part of a recorded backward pass: its graph, and the gradients that the graph computes, by weight."""

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.gradients: dict[nn.Parameter, Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(gradient.nbytes for gradient in self.gradients.values())


class Replay(torch.autograd.Function):
    """Replays a stretch of a backward pass when autograd asks for gradients; passes losses (B,) on unchanged.

    Of several in a row, autograd hands out the gradients of one, and so DDP sends them, before it calls the next.
    """

    @staticmethod
    def forward(ctx: object, passes: Passes, stretch: Stretch, losses: Tensor, *weights: Tensor) -> Tensor:
        ctx.passes, ctx.stretch = passes, stretch
        return losses.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: object, loss_gradients: Tensor) -> tuple[Tensor | None, ...]:
        passes, stretch = ctx.passes, ctx.stretch
        if stretch is passes.stretches[0]:
            passes.loss_gradients.copy_(loss_gradients)
        stretch.graph.replay()
        hand_out = torch.Tensor.clone if passes.copies else torch.Tensor.detach
        return None, None, loss_gradients, *map(hand_out, stretch.gradients.values())


class RecordedUpdate:
    """The update of the weights as a CUDA graph, for gradients that have the addresses of an earlier step's.

    With other addresses, as at a first step and where DDP rearranges its buckets, the update is not replayed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.rates = [torch.zeros((), device=group["params"][0].device) for group in optimizer.param_groups]
        self.graphs: dict[tuple[int, ...], tuple | None] = {}

    def __call__(self, update: Callable[[], tuple[Tensor, ...]], gradients: list[Tensor]) -> tuple[Tensor, ...]:
        addresses = tuple(gradient.data_ptr() for gradient in gradients)
        if addresses not in self.graphs:
            self.graphs[addresses] = None
            return update()
        if self.graphs[addresses] is None:
            self.graphs[addresses] = self.record(update)
        for rate, group in zip(self.rates, self.optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        graph, results = self.graphs[addresses]
        graph.replay()
        return tuple(result.clone() for result in results)

    def record(self, update: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
        """Records an update whose learning rates are read from the device."""
        graph, groups = torch.cuda.CUDAGraph(), self.optimizer.param_groups
        before = [(group["lr"], group["capturable"]) for group in groups]
        for group, rate in zip(groups, self.rates, strict=True):
            group.update(lr=rate, capturable=True)
        with torch.cuda.graph(graph, capture_error_mode=MODE):
            results = update()
        for group, (lr, capturable) in zip(groups, before, strict=True):
            group.update(lr=lr, capturable=capturable)
        return graph, results


def record_passes(
    objective: DiffusionLoss, how: bool | str, device: torch.device, num_parts: int,
) -> nn.Module:
    """Returns the objective for `speed.replicate`: itself or, on a GPU with a mode of CUDA_GRAPHS, recorded."""
    if device.type != "cuda" or how not in CUDA_GRAPHS:
        return objective
    return Recorded(objective, copies=num_parts > 1)


def record_update(accelerator: Accelerator, optimizer: torch.optim.Optimizer, how: bool | str, num_parts: int) -> None:
    """Makes `update_weights` replay steps of AdamW, where passes are recorded and gradients keep their addresses."""
    if (accelerator.device.type == "cuda" and how in CUDA_GRAPHS and num_parts == 1 and accelerator.scaler is None
            and isinstance(optimizer.optimizer, torch.optim.AdamW)):
        optimizer.replay_update = RecordedUpdate(optimizer)
