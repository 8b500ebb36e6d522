"""A CIFAR-10 classifier's weights -> a TorchScript file of its pooled features, for fid.py features=torchscript.

    python scripts/studies/export_features.py resnet56.th data/resnet56.pt

The weights are those of github.com/akamaster/pytorch_resnet_cifar10 (BSD-2): a ResNet of He et al. (arXiv 1512.03385,
section 4.2) with shortcuts that pad channels; 64 features. Distances on these features rank runs; none is an FID.
"""

import argparse
import io
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from runtime.command import program
from runtime.files import atomic_write
from runtime.schema import as_path
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


@program
def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("weights", type=as_path)
    parser.add_argument("out", type=as_path)
    arguments = parser.parse_args()
    if arguments.out.exists():
        raise ValueError(f"{arguments.out} is there already: name another, or move it away.")
    state = read_tensors(arguments.weights)["state_dict"]
    network = Classifier(depth=2 + 2 * sum(key.endswith("conv1.weight") and "layer" in key for key in state))
    network.load_state_dict({key.removeprefix("module."): value for key, value in state.items()})
    # One file has one SHA-256: a file's name would be in it, and unfrozen code lists what it uses in any order.
    scripted = io.BytesIO()
    torch.jit.save(torch.jit.freeze(torch.jit.script(network.eval()), optimize_numerics=False), scripted)
    with atomic_write(arguments.out) as partial:
        partial.write_bytes(scripted.getvalue())
    print(f"Features of {arguments.weights}: {arguments.out}")


if __name__ == "__main__":
    main()
