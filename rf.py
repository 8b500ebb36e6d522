"""Flow matching on straight lines (rectified flow, arXiv 2209.03003; SiT, arXiv 2401.08740), and TREAD guidance.

    accelerate launch train.py model=tread diffusion=rf                                   # train
    python rf.py checkpoint=runs/x guidance=tread gamma1=0.3 gamma2=0.7 scale=1.5         # guided and unguided grids

Math in the paper's letters: t is a noise level in [0, 1], z_t = (1 - t)·x + t·eps the state, v = eps - x its velocity.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal, get_args

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt
from torch import Tensor

from guidance import UNGUIDED, Forward, Guidance, Network
from routing_module import Route

LAST_STEP = 0.04      # noise level at which the SDE's last step begins, which adds no noise
Shift = Annotated[float, Gt(0)] | Literal["size"] | None
TimestepSampling = Literal["logit_normal", "uniform"]
Solver = Literal["euler", "heun", "euler_maruyama"]


def shifted(t: Tensor, shift: Shift, shape: torch.Size) -> Tensor:
    """Moves noise levels t to s·t / (1 + (s - 1)·t), for s > 1 towards the noise (arXiv 2403.03206, Eq. 23).

    A shift of "size" is s = sqrt(C·h·w / 4096) for latents of `shape` (B, C, h, w) (arXiv 2512.12386), and None is 1.
    """
    s = math.sqrt(math.prod(shape[1:]) / 4096) if shift == "size" else shift or 1.0
    return s * t / (1 + (s - 1) * t)


class RF:
    """Noises a latent on the line z_t = (1 - t)·x + t·eps, and learns its velocity v = eps - x.

    Noise levels are sampled as sigmoid(N(0, 1)), "logit_normal" (arXiv 2403.03206), or "uniform" in [0, 1), and moved
    by `shift` (see `shifted`). The sampler's steps use the same shift by default. cosine_weight multiplies a second
    term of the loss: one minus the cosine of the angle between estimated and true velocity (LightningDiT, arXiv
    2501.01423).
    """

    changeable = ("cosine_weight",)     # when a run is resumed
    max_noise = 1.0                     # the highest noise level

    def __init__(
        self, timestep_sampling: TimestepSampling = "logit_normal", cosine_weight: Annotated[float, Ge(0)] = 0.0,
        shift: Shift = None,
    ):
        self.timestep_sampling, self.cosine_weight = timestep_sampling, cosine_weight
        self.shift = shift

    def draw_t(self, x: Tensor) -> Tensor:
        """Samples noise levels (B,) for latents x (B, C, h, w) in training."""
        uniform = {"logit_normal": False, "uniform": True}[self.timestep_sampling]
        t = torch.rand(len(x), device=x.device) if uniform else torch.randn(len(x), device=x.device).sigmoid()
        return shifted(t, self.shift, x.shape)

    def draw(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Samples noise levels (B,) and unit noise like x (B, C, h, w), as `loss` takes them."""
        return self.draw_t(x), torch.randn_like(x)

    def velocity(self, net: Forward, z: Tensor, t: Tensor, y: Tensor, routes: tuple[Route, ...] = ()) -> Tensor:
        """Estimates the velocity v (B, C, h, w) at states z and noise levels t (B,), in float32.

        The network runs in the precision of the caller's autocast. A network that also predicts variances (learn_sigma)
        returns 2C channels; the first C are v.
        """
        z = z.float()
        return net(z, t.float(), y, routes=routes)[:, : z.shape[1]].float()

    def loss(
        self, net: Forward, x: Tensor, y: Tensor, routes: tuple[Route, ...] = (),
        t: Tensor | None = None, eps: Tensor | None = None,
        mask_noise: Tensor | None = None,
    ) -> Tensor:
        """Returns each sample's squared error of the velocity (B,), a mean over channels and pixels.

        cosine_weight adds one minus the cosine over channels, a mean over pixels.
        x is (B, C, h, w) float32 and y (B,); t (B,) and unit noise eps like x are sampled if they are None.
        `mask_noise` is as in `EDM.loss`.
        """
        if t is None:
            t = self.draw_t(x)
        if eps is None:
            eps = torch.randn_like(x)
        t_line = t.view(-1, 1, 1, 1)
        z = (1 - t_line) * x + t_line * eps
        if mask_noise is not None:
            net = partial(net, mask_noise=mask_noise)
        v_hat, v = self.velocity(net, z, t, y, routes), eps - x
        # A network's first prediction is 0, which has no direction. Below a length of 0.1 the cosine fades. Otherwise
        # the first gradient would be about 1e7, and AdamW would remember it for hundreds of steps.
        angle = 1 - F.cosine_similarity(v_hat, v, dim=1, eps=0.1).unsqueeze(1)                   # (B, 1, h, w)
        error = (v_hat - v).square() + self.cosine_weight * angle
        return error.mean(dim=(1, 2, 3))

    @torch.no_grad()
    def sample(
        self, net: Network, noise: Tensor, y: Tensor, num_steps: int = 40, solver: Solver = "euler",
        guidance: Guidance | None = None,
        shift: Shift = None, randn_like: Callable[[Tensor], Tensor] = torch.randn_like,
    ) -> Tensor:
        """Turns unit noise (B, C, h, w) into latents (B, C, h, w) float32 along t = 1 → 0.

        `solver` is "euler" (num_steps evaluations), "heun" (2·num_steps - 1) or "euler_maruyama". Heun's last step is
        Euler's, because a network has hardly been trained at t = 0. "euler_maruyama" is the SDE of
        `sample_euler_maruyama`, the only solver that uses `randn_like`. The steps are equal except for `shift` (see
        `shifted`); None is the shift of training. The state is float64, as in EDM's sampler.
        """
        if solver not in get_args(Solver):
            raise ValueError(f"solver={solver} is none of {', '.join(get_args(Solver))}.")
        if solver == "euler_maruyama":
            return self.sample_euler_maruyama(net, noise, y, num_steps, guidance, shift, randn_like)
        v = (guidance or UNGUIDED).guide(self.velocity, net, noise, y, num_steps)
        ramp = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
        t_steps = shifted(ramp, shift or self.shift, noise.shape).tolist()

        z_next = noise.double()
        for i in range(num_steps):
            z_cur, t_cur, t_next = z_next, t_steps[i], t_steps[i + 1]
            # Euler, from t_cur to t_next.
            v_cur = v(z_cur, t_cur, i).double()
            z_next = z_cur + (t_next - t_cur) * v_cur
            # Heun's correction, except in the step to t = 0.
            if solver == "heun" and i < num_steps - 1:
                v_prime = v(z_next, t_next, i).double()
                z_next = z_cur + (t_next - t_cur) * (v_cur + v_prime) / 2
        return z_next.float()

    def sample_euler_maruyama(
        self, net: Network, noise: Tensor, y: Tensor, num_steps: int = 250, guidance: Guidance | None = None,
        shift: Shift = None, randn_like: Callable[[Tensor], Tensor] = torch.randn_like,
    ) -> Tensor:
        """Turns unit noise into latents by the SDE dz = (v - t·s) dt + sqrt(2t) dW, whose score is s (SiT, Eq. 4).

        num_steps - 1 equal steps lead from t = 1 to 0.04, and one step with drift only leads to 0, as in SiT and REPA.
        A shift moves all of them, as in SR-DiT. `randn_like` samples the noise of each step except the last.
        """
        v = (guidance or UNGUIDED).guide(self.velocity, net, noise, y, num_steps)
        ramp = torch.linspace(1, LAST_STEP, num_steps, dtype=torch.float64)
        t_steps = [*shifted(ramp, shift or self.shift, noise.shape).tolist(), 0.0]

        z_next = noise.double()
        for i in range(num_steps):
            z_cur, t_cur, t_next = z_next, t_steps[i], t_steps[i + 1]
            v_cur = v(z_cur, t_cur, i).double()
            s_cur = -(z_cur + (1 - t_cur) * v_cur) / t_cur
            z_next = z_cur + (t_next - t_cur) * (v_cur - t_cur * s_cur)
            if i < num_steps - 1:
                z_next = z_next + math.sqrt(2 * t_cur * (t_cur - t_next)) * randn_like(z_cur)
        return z_next.float()


def sample_tread(
    net1: Network, gamma1: float, net2: Network, gamma2: float, noise: Tensor, y: Tensor, num_steps: int = 40,
    scale: float = 1.5, routes: tuple[Route, ...] | None = None,
) -> Tensor:
    """Samples a flow-matching network guided by a difference in selection ratio (arXiv 2601.01608, SG).

    net1 at ratio gamma1 is the strong pass and net2, often the same network, at gamma2 ≥ gamma1 the weak one. Both
    passes see the label; the official code drops it in both. noise is (B, C, h, w), y (B,); returns latents like
    noise, float32. `routes` are for networks without routes.
    """
    weak = None if net2 is net1 else net2
    guidance = Guidance(scale, gamma1, gamma2, drop_label=False, net2=weak, routes=routes)
    return RF().sample(net1, noise, y, num_steps, guidance=guidance)


def main() -> None:
    """Runs the command, which the modules of the method do not import."""
    from sampling.grids import compare_guided

    compare_guided()


if __name__ == "__main__":
    main()
