"""Published scores: sampling as their images were sampled, and comparing our scores with them if so."""

import json

from runtime.schema import read
from sampling.checks import sampler_settings
from sampling.options import NO_GUIDANCE, DrawingSettings
from scoring.results import Published
from weights.loading import Checkpoint, Trained


def as_published(cfg: DrawingSettings, checkpoint: Checkpoint | None = None) -> DrawingSettings:
    """Completes fid.py's settings by those of the gauge or, with sampler=published, by those in a checkpoint's record.

    What is given goes first. Scores in the record come along in any case, to be compared with ours. Raises ValueError
    where sampler=published finds none, or none of this network's diffusion.
    """
    asked, published = cfg.published is not None or cfg.sampler == "published", cfg.published
    why = "its record holds no published scores"
    if published is None and checkpoint is not None and checkpoint.record is not None:
        record = checkpoint.record
        published = record.published and read(Published, record.published, f"{checkpoint.folder}/meta.json: published.")
        trained_with = record.diffusion.get("name")
        if published and published.diffusion not in (None, trained_with):
            why = f"{published.where} is of {published.diffusion}, and this network of {trained_with}"
            published = None
    if asked and published is None:
        raise ValueError(f"sampler=published cannot sample {cfg.checkpoint or cfg.images}: {why}. Leave it out, or "
                         f"give num_steps=, sampler.solver= and the like.")
    if not asked:
        return cfg.model_copy(update={"published": published, "num_steps": cfg.num_steps or 40})
    given = {} if cfg.sampler == "published" else {key: value for key, value in cfg.sampler if value is not None}
    theirs = {key: getattr(published, key) for key in ("num_samples", "num_steps", "scale", "interval", "channels")
              if getattr(cfg, key) is None}
    theirs["sampler"] = published.sampler.model_copy(update=given)
    return cfg.model_copy(update={**theirs, "published": published})


def is_drawn_as(published: Published, cfg: DrawingSettings, trained: Trained) -> bool:
    """True if a checkpoint's images are sampled as those of the published scores were."""
    ours, theirs = (sampler_settings(trained.diffusion, dict(one.sampler)) for one in (cfg, published))
    guidance = {key: getattr(published, key, unguided) for key, unguided in NO_GUIDANCE}
    return (ours == theirs and all(getattr(cfg, key) == value for key, value in guidance.items())
            and cfg.num_steps == published.num_steps and (cfg.num_samples or 50_000) == published.num_samples
            and published.step in (None, trained.step) and cfg.classes is None and trained.weights != "model")


def compare_published(row: dict, published: Published) -> str:
    """Compares the scores of a row with published ones, unless its images were sampled differently."""
    if row["published"] is None:
        how = published.model_dump(exclude={"where", "scores", "tolerance"}, exclude_none=True)
        return f"{published.where}: not compared, as the images were sampled differently. Theirs: {json.dumps(how)}"
    lines = [f"{published.where}:", f"{'':<16}  {'ours':>9} {'theirs':>9}"]
    for name, theirs in published.scores.items():
        ours, tolerance = row["metrics"].get(name), published.tolerance.get(name)
        verdict = "not measured" if ours is None else ""
        if tolerance is not None:
            verdict = verdict or ("within" if abs(ours - theirs) <= tolerance else "OUTSIDE")
            verdict = f"± {tolerance:<5} {verdict}"
        lines.append(f"{name:<16}  {'' if ours is None else f'{ours:.4f}':>9} {theirs:>9} {verdict}".rstrip())
    return "\n".join(lines)
