"""Shards a network over ranks by torch's FSDP2, block by block; gathers its tensors, and copies complete ones into it.

A sharded tensor is a DTensor. It has the complete tensor's shape, and each rank holds some of the rows. Every function
here that handles tensors returns plain ones unchanged, so that its callers need not ask which they have.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeGuard, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor  # importing it takes a second

Net = TypeVar("Net", bound=nn.Module)


def shard(net: Net, device: torch.device, dtype: torch.dtype) -> Net:
    """Moves this rank's part of each parameter of a DiT from the CPU to `device`, one block at a time.

    A block's linear layers are gathered when it is called, in `dtype`: float32, or autocast's, which would cast them
    anyway. All else is gathered with the network in float32, as autocast leaves it: embeddings, the final layer, a
    block's norms, and a scan's decays. Gradients are added up in float32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # imports that take a second

    layers = [layer for layer in net.get_submodule("blocks").modules() if isinstance(layer, nn.Linear)]
    linear = {p for layer in layers for p in layer.parameters()}
    # The network's own weights are freed after a pass, too. An unused average's would otherwise remain.
    unit = partial(fully_shard, mesh=all_ranks(device), reshard_after_forward=True)
    # The network comes before its blocks, as it would not find linear layers in blocks that are units already.
    unit(net, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), ignored_params=linear)
    cast = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in net.get_submodule("blocks").children():
        unit(block, mp_policy=cast, ignored_params={*block.parameters()} - linear)
    return net


def shard_rest(objective: nn.Module, net: nn.Module, device: torch.device) -> nn.Module:
    """Shards what an objective trains besides its network, which is sharded already, as one more unit.

    Without this each rank would step by its own gradients. Frozen parts, such as a teacher, are replicated.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    rest = {*objective.parameters()} - {*net.parameters()}
    trained = {p for p in rest if p.requires_grad}
    if trained:
        fully_shard(objective, mesh=all_ranks(device), mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False),
                    ignored_params={*objective.parameters()} - trained)
    return objective


def all_ranks(device: torch.device) -> DeviceMesh:
    return init_device_mesh(device.type, (torch.distributed.get_world_size(),))


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def is_sharded(tensor: Tensor) -> TypeGuard["DTensor"]:
    return hasattr(tensor, "full_tensor")


# ---- out and in, one tensor at a time -------------------------------------------------------------------------------


def gather_full(tensor: Tensor) -> Tensor:
    """Gathers a sharded tensor; all ranks call it together. A plain one is returned as it is."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def local_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns the part of each tensor that this rank holds, in the same memory; of a plain one, all of it.

    Operations on lists of tensors are slow for sharded ones.
    """
    with torch.no_grad():  # otherwise `to_local` would be recorded, for a backward pass
        return [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors]


def total_norm(accelerator: Accelerator, tensors: Sequence[Tensor]) -> Tensor:
    """Computes the norm of all tensors as one vector, on the device; all ranks call it together.

    Parts are summed over ranks at once. A plain tensor among sharded ones is the same on every rank and counts once.
    """
    sharded, plain = [t for t in tensors if is_sharded(t)], [t for t in tensors if not is_sharded(t)]
    norms = [torch.nn.utils.get_total_norm(local_tensors(group)) for group in (sharded, plain) if group]
    if sharded and accelerator.num_processes > 1:
        square = norms[0].double().square()
        torch.distributed.all_reduce(square, group=sharded[0].device_mesh.get_group())
        norms[0] = square.sqrt().float()
    return norms[0] if len(norms) == 1 else torch.hypot(*norms)


def map_shares(work: Callable[[Tensor], Tensor], stack: Tensor, like: Tensor) -> Tensor:
    """Maps a stack of matrices by `work`, each rank a share of them; all ranks call it together.

    `stack` (n, rows, columns) has what this rank holds of n matrices that are distributed as `like` is: all rows, or
    its shard's. `work` maps complete ones (k, all rows, columns), and this rank gets its part of all n results.
    Replicas exchange their shares once, shards twice.
    """
    group = like.device_mesh.get_group() if is_sharded(like) else None
    world = torch.distributed.get_world_size(group) if torch.distributed.is_initialized() else 1
    if world == 1:
        return work(stack)
    share = -(-len(stack) // world)
    padded = nn.functional.pad(stack, (0, 0, 0, 0, 0, share * world - len(stack)))
    result, (_, held, columns) = torch.empty_like(padded), padded.shape
    if not is_sharded(like):
        own = work(padded.chunk(world)[torch.distributed.get_rank(group)])
        torch.distributed.all_gather_into_tensor(result, own.contiguous(), group)
        return result[: len(stack)]
    most = -(-len(like) // world)
    rows = [max(0, min(most, len(like) - rank * most)) for rank in range(world)]
    sizes, equal = [share * count * columns for count in rows], world * [share * held * columns]
    parts = padded.new_empty(sum(sizes))
    torch.distributed.all_to_all_single(parts, padded.flatten(), sizes, equal, group)
    own = work(torch.cat([part.view(share, count, columns)
                          for part, count in zip(parts.split(sizes), rows, strict=True)], dim=1))
    parts = torch.cat([part.flatten() for part in own.split(rows, dim=1)])
    torch.distributed.all_to_all_single(result.view(-1), parts, equal, sizes, group)
    return result[: len(stack)]


@contextlib.contextmanager
def gathering(groups: Iterable[Mapping[str, Tensor]], keep: bool) -> Iterator[Iterator[dict[str, Tensor]]]:
    """Yields an iterator over groups of named tensors, as complete copies on the CPU; only ranks that `keep` get them.

    So tied weights no longer share memory, which no file can hold. All ranks enter with the same groups. A rank that
    leaves early, such as the main one on a full disk, still takes part in gathering the rest, so that no rank waits
    for it. So do the others, which may leave at once.
    """
    def complete(group: Mapping[str, Tensor]) -> dict[str, Tensor]:
        full = ((name, gather_full(tensor)) for name, tensor in group.items())
        return {name: tensor.to("cpu", copy=True) for name, tensor in full if keep}

    stream = map(complete, groups)
    try:
        yield stream
    finally:
        for _ in stream:
            pass


def local_shard(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns the rows of a complete tensor that `like`, of the same shape, holds on this rank.

    If `like` is plain, or of another shape, as for AdamW's count of steps, it returns the complete tensor.
    """
    if not is_sharded(like) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def copy_into(targets: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copies complete tensors into those of the same names; each rank copies its part into a sharded one."""
    for name, tensor in state.items():
        assert tensor.shape == targets[name].shape, name
        targets[name].copy_(local_shard(tensor, targets[name]))
