"""Seeds -> images, over ranks: a labelled grid, a folder of PNGs, or one npz.

    python sample.py checkpoint=runs/quickstart-tread                     # a grid, one row per class
    python sample.py checkpoint=runs/x seeds=0-63 'classes=[207,360]' num_steps=40 out=dogs.png
    accelerate launch sample.py checkpoint=runs/x seeds=100000-149999 out=samples.npz guidance=cfg scale=1.5

`checkpoint` is a run or a checkpoint folder; weights of other code are imported into one (docs/interop.md). Each image
depends only on its seed, so it is the same on any number of ranks and at any batch size. Options:
configs/sample.yaml and configs/sampling.yaml.
"""

from collections.abc import Mapping
from pathlib import Path

from runtime.command import command
from runtime.device import join_ranks
from runtime.ranks import from_main
from runtime.schema import refuse
from sampling.generate import compile_to_sample, gathered, generate
from sampling.grids import GridSettings, default_grid
from sampling.opening import open_sampling
from sampling.options import check_guided, labels_of, parse_range
from sampling.pictures import require_ours, write_grid, write_npz, write_pngs


class SampleSettings(GridSettings):
    """configs/sample.yaml."""

    latents: bool
    compile: bool | None


def check_settings(cfg: SampleSettings, cli_overrides: Mapping[str, str]) -> SampleSettings:
    """Returns the settings; raises ValueError for some that do not go together."""
    if (Path(cfg.out).suffix if cfg.out else ".png") not in ((".npz",) if cfg.latents else (".png", ".npz", "")):
        raise ValueError(f"out={cfg.out or 'null'} is neither a grid (.png), nor an .npz (which latents=true needs), "
                         f"nor a folder (a name without a suffix).")
    if cfg.latents:
        refuse(cli_overrides, "autoencoder", "decode_precision", "decode_batch_size",
               why="latents=true decodes nothing")
    check_guided(cfg, cli_overrides)
    return cfg


@command("sample", SampleSettings, rooms=("solvers", "guidances"), check=check_settings)
def main(cfg: SampleSettings) -> None:
    state = join_ranks(cfg.cpu, cfg.tf32, cfg.precisions)
    seeds, settings = parse_range("seeds", cfg.seeds), cfg.model_dump_json(exclude={"out"})
    sampling = open_sampling(state, cfg, as_latents=cfg.latents)
    trained = sampling.trained
    out = Path(cfg.out) if cfg.out else default_grid(cfg, trained)
    from_main(state, lambda: require_ours(out, settings=settings if cfg.out else ""))
    compile_to_sample(trained.net, sampling.sampler.guidance, cfg.compile, len(seeds), state.device)
    labels = labels_of(seeds, sampling.classes)
    images = gathered(state, generate(
        state, trained.net, sampling.sampler, sampling.decode, seeds, labels,
        batch_size=cfg.batch_size, precision=cfg.precision, progress="sampling"))
    if out.suffix == ".png":
        write_grid(state, images, labels, out, trained.display_names, settings)
    elif not state.is_main_process:
        for _ in images:  # every rank samples its share
            pass
    elif out.suffix == ".npz":
        write_npz(images, out, seeds, labels, settings, ("latents", "labels") if cfg.latents else ("arr_0", "arr_1"))
    else:
        write_pngs(images, out.resolve() if out.is_symlink() else out, seeds, labels, settings)
    state.print(f"{len(seeds)} {'latents' if cfg.latents else 'images'} from {trained.checkpoint.folder}: {out}")


if __name__ == "__main__":
    main()
