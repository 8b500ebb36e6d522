"""Teachers: which tokens they make of an image."""

import pytest
import timm
import torch
from own_code import pooled
from torch.nn.functional import interpolate

from examples import own_teacher
from objectives.teachers import Teacher

IMAGES = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_a_teacher_gets_images_unchanged_and_its_map_is_read_in_raster_order():
    means = IMAGES.float().view(2, 3, 4, 16, 4, 16).mean((3, 5))
    torch.testing.assert_close(Teacher(pooled, 4)(IMAGES), means.flatten(2).transpose(1, 2))
    with pytest.raises(ValueError, match="makes 16 tokens per image, but the network's grid has 8 × 8"):
        Teacher(pooled, 8)


@torch.no_grad()
def test_the_example_gives_timms_last_tokens_of_normalised_images_without_those_of_class_and_registers(monkeypatch):
    torch.manual_seed(0)
    network = timm.create_model("test_vit", num_classes=0, img_size=160).eval()
    monkeypatch.setattr(own_teacher, "network", lambda device: network)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    images = interpolate((IMAGES / 255 - mean) / std, (160, 160), mode="bicubic")
    monkeypatch.setattr(own_teacher, "prepared", lambda images, pixels, plain=own_teacher.prepared: plain(images, 160))
    assert network.num_prefix_tokens == 1
    torch.testing.assert_close(Teacher(own_teacher.dinov2, 10)(IMAGES), network.forward_features(images)[:, 1:])
    assert Teacher(own_teacher.colours, 16)(IMAGES).shape == (2, 256, 3)
