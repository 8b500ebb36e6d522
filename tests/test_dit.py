"""DiT: published sizes, the initialisation that makes blocks identities, and weights that travel."""

import pytest
import torch

from blocks import WIDTHS
from dit import DiT, DiT_models, infer_architecture


@pytest.mark.parametrize("name", DiT_models)
def test_every_size_maps_a_latent_to_its_own_shape(name):
    with torch.device("meta"):
        model = DiT_models[name](learn_sigma=True, num_classes=7)
        out = model(torch.empty(2, 4, 32, 32), torch.empty(2), torch.zeros(2, dtype=torch.int64))
    assert out.shape == (2, 8, 32, 32)


def tiny(**kwargs):
    return DiT(**dict(input_size=8, in_channels=3, hidden_size=32, depth=3, num_heads=2, num_classes=5) | kwargs)


def test_unpatchify_undoes_the_patch_embeddings_order():
    model = tiny(in_channels=2)
    with torch.no_grad():  # a patch embedding that lists its patch's pixels as (row, column, channel)
        model.x_embedder.proj.weight.copy_(torch.eye(8).view(2, 2, 2, 8).permute(3, 2, 0, 1).repeat(4, 1, 1, 1))
    x = torch.randn(3, 2, 8, 8)
    assert torch.allclose(model.unpatchify(model.x_embedder(x)[..., :8]), x, atol=1e-6)


def test_the_position_embedding_is_no_parameter_but_is_saved():
    model = tiny()
    assert "pos_embed" in model.state_dict() and "pos_embed" not in dict(model.named_parameters())


@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize("options",
                         [{}, {"learn_sigma": True, "num_classes": 10}, {"input_size": 64, "in_channels": 3}])
def test_the_architecture_is_read_off_the_weights(size, options):
    with torch.device("meta"):
        model = DiT_models[f"DiT-{size}/4"](**options)
        again = DiT(**infer_architecture(model.state_dict()))
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in model.state_dict().items()}
    assert again.blocks[0].attn.num_heads == model.blocks[0].attn.num_heads


def test_weights_that_are_not_a_dits_raise_a_one_line_error():
    with pytest.raises(ValueError, match="not a DiT's"):
        infer_architecture({"conv1.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match="width 32 and depth 3"):
        infer_architecture(tiny().state_dict())


@pytest.mark.parametrize(("options", "says"), [
    ({"input_size": 9}, "side 9 is not a multiple of the patch size 2"),
    ({"num_heads": 3}, "hidden_size 32 must be a multiple of num_heads 3"),
    ({"block": "unet"}, "block is 'unet'; it must be one of dit, lightning"),
    ({"block": "lightning", "num_heads": 16}, "16 heads gives 2 channels"),
])
def test_sizes_that_do_not_fit_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        tiny(**options)
