"""Whatever method reaches the blocks, what never leaves never leaves, or the call is refused."""

import inspect
import re

import pytest
import torch
from foreign_networks import BATCH, NETWORKS, K, N, family, noise_for, refused
from test_routed import TWO
from torch import nn

from routed import Route, routed
from routed.families import family_of

FAMILIES = sorted({name.partition(",")[0] for name in NETWORKS})
BESIDE = {"VisionTransformer": ["forward_features", "forward_intermediates", "get_intermediate_layers"]}
BESIDE["Eva"] = BESIDE["VisionTransformer"][:2]
ENCODERS = [name for name in NETWORKS if name.startswith(("VisionTransformer", "Eva"))]


def ways_in(network) -> set[str]:
    """Public methods that read the blocks, or that call one which does."""
    sources = {name: inspect.getsource(part) for name in dir(type(network))
               if inspect.isfunction(part := inspect.getattr_static(type(network), name))
               and (name == "forward" or not hasattr(nn.Module, name)) and part.__module__ != "torch.nn.modules.module"}
    found, seek = set(), {spec.path.partition(".")[0] for spec in family_of(network).lists}
    while seek:
        seek = {name for name, source in sources.items() if name not in found
                and any(re.search(rf"self\.{part}\b", source) for part in seek)}
        found |= seek
    return {name for name in found if not name.startswith("_")}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_ways_into_each_network_are_those_that_are_tested(name):
    no_pass = {"prune_intermediate_layers", "fix_init_weight", "init_weights", "set_encoder", "set_decoder",
               "resize_token_embeddings", "set_input_embeddings", "get_input_embeddings", "get_encoder", "get_decoder",
               "get_position_embeddings", "resize_position_embeddings"}
    assert ways_in(family(name).model) - no_pass == {"forward", *BESIDE.get(name, [])}


def tokens_by(case, way):
    """All tokens after the last block, class and register tokens first, by another method than the forward."""
    model, x, prefix = case.model, case.inputs["x"], case.model.num_prefix_tokens
    if way == "forward_features":
        return model.forward_features(x)
    if way == "forward_intermediates":
        return model.forward_intermediates(x, output_fmt="NLC")[0]
    [(tokens, first)] = model.get_intermediate_layers(x, n=1, return_prefix_tokens=True, norm=True)
    return torch.cat([first, tokens], dim=1) if prefix else tokens


@pytest.mark.parametrize(("name", "way"), [(name, way) for name in ENCODERS for way in BESIDE[name.partition(",")[0]]])
def test_class_and_register_tokens_are_kept_by_every_entry_to_an_encoder(name, way):
    case, noise = family(name), noise_for(family(name))
    with torch.no_grad(), routed(case.model, [Route(0, -1, 0.75)], mask_noise=noise) as routing:
        expected, ids = case.call(), routing.ids_keep[0]
        out = tokens_by(case, way)
        assert torch.equal(out, expected) and torch.equal(routing.ids_keep[0], ids) and ids.shape == (BATCH, K)


@pytest.mark.parametrize("name", [name for name in NETWORKS if name.startswith("Dinov2")])
def test_an_encoder_is_routed_by_the_part_that_holds_its_blocks(name):
    case, noise = family(name), noise_for(family(name))
    with torch.no_grad(), routed(case.model, [Route(0, -1, 0.75)], mask_noise=noise):
        tokens = case.model.encoder(case.model.embeddings(case.inputs["pixel_values"])).last_hidden_state
        assert torch.equal(case.model.layernorm(tokens), case.call())


def test_a_pass_that_stops_early_or_brings_a_mask_is_refused_by_every_way():
    case = family("VisionTransformer, registers")
    model, x = case.model, case.inputs["x"]

    def stopped():
        model.forward_intermediates(x, indices=[0], stop_early=True)
    assert "After block 0 came the end" in refused(model, TWO, stopped)
    assert "After block 0 came block 0" in refused(model, TWO, lambda: (stopped(), stopped()))
    for way in (model.forward_features, model.forward_intermediates):
        assert "write along={'attn_mask': pairs}" in refused(
            model, TWO, lambda way=way: way(x, attn_mask=torch.ones(N + 3, N + 3)))


@pytest.mark.parametrize(("name", "says"), [
    ("FluxTransformer2DModel", "img_ids"), ("Lumina2Transformer2DModel", "encoder_attention_mask"),
    ("QwenImageTransformer2DModel", "img_shapes"), ("Krea2Transformer2DModel", "encoder_hidden_states")])
def test_blocks_reached_past_the_call_that_counts_their_text_are_refused(name, says):
    case = family(name)
    with pytest.raises(KeyError, match=says), routed(case.model, TWO):
        case.blocks[0](torch.zeros(BATCH, N, 16))
