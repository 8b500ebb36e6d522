"""`routed` beside what trainers use: compiled blocks, sizes that change, quantised bases with LoRA."""

from pathlib import Path

import pytest
import torch
from foreign_networks import BATCH, assert_close, example, gradients, noise_for, randn
from test_routed import FLUX, TWO, assert_as_if_given_only_them
from torch import nn

from routed import Route, routed
from routed.families import family_of


def with_compiled_blocks(model, how):
    torch._dynamo.reset()
    if how == "compile_repeated_blocks":
        model.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
    for spec in family_of(model).lists if how == "torch.compile" else ():
        blocks = model.get_submodule(spec.path)
        for i, block in enumerate(blocks):
            blocks[i] = torch.compile(block, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize(("name", "how"), [
    ("FluxTransformer2DModel, Kontext", "compile_repeated_blocks"), ("WanTransformer3DModel", "torch.compile")])
def test_compiled_blocks_are_routed_with_and_without_checkpointing(name, how):
    """Two passes wait for one backward, outside the `with` block."""
    def trained(how="", checkpointed=False):
        case = example(name)
        if checkpointed:
            case.model.enable_gradient_checkpointing()
        case.model.train()
        with_compiled_blocks(case.model, how)
        with routed(case.model, TWO, mask_noise=noise_for(case, 2)) as routing:
            out, again = case.tokens(case.call()), case.tokens(case.call(timestep=case.inputs["timestep"] / 2))
        assert routing.ids_keep[0].shape == (BATCH, 8)
        (out.square().mean() + 2 * again.mean()).backward()
        return out.detach(), {key.replace("_orig_mod.", ""): grad for key, grad in gradients(case.model).items()}

    (plain, expected) = trained()
    for checkpointed in (False, True):
        out, found = trained(how, checkpointed)
        assert torch.allclose(out, plain, atol=1e-5)
        assert_close(found, expected)


class Rotated(nn.Module):
    def forward(self, x, rope):
        q = x * rope
        return x + (q @ q.mT).softmax(-1) @ x


def test_a_compiled_network_is_routed_at_every_size_and_sizes_are_dynamic_from_the_second_on():
    """Four tokens of text stand in front. With mask_noise, whose size is a constant, each size is compiled."""
    torch._dynamo.reset()
    graphs, net = [], nn.Module()
    net.blocks = nn.ModuleList([Rotated()])
    net.forward = lambda x: net.blocks[0](x, torch.ones(1, x.shape[1], 8).cumsum(1))

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(net, backend=backend, fullgraph=True)
    for length, count in ((16, 1), (24, 2), (36, 2)):
        x, outs = randn(3, length, 8), []
        for model in (net, compiled):
            torch.manual_seed(length)
            with torch.no_grad(), routed(model, [Route(0, 0, 0.5)], blocks="blocks", along={"rope": 1},
                                         keep=4) as routing:
                outs.append(model(x))
            assert routing.ids_keep[0].shape == (3, (length - 4) // 2)
        assert torch.allclose(*outs, atol=1e-5) and len(graphs) == count


@pytest.mark.parametrize("name", [FLUX, "SD3Transformer2DModel", "WanTransformer3DModel"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_lora_on_an_8_bit_base_trains_as_if_given_only_the_kept_tokens(name, checkpointed):
    pytest.importorskip("torchao", reason="8 bits are torchao's, which is optional")
    peft = pytest.importorskip("peft", reason="the LoRA is PEFT's, which is optional")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    case = example(name)
    case.model.requires_grad_(False)
    quantize_(case.model, Int8WeightOnlyConfig())
    assert any("Int8" in type(p.data).__name__ or "Quant" in type(p.data).__name__ for p in case.model.parameters())
    case.model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"],
                                           init_lora_weights=False))
    if checkpointed:
        case.model.enable_gradient_checkpointing()
    case.model.train()
    _, found = assert_as_if_given_only_them(case)
    assert found and all("lora" in key for key in found)


def test_the_lora_of_the_page_trains():
    pytest.importorskip("peft", reason="the LoRA is PEFT's, which is optional")
    page = (Path(__file__).resolve().parents[2] / "docs" / "trainers.md").read_text(encoding="utf-8")
    exec(page.partition("## LoRA by PEFT")[2].partition("```python\n")[2].partition("```")[0], {})
