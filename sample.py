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

from runtime import files
from runtime.command import command
from runtime.device import join_ranks
from runtime.schema import refuse
from sampling.generate import SAMPLING_VERSION, compile_to_sample, gathered, generate
from sampling.grids import GridSettings, default_grid
from sampling.opening import Sampling, open_sampling
from sampling.options import check_guided, labels_of, parse_seeds
from sampling.pictures import check_file, check_folder, write_grid, write_npz, write_pngs


class SampleSettings(GridSettings):
    """configs/sample.yaml."""

    latents: bool
    overwrite: bool
    compile: bool | None


def name_set(cfg: SampleSettings, sampling: Sampling, seeds: list[int]) -> str:
    """Hashes all that a set of pictures depends on, to recognise a folder that holds the same set."""
    trained = sampling.trained
    return files.record_sha256({
        **sampling.sampler.record(), **trained.recorded, "weights_sha256": trained.checkpoint.sha256,
        "autoencoder": trained.autoencoder, "precision": cfg.precision, "decode_precision": cfg.decode_precision,
        "classes": sampling.classes, "seeds": seeds, "sampling_version": SAMPLING_VERSION})


def suffix_of_output(cfg: SampleSettings) -> str:
    """Returns the suffix of the output: .png for a grid, .npz, or none for a folder."""
    return Path(cfg.out).suffix if cfg.out else ".png"


def check_settings(cfg: SampleSettings, cli_overrides: Mapping[str, str]) -> SampleSettings:
    """Returns the settings; raises ValueError for some that do not go together."""
    if suffix_of_output(cfg) not in ((".npz",) if cfg.latents else (".png", ".npz", "")):
        raise ValueError(f"out={cfg.out or 'null'} is neither a grid (.png), nor an .npz (which latents=true needs), "
                         f"nor a folder (a name without a suffix).")
    if cfg.latents:
        refuse(cli_overrides, "autoencoder", "decode_precision", "decode_batch_size",
               why="latents=true decodes nothing")
    check_guided(cfg, cli_overrides)
    return cfg


@command("sample", SampleSettings, rooms=("solvers", "guidances"), check=check_settings)
def main(cfg: SampleSettings) -> None:
    state, kind = join_ranks(cfg.cpu, cfg.tf32, cfg.precisions), suffix_of_output(cfg)
    seeds = parse_seeds("seeds", cfg.seeds)
    sampling = open_sampling(state, cfg, as_latents=cfg.latents)
    trained = sampling.trained
    out = Path(cfg.out) if cfg.out else default_grid(cfg, "sample", trained)
    if kind and not cfg.overwrite:
        check_file(out, "name another, or replace it with overwrite=true")
    compile_to_sample(trained.net, sampling.sampler.guidance, cfg.compile, len(seeds), state.device)
    labels = labels_of(seeds, sampling.classes)
    batches = generate(state, trained.net, sampling.sampler, sampling.decode, seeds, labels,
                       batch_size=cfg.batch_size, precision=cfg.precision, progress="sampling")
    if kind == ".png":
        write_grid(state, gathered(state, batches), labels, out, trained.display_names, sampling.classes)
    elif kind == ".npz":
        keys = ("latents", "labels") if cfg.latents else ("arr_0", "arr_1")
        write_npz(state, gathered(state, batches), out, seeds, labels, keys)
    else:
        name = name_set(cfg, sampling, seeds)
        earlier = check_folder(out, name, cfg.overwrite)
        state.wait_for_everyone()  # until all ranks have checked the folder
        for file in earlier if state.is_main_process else ():
            file.unlink()
        write_pngs(state, batches, out, name, seeds, labels)
    state.print(f"{len(seeds)} {'latents' if cfg.latents else 'images'} from {trained.checkpoint.folder}: {out}")


if __name__ == "__main__":
    main()
