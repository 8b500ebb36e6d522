"""A teacher, features and a decoder as users write them, named as `python:own_code.<function>`."""

import torch
from torch.nn.functional import adaptive_avg_pool2d


def pooled(images):
    """A teacher of 4 × 4 tokens, the mean colours of the image's squares."""
    return adaptive_avg_pool2d(images.float(), 4)


def bright(z):
    """A decoder that enlarges three of the latent's channels twice."""
    return z[:, :3].repeat_interleave(2, dim=2).repeat_interleave(2, dim=3) * 0.5


def means(weights, device):
    """Features: the mean colour, times the number in a file of weights if there is one."""
    scale = torch.load(weights, weights_only=True).item() if weights else 1.0
    return lambda images: images.float().mean((2, 3)) * scale


def number(weights, device):
    return lambda images: images.float().mean()


def probabilities(weights, device):
    return lambda images: (images.float().mean((2, 3)) / 255).softmax(1)


def training(weights, device):
    """Features of a network in training mode, which depend on the others in the batch."""
    return lambda images: torch.nn.BatchNorm1d(3)(images.float().mean((2, 3)))
