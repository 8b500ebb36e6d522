"""Teachers: which tokens they make of an image, from whose weights, and that they are frozen."""

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from test_alignment import aligned
from test_objectives import loss_of
from torch.nn.functional import interpolate

from objectives import own_state, trained_parameters
from objectives.teachers import LITE0, lite0_weights, load_teacher

IMAGES = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_efficientnet_lite0_gives_its_stride_16_map_in_raster_order():
    network, caught = timm.create_model("tf_efficientnet_lite0").eval(), []
    network.load_state_dict(lite0_weights())
    network.blocks[4].register_forward_hook(lambda *args: caught.append(args[2]))
    network(interpolate((IMAGES.float() - 127) / 128, (128, 128), mode="bicubic"))
    tokens = load_teacher(LITE0, 8)(IMAGES)
    assert tokens.shape == (2, 64, 112)
    torch.testing.assert_close(tokens[:, 11], caught[0][:, :, 1, 3], rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize(("name", "width"), [("test_convnext", 48), ("test_efficientnet", 48)])
def test_a_convolutional_network_gives_its_stride_16_map(hub, name, width):
    save_file(timm.create_model(name).state_dict(), hub / f"{name}.safetensors")
    assert load_teacher(name, 4)(IMAGES).shape == (2, 16, width)


class Pooled(torch.nn.Module):
    """A program that maps images of any size to a map of 4 × 4."""

    def forward(self, images):
        return torch.nn.functional.adaptive_avg_pool2d(images.float(), 4)


@pytest.fixture
def script(tmp_path):
    torch.jit.script(Pooled()).save(str(tmp_path / "pooled.pt"))
    return str(tmp_path / "pooled.pt")


def test_a_torchscript_file_gets_images_as_they_are(script):
    tokens = load_teacher(script, 4)(IMAGES)
    torch.testing.assert_close(tokens[1, 6], IMAGES[1, :, 16:32, 32:48].float().mean((1, 2)))


@pytest.mark.parametrize(("name", "says"), [
    ("test_vit", "model.safetensors of timm/test_vit.r160_in1k .* put it at .*test_vit.safetensors"),
    ("vit_base_patch14_dinov22", "did you mean vit_base_patch14_dinov2"),
    ("no.pt", "no.pt is not a complete TorchScript file"),
    ("script", r"makes 16 tokens per image, but the network's grid has 8 × 8"),
    (__file__, "is not a complete TorchScript file"),
])
def test_an_unavailable_teacher_raises_a_one_line_error(hub, script, name, says):
    with pytest.raises(ValueError, match=says):
        load_teacher(script if name == "script" else name, 8)


def test_a_teacher_in_the_step_gives_its_stored_tokens():
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    online = aligned(shapes={"image": (3, 8, 8)}, teacher=LITE0, blocks=[1])
    stored = aligned(shapes={"teacher": (16, 112)}, blocks=[1])
    stored.projector.load_state_dict(online.projector.state_dict())
    rows = load_teacher(LITE0, 4)(images).half()
    assert online.own_arrays == ("image",)
    one, other = (loss_of(objective, **given)[1]["alignment"]
                  for objective, given in ((online, {"image": images}), (stored, {"teacher": rows})))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-3)


def test_a_teacher_is_frozen_in_eval_mode_and_neither_trained_nor_saved():
    before = torch.get_rng_state()
    online = aligned(shapes={"image": (3, 8, 8)}, teacher=LITE0, blocks=[1])
    torch.set_rng_state(before)
    stored = aligned(shapes={"teacher": (16, 112)}, blocks=[1])
    assert all(torch.equal(*pair)
               for pair in zip(online.projector.parameters(), stored.projector.parameters(), strict=True))
    assert trained_parameters(online).keys() == trained_parameters(stored).keys()
    assert own_state(online).keys() == own_state(stored).keys()
    online.train()
    assert online.projector.training and not any(module.training for module in online.teacher.modules())
    kept = {key: value.clone() for key, value in online.teacher.state_dict().items()}
    online.teacher.requires_grad_(True)  # as nobody should
    loss_of(online, image=torch.zeros(4, 3, 8, 8, dtype=torch.uint8))[0].mean().backward()
    assert all(p.grad is None for p in online.teacher.parameters())
    assert all(torch.equal(value, kept[key])
               for key, value in online.teacher.state_dict().items())  # no running mean moved
