"""DDP and FSDP2 on two ranks, with and without checkpoints, give the gradients of one process."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from routed import Route, routed

BATCH, N, D, ROUTES = 4, 16, 8, [Route(0, 1, 0.5), Route(2, -1, 0.25)]
X, NOISE, TABLE = (torch.randn(*shape, generator=torch.Generator().manual_seed(1)) for shape in (
    (BATCH, N, D), (BATCH, 2, N), (N, D // 2)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x, rope):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, D // 2)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q * rope[None, None], k * rope, v).transpose(1, 2).flatten(2))
        return x


class Network(nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.checkpointed = nn.ModuleList(Block() for _ in range(4)), checkpointed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, TABLE, use_reentrant=False) if self.checkpointed else block(x, TABLE)
        return x


def gradients(net, model, rows):
    with routed(model, ROUTES, blocks="blocks", along={"rope": 0}, mask_noise=NOISE[rows]):
        loss = model(X[rows]).square().mean()
    loss.backward()
    grads = {name: p.grad for name, p in net.named_parameters()}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in grads.items()}


def train(rank, how, checkpointed, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        net = model = Network(checkpointed)
        if how == "DDP":
            model = nn.parallel.DistributedDataParallel(net)
        else:
            mesh = torch.distributed.init_device_mesh("cpu", (2,))
            for part in (*net.blocks, net):
                fully_shard(part, mesh=mesh)
        grads = gradients(net, model, slice(rank, None, 2))
        if rank == 0:
            torch.save(grads, folder / "gradients.pt")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("how", ["DDP", "FSDP2"])
def test_two_ranks_give_the_gradients_of_one_process(how, checkpointed, tmp_path):
    net = Network(checkpointed)
    expected = gradients(net, net, slice(None))
    torch.multiprocessing.spawn(train, (how, checkpointed, tmp_path), nprocs=2)
    for name, grad in torch.load(tmp_path / "gradients.pt").items():
        assert torch.allclose(grad, expected[name], atol=1e-6), name
