"""Features -> statistics -> scores: FID, sFID, Inception Score, precision and recall, as ADM has them.

This is only mathematics on tensors. If several processes share the work, the caller passes a function that sums.
"""

import contextlib
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from scipy.linalg.lapack import dpstrf
from torch import Tensor

from runtime.device import upload

SPLIT = 5000        # images of one Inception Score; the score of a set is the mean over its splits
NEIGHBOUR = 3       # precision and recall: a ball reaches the third nearest neighbour
BLOCK = 10000       # rows and columns of distances that ADM's evaluator computes in one piece

Array = Tensor | np.ndarray
OverRanks = Callable[[Tensor], Tensor]  # sums a tensor over all processes
Distances = Callable[[Tensor, Tensor], Tensor]  # features (N, D) and (M, D) -> squared distances (N, M)


# ---- features -> statistics -----------------------------------------------------------------------------------------


class Moments:
    """Mean and covariance of a stream of features (B, D), in float64.

    Sums are taken about the first batch's mean, so that a mean far from zero costs no digits.
    """

    def __init__(self, size: int, device: torch.device | str = "cpu"):
        self.count = 0
        self.shift, self.sum = torch.zeros((2, size), dtype=torch.float64, device=device)
        self.outer = torch.zeros((size, size), dtype=torch.float64, device=device)

    def add(self, features: Tensor) -> None:
        features = features.to(self.sum.device, torch.float64)
        if not self.count:
            self.shift = features.mean(0)
        centred = features - self.shift
        self.count += len(centred)
        self.sum += centred.sum(0)
        self.outer.addmm_(centred.T, centred)

    def merge(self, summed: OverRanks) -> None:
        """Replaces each rank's moments by those of all ranks' features together."""
        count, total = summed(self.sum.new_tensor(self.count)), summed(self.sum + self.count * self.shift)
        mean = total / count
        to_mean = mean - self.shift  # the same sums, about the mean of all
        cross = torch.outer(self.sum, to_mean)
        outer = self.outer - cross - cross.T + self.count * torch.outer(to_mean, to_mean)
        self.count, self.shift, self.sum, self.outer = int(count), mean, torch.zeros_like(mean), summed(outer)

    def mean_and_covariance(self) -> tuple[Tensor, Tensor]:
        """Returns mu (D,) and the unbiased sigma (D, D) of two images or more."""
        mean = self.sum / self.count
        return self.shift + mean, (self.outer - self.count * torch.outer(mean, mean)) / (self.count - 1)


class ScoreSums:
    """The sums behind the Inception Score of each split of 5000 images, in the order of the images' indices."""

    def __init__(self, count: int, num_classes: int, device: torch.device | str = "cpu"):
        # Of each split: images, sum of p·log p, and sums of p per class.
        self.sums = torch.zeros((-(-count // SPLIT), 2 + num_classes), dtype=torch.float64, device=device)

    def add(self, indices: Tensor, probs: Tensor) -> None:
        p = probs.to(self.sums.device, torch.float64)
        rows = torch.cat([torch.ones_like(p[:, :1]), torch.special.entr(p).neg().sum(1, keepdim=True), p], dim=1)
        self.sums.index_add_(0, upload(indices // SPLIT, p.device), rows)

    def merge(self, summed: OverRanks) -> None:
        self.sums = summed(self.sums)

    def score(self) -> float:
        """Returns exp of the mean KL(p(y|x) || p(y)), averaged over the splits (Salimans et al., arXiv 1606.03498)."""
        count, p_log_p, p = self.sums[:, :1], self.sums[:, 1], self.sums[:, 2:]
        return (p_log_p / count[:, 0] + torch.special.entr(p / count).sum(1)).exp().mean().item()


# ---- statistics -> scores -------------------------------------------------------------------------------------------


def frechet_distance(mu1: Array, sigma1: Array, mu2: Array, sigma2: Array) -> float:
    """Computes |mu1 - mu2|² + tr(sigma1 + sigma2 - 2 (sigma1 sigma2)^½) of two Gaussians (Heusel et al., 1706.08500).

    Means (D,) and covariances (D, D) are tensors or arrays. With sigma1 = A Aᵀ and sigma2 = B Bᵀ the trace of the root
    is the sum of the singular values of Aᵀ B, which is real for any rank, as for fewer images than dimensions.
    """
    mu1, sigma1, mu2, sigma2 = (torch.as_tensor(value, dtype=torch.float64).cpu()
                                for value in (mu1, sigma1, mu2, sigma2))
    root = sum_of_singular_values(square_root(sigma1).T @ square_root(sigma2))
    return ((mu1 - mu2).square().sum() + sigma1.trace() + sigma2.trace() - 2 * root).item()


def square_root(sigma: Tensor) -> Tensor:
    """Factors a covariance (D, D) of rank r as A Aᵀ with A (D, r), by Cholesky's method with pivots."""
    factor, pivots, rank, _ = dpstrf(sigma.numpy(), lower=1)
    A = torch.empty(len(sigma), rank, dtype=torch.float64)
    A[torch.from_numpy(pivots).long() - 1] = torch.from_numpy(factor).tril()[:, :rank]
    return A


def sum_of_singular_values(K: Tensor) -> Tensor:
    """Sums the singular values of K (r, s), as square roots of the eigenvalues of K Kᵀ.

    Eigenvalues below 1e-16 of the largest are rounding errors, and a thousand of their roots would change a FID. So the
    large ones are summed first, and the others after K is projected onto the remaining vectors.
    """
    total, first = K.new_zeros(()), None
    while len(K):
        values, vectors = torch.linalg.eigh(K @ K.T)  # ascending
        first = values[-1] if first is None else first
        if values[-1] <= 1e-28 * first:
            break
        large = values > 1e-8 * values[-1]
        total += values[large].sqrt().sum()
        K = vectors[:, ~large].T @ K
    return total


def norms_in_half(half: Tensor) -> Tensor:
    """Sums the squares of float16 rows (N, D) in float16, in the order in which TensorFlow's reduce_sum does on a CPU.

    Each half of the row goes into 4 accumulators of 8 lanes; only the 8 lanes at the end are added in float32. The
    rounding on the way decides on which side of a ball a feature falls, so only this order reproduces ADM's counts.
    """
    squares = torch.nn.functional.pad(half * half, (0, -half.shape[1] % 64))
    lanes = squares.view(len(half), 2, -1, 4, 8)
    total = lanes[:, :, 0]
    for step in range(1, lanes.shape[2]):
        total = total + lanes[:, :, step]
    total = total[:, :, 0] + total[:, :, 1] + total[:, :, 2] + total[:, :, 3]
    total = total.float().sum(2).half()
    return total[:, 0] + total[:, 1]


def distances_in_half(u: Tensor, v: Tensor, rows: int = 1000) -> Tensor:
    """Computes squared distances (N, M) between features (N, D) and (M, D), rounded as ADM's evaluator rounds them.

    That is float16 throughout, and float32 where any distance of the block overflows float16. It returns either type.
    """
    half_u, half_v = u.half(), v.half()
    distances = torch.empty((len(u), len(v)), dtype=torch.float16, device=u.device)
    norm_v, wide_v = norms_in_half(half_v), half_v.float().T
    for part, block in zip(half_u.split(rows), distances.split(rows), strict=True):
        # float16 products are exact in float32. This way every device sums them in float32.
        block[:] = (norms_in_half(part)[:, None] - 2 * (part.float() @ wide_v).half() + norm_v).clamp_(min=0)
        if not block.isfinite().all():
            return (u.square().sum(1)[:, None] - 2 * u @ v.T + v.square().sum(1)).clamp_(min=0)
    return distances


def squared_distances(u: Tensor, v: Tensor, rows: int = 1000) -> Tensor:
    """Computes squared distances (N, M) float32 between features (N, D) and (M, D), on a device that has float64.

    Products are float64 and about the mean, so a shift of all features changes no distance. Copies have distance 0.
    """
    distances = torch.empty((len(u), len(v)), device=u.device)
    centre = v.double().mean(0)
    v = v.double() - centre
    for part, block in zip(u.split(rows), distances.split(rows), strict=True):
        part = part.double() - centre
        norms = part.square().sum(1)[:, None] + v.square().sum(1)
        exact = torch.addmm(norms, part, v.T, alpha=-2)
        block[:] = exact.masked_fill_(exact < 1e-12 * norms, 0)  # rounding between copies
    return distances


def radii(features: Tensor, measure: Distances) -> Tensor:
    """Computes each feature's squared distance (N,) float32 to its third nearest neighbour among the others (N, D)."""
    reaches = []
    for centres in features.split(BLOCK):
        nearest = torch.full((len(centres), NEIGHBOUR + 1), math.inf, device=features.device)  # and itself
        for others in features.split(BLOCK):
            distances = measure(centres, others)
            for rows, block in zip(nearest.split(1000), distances.split(1000), strict=True):
                rows[:] = torch.cat([rows, block.float()], 1).topk(NEIGHBOUR + 1, largest=False).values
        reaches.append(nearest[:, -1])
    return torch.cat(reaches)


def precision_recall(
    reference: Tensor, images: Tensor, measure: Distances = squared_distances,
) -> tuple[float, float]:
    """Computes the fraction of images in the reference's balls, and of the reference in the images' balls.

    Features are (N, D) and (M, D) float32 on one device; a ball reaches the third nearest neighbour in its own set
    (Kynkäänniemi et al., arXiv 1904.06991). Raises ValueError for sets without a third neighbour.
    """
    if (fewest := min(len(reference), len(images))) <= NEIGHBOUR:
        raise ValueError(f"precision and recall need more than {NEIGHBOUR} images of both sets, and there are "
                         f"{fewest}: name other metrics=.")
    with exact_float32():
        reference_radii, image_radii = radii(reference, measure), radii(images, measure)
        within_images = torch.zeros(len(reference), dtype=torch.bool, device=reference.device)
        within_reference = torch.zeros(len(images), dtype=torch.bool, device=reference.device)
        for first in range(0, len(reference), BLOCK):
            for left in range(0, len(images), BLOCK):
                columns = slice(left, left + BLOCK)
                distances = measure(reference[first : first + BLOCK], images[columns])
                for top, part in zip(range(first, len(reference), 1000), distances.split(1000), strict=False):
                    rows, part = slice(top, top + len(part)), part.float()
                    within_images[rows] |= (part <= image_radii[columns]).any(1)
                    within_reference[columns] |= (part <= reference_radii[rows, None]).any(0)
    return within_reference.double().mean().item(), within_images.double().mean().item()


@contextlib.contextmanager
def exact_float32() -> Iterator[None]:
    """Turns TensorFloat-32 off, as its 10 bits change scores, and restores the earlier setting."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
