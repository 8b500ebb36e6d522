"""A run's folder: its lock, how checkpoints are saved and resumed, and what is discarded after the resumed step."""

import json
import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from omegaconf import OmegaConf
from torch import nn

from autoencoder import Convention
from dit import LabelEmbedder
from objectives import class_of, own_state, trained_parameters
from runtime import files, ranks, sharding
from runtime.schema import as_recorded, as_text, leaves, typed
from training.optimizers import load_optimizer, optimizer_tensors
from training.run import Run
from training.settings import ONLY_AT_START, WITHOUT_EFFECT
from weights import checkpoints
from weights.averages import names_of
from weights.loading import Trained, find_on_main_rank, load_trained, other_data
from weights.records import architecture, diffusion_class, diffusion_keywords

MAX_SKIPPED = 100   # steps in a row without a finite gradient, which stop a run

Meta = dict[str, Any]  # what a checkpoint's meta.json holds; its own hash says that it is as `save` wrote it


def tells_runs_apart(key: str) -> bool:
    """True if two runs that differ in the setting at a dotted key are different runs.

    Names, paths, what is shown or kept, and the kind of device do not matter.
    """
    return not any(f"{key}.".startswith(f"{name}.") for name in WITHOUT_EFFECT)


# ---- may it resume? -------------------------------------------------------------------------------------------------


def require_no_steps(run: Run) -> None:
    """Raises ValueError if a run without a checkpoint has recorded steps beyond its first save, or up to its end."""
    last = max(map(training_step, files.read_rows(run.folder / "metrics.jsonl")), default=0)
    if 0 < last >= min(run.cfg.checkpoint.every + 1, run.cfg.steps):
        raise ValueError(f"{run.folder} has recorded {last} steps and has no checkpoint, so training would replace the "
                         f"record: restore its checkpoints, set name=<another>, or move the folder away.")


def differing(old: Any, new: Any) -> tuple[Any, Any]:
    """Reduces two dicts to the keys in which they differ; returns other values unchanged."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return old, new
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return {key: old.get(key) for key in keys}, {key: new.get(key) for key in keys}


def fixed(settings: dict[str, Any], kind: type) -> dict[str, Any]:
    """Returns the settings of a diffusion or an objective without those that its class lets a resumed run change."""
    return {key: value for key, value in settings.items() if key not in getattr(kind, "changeable", ())}


def check_resumable(meta: dict[str, Any], now: dict[str, Any], run_dir: Path) -> None:
    """Raises ValueError if a checkpoint's record has another network, diffusion, objective, data set or start."""
    def facts(record: dict[str, Any]) -> dict[str, Any]:
        diffusion, objective = diffusion_keywords(record["diffusion"]), record["objective"]
        return {"network": architecture(record["network"]),
                "diffusion": fixed(diffusion, diffusion_class(diffusion["name"])),
                "objective": fixed(objective, class_of(objective.get("name"))),
                "data set": record["data"]["fingerprint"],
                "init_from": record["init_from"] and os.path.realpath(record["init_from"]),
                "optimizer": record["optimizer"]}

    was, is_now = facts(meta), facts(now)
    for fact in was:
        old, new = differing(was[fact], is_now[fact])
        if old != new:
            anew = f" and {typed('init_from', run_dir)}, which continues from its weights" if fact == "data set" else ""
            raise ValueError(f"{run_dir} was trained with another {fact}, so it cannot resume: it has {old}, this "
                             f"command {new}. Start another run with name=<another>{anew}, or give the settings that "
                             f"it started with.")


def changed_settings(meta: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Describes by key how settings that tell runs apart have changed since a checkpoint's record was written."""
    def settings(record: dict[str, Any]) -> dict[str, Any]:
        config = {key: value for key, value in leaves(record["config"]).items() if tells_runs_apart(key)
                  and not key.startswith("route_schedule.")}
        length = {"steps": record["config"]["steps"]} if config.get("optimizer.schedule") == "cosine" else {}
        return {**config, **length, "world": record["world"], "route_schedule": record["route_schedule"]}

    was, is_now = settings(meta), settings(now)
    return {key: f"{key} was {as_text(was[key])} and is now {as_text(value)}" for key, value in is_now.items()
            if key in was and was[key] != value}


def open_parent(state: Accelerator, path: str, record: dict[str, Any], new_label_table: bool = False) -> Trained:
    """Loads the EMA weights that a run of `record` starts from: another run's, or imported ones.

    With `new_label_table` the table of labels is initialised again by the run's seed. Raises ValueError for weights of
    another network or diffusion. Routes may differ.
    """
    network = record["network"]
    parent = load_trained(find_on_main_rank(state, path))
    if new_label_table:
        labels = {"num_classes": network["num_classes"], "null_label": True}
        parent.recorded["network"] = parent.recorded["network"] | labels
        parent.net.y_embedder = LabelEmbedder(network["num_classes"], parent.net.pos_embed.shape[-1])
        nn.init.normal_(parent.net.y_embedder.embedding_table.weight, std=0.02,
                        generator=torch.Generator().manual_seed(record["seed"]))
    old, new = (architecture(recorded["network"])
                | {f"diffusion.{key}": recorded["diffusion"].get(key) for key in ("name", "sigma_data")}
                for recorded in (parent.recorded, record))
    if old != new:
        old, new = differing(old, new)
        kept, needed = (sizes.get("num_classes", 0) for sizes in (old, new))
        remedy = ("new_label_table=true initialises the table of labels again, to fine-tune on other classes"
                  + f"; data.num_classes={kept} keeps it, if labels are its indices" * (kept > needed) + "."
                  if old.keys() <= {"num_classes", "null_label"} else
                  "DiT's published weights are for sampling: train.py trains under EDM or flow matching, not DDPM."
                  if old.get("diffusion.name") == "ddpm" else
                  "Set model.backbone_type, model, objective, diffusion and data to what it was trained with.")
        raise ValueError(f"init_from={path} has another network or diffusion: {old} there, {new} here. {remedy}")
    return parent


# ---- resuming and saving --------------------------------------------------------------------------------------------


def resume(run: Run) -> Meta | None:
    """Restores a run's latest checkpoint, or else loads the weights that the run starts from.

    Returns what the checkpoint's meta.json holds. Raises ValueError if the run cannot resume.
    """
    run.run_id = f"{run.folder.name}-{time.time_ns():x}"
    latest, meta = ranks.from_main(run.accelerator, partial(checkpoints.read_latest, run.folder)), None
    if latest is not None:
        folder, meta = latest
        with as_recorded(folder):
            restore(run, folder, meta)
    else:
        ranks.from_main(run.accelerator, partial(require_no_steps, run))
        begin(run)
    for net in run.averages.values():
        net.null_label = run.record["null_label"]
    return meta


def begin(run: Run) -> None:
    """Loads the weights that a run starts from, if it names any; raises ValueError where they do not fit."""
    if run.cfg.init_from is not None:
        parent = open_parent(run.accelerator, run.cfg.init_from, run.record, run.cfg.new_label_table)
        data = run.record["data"]
        names = None if run.cfg.new_label_table else data["class_names"]
        for difference in other_data(parent, names, Convention.read(data["convention"])):
            run.accelerator.print(f"init_from={run.cfg.init_from}: {difference}. The network has to learn that anew.")
        run.record["parent"] = {"step": parent.checkpoint.record.step, "weights_sha256": parent.checkpoint.sha256}
        run.record["null_label"] |= parent.net.null_label and not run.cfg.new_label_table
        for net in (run.model, *run.averages.values()):
            sharding.copy_into(net.state_dict(), parent.net.state_dict())


def restore(run: Run, folder: Path, meta: Meta) -> None:
    """Loads a checkpoint into a run, given its folder and its meta.json; raises ValueError if it does not fit."""
    check_resumable(meta, run.record, run.folder)
    note_changes(run, meta)
    run.record["parent"] = meta["parent"]
    run.record["null_label"] = meta["null_label"] or (run.record["null_label"] and meta["step"] < run.cfg.steps)
    run.step = run.saved = meta["step"]
    run.images, run.elapsed_before = meta["images"], meta["elapsed_s"]
    run.lowest_loss = math.inf if meta["lowest_loss"] is None else meta["lowest_loss"]
    if meta["run_id"].rpartition("-")[0] == run.folder.name:  # else a copy, and wandb would drop its rows as known
        run.run_id = meta["run_id"]
    sharding.copy_into(run.model.state_dict(), checkpoints.load(folder, "model"))
    was = {decay: name for name, decay in names_of(meta["config"]["ema"]["decay"]).items()}
    for name, decay in names_of(run.cfg.ema.decay).items():
        file = was.get(decay, "ema" if name == "ema" else "model")
        if file == "model":
            run.accelerator.print(f"{name} begins at step {run.step} with the weights of that step.")
        sharding.copy_into(run.averages[name].state_dict(), checkpoints.load(folder, file))
    training = checkpoints.load(folder, "training")
    run.sums.values.copy_(training.pop("sums"))
    state = own_state(run.objective)
    sharding.copy_into(state, {name: training.pop(name) for name in state})
    load_optimizer(trained_parameters(run.objective), run.optimizer, training)
    if run.accelerator.scaler is not None and meta["scaler"] is not None:
        run.accelerator.scaler.load_state_dict(meta["scaler"])


def note_changes(run: Run, meta: Meta) -> None:
    """Prints and records how settings, code or device have changed since a checkpoint.

    Raises ValueError for fewer steps than the run has taken, and for other settings of a finished run.
    """
    step, steps, changes = meta["step"], run.cfg.steps, changed_settings(meta, run.record)
    if step > steps:
        raise ValueError(f"{run.folder} has taken {step} steps already, more than steps={steps}: raise steps, or start "
                         f"another run with name=<another>.")
    others = [text for key, text in changes.items() if key not in ("world", "steps")]
    if step == steps and others:
        raise ValueError(f"{run.folder} has finished its {step} steps with other settings: {'; '.join(others)}. Train "
                         f"with these under another name=<name> or run_dir=<folder>, or continue that run with a "
                         f"larger steps=.")
    now = run.record["history"][-1] | {"step": step}  # a new entry only if one of these or a setting has changed
    if changed := {key: text for key, text in changes.items() if key not in ONLY_AT_START and step < steps}:
        now["changed"] = changed
    for change in changed.values():
        run.accelerator.print(f"Resuming with a change: {change}. From here on the run differs from one without the "
                              f"change.")
    unchanged = meta["history"][-1] | {"step": step} == now
    run.record["history"] = meta["history"] if unchanged else [*meta["history"], now]


def save(run: Run) -> None:
    """Writes a checkpoint unless this step has one, and prunes older ones; all ranks call it together."""
    cfg, accelerator = run.cfg, run.accelerator
    if run.saved == run.step:
        return
    run.saved = run.step
    total = run.sums.over_ranks(accelerator)
    training = optimizer_tensors(trained_parameters(run.objective), run.optimizer) | own_state(run.objective)
    training["sums"] = torch.tensor([*total.values()], dtype=torch.float64)
    meta = {"step": run.step, "images": run.images, "elapsed_s": run.elapsed, "run_id": run.run_id,
            "lowest_loss": run.lowest_loss if math.isfinite(run.lowest_loss) else None,
            "scaler": accelerator.scaler and accelerator.scaler.state_dict(),
            "sound": not run.is_diverging(total), **run.record, "torch": torch.__version__}
    tensors = {**{name: net.state_dict() for name, net in run.averages.items()},
               "model": run.model.state_dict(), "training": training}
    with sharding.gathering(tensors.values(), keep=accelerator.is_main_process) as complete:
        if accelerator.is_main_process:
            checkpoints.save(run.checkpoint, tensors, meta, complete)
            checkpoints.prune(run.folder, run.step, cfg.checkpoint.keep_last, cfg.checkpoint.keep_every)


def require_gradients(run: Run, skipped: int) -> None:
    """Raises ValueError, with the cause and the remedy, if too many steps in a row were skipped."""
    if skipped < min(MAX_SKIPPED, run.cfg.steps):  # in a short run, all of its steps
        return
    last_good = checkpoints.last_sound(run.folder, run.step - skipped)
    remedy = (f"Move checkpoints newer than {last_good} away to resume from it" if last_good else
              f"There is no good checkpoint: move {run.folder} away, or set name=<another>")
    raise ValueError(f"the last {skipped} steps had no finite gradient and were skipped: the run stops at step "
                     f"{run.step}. {remedy}; and lower optimizer.lr, set optimizer.clip_norm=1 or precision=fp32.")


# ---- the folder -----------------------------------------------------------------------------------------------------


def lock_run(run: Run) -> None:
    """Locks a run's folder for this process; raises ValueError where another one trains in it.

    A run from elsewhere may contain links, through which training would write and delete elsewhere. They are refused.
    So is a folder of other files, some of which training would replace, and the folder of all runs.
    """
    names = ("config.yaml", "metrics.jsonl", "results.jsonl", "samples", "metadata.json")
    others = [*filter(os.path.lexists, map(run.folder.joinpath, names)), *run.folder.glob("*/checkpoints")]
    if others and not (run.folder / "checkpoints").is_dir():    # which a run has before all of these
        raise ValueError(f"{run.folder} holds {others[0].relative_to(run.folder)} and no checkpoints/, so it is no "
                         f"run's folder: set another run_dir= or name=.")
    for path in run.folder.iterdir() if run.folder.is_dir() else ():
        files.inside(run.folder, path.name)
    run.lock = files.lock_folder(run.folder, f"Another process is training {run.folder}. Stop it first, or set "
                                      f"name=<another> for a second run.")


def prepare_folder(run: Run, meta: Meta | None) -> None:
    """Creates a run's folder, prunes its checkpoints, and checks that one more fits its disk."""
    for folder in (run.folder / "checkpoints", run.folder / "samples"):  # fails now rather than at the first save
        folder.mkdir(parents=True, exist_ok=True)
    # A kill may have come between the last save and its pruning, which obeys the settings of that save.
    kept = (meta or run.record)["config"]["checkpoint"]
    checkpoints.prune(run.folder, run.step, kept["keep_last"], kept["keep_every"])
    if meta is None:  # a run that starts over scores its untrained network again
        discard_after(run.folder, -1)
        write_settings(run)
    if run.step < run.cfg.steps:
        size = 4 * sum(tensor.numel() for tensor in run.model.state_dict().values())
        needed = (3 + len(run.averages)) * size  # the averages, the weights, and the optimizer's two moments
        files.require_room(run.folder, needed, "a checkpoint: make room, or set run_dir= to another disk.")


def begin_record(run: Run) -> None:
    """Discards what a resumed run wrote after its checkpoint, and writes the settings to config.yaml.

    This waits for the first step, so that a command that takes no step changes no record.
    """
    if run.accelerator.is_main_process:
        discard_after(run.folder, run.step)
        write_settings(run)


def write_settings(run: Run) -> None:
    summary = " ".join(run.summary.split())
    files.write_text(run.folder / "config.yaml", f"# {summary}\n{OmegaConf.to_yaml(run.cfg.model_dump())}")


def discard_after(run_dir: Path, step: int) -> None:
    """Discards what a run wrote after `step`, which it now repeats: damaged checkpoints, grids, metrics, scores."""
    for path in (run_dir / "results.jsonl", run_dir / "metrics.jsonl"):
        with files.locked(path):  # fid.py may be adding a row
            rows = "".join(json.dumps(row) + "\n" for row in files.read_rows(path) if training_step(row) <= step)
            if path.is_file() and rows.encode() != path.read_bytes():
                files.write_text(path, rows)
    checkpoints.set_aside_after(run_dir, step)
    for picture in (run_dir / "samples").glob("step-" + 8 * "[0-9]" + ".png"):
        if int(picture.stem.removeprefix("step-")) > step:
            picture.unlink()


def training_step(row: dict[str, Any]) -> int:
    """Returns training's step in a row of metrics or scores; -1 for a row of fid.py or of another program."""
    source = row.get("source", row | {"in_training": True})
    step = source.get("step") if isinstance(source, dict) and source.get("in_training") else None
    return step if isinstance(step, int) else -1
