"""The loss of TREAD's first version (arXiv 2501.04765v1, nano256/tread-nano): over the patches of kept tokens."""

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import unfold

from edm import EDM
from objectives.diffusion import DiffusionLoss, Objective, draw_mask_noise
from routing_module import Router


class Version1(Objective):
    """Minimises the mean over routes of the error of a route's kept patches, plus mae_weight times the MAE term.

    That term is the squared error of D_x against the noised input, over the patches of routed tokens. The input is
    normalised in each patch by its mean and unbiased variance (arXiv 2306.09305, as in TREAD's first code). Raises
    ValueError if it is not the innermost loss, and for another diffusion, no routes, or another selection.
    """

    def __init__(self, inner: Objective, mae_weight: float = 0.0):
        super().__init__(inner)
        if not isinstance(inner, DiffusionLoss):
            raise ValueError("objective=version1 replaces the diffusion's loss, so it must come first: "
                             "objective=[version1,<the others>].")
        if type(self.diffusion) is not EDM or not self.net.routes or self.net.router.selection != "random":
            raise ValueError("objective=version1 is a loss of EDM over the patches of the kept tokens: set diffusion="
                             "edm, model.routes, and model.selection=random, as it must know which are kept.")
        self.mae_weight = mae_weight

    def forward(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        weight = x.new_ones(len(x), 1, 1, 1) if weight is None else weight.float()
        mask_noise = draw_mask_noise(self.net, self.routes, weight, self.keep_masked)
        return self.loss(x, y, weight, mask_noise), {}

    def loss(
        self, x: Tensor, y: Tensor, weight: Tensor, mask_noise: Tensor,
        sigma: Tensor | None = None, eps: Tensor | None = None,
    ) -> Tensor:
        """Returns each sample's loss (B,); mask_noise (B, R, N) decides which tokens are kept."""
        edm, net, routes = self.diffusion, self.net, self.routes
        sigma = (edm.draw_sigma(len(x), x.device) if sigma is None else sigma).view(-1, 1, 1, 1)
        x_noised = x + sigma * (torch.randn_like(x) if eps is None else eps)
        D_x = edm.denoise(partial(net, mask_noise=mask_noise), x_noised, sigma, y, routes)
        error = weight * ((D_x - x) / edm.preconditioning(sigma)[1]).square()
        patch_size = math.isqrt(error[0, 0].numel() // mask_noise.shape[2])

        def patches(image: Tensor) -> Tensor:
            return unfold(image, patch_size, stride=patch_size).transpose(1, 2)  # (B, N, C · p²), in raster order

        per_patch, auxiliary, total = patches(error).mean(dim=2), 0.0, 0.0           # (B, N)
        if self.mae_weight > 0:
            target = patches(x_noised)
            var, mean = torch.var_mean(target, dim=2, keepdim=True)
            target = (target - mean) / (var + 1e-6).sqrt()
            auxiliary = patches(weight * torch.ones_like(x_noised)) * (patches(D_x) - target).square()
            auxiliary = self.mae_weight * auxiliary.mean(dim=2)                      # (B, N)
        for r, route in enumerate(routes):
            ids_keep = Router().get_mask(patches(x_noised), route.selection_ratio, mask_noise[:, r])  # (B, K)
            kept = torch.zeros_like(per_patch).scatter(1, ids_keep, 1.0)
            num_routed = max(1, kept.shape[1] - ids_keep.shape[1])
            total = total + (per_patch * kept).sum(dim=1) / ids_keep.shape[1]
            total = total + (auxiliary * (1 - kept)).sum(dim=1) / num_routed
        return total / len(routes)
