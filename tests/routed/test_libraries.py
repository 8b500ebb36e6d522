"""Each network of diffusers and timm that `routed` knows is exact, also where it is checkpointed."""

from pathlib import Path

import pytest
import torch
from library_networks import NETWORKS, TEXT, TIME, VIDEO, WORDS, example, family
from oracle import BATCH, THREE, Case, N, assert_close, assert_exact, gradients, is_routed, refused
from small_networks import CODES
from torch import nn

from routed import Route, Router, families, routed


def noise_for(case: Case, routes: int = 1, seed: int = 3) -> torch.Tensor:
    return torch.rand(BATCH, routes, case.n, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NETWORKS)
def test_kept_tokens_come_out_as_if_the_network_had_only_them(name):
    case, noise = family(name), noise_for(family(name), 3)
    ids, grads = assert_exact(case, mask_noise=noise)
    assert len(grads) > 20 and not is_routed(case.model)
    for r, route in enumerate(THREE):
        assert torch.equal(ids[r], Router().get_mask(torch.empty(BATCH, case.n, 1), route.selection_ratio, noise[:, r]))


def test_a_route_may_cover_all_blocks_of_a_network_that_changes_the_text_between_them():
    assert_exact(family("BriaFiboTransformer2DModel, edit"), [Route(0, -1, 0.5)])


def in_training(name: str, checkpointed: bool) -> Case:
    """A network with dropout, which makes any slip of the generator visible."""
    case = example(name)
    for module in case.model.train().modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    if checkpointed:
        if hasattr(case.model, "set_grad_checkpointing"):
            case.model.set_grad_checkpointing()
        else:
            case.model.enable_gradient_checkpointing()
    torch.manual_seed(5)
    return case


# diffusers 0.42.1 hands Chroma's mask to no block that is checkpointed
@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "ChromaTransformer2DModel, masked"])
def test_gradient_checkpointing_uses_the_masks_of_its_own_pass(name):
    """Two passes wait for one backward outside the `with` block."""
    def trained(checkpointed):
        case = in_training(name, checkpointed)
        with routed(case.model, THREE):
            out = case.call()
            loss = out.square().mean() + 2 * case.call().mean()
        loss.backward()
        assert not is_routed(case.model)
        return out.detach(), gradients(case.model)

    (plain, expected), (out, grads) = trained(False), trained(True)
    assert torch.equal(out, plain)
    assert_close(grads, expected)


@pytest.mark.parametrize("name", ["SD3Transformer2DModel", "Flux2Transformer2DModel", "WanTransformer3DModel"])
def test_autocast_routes_and_keeps_gradients_finite(name):
    case = family(name)
    with torch.autocast("cpu", torch.bfloat16), routed(case.model, THREE) as routing:
        out = case.call()
    out.float().mean().backward()
    assert out.isfinite().all() and all(grad.isfinite().all() for grad in gradients(case.model).values())
    assert routing.ids_keep[1].shape == (BATCH, 8)


@pytest.mark.parametrize("name", ["VisionTransformer", "VisionTransformer, registers"])
@pytest.mark.parametrize("enter", [
    lambda model, x: model.forward_features(x),
    lambda model, x: model.forward_intermediates(x, 1, output_fmt="NLC")[0],
    lambda model, x: torch.cat(model.get_intermediate_layers(x, n=1, return_prefix_tokens=True, norm=True)[0][::-1], 1),
])
def test_class_and_register_tokens_are_kept_by_every_entry_to_an_encoder(name, enter):
    case = family(name)
    with torch.no_grad(), routed(case.model, [Route(0, -1, 0.75)], mask_noise=noise_for(case)) as routing:
        expected, ids = case.call(), routing.ids_keep[0]
        assert torch.equal(enter(case.model, *case.inputs.values()), expected) and ids.shape == (BATCH, N // 4)


@pytest.mark.parametrize(("name", "says", "inputs"), [
    ("SD3Transformer2DModel", "computes with the others", dict(
        block_controlnet_hidden_states=[torch.zeros(BATCH, N, 16)])),
    ("FluxTransformer2DModel", "holds ['attention_mask']",
     dict(joint_attention_kwargs=dict(attention_mask=torch.ones(BATCH, 1, 1, N + TEXT) > 0))),
    ("FluxTransformer2DModel", "16 of 8 tokens may be routed", dict(hidden_states=torch.zeros(BATCH, 8, 4))),
    ("VisionTransformer", "write along={'attn_mask': pairs}", dict(attn_mask=torch.ones(N + 1, N + 1))),
    ("LTX2VideoTransformer3DModel", "write along={'self_attention_mask': pairs or 1 or None}",
     dict(video_self_attention_mask=torch.ones(BATCH, N, N))),
    ("WanTransformer3DModel", "for each of 16 samples or of as many tokens", dict(
        hidden_states=VIDEO[:1].repeat(N, 1, 1, 1, 1), timestep=TIME[:1].repeat(N),
        encoder_hidden_states=WORDS[:1].repeat(N, 1, 1))),
    ("ZImageTransformer2DModel", "several images per sample", dict(x=[[torch.zeros(4, 1, 8, 16)]] * BATCH)),
])
def test_what_a_known_network_may_not_be_given_on_a_route_is_refused(name, says, inputs):
    case = family(name)
    assert says in refused(case.model, THREE, lambda: case.call(**inputs))


def test_each_known_network_is_tested_and_on_the_page():
    alike = {"DiT": "SiT", "PixArt": "PixArtMS", "dit.DiT": "SiT", "Flux2": "Flux"}
    known = {alike.get(name, name).rpartition(".")[2] for name in families.FAMILIES}
    assert known == {name.partition(",")[0] for name in (*NETWORKS, *CODES)}
    page = (Path(__file__).resolve().parents[2] / "docs" / "trainers.md").read_text()
    assert [name for name in families.FAMILIES if f"`{name.rpartition('.')[2]}`" not in page] == []
