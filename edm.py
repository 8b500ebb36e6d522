"""EDM (Karras et al., arXiv 2206.00364): preconditioning, training loss and the stochastic Heun sampler.

Math in the paper's letters: sigma is a noise level, x a clean latent, D_x its estimate, F_x the raw network output.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from guidance import UNGUIDED, Guidance
from routing_module import Route


class EDM:
    """Noises a latent as x + sigma·eps with ln(sigma) ~ N(P_mean, P_std²), and learns D(x + sigma·eps; sigma) = x."""

    def __init__(self, P_mean: float = -1.2, P_std: float = 1.2, sigma_data: float = 0.5):
        if P_std < 0 or sigma_data <= 0:
            raise ValueError(f"EDM with P_std={P_std} and sigma_data={sigma_data}: the first may not be negative, and "
                             f"the second, the standard deviation of the latents, must be positive.")
        self.P_mean, self.P_std, self.sigma_data = P_mean, P_std, sigma_data

    def preconditioning(self, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns c_skip, c_out, c_in and c_noise (Table 1) in the shape of sigma."""
        total = sigma**2 + self.sigma_data**2
        c_skip = self.sigma_data**2 / total
        c_out = sigma * self.sigma_data / total.sqrt()
        c_in = 1 / total.sqrt()
        c_noise = sigma.log() / 4
        return c_skip, c_out, c_in, c_noise

    def denoise(self, net: nn.Module, x: Tensor, sigma: Tensor, y: Tensor, routes: tuple[Route, ...] = ()) -> Tensor:
        """Estimates the clean latent D_x (B, C, h, w) from a noised x at noise levels sigma (B,) (Eq. 7), in float32.

        The network runs in whatever precision the caller's autocast sets; all around it stays float32. A network that
        also predicts variances (learn_sigma) answers with 2C channels, of which the first C are F_x.
        """
        x, sigma = x.float(), sigma.float().view(-1, 1, 1, 1)
        c_skip, c_out, c_in, c_noise = self.preconditioning(sigma)
        F_x = net(c_in * x, c_noise.flatten(), y, routes=routes)[:, : x.shape[1]].float()
        return c_skip * x + c_out * F_x

    def loss(
        self, net: nn.Module, x: Tensor, y: Tensor, routes: tuple[Route, ...] = (),
        sigma: Tensor | None = None, eps: Tensor | None = None,
    ) -> Tensor:
        """Returns each sample's denoising loss (B,), a mean over channels and pixels with weight 1/c_out² (Eq. 8).

        x is (B, C, h, w) float32 and y (B,); sigma (B,) and unit noise eps like x are drawn where they are not given.
        """
        if sigma is None:
            sigma = (self.P_mean + self.P_std * torch.randn(x.shape[0], device=x.device)).exp()
        if eps is None:
            eps = torch.randn_like(x)
        sigma = sigma.view(-1, 1, 1, 1)
        c_out = self.preconditioning(sigma)[1]
        D_x = self.denoise(net, x + sigma * eps, sigma, y, routes)
        return ((D_x - x) / c_out).square().mean(dim=(1, 2, 3))

    @torch.no_grad()
    def sample(
        self, net: nn.Module, noise: Tensor, y: Tensor, num_steps: int = 40,
        sigma_min: float = 0.002, sigma_max: float = 80, rho: float = 7,
        S_churn: float = 0, S_min: float = 0, S_max: float = math.inf, S_noise: float = 1,
        guidance: Guidance | None = None, randn_like: Callable[[Tensor], Tensor] = torch.randn_like,
    ) -> Tensor:
        """Turns unit noise (B, C, h, w) into latents (B, C, h, w) float32 by Heun's method with churn (Algorithm 2).

        Takes 2·num_steps - 1 network evaluations. The state is float64, as the steps near sigma_min are small beside
        the state at sigma_max. `randn_like` draws the noise of churn.
        """
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
            # Heun's correction, except into t = 0, where the slope has no value.
            if i < num_steps - 1:
                d_prime = (x_next - D(x_next, t_next, i).double()) / t_next
                x_next = x_hat + (t_next - t_hat) * (d_cur + d_prime) / 2
        return x_next.float()


class DDPM(EDM):
    """A network that predicts eps at 1000 discrete steps of a linear schedule, seen as a denoiser (Table 1, iDDPM).

    This is what the weights published with facebookresearch/DiT are; it serves to sample them with the same sampler.
    """

    def __init__(self, num_timesteps: int = 1000, beta_min: float = 1e-4, beta_max: float = 0.02):
        super().__init__()
        betas = torch.linspace(beta_min, beta_max, num_timesteps, dtype=torch.float64)
        alphas_cumprod = (1 - betas).cumprod(0)
        self.sigmas = ((1 - alphas_cumprod) / alphas_cumprod).sqrt().float()     # (num_timesteps,) ascending

    def preconditioning(self, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns c_skip, c_out, c_in and c_noise, the index of the nearest noise level, in the shape of sigma."""
        c_noise = (sigma[..., None] - self.sigmas.to(sigma.device)).abs().argmin(-1).float()
        return torch.ones_like(sigma), -sigma, (sigma**2 + 1).rsqrt(), c_noise
