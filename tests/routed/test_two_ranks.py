"""DDP and FSDP2 on two ranks, with and without checkpoints, give the gradients of one process."""

import pytest
import torch
from oracle import N, randn
from small_networks import D, Plain
from torch import nn
from torch.distributed.fsdp import fully_shard

from routed import Route, routed

ROUTES = [Route(0, 1, 0.5), Route(2, -1, 0.25)]
SAMPLES, NOISE = randn(4, N, D), randn(4, 2, N).sigmoid()


def gradients(net, model, rows):
    with routed(model, ROUTES, blocks="blocks", along={"rope": 0}, mask_noise=NOISE[rows]) as routing:
        loss = model(SAMPLES[rows]).square().mean()
    loss.backward()
    assert len(routing.trials) == 4
    grads = {name: p.grad for name, p in net.named_parameters()}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in grads.items()}


def train(rank, how, checkpointed, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        net = model = Plain(checkpointed)
        if how == "DDP":
            model = nn.parallel.DistributedDataParallel(net)
        else:
            mesh = torch.distributed.init_device_mesh("cpu", (2,))
            for part in (*net.blocks, net):
                fully_shard(part, mesh=mesh)
            model = torch.compile(net, backend="eager") if "compiled" in how else net
        grads = gradients(net, model, slice(rank, None, 2))
        if rank == 0:
            torch.save(grads, folder / "gradients.pt")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("how", ["DDP", "FSDP2", "FSDP2, compiled"])
def test_two_ranks_give_the_gradients_of_one_process(how, checkpointed, tmp_path):
    net = Plain(checkpointed)
    expected = gradients(net, net, slice(None))
    # A process that the fork server starts ends at once. One that is spawned unloads Python while gloo's threads run.
    torch.multiprocessing.start_processes(train, (how, checkpointed, tmp_path), nprocs=2, start_method="forkserver")
    for name, grad in torch.load(tmp_path / "gradients.pt", weights_only=True).items():
        assert torch.allclose(grad, expected[name], atol=1e-6), name
