"""The loss of TREAD's first version (arXiv 2501.04765v1, nano256/tread-nano): over the patches of kept tokens."""

from functools import partial
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor
from torch.nn.functional import unfold

from edm import EDM
from objectives.diffusion import DiffusionLoss


class Version1(DiffusionLoss):
    """Minimises the mean over routes of the error of a route's kept patches, plus mae_weight times the MAE term.

    That term is the squared error of D_x against the noised input, over the patches of routed tokens. The input is
    normalised in each patch by its mean and unbiased variance (arXiv 2306.09305, as in TREAD's first code). Raises
    ValueError for another diffusion, no routes, or another selection.
    """

    changeable = ("mae_weight",)
    diffusion: EDM

    def __init__(self, *args: Any, mae_weight: Annotated[float, Ge(0)] = 0.0):
        super().__init__(*args)
        if type(self.diffusion) is not EDM or not self.net.routes or self.net.router.selection != "random":
            raise ValueError("objective=version1 is a loss of EDM over the patches of the kept tokens: set diffusion="
                             "edm, model.routes, and model.selection=random, as it must know which are kept.")
        self.mae_weight = mae_weight

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mask_noise = torch.rand(len(x), len(self.routes), self.net.pos_embed.shape[1], device=x.device)
        return self.loss(x, y, mask_noise, *self.diffusion.draw(x)), {}

    def loss(self, x: Tensor, y: Tensor, mask_noise: Tensor, sigma: Tensor, eps: Tensor) -> Tensor:
        """Returns each sample's loss (B,); mask_noise (B, R, N) decides which tokens are kept."""
        edm, sigma = self.diffusion, sigma.view(-1, 1, 1, 1)
        x_noised = x + sigma * eps
        D_x = edm.denoise(partial(self.net, mask_noise=mask_noise), x_noised, sigma, y, self.routes)

        def patches(image: Tensor) -> Tensor:
            size = self.net.patch_size
            return unfold(image, size, stride=size).transpose(1, 2)  # (B, N, C · p²), in raster order

        error = patches(((D_x - x) / edm.preconditioning(sigma)[1]).square()).mean(dim=2)       # (B, N)
        auxiliary, total = torch.zeros_like(error), torch.zeros_like(error[:, 0])
        if self.mae_weight > 0:
            target = patches(x_noised)
            var, mean = torch.var_mean(target, dim=2, keepdim=True)
            target = (target - mean) / (var + 1e-6).sqrt()
            auxiliary = self.mae_weight * (patches(D_x) - target).square().mean(dim=2)          # (B, N)
        for r, route in enumerate(self.routes):
            ids_keep = self.net.router.get_mask(patches(x_noised), route.selection_ratio, mask_noise[:, r])  # (B, K)
            kept = torch.zeros_like(error).scatter(1, ids_keep, 1.0)
            num_routed = max(1, kept.shape[1] - ids_keep.shape[1])
            total = total + (error * kept).sum(dim=1) / ids_keep.shape[1]
            total = total + (auxiliary * (1 - kept)).sum(dim=1) / num_routed
        return total / len(self.routes)
