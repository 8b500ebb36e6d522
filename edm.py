"""EDM (Karras et al., arXiv 2206.00364): preconditioning, training loss and the stochastic Heun sampler.

Math in the paper's letters: sigma is a noise level, x a clean latent, D_x its estimate, F_x the raw network output.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import accumulate, repeat
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from guidance import UNGUIDED, Forward, Guidance, Network
from routing_module import Route

Level = Annotated[float, Ge(1e-6), Le(1e6)]    # of noise: its squares and roots fit float32
NotNegative = Annotated[float, Ge(0)]


class EDM:
    """Noises a latent as x + sigma·eps with ln(sigma) ~ N(P_mean, P_std²), and learns D(x + sigma·eps; sigma) = x."""

    max_noise = math.inf     # the highest noise level

    def __init__(self, P_mean: float = -1.2, P_std: float = 1.2, sigma_data: Annotated[float, Gt(0)] = 0.5):
        self.P_mean, self.P_std, self.sigma_data = P_mean, P_std, sigma_data

    def draw_sigma(self, count: int, device: torch.device) -> Tensor:
        """Samples noise levels (count,) for training."""
        return (self.P_mean + self.P_std * torch.randn(count, device=device)).exp()

    def draw(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Samples noise levels (B,) and unit noise like x (B, C, h, w), as `loss` takes them."""
        return self.draw_sigma(len(x), x.device), torch.randn_like(x)

    def preconditioning(self, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns c_skip, c_out, c_in and c_noise (Table 1) in the shape of sigma."""
        total = sigma**2 + self.sigma_data**2
        c_skip = self.sigma_data**2 / total
        c_out = sigma * self.sigma_data / total.sqrt()
        c_in = 1 / total.sqrt()
        c_noise = sigma.log() / 4
        return c_skip, c_out, c_in, c_noise

    def denoise(self, net: Forward, x: Tensor, sigma: Tensor, y: Tensor, routes: tuple[Route, ...] = ()) -> Tensor:
        """Estimates the clean latent D_x (B, C, h, w) from a noised x at noise levels sigma (B,) (Eq. 7), in float32.

        The network runs in the precision of the caller's autocast; everything around it is float32. A network that
        also predicts variances (learn_sigma) returns 2C channels; the first C are F_x.
        """
        x, sigma = x.float(), sigma.float().view(-1, 1, 1, 1)
        c_skip, c_out, c_in, c_noise = self.preconditioning(sigma)
        F_x = net(c_in * x, c_noise.flatten(), y, routes=routes)[:, : x.shape[1]].float()
        return c_skip * x + c_out * F_x

    def loss(
        self, net: Forward, x: Tensor, y: Tensor, routes: tuple[Route, ...] = (),
        sigma: Tensor | None = None, eps: Tensor | None = None,
        mask_noise: Tensor | None = None,
    ) -> Tensor:
        """Returns each sample's denoising loss (B,), a mean over channels and pixels with weight 1/c_out² (Eq. 8).

        x is (B, C, h, w) float32 and y (B,); sigma (B,) and unit noise eps like x are sampled if they are None.
        mask_noise (B, len(routes), N) decides the masks; without it the network samples them.
        """
        if sigma is None:
            sigma = self.draw_sigma(x.shape[0], x.device)
        if eps is None:
            eps = torch.randn_like(x)
        if mask_noise is not None:
            net = partial(net, mask_noise=mask_noise)
        sigma = sigma.view(-1, 1, 1, 1)
        c_out = self.preconditioning(sigma)[1]
        D_x = self.denoise(net, x + sigma * eps, sigma, y, routes)
        return ((D_x - x) / c_out).square().mean(dim=(1, 2, 3))

    @torch.no_grad()
    def sample(
        self, net: Network, noise: Tensor, y: Tensor, num_steps: int = 40,
        sigma_min: Level = 0.002, sigma_max: Level = 80, rho: Annotated[float, Ge(0.1), Le(100)] = 7,
        S_churn: NotNegative = 0, S_min: NotNegative = 0, S_max: NotNegative = math.inf, S_noise: NotNegative = 1,
        guidance: Guidance | None = None, randn_like: Callable[[Tensor], Tensor] = torch.randn_like,
    ) -> Tensor:
        """Turns unit noise (B, C, h, w) into latents (B, C, h, w) float32 by Heun's method with churn (Algorithm 2).

        Takes 2·num_steps - 1 network evaluations. The state is float64, because steps near sigma_min are small compared
        with the state at sigma_max. `randn_like` samples the noise of churn. Raises ValueError for limits in wrong
        order, and for settings of churn without any.
        """
        for name, low, high in (("sigma", sigma_min, sigma_max), ("S", S_min, S_max)):
            if low >= high:
                raise ValueError(f"sampler.{name}_min={low} is not below sampler.{name}_max={high}.")
        if S_churn == 0 and (S_min, S_max, S_noise) != (0, math.inf, 1):
            raise ValueError(f"S_min={S_min} S_max={S_max} S_noise={S_noise} would change nothing without churn: also "
                             f"set sampler.S_churn=40.")
        D = (guidance or UNGUIDED).guide(self.denoise, net, noise, y, num_steps)
        # The time grid stays on the host: comparing or reading it never waits for the device.
        ramp = torch.linspace(0, 1, num_steps, dtype=torch.float64)
        t_steps = (sigma_max ** (1 / rho) + ramp * (sigma_min ** (1 / rho) - sigma_max ** (1 / rho))) ** rho
        t_steps = [*t_steps.tolist(), 0.0]

        x_next = noise.double() * t_steps[0]
        for i in range(num_steps):
            x_cur, t_cur, t_next = x_next, t_steps[i], t_steps[i + 1]
            # Churn: add noise to climb from t_cur to a higher level t_hat.
            if S_churn > 0 and S_min <= t_cur <= S_max:
                t_hat = t_cur * (1 + min(S_churn / num_steps, math.sqrt(2) - 1))
                x_hat = x_cur + math.sqrt(t_hat**2 - t_cur**2) * S_noise * randn_like(x_cur)
            else:
                t_hat, x_hat = t_cur, x_cur
            # Euler, from t_hat to t_next.
            d_cur = (x_hat - D(x_hat, t_hat, i).double()) / t_hat
            x_next = x_hat + (t_next - t_hat) * d_cur
            # Heun's correction, except in the step to t = 0, where the slope is undefined.
            if i < num_steps - 1:
                d_prime = (x_next - D(x_next, t_next, i).double()) / t_next
                x_next = x_hat + (t_next - t_hat) * (d_cur + d_prime) / 2
        return x_next.float()


class DDPM(EDM):
    """A network that predicts eps at 1000 discrete steps of a linear schedule, seen as a denoiser (Table 1, iDDPM).

    The weights published with facebookresearch/DiT are of this kind. They can be sampled with EDM's sampler, or with
    the ancestral one that their published numbers come from.
    """

    def __init__(self, num_timesteps: int = 1000, beta_min: float = 1e-4, beta_max: float = 0.02):
        super().__init__()
        betas = torch.linspace(beta_min, beta_max, num_timesteps, dtype=torch.float64)
        self.alphas_cumprod = (1 - betas).cumprod(0)                                    # (num_timesteps,) descending
        self.sigmas = ((1 - self.alphas_cumprod) / self.alphas_cumprod).sqrt().float()  # ascending

    def preconditioning(self, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns c_skip, c_out, c_in and c_noise, the index of the nearest noise level, in the shape of sigma."""
        c_noise = (sigma[..., None] - self.sigmas.to(sigma.device)).abs().argmin(-1).float()
        return torch.ones_like(sigma), -sigma, (sigma**2 + 1).rsqrt(), c_noise

    @torch.no_grad()
    def sample(
        self, net: Network, noise: Tensor, y: Tensor, num_steps: int = 40,
        sigma_min: Level = 0.002, sigma_max: Level = 80, rho: Annotated[float, Ge(0.1), Le(100)] = 7,
        S_churn: NotNegative = 0, S_min: NotNegative = 0, S_max: NotNegative = math.inf, S_noise: NotNegative = 1,
        guidance: Guidance | None = None, randn_like: Callable[[Tensor], Tensor] = torch.randn_like,
        solver: Literal["heun", "ancestral"] = "heun",
    ) -> Tensor:
        """Turns unit noise (B, C, h, w) into latents (B, C, h, w) float32.

        `solver` is "heun" (`EDM.sample`) or "ancestral" (`sample_ancestral`, which ignores sigma_min … S_noise).
        """
        if solver not in ("heun", "ancestral"):
            raise ValueError(f"solver={solver} is neither heun nor ancestral.")
        if solver == "ancestral":
            return self.sample_ancestral(net, noise, y, num_steps, guidance, randn_like)
        return super().sample(net, noise, y, num_steps, sigma_min, sigma_max, rho, S_churn, S_min, S_max, S_noise,
                              guidance, randn_like)

    def predict(self, net: Forward, x: Tensor, sigma: Tensor, y: Tensor, routes: tuple[Route, ...] = ()) -> Tensor:
        """Estimates eps, and where the variance lies in its range from -1 to 1: (B, 2C, h, w) float32.

        x is a state of variance 1, sqrt(abar)·x_0 + sqrt(1 - abar)·eps. Raises ValueError for a network without
        variances.
        """
        out = net(x.float(), self.preconditioning(sigma.float())[3], y, routes=routes).float()
        if out.shape[1] != 2 * x.shape[1]:
            raise ValueError(f"solver=ancestral needs a network that also predicts a variance, in 2·{x.shape[1]} "
                             f"channels, but this one has {out.shape[1]}: set sampler.solver=heun.")
        return out

    def sample_ancestral(
        self, net: Network, noise: Tensor, y: Tensor, num_steps: int = 250, guidance: Guidance | None = None,
        randn_like: Callable[[Tensor], Tensor] = torch.randn_like,
    ) -> Tensor:
        """Turns unit noise into latents through x_{t-1} ~ p(x_{t-1} | x_t) (DDPM, arXiv 2006.11239, Algorithm 2).

        It takes num_steps of the 1000 steps, evenly spaced. The log variance lies between those of the posterior and of
        beta (iDDPM, arXiv 2102.09672, Eq. 15), and latents are not clipped. `randn_like` samples the noise of each step
        except the last. Raises ValueError for more steps than there are.
        """
        if num_steps > len(self.sigmas):
            raise ValueError(f"num_steps={num_steps}, but solver=ancestral visits {len(self.sigmas)} noise levels, "
                             f"each at most once: set num_steps={len(self.sigmas)} or fewer, or sampler.solver=heun.")
        model = (guidance or UNGUIDED).guide(self.predict, net, noise, y, num_steps)
        stride = (len(self.sigmas) - 1) / max(1, num_steps - 1)     # summed, as in DiT: i · stride may round otherwise
        steps = [round(step) for step in accumulate(repeat(stride, num_steps - 1), initial=0.0)]
        abar = [1.0, *self.alphas_cumprod[steps].tolist()]  # from data to noise

        x_prev = noise.double()
        for i in range(num_steps, 0, -1):
            x, alpha, beta = x_prev, abar[i] / abar[i - 1], 1 - abar[i] / abar[i - 1]
            eps, share = model(x, self.sigmas[steps[i - 1]].item(), num_steps - i).double().chunk(2, dim=1)
            x_0 = x / math.sqrt(abar[i]) - math.sqrt(1 / abar[i] - 1) * eps
            # The posterior's mean and, except in the last step, noise with the variance that the network predicts.
            x_prev = math.sqrt(abar[i - 1]) * beta / (1 - abar[i]) * x_0
            x_prev = x_prev + math.sqrt(alpha) * (1 - abar[i - 1]) / (1 - abar[i]) * x
            if i > 1:
                log_beta, log_posterior = math.log(beta), math.log(beta * (1 - abar[i - 1]) / (1 - abar[i]))
                log_var = (1 + share) / 2 * log_beta + (1 - share) / 2 * log_posterior
                x_prev = x_prev + (log_var / 2).exp() * randn_like(x)
        return x_prev.float()
