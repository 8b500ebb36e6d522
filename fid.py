"""Images -> features -> statistics -> FID, sFID, Inception Score, precision and recall, as ADM's evaluator has them.

    python fid.py checkpoint=runs/x reference=VIRTUAL_imagenet256_labeled.npz num_samples=50000
    accelerate launch fid.py checkpoint=runs/x reference=… features=inception         # all GPUs, Inception on them too
    python fid.py images=FOLDER|ZIP|NPZ reference=…                                    # what somebody else made
    python fid.py reference_from=FOLDER|ZIP|NPZ|LATENTS out=ref.npz                    # statistics, in ADM's keys
    python fid.py gauge=dit_xl2 checkpoint=DiT-XL-2-256x256.pt reference=…             # somebody's, as published
    python fid.py checkpoint=runs/b2_tread sampler=published reference=…               # ours, as theirs was drawn

Each result is a row of results.jsonl that says exactly what was measured. Options: configs/fid.yaml and
configs/drawing.yaml; what the numbers mean and why they differ from somebody else's: docs/evaluation.md.
"""

import json
import os
import time
from pathlib import Path
from typing import Literal

import numpy as np
from accelerate import PartialState

from runtime import files, ranks
from runtime.command import command
from runtime.device import describe_device, join_ranks
from runtime.schema import Location, Size, Steps, Whole, one_of, read, read_record
from sampling.generate import load_decoder
from sampling.options import DrawingSettings, SamplerSettings, build_guidance, labels_of, read_classes, sampler_settings
from scoring.drawing import DRAWN_RULE, Drawing
from scoring.evaluation import score_images
from scoring.features import EXTRACTORS, Extractor
from scoring.features import load as load_extractor
from scoring.image_sets import Images, evenly, open_images, read_over_ranks
from scoring.metrics import frechet_distance  # noqa: F401      (others call it fid.frechet_distance)
from scoring.results import (
    AtLeastTwo,
    Metrics,
    Published,
    describe_autoencoder,
    describe_classes,
    describe_extractor,
    result_row,
    scored_before,
    versions,
)
from scoring.statistics import Kept, available_metrics, measure, open_reference, write_reference
from weights.loading import Trained, find_weights, load_trained
from weights.records import CheckpointRecord


class ScoringSettings(DrawingSettings):
    """configs/fid.yaml, and that of the sweep."""

    images: Location | None
    reference_from: Location | None
    reference: Location | None
    out: Location | None
    reference_images: Whole
    num_samples: AtLeastTwo | None
    num_steps: Steps | None
    sampler: SamplerSettings | Literal["published"]
    metrics: Metrics | None
    resolution: Size | None
    features: one_of(EXTRACTORS)
    features_weights: Location | None
    sha256: str | None
    keep_features: bool
    results: Location | None
    seed: Whole
    published: Published | None


def report(row: dict, path: Path) -> None:
    """Shows a row as a table and appends it to results.jsonl, in this order, as writing may fail."""
    images, reference, extractor = row["source"], row["reference"], row["extractor"]
    origin = images.get("checkpoint") or images["path"]
    step = f", step {images['step']} ({images['weights']})" if images.get("step") is not None else ""
    lines = [f"{metric:<16}  {value:.6g}" for metric, value in row["metrics"].items()]
    sha256 = f" ({extractor['sha256'][:12]})" if extractor["sha256"] else ""
    lines += [f"{'images':<16}  {row['images']:,} from {origin}{step}",
              f"{'reference':<16}  {reference['path']} ({reference.get('sha256', '')[:12]})",
              f"{'features':<16}  {extractor['name']}{sha256}",
              f"{'time':<16}  {row['seconds']:.1f} s", f"{'record':<16}  {path}"]
    print("\n" + "\n".join(lines))
    files.append_row(path, row)


H100 = {"fp32": 120e12, "bf16": 240e12, "fp16": 240e12}      # FLOP/s: 30 % of a large product's (fp32: TF32), assumed


def derived_hours(drawn: dict, count: int, precision: str) -> float:
    """Derives the hours of one H100 that drawing `count` images takes, by the FLOPs of the network alone."""
    return 2 * sum(drawn["multiply_adds"].values()) * count / H100[precision] / 3600


def beside_published(row: dict, published: Published) -> str:
    """Sets the scores of a row beside published ones; says why not where its images were drawn otherwise."""
    if row["published"] is None:
        how = published.model_dump(exclude={"where", "scores", "tolerance"}, exclude_none=True)
        return f"{published.where}: not compared, as the images were drawn otherwise. Theirs: {json.dumps(how)}"
    lines = [f"{published.where}:", f"{'':<16}  {'ours':>9} {'theirs':>9}"]
    for name, theirs in published.scores.items():
        ours, tolerance = row["metrics"].get(name), published.tolerance.get(name)
        said = "not measured" if ours is None else ""
        if tolerance is not None:
            verdict = said or ("within" if abs(ours - theirs) <= tolerance else "OUTSIDE")
            said = f"± {tolerance:<5} {verdict}"
        lines.append(f"{name:<16}  {'' if ours is None else f'{ours:.4f}':>9} {theirs:>9} {said}".rstrip())
    return "\n".join(lines)


# ---- entry ----------------------------------------------------------------------------------------------------------


def check_settings(cfg: ScoringSettings) -> None:
    """Raises ValueError, with the knob, for settings that do not go together."""
    given = [key for key in ("checkpoint", "images", "reference_from") if getattr(cfg, key) is not None]
    if len(given) != 1:
        raise ValueError(f"Give one of checkpoint=, images= and reference_from=, not {' and '.join(given) or 'none'}.")
    meant = {"out": ["reference_from"], "reference_images": ["reference_from"],
             "resolution": ["images", "reference_from"]}
    for key, users in meant.items():
        if getattr(cfg, key) and given[0] not in users:
            raise ValueError(f"{key}={getattr(cfg, key)} is for {' and '.join(users)}, not for {given[0]}: leave it "
                             f"out.")
    needed = "out" if given == ["reference_from"] else "reference"
    if getattr(cfg, needed) is None:
        raise ValueError(f"{given[0]}={getattr(cfg, given[0])} needs {needed}=<an npz>.")
    if needed == "out" and Path(cfg.out).suffix != ".npz":
        raise ValueError(f"out={cfg.out} must end in .npz.")


DRAWN = ("num_steps", "scale", "interval", "channels")     # what says, with the sampler, how images are drawn


def as_published(cfg: ScoringSettings) -> ScoringSettings:
    """Completes the settings by those of the gauge or, with sampler=published, by those that the run's record holds.

    What is given goes first. The scores that the record holds come along in any case, to be set beside ours. Raises
    ValueError where sampler=published finds none, or none that a network of this diffusion can be drawn as.
    """
    check_settings(cfg)
    asked, published = cfg.published is not None or cfg.sampler == "published", cfg.published
    why = "its record holds no published scores"
    if published is None and cfg.checkpoint is not None:
        folder = find_weights(Path(cfg.checkpoint), cfg.weights or "ema")[1]
        if folder is not None:
            record = read_record(CheckpointRecord, folder / "meta.json", "It describes no checkpoint of ours.")
            published = record.published and read(Published, record.published, f"{folder / 'meta.json'}: published.")
            trained_with = record.diffusion.get("name")
            if published and published.diffusion not in (None, trained_with):
                why = f"{published.where} is of {published.diffusion}, and this network of {trained_with}"
                published = None
    if asked and published is None:
        raise ValueError(f"sampler=published cannot draw {cfg.checkpoint or cfg.images}: {why}. Leave it out, or give "
                         f"num_steps=, sampler.solver= and the like.")
    sampler = SamplerSettings() if cfg.sampler == "published" else cfg.sampler
    settings = {"published": published, "num_steps": cfg.num_steps or 40, "sampler": sampler}
    if asked:
        given = {key: value for key, value in sampler if value is not None}
        settings |= {key: getattr(published, key) for key in ("num_samples", *DRAWN) if getattr(cfg, key) is None}
        settings["sampler"] = published.sampler.model_copy(update=given)
    return cfg.model_copy(update=settings)


def drawn_so(cfg: ScoringSettings, trained: Trained, published: Published) -> bool:
    """Tells whether a checkpoint's images are drawn as those of the published scores were."""
    ours, theirs = (sampler_settings(trained.diffusion, dict(one.sampler)) for one in (cfg, published))
    return (ours == theirs and all(getattr(cfg, key) == getattr(published, key) for key in DRAWN)
            and (cfg.gamma1, cfg.gamma2, cfg.drop_label, cfg.weak, cfg.routes) == (0, 0, True, None, None)
            and (cfg.num_samples or 50_000) == published.num_samples and cfg.classes is None
            and published.step in (None, trained.step) and trained.weights != "model")


def choose(images: Images, num_samples: int | None, source: str) -> np.ndarray:
    """Picks the images to look at: all, or `num_samples` evenly spread; raises ValueError where there are fewer."""
    if images.count < (num_samples or 2):
        raise ValueError(f"{source} holds {images.count} images and {num_samples or 'at least two'} are needed: "
                         f"set num_samples lower, or add images.")
    return evenly(images.count, num_samples or images.count)


def open_checkpoint(cfg: ScoringSettings, state: PartialState) -> tuple[Drawing, Path]:
    """Loads a checkpoint to draw from; returns what draws, with its record, and the folder of the results."""
    trained = load_trained(cfg.checkpoint, cfg.weights, cfg.diffusion_name, cfg.autoencoder, state.device,
                           cfg.num_heads)
    if trained.inferred:
        state.print(trained.inferred)
    classes = read_classes(cfg, trained, state)
    seeds = list(range(cfg.seed, cfg.seed + (cfg.num_samples or 50_000)))
    guidance, guidance_record = build_guidance(cfg, trained, state.device)
    decode = load_decoder(trained, cfg, state.device)
    drawing = Drawing(
        trained.net, trained.diffusion, decode, seeds, labels_of(seeds, classes), batch_size=cfg.batch_size,
        num_steps=cfg.num_steps, guidance=guidance, precision=cfg.precision,
        sampler=cfg.sampler.model_dump(),
    )
    if cfg.published and drawn_so(cfg, trained, cfg.published):
        drawing.published = cfg.published
    given = Path(cfg.checkpoint)
    drawing.record = {
        "checkpoint": str(trained.folder or given), "step": trained.step, "weights": trained.weights,
        "weights_sha256": trained.weights_sha256, "ema": trained.weights == "ema",
        "classes": describe_classes(classes, trained.net.num_classes),
        **({"family": trained.family} if trained.family else {}),      # which says how bare weights were read
        **describe_autoencoder(trained.autoencoder, cfg.decode_precision), **drawing.record,
        "guidance": guidance_record,
    }
    return drawing, trained.run_folder or (given if given.is_dir() else given.parent)


def open_extractor(cfg: ScoringSettings, state: PartialState) -> Extractor:
    with state.local_main_process_first():      # which downloads weights, and records their hash, for the others
        return load_extractor(cfg.features, cfg.features_weights, cfg.sha256, state.device)


def run(cfg: ScoringSettings, reuse: bool = False, must_have: str | None = None) -> tuple[dict, Path]:
    """Scores what the settings, completed by `as_published`, name; returns the row and the file it was appended to.

    With `reuse`, a row that the main rank finds there is returned instead; a rank that does not see it gets it without
    its numbers. Raises ValueError or OSError, with the knob, for settings and files that cannot work, or where the
    metric `must_have` would not be among the numbers.
    """
    state, started = PartialState(), time.perf_counter()

    # ---- everything that can be wrong, before anything slow
    extractor = open_extractor(cfg, state)
    reference = open_reference(cfg.reference, extractor)
    metrics = available_metrics(extractor, reference, cfg.metrics)
    if must_have and must_have not in metrics:
        raise ValueError(f"metric={must_have} is not among the metrics {', '.join(metrics)}.")
    if cfg.checkpoint is not None:
        drawing, home = open_checkpoint(cfg, state)
        count, source, rule, published = len(drawing.seeds), drawing.record, DRAWN_RULE, drawing.published
        if cfg.published:
            state.print(f"Drawing takes about {derived_hours(source, count, cfg.precision):.2g} hours of one H100 "
                        f"[derived: FLOPs at {H100[cfg.precision] / 1e12:.0f} TFLOP/s].")
    else:
        images, home = open_images("images", cfg.images, cfg.resolution, state.device, cfg.autoencoder,
                                   cfg.decode_batch_size), Path()
        chosen = choose(images, cfg.num_samples, f"images={cfg.images}")
        count, source, rule = len(chosen), {**images.record, "images": images.count}, "as stored"
        published = cfg.published if cfg.published and cfg.published.num_samples == count else None
    results = Path(cfg.results or home / "results.jsonl")
    root = results.parent / "features" if cfg.keep_features else None
    results.parent.mkdir(parents=True, exist_ok=True)
    writable = os.access(results if results.exists() else results.parent, os.W_OK)
    if results.is_symlink() or not writable or (results.exists() and not results.is_file()):
        raise ValueError(f"{results} cannot be written, or is no ordinary file: set results=<a file>.")
    place = results.parent.stat()

    def kept(record: dict, count: int) -> Kept | None:
        facts = {"extractor": describe_extractor(extractor), "versions": versions(extractor),
                 **describe_device(state.device)}
        return Kept(root, record | {"count": count} | facts, extractor.sizes, count) if root else None

    def row(scores: dict[str, float | None], resumed_images: int = 0) -> dict:
        return result_row(
            scores, count, source, extractor, reference, seconds=time.perf_counter() - started,
            batch_size=cfg.batch_size, image_rule=rule, resolution=cfg.resolution, resumed_images=resumed_images)

    if reuse:
        wanted = row(dict.fromkeys(metrics))
        old = scored_before(wanted, results)
        if ranks.main_rank_says(state, old is not None):
            return old or wanted, results

    # ---- the reference's own images, then the stream
    stored = reference.images.count if reference.images else 0
    keep = kept({"images": reference.record}, stored) if stored else None
    reference.complete(extractor, metrics, cfg.batch_size, keep)
    keep = kept({"images": dict(source)}, count)
    todo = np.arange(count) if keep is None else keep.missing(count)
    if cfg.checkpoint is not None:
        batches = drawing.draw(todo)
    else:
        batches = read_over_ranks(images, chosen, todo, cfg.batch_size)
    scores = score_images(batches, count, reference, extractor, metrics=metrics, keep=keep, progress="scoring")
    scored = row(scores, keep.count if keep else 0)
    scored["published"] = published and published.model_dump(include={"where", "scores"})
    if state.is_main_process:
        size, reference_size = source.get("size"), reference.record.get("size")
        if size and reference_size and size != reference_size:
            print(f"The images are {size[1]}x{size[0]} and the reference's {reference_size[1]}x{reference_size[0]}: is "
                  f"it the right one?")
        report(scored, results)
        files.require_same(results.parent, place)
    state.wait_for_everyone()       # until the row is there for all to read
    return scored, results


@command("fid", ScoringSettings)
def main(cfg: ScoringSettings) -> None:
    state = join_ranks(cfg.cpu, cfg.tf32)
    if cfg.reference_from is not None:
        write_statistics(cfg, state)
        return
    cfg = as_published(cfg)
    row, _ = run(cfg)
    if cfg.published:
        state.print(beside_published(row, cfg.published))


def write_statistics(cfg: ScoringSettings, state: PartialState) -> None:
    """Measures `reference_from` and writes `out`."""
    check_settings(cfg)
    extractor = open_extractor(cfg, state)
    images = open_images("reference_from", cfg.reference_from, cfg.resolution, state.device, cfg.autoencoder,
                         cfg.decode_batch_size)
    chosen = choose(images, cfg.num_samples, f"reference_from={cfg.reference_from}")
    if cfg.reference_images > images.count:
        raise ValueError(f"reference_images={cfg.reference_images} are asked for arr_0, but "
                         f"reference_from={cfg.reference_from} holds {images.count}.")
    tally = measure(images, extractor, cfg.batch_size, progress="reference", chosen=chosen)
    if state.is_main_process:
        write_reference(Path(cfg.out), tally, extractor, images, cfg.reference_images)
        print(f"Statistics of {tally.count:,} images of {images.record['size']} on {extractor.name}: {cfg.out}")


if __name__ == "__main__":
    main()
