"""Times the official TREAD code's training step and ours: the same network, batch and precision, in turns.

    git clone https://github.com/CompVis/tread official && git -C official checkout fccf77c
    python scripts/studies/benchmark_official.py path=official batch_size=256 precision=bf16 compile=true \
        'variants=[dit,tread,dit-eager,tread-eager]'

Their source is read from `path` and is not part of this project. As published its step cannot run on one GPU, so two
things are changed from outside: `model.module` is the network itself, as without DDP, and two modules that only its
sampling needs (`utils.edm_helper`, which imports DeepSpeed, and `autoencoder`) are empty. Network, routes, loss, EMA
and the order of calls are theirs; both use data from our loader. Prints a table and writes <out>.json.
Options: configs/benchmark.yaml.
"""

import contextlib
import copy
import importlib
import sys
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch
from accelerate import Accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from latents.loader import to_latent
from runtime.command import command
from runtime.device import DTYPES
from runtime.schema import Location, one_of
from scripts import benchmark

FILES = ("dit.py", "edm.py", "routing_module.py", "utils/train_helper.py")
COMMIT = "fccf77c"


class OfficialSettings(benchmark.BenchmarkSettings):
    """configs/benchmark_official.yaml: those of the benchmark that the official code has, and where it lies."""

    path: Location | None
    mode: one_of(["train"])
    grad_accum_steps: one_of([1])
    precision: one_of(DTYPES)


@contextlib.contextmanager
def modules_of(path: Path) -> Iterator[None]:
    """Makes imports find the official modules, though several have names of ours, and then ours again."""
    empty = {name: types.ModuleType(name) for name in ("utils.edm_helper", "autoencoder")}
    empty["autoencoder"].SDVAE_EMA = None
    names = ("dit", "edm", "routing_module", "utils", "utils.train_helper", *empty)
    ours = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(path))
    sys.modules.update(empty)
    try:
        yield
    finally:
        sys.path.remove(str(path))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(ours)


def open_official(path: str | None) -> tuple[types.ModuleType, types.ModuleType, types.ModuleType]:
    """Imports the official dit, edm and utils.train_helper; raises ValueError where `path` does not hold them."""
    if path is None or (missing := [name for name in FILES if not (Path(path) / name).is_file()]):
        lacks = "=null" if path is None else f"={path} lacks {', '.join(missing)}"
        raise ValueError(f"path{lacks}: give a checkout of github.com/CompVis/tread at {COMMIT}.")
    with modules_of(Path(path).resolve()):
        return tuple(importlib.import_module(name) for name in ("dit", "edm", "utils.train_helper"))


class OfficialVariant:
    """The official network in training, past its first step."""

    def __init__(self, official: tuple, cfg: OfficialSettings, accelerator: Accelerator, name: str,
                 loader: benchmark.Batches, kind: str):
        dit, edm, self.helper = official
        self.name, self.accelerator, self.loader, self.kind = f"official {name}", accelerator, loader, kind
        self.stance = "force_eager" if name.endswith("-eager") or not cfg.compile else "default"
        ours = benchmark.make_network(cfg, name, "meta")
        torch.manual_seed(0)
        net = dit.DiT(
            input_size=ours.input_size, patch_size=ours.patch_size, in_channels=ours.in_channels,
            hidden_size=ours.pos_embed.shape[-1], depth=len(ours.blocks), num_heads=ours.blocks[0].attn.num_heads,
            num_classes=ours.num_classes, enable_routing=bool(ours.routes),
            routes=[{"selection_ratio": route.selection_ratio, "start_layer_idx": route.start_layer_idx,
                     "end_layer_idx": route.end_layer_idx} for route in ours.routes],
        ).to(accelerator.device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
        self.diffusion = edm.EDMDiffusion()
        net = self.diffusion.wrap_model_with_precond(net)
        self.ema = copy.deepcopy(net).eval()
        self.helper.requires_grad(self.ema, False)
        self.net, self.optimizer = accelerator.prepare(net.train(), optimizer)
        self.first_step = sum(self.measure(1).values())
        self.measure(cfg.warmup)

    def measure(self, count: int) -> dict[str, float]:
        """Returns the seconds of a step."""
        return benchmark.seconds_of_parts(self.accelerator.device, partial(self.take_steps, count), count)

    def take_steps(self, count: int, mark: benchmark.Mark) -> None:
        """Takes steps as the official loop does."""
        device = self.accelerator.device
        with torch.compiler.set_stance(self.stance):
            for _ in range(count):
                stored, y, _ = next(self.loader)
                x, y = to_latent(stored.to(device), self.kind), y.to(device)
                with self.accelerator.autocast():
                    loss = self.diffusion.get_training_loss(self.net, x, y.long(), class_drop_prob=0.1).mean()
                self.optimizer.zero_grad()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.helper.update_ema(self.ema, self.net)
                loss.item()  # which waits for the device, in every step
                mark("step")


def time_both(cfg: OfficialSettings, accelerator: Accelerator) -> dict:
    """Times training steps of all variants, ours and theirs, in turn; `over official` is of the same round."""
    official = open_official(cfg.path)
    variants, took, _, products = benchmark.steps_in_turn(cfg, accelerator, lambda *data: [
        kind(cfg, accelerator, name, *data) for name in cfg.variants
        for kind in (benchmark.Variant, partial(OfficialVariant, official))])
    rows = []
    for variant in variants:
        ours, per_step = variant.name.removeprefix("official "), median(took[variant.name])
        ratios = [one / other for one, other in zip(took[f"official {ours}"], took[variant.name], strict=True)]
        rows.append({"variant": variant.name, "batch": cfg.batch_size, "tokens": cfg.tokens, "parts": {},
                     "images/s": cfg.batch_size / per_step, "s/step": per_step, "over official": median(ratios),
                     "first step s": variant.first_step, "rounds s/step": took[variant.name]})
    return {"rows": rows, "matmul FLOP/s": products, "official": COMMIT}


@command("benchmark_official", OfficialSettings)
def main(cfg: OfficialSettings) -> None:
    with benchmark.compiled_code_in(cfg.compile_cache):
        accelerator = benchmark.start(cfg)
        benchmark.finish(cfg, benchmark.describe(cfg, accelerator) | time_both(cfg, accelerator))


if __name__ == "__main__":
    main()
