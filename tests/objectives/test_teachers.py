"""Teachers: which tokens they make of an image, and from whose weights."""

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch.nn.functional import interpolate

from objectives.teachers import load_teacher

IMAGES = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A machine without network, whose torch.hub folder holds what was put there."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    folder.mkdir(parents=True)
    return folder


@torch.no_grad()
def test_a_transformer_gives_its_last_tokens_without_those_of_class_and_registers(hub):
    torch.manual_seed(0)
    network = timm.create_model("test_vit", num_classes=0).eval()
    save_file(network.state_dict(), hub / "test_vit.safetensors")
    teacher = load_teacher("test_vit", 10)  # of 10 × 10 patches of 16 pixels, as its own positions are
    mean, std = (torch.tensor(values).view(3, 1, 1)
                 for values in (network.pretrained_cfg["mean"], network.pretrained_cfg["std"]))
    images = interpolate((IMAGES / 255 - mean) / std, (160, 160), mode="bicubic")
    assert network.num_prefix_tokens == 1
    torch.testing.assert_close(teacher(IMAGES), network.forward_features(images)[:, 1:])
    assert load_teacher("test_vit", 4)(IMAGES).shape == (2, 16, 64)  # another grid: positions are resampled


def test_a_convolutional_network_gives_its_stride_16_map(hub):
    save_file(timm.create_model("test_efficientnet").state_dict(), hub / "test_efficientnet.safetensors")
    assert load_teacher("test_efficientnet", 4)(IMAGES).shape == (2, 16, 48)


@pytest.mark.parametrize(("name", "says"), [
    ("test_vit", "model.safetensors of timm/test_vit.r160_in1k .* put it at .*test_vit.safetensors"),
    ("vit_base_patch14_dinov22", "did you mean vit_base_patch14_dinov2"),
    ("teacher.pt", "is neither python:module.function nor a model of timm's with weights"),
    ("python:no_such.tokens", "No module named 'no_such'.*: start the command with PYTHONPATH="),
    ("python:own_code.none", "has no attribute 'none'"),
    ("python:own_code.pooled", r"makes 16 tokens per image, but the network's grid has 8 × 8"),
])
def test_an_unavailable_teacher_raises_a_one_line_error(hub, name, says):
    with pytest.raises(ValueError, match=says):
        load_teacher(name, 8)


def test_a_function_of_ones_own_gets_images_unchanged_and_its_map_is_read_in_raster_order():
    tokens = load_teacher("python:own_code.pooled", 4)(IMAGES)
    means = IMAGES.float().view(2, 3, 4, 16, 4, 16).mean((3, 5))
    torch.testing.assert_close(tokens, means.flatten(2).transpose(1, 2))
    assert load_teacher("python:examples.own_teacher.colours", 16)(IMAGES).shape == (2, 256, 3)
