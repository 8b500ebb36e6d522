"""Solvers of your own: `solvers/<name>.py` declares one function, and sampler.solver=<name> samples with it.

It is called as solver(diffusion, net, noise, y, num_steps, guidance=…, randn_like=…), as `RF.sample` is, with its other
keywords as settings, such as +sampler.eta=0.5. It returns latents (B, C, h, w) like noise. CONTRIBUTING.md has one.
"""

BASE = None
