"""Counts the Triton kernels that a GPU would run for blocks of a DiT, the bytes that they move, and library calls.

    python tests/scripts/count_kernels.py DiT-XL/2 32 256      # 32 images of 256 tokens, bf16 autocast; needs no GPU

Both passes are traced on the CPU, with a GPU's flash attention, and moved to fake tensors of an H200, for which
inductor plans its kernels. A kernel moves each buffer that it reads or writes once.
"""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner, select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import MultiOutput
from torch._inductor.scheduler import ExternKernelSchedulerNode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from dit import DiT_models

CUDA = torch.device("cuda", 0)
H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=141 << 30, warp_size=32,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536, gcnArchName="",
    shared_memory_per_block_optin=232448, shared_memory_per_block=49152, L2_cache_size=50 << 20)


class Planned(Exception):
    """Ends a compilation that has planned its kernels."""


class Flash(torch.autograd.Function):
    """A GPU's flash attention, for tensors that are on the CPU while they are traced."""

    calls = 0

    @staticmethod
    def forward(ctx: object, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse, _, _, *most, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse, seed, offset)
        Flash.calls += 1
        ctx.most = most
        return out

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, ...]:
        *tensors, seed, offset = ctx.saved_tensors
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            gradient, *tensors, None, None, *ctx.most, 0.0, False, seed, offset)


def empty_like(value: object, device: torch.device, mode: FakeTensorMode | None = None) -> object:
    if not isinstance(value, Tensor):
        return value
    with mode or contextlib.nullcontext():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def count_block(block: nn.Module, *inputs: Tensor) -> dict[str, dict[str, int]]:
    """Returns kernels, calls and bytes of a block's forward and backward pass, for inputs on the CPU."""
    counted: dict[str, dict[str, int]] = {}
    Flash.calls = 0

    def plan(graph: GraphLowering, update: Callable = GraphLowering._update_scheduler) -> None:
        update(graph)
        row = counted["backward" if graph.is_backward else "forward"] = {"kernels": 0, "calls": 0, "bytes": 0}
        for node in graph.scheduler.nodes:
            if not isinstance(node, ExternKernelSchedulerNode):
                row["kernels"] += 1
                row["bytes"] += node.get_read_write_buffers_sizes()
            elif not isinstance(node.node, MultiOutput):  # of a call that is counted already
                row["calls"] += 1
        raise Planned

    def compiler(is_backward: bool) -> Callable:
        def compile_there(gm: torch.fx.GraphModule, arguments: list) -> Callable:
            mode = FakeTensorMode(allow_non_fake_inputs=True)

            def there(value: object) -> object:
                return empty_like(value, CUDA, mode)

            outputs = [node.meta["val"] if node is not None and "val" in node.meta else None
                       for node in gm.graph.find_nodes(op="output")[0].args[0]]
            for node in gm.graph.nodes:
                node.meta = {key: tree_map(there, value) for key, value in node.meta.items() if key != "tensor_meta"}
            try:
                compile_fx_inner(gm, list(map(there, arguments)), is_backward=is_backward)
            except Exception as error:
                if "Planned" not in repr(error):
                    raise
            return make_boxed_func(lambda *_: [empty_like(out, torch.device("cpu")) for out in outputs])
        return compile_there

    def partition(gm: torch.fx.GraphModule, arguments: list, **options: object) -> tuple:
        joint_graph_passes(gm)
        return min_cut_rematerialization_partition(gm, arguments, compiler="inductor", **options)

    names, weights = zip(*block.named_parameters(), strict=True)

    def call(weights: list[Tensor], *inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.func.functional_call(block, dict(zip(names, weights, strict=True)), inputs)

    with mock.patch.multiple(CudaInterface, get_device_properties=lambda *_: H200,
                             is_bf16_supported=lambda **_: True), \
            mock.patch.object(torch.cuda, "get_device_properties", lambda *_: H200), \
            mock.patch("torch._inductor.scheduler.has_triton", lambda *_: True), \
            mock.patch.object(GraphLowering, "_update_scheduler", plan), \
            mock.patch.object(F, "scaled_dot_product_attention", lambda q, k, v, **_: Flash.apply(q, k, v)), \
            config.patch(force_disable_caches=True):
        traced = aot_function(call, compiler(False), compiler(True), partition, select_decomp_table())
        ended = traced([p.detach().requires_grad_() for p in weights], *inputs)
        assert Flash.calls, "on a CPU dit.py has no fused attention for so few tokens: count more"
        ended.sum().backward()
    return counted


def main() -> None:
    name, images, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with torch.device("meta"):
        net = DiT_models[name](input_size=2 * round(tokens**0.5))
    hidden, block = net.pos_embed.shape[-1], net.blocks[0].to_empty(device="cpu")
    counted = count_block(block, torch.randn(images, tokens, hidden, requires_grad=True),
                          torch.randn(images, hidden, requires_grad=True), torch.arange(tokens)[None])
    for direction, row in counted.items():
        print(f"{direction}: {row['kernels']} Triton kernels, {row['bytes'] / 1e6:,.0f} MB; {row['calls']} calls")
    print(f"{len(net.blocks)} blocks: {len(net.blocks) * sum(row['bytes'] for row in counted.values()) / 1e9:,.1f} GB")


if __name__ == "__main__":
    main()
