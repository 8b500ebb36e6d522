"""Shards a network over ranks by torch's FSDP2, block by block; takes its tensors out whole and puts whole ones in.

A sharded tensor is a DTensor: its shape is the whole's, and each rank holds some of its rows. Whatever handles tensors
here takes plain ones, too, and leaves them as they are, so that nobody else asks which they are.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

STATE_BYTES = 20     # of a parameter that is trained: weight, gradient, AdamW's two moments and average, in float32


def shard(net: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Leaves to this rank, on `device`, its part of each parameter of a DiT that lies on the CPU, one block at a time.

    Each block is gathered when it is called, in `dtype`, that of autocast or float32: its linear layers, which autocast
    would cast anyway. All else is gathered with the network, in float32 as autocast leaves it: embeddings, the final
    layer, and what blocks have beside linear layers (norms, a scan's decays). Gradients are added up in float32.
    """
    from torch.distributed.device_mesh import init_device_mesh  # which take a second
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    layers = [layer for layer in net.blocks.modules() if isinstance(layer, nn.Linear)]
    linear = {p for layer in layers for p in layer.parameters()}
    # What the network has gathered is let go like the rest: the average's would still be there when it has moved on.
    unit = partial(fully_shard, mesh=mesh, reshard_after_forward=True)
    # The network first, as it would not look into blocks that are units already.
    unit(net, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), ignored_params=linear)
    cast = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in net.blocks:
        unit(block, mp_policy=cast, ignored_params={*block.parameters()} - linear)
    return net


def shard_rest(objective: nn.Module, net: nn.Module, device: torch.device) -> nn.Module:
    """Shares out what an objective trains beside its network, which is sharded already, as one more unit.

    Without this its gradients would not be added up over ranks. What is frozen stays whole on each rank.
    """
    of_net = {*net.parameters()}
    rest = [p for p in objective.parameters() if p not in of_net]
    if any(p.requires_grad for p in rest):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
        frozen = {p for p in rest if not p.requires_grad}
        fully_shard(objective, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False),
                    ignored_params=of_net | frozen)
    return objective


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")      # it is a DTensor, whose import takes a second


def bytes_a_rank(net: nn.Module, world: int) -> int:
    """Counts what the fullest of `world` ranks holds between passes, in bytes; `net` is whole, and may lie on meta.

    That is STATE_BYTES a parameter, of as many of its rows as are a rank's share, rounded up. On top comes what a pass
    needs: activations, and one block gathered while another is used.
    """
    return STATE_BYTES * sum(-(-len(p) // world) * p[0].numel() for p in net.parameters())


# ---- out and in, one tensor at a time -------------------------------------------------------------------------------


def whole(tensor: Tensor) -> Tensor:
    """Gathers a sharded tensor; all ranks call it together. A plain one is whole."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


@contextlib.contextmanager
def gathering(tensors: Iterable[Tensor]) -> Iterator[Iterator[Tensor]]:
    """Yields the tensors, each gathered when it is its turn, so that one at a time is whole.

    All ranks enter with the same ones. Whoever leaves before the end, as the main rank before a full disk or the others
    at once, still takes part in gathering the rest, so that nobody waits for it.
    """
    stream = map(whole, tensors)
    try:
        yield stream
    finally:
        for _ in stream:
            pass


def part(tensor: Tensor, like: Tensor) -> Tensor:
    """Cuts out of a whole tensor the rows that `like`, of its shape, has on this rank.

    It is returned as it is where `like` is plain, or of another shape, as AdamW's count of steps.
    """
    if not is_sharded(like) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import DTensor

    rows = -(-len(tensor) // like.device_mesh.size())
    first = rows * like.device_mesh.get_local_rank()
    return DTensor.from_local(tensor[first : first + rows].to(like.device), like.device_mesh, like.placements,
                              run_check=False, shape=like.shape, stride=like.stride())


def load(net: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copies whole tensors into those of a network that have their names."""
    copy_into(net.state_dict(), state)


@torch.no_grad()
def copy_into(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copies whole tensors into those of the same names; into a sharded one, each rank its part."""
    for name, tensor in state.items():
        assert tensor.shape == own[name].shape, name
        own[name].copy_(part(tensor, own[name]))
