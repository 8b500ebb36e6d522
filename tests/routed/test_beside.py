"""`routed` beside what trainers combine: compiled blocks, sizes that change, quantised bases with LoRA, other torches."""

import re

import pytest
import torch
from foreign_networks import BATCH, PLACES, example, randn
from test_routed import FLUX, TWO, assert_close, gradients, noise_for

from routed import Route, passes, routed
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
        with routed(case.model, TWO, mask_noise=noise_for(case, 2)) as taken:
            out, again = case.tokens(case.call()), case.tokens(case.call(timestep=case.inputs["timestep"] / 2))
        assert taken.ids_keep[0].shape == (BATCH, 8)
        (out.square().mean() + 2 * again.mean()).backward()
        return out.detach(), {key.replace("_orig_mod.", ""): grad for key, grad in gradients(case.model).items()}

    (plain, expected) = trained()
    for checkpointed in (False, True):
        out, found = trained(how, checkpointed)
        assert torch.allclose(out, plain, atol=1e-5)
        assert_close(found, expected)


def test_a_compiled_network_is_routed_at_every_size_of_image_and_batch():
    torch._dynamo.reset()
    case = example(FLUX)
    compiled = torch.compile(case.model, backend=lambda graph, inputs: graph.forward, fullgraph=True)
    for length, batch in ((16, 3), (8, 2)):
        few = {key: value[:batch] for key, value in case.inputs.items() if key not in ("img_ids", "txt_ids")}
        few |= dict(hidden_states=randn(batch, length, 4), img_ids=PLACES[:length])
        noise, outs = torch.rand(batch, 2, length), []
        for model in (case.model, compiled):
            with torch.no_grad(), routed(model, TWO, mask_noise=noise) as taken:
                outs.append(case.call(model, **few))
            assert taken.ids_keep[0].shape == (batch, length // 2)
        assert torch.allclose(*outs, atol=1e-5)


@pytest.mark.parametrize("name", [FLUX, "SD3Transformer2DModel", "WanTransformer3DModel"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_lora_on_an_8_bit_base_trains_as_if_given_only_the_kept_tokens(name, checkpointed):
    pytest.importorskip("torchao", reason="8 bits are torchao's, which is optional")
    peft = pytest.importorskip("peft", reason="the LoRA is PEFT's, which is optional")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    case = example(name)
    case.model.requires_grad_(False)
    quantize_(case.model, Int8WeightOnlyConfig())
    assert any(type(p.data).__name__ == "Int8Tensor" or "Quant" in type(p.data).__name__ for p in case.model.parameters())
    case.model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False))
    if checkpointed:
        case.model.enable_gradient_checkpointing()
    case.model.train()
    with routed(case.model, [Route(0, -1, 0.75)], mask_noise=noise_for(case)) as taken:
        out = case.tokens(case.call())
    [ids] = taken.ids_keep
    stayed = torch.stack([out[b, ids[b]] for b in range(BATCH)])
    stayed.square().sum().backward()
    found = gradients(case.model)
    assert found and all("lora" in key for key in found)
    for b in range(BATCH):
        fewer = case.alone(b, ids[b])
        assert torch.allclose(fewer[0], stayed[b], atol=1e-5)
        fewer.square().sum().backward()
    assert_close(found, gradients(case.model))


def test_a_torch_with_other_private_functions_is_named_on_entry(monkeypatch):
    net = example("VisionTransformer").model
    passes.check_torch.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
        with pytest.raises(RuntimeError, match=f"in torch {re.escape(torch.__version__)}, "), routed(net, TWO):
            pass
    with routed(net, TWO):          # and the hooks are as they were
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
