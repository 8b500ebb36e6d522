"""The features of a CIFAR-10 classifier, for every command that scores:

    python fid.py … features=python:scripts.studies.resnet56.resnet56 features_weights=data/resnet56.th

The weights are those of github.com/akamaster/pytorch_resnet_cifar10 (BSD-2): a ResNet of He et al. (arXiv 1512.03385,
section 4.2) with shortcuts that pad channels; 64 features. Distances on these features rank runs; none is an FID.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weights.reading import read_tensors


class Block(nn.Module):
    def __init__(self, width: int, new_width: int):
        super().__init__()
        self.stride, self.pad = new_width // width, (new_width - width) // 2
        self.conv1 = nn.Conv2d(width, new_width, 3, self.stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(new_width)
        self.conv2 = nn.Conv2d(new_width, new_width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(new_width)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.pad, self.pad))
        return F.relu(shortcut + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class Classifier(nn.Module):
    """Maps uint8 images (B, 3, H, W) to pooled features (B, 64); `linear` is kept to check the weights by."""

    def __init__(self, depth: int = 56):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        widths = [(16, 16), (16, 32), (32, 64)]
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(Block(width, new_width), *(Block(new_width, new_width) for _ in range((depth - 2) // 6 - 1)))
            for width, new_width in widths)
        self.linear = nn.Linear(64, 10)
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        x = (images.float() / 255 - self.mean) / self.std
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return x.mean((2, 3))


def resnet56(weights: Path | None, device: torch.device) -> nn.Module:
    """Loads the classifier from its published file; raises ValueError if none is named."""
    if weights is None:
        raise ValueError("resnet56 needs features_weights=path/to/resnet56.th.")
    state = read_tensors(weights)["state_dict"]
    network = Classifier(depth=2 + 2 * sum(key.endswith("conv1.weight") and "layer" in key for key in state))
    network.load_state_dict({key.removeprefix("module."): value for key, value in state.items()})
    return network.to(device).eval()
