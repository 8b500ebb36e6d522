"""DiT: what is read off weights, and sizes that do not fit."""

import pytest
import torch

from blocks.transformer import WIDTHS
from dit import DiT, DiT_models, infer_architecture


@pytest.mark.parametrize("name", [*(f"DiT-{size}/4" for size in WIDTHS), "LightningDiT-B/1", "LightningDiT-L/2"])
@pytest.mark.parametrize("options",
                         [{}, {"learn_sigma": True, "num_classes": 10}, {"input_size": 64, "in_channels": 3}])
def test_the_architecture_is_read_off_the_weights(name, options):
    with torch.device("meta"):
        model = DiT_models[name](**options)
        again = DiT(**infer_architecture(model.state_dict()))
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in model.state_dict().items()}
    assert again.blocks[0].attn.num_heads == model.blocks[0].attn.num_heads


@pytest.mark.parametrize(("options", "says"), [
    ({"input_size": 9}, "side 9 is not a multiple of the patch size 2"),
    ({"num_heads": 3}, "hidden_size 32 must be a multiple of num_heads 3"),
    ({"block": "unet"}, "block is 'unet'; it must be one of dit, lightning"),
    ({"block": "lightning", "num_heads": 16}, "16 heads gives 2 channels"),
])
def test_sizes_that_do_not_fit_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        DiT(**dict(input_size=8, in_channels=3, hidden_size=32, depth=3, num_heads=2, num_classes=5) | options)
