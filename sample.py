"""Seeds -> images, over ranks: a labelled grid, a folder of PNGs, or one npz.

    python sample.py checkpoint=runs/quickstart-tread                     # a grid, one row per class
    python sample.py checkpoint=runs/x seeds=0-63 'classes=[207,360]' num_steps=40 out=dogs.png
    accelerate launch sample.py checkpoint=runs/x seeds=100000-149999 out=samples.npz guidance=cfg scale=1.5

`checkpoint` is a run or a checkpoint folder; weights of other code are imported into one (docs/interop.md). Each image
depends only on its seed, so it is the same on any number of ranks and at any batch size. Options:
configs/sample.yaml and configs/sampling.yaml. `python rf.py` is also here: guided and unguided grids, with costs.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from accelerate import PartialState
from omegaconf import OmegaConf

from guidance import Guidance
from runtime import files
from runtime.command import command
from runtime.device import join_ranks
from runtime.schema import CONFIGS, Location, Selection, as_text, name_of_changes, refuse
from sampling.generate import SAMPLING_VERSION, Batch, gathered, generate, sampling_cost
from sampling.opening import Sampling, open_sampling
from sampling.options import GRID_CLASSES, GuidanceSettings, SamplingSettings, check_guided, labels_of, parse_seeds
from sampling.pictures import check_file, check_folder, write_grid, write_npz, write_pngs
from training import speed
from weights.loading import Trained

# Settings that change at most the last bits of an image, or that the name already contains.
NOT_IN_NAME = {"checkpoint", "weights", "out", "overwrite", "latents", "batch_size", "decode_batch_size", "compile",
               "tf32", "cpu"}


class GridSettings(SamplingSettings):
    """configs/rf.yaml."""

    seeds: Selection | None
    out: Location | None


class SampleSettings(GridSettings):
    """configs/sample.yaml."""

    latents: bool
    overwrite: bool


def default_grid(cfg: GridSettings, config_name: str, trained: Trained, ending: str = "") -> Path:
    """Returns the path of a grid among the run's samples, or in a checkpoint's folder.

    Its name contains the settings that change the images and are not the command's defaults, so that grids with other
    settings are kept.
    """
    usual = {}
    for name in ("guidance/none", "sampling", config_name):
        usual |= OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{name}.yaml"))
    hidden = NOT_IN_NAME | ({*GuidanceSettings.model_fields} if ending == "-unguided" else set())
    ending = f"{name_of_changes(cfg.model_dump(mode='json', exclude=hidden), usual)}{ending}.png"
    checkpoint, path = trained.checkpoint, Path(cfg.checkpoint)
    if checkpoint.run is not None:
        return files.inside(checkpoint.run, "samples", f"{checkpoint.folder.name}-{trained.weights}{ending}")
    # What does not exist is a name of the Hugging Face Hub; its grids are written here.
    place, stem = Path(), f"{'-'.join(path.parts)}{f'-{cfg.weights}' if cfg.weights else ''}"
    if path.exists():  # beside the folder, which may be published as it is
        place, stem = checkpoint.folder.resolve().parent, f"{checkpoint.folder.resolve().name}-{trained.weights}"
    return place / f"{stem}{ending}"


def sample_all(
    state: PartialState, cfg: GridSettings, sampling: Sampling, seeds: list[int], guidance: Guidance | None,
) -> Iterator[Batch]:
    """Samples this rank's batches."""
    return generate(
        state, sampling.trained.net, sampling.trained.diffusion, sampling.decode, seeds,
        labels_of(seeds, sampling.classes),
        batch_size=cfg.batch_size, num_steps=cfg.num_steps, guidance=guidance, precision=cfg.precision,
        progress="sampling, guided" if guidance else "sampling", **sampling.sampler,
    )


def name_set(cfg: SampleSettings, sampling: Sampling, seeds: list[int]) -> str:
    """Hashes all that a set of pictures depends on, to recognise a folder that holds the same set."""
    trained = sampling.trained
    settings = cfg.model_dump(include={"num_steps", "precision", "decode_precision"})
    return files.record_sha256({
        **settings, "weights_sha256": trained.checkpoint.sha256, **trained.recorded, "autoencoder": trained.autoencoder,
        "sampler": {key: str(value) for key, value in sampling.sampler.items()},
        "guidance": sampling.guidance_record, "classes": sampling.classes, "seeds": seeds,
        "sampling_version": SAMPLING_VERSION})


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
    another = "name another, or replace it with overwrite=true"
    if cfg.out and kind and not cfg.overwrite:
        check_file(Path(cfg.out), another)
    sampling = open_sampling(state, cfg, as_latents=cfg.latents)
    trained = sampling.trained
    out = Path(cfg.out) if cfg.out else default_grid(cfg, "sample", trained)
    if not cfg.out and not cfg.overwrite:
        check_file(out, another)
    speed.compile_to_sample(trained.net, sampling.guidance, cfg.compile, len(seeds), state.device)
    batches = sample_all(state, cfg, sampling, seeds, sampling.guidance)
    if kind == ".png":
        write_grid(state, gathered(state, batches), out, trained.display_names, sampling.classes)
    elif kind == ".npz":
        keys = ("latents", "labels") if cfg.latents else ("arr_0", "arr_1")
        write_npz(state, gathered(state, batches), out, len(seeds), keys)
    else:
        name = name_set(cfg, sampling, seeds)
        earlier = check_folder(out, name, cfg.overwrite)
        state.wait_for_everyone()  # until all ranks have checked the folder
        for file in earlier if state.is_main_process else ():
            file.unlink()
        write_pngs(state, batches, out, name)
    kind = "latents" if cfg.latents else "images"
    state.print(f"{len(seeds)} {kind} from {trained.checkpoint.folder}: {out}")


def check_grid(cfg: GridSettings, cli_overrides: Mapping[str, str]) -> GridSettings:
    """Returns the settings; raises ValueError for some that do not go together."""
    if cfg.out and Path(cfg.out).suffix != ".png":
        raise ValueError(f"out={cfg.out} is not a .png; python sample.py writes npz files and folders.")
    check_guided(cfg, cli_overrides)
    return cfg


@command("rf", GridSettings, rooms=("solvers", "guidances"), check=check_grid)
def compare_guided(cfg: GridSettings) -> None:
    """Samples a flow-matching network guided and unguided, and prints what each costs: `python rf.py`."""
    state = join_ranks(cfg.cpu, cfg.tf32, cfg.precisions)
    sampling = open_sampling(state, cfg, most_classes=GRID_CLASSES)
    trained = sampling.trained
    if trained.diffusion.max_noise != 1 or sampling.guidance is None:
        raise ValueError(f"rf.py samples flow matching (diffusion=rf) with and without guidance, and this is "
                         f"{trained.recorded['diffusion']['name']} with scale={as_text(cfg.scale)}: use sample.py.")
    seeds = list(range(8 * len(sampling.classes))) if cfg.seeds is None else parse_seeds("seeds", cfg.seeds)
    if cfg.out:
        out = Path(cfg.out)
        unguided = out.with_name(f"{out.stem.removesuffix('-guided')}-unguided.png")
    else:
        out, unguided = (default_grid(cfg, "rf", trained, ending) for ending in ("-guided", "-unguided"))
    for path in (out, unguided):
        check_file(path, "name another")
    state.print("GFLOP: linear layers' multiply-adds, as the SG paper counts. In brackets: with attention, and two per "
                "multiply-add, as torch counts")
    cost = partial(sampling_cost, trained.net, trained.diffusion, cfg.num_steps, **sampling.sampler)
    evaluations = cost(None)[0]  # one pass each
    shares = {"an evaluation": 1 / evaluations, f"an image of {evaluations}": 1,
              f"all {len(seeds)} images": len(seeds)}
    speed.compile_to_sample(trained.net, sampling.guidance, cfg.compile, len(seeds), state.device)
    for path, guidance in ((out, sampling.guidance), (unguided, None)):
        _, linear, attention = cost(guidance)
        state.print(f"{'guided' if guidance else 'unguided':<9}" + ", ".join(
            f"{linear * share / 1e9:.4g} [{2 * (linear + attention) * share / 1e9:.4g}] GFLOP {unit}"
            for unit, share in shares.items()))
        write_grid(state, gathered(state, sample_all(state, cfg, sampling, seeds, guidance)), path,
                   trained.display_names, sampling.classes)
        state.print(f"         {path}")


if __name__ == "__main__":
    main()
