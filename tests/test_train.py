"""Training as users run it: what it starts from, options of the loop, mistakes, one step, what it writes, samples."""

import io
import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import run_command
from PIL import Image
from safetensors.torch import load_file
from spoils import with_new_hashes
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_runs import assert_same_end, refusal, rows, trained

import fid
import sample
import train
from edm import EDM
from runtime import files
from train import main, train_step
from training import run_folder, speed
from training.run import choose_sizes
from training.settings import TrainSettings
from weights import checkpoints


def test_a_run_starts_from_anothers_ema_with_its_own_schedule_and_resumes_without_it(shapes, tmp_path):
    parent, run = tmp_path / "parent", tmp_path / "run"
    trained(parent, shapes, "diffusion=rf", "steps=2")
    options = ("diffusion=rf", "model=dit", f"init_from={parent}", "optimizer.lr=0")
    trained(run, shapes, *options, "steps=1")
    start = load_file(checkpoints.latest(parent) / "ema.safetensors")
    for name in ("model", "ema"):  # a step at a learning rate of 0 changes nothing
        weights = load_file(checkpoints.latest(run) / f"{name}.safetensors")
        assert all(torch.equal(weights[key], start[key]) for key in start), name
    meta = checkpoints.read_meta(checkpoints.latest(run))
    assert meta["step"] == 1 and meta["network"]["routes"] == [] and meta["init_from"] == str(parent)
    assert meta["parent"] == {"step": 2, "weights_sha256": files.sha256(checkpoints.latest(parent) / "ema.safetensors")}
    shutil.rmtree(parent)
    trained(run, shapes, *options, "steps=2")
    assert checkpoints.read_meta(checkpoints.latest(run))["parent"] == meta["parent"]
    assert "was trained with another init_from" in refusal(run, shapes, "diffusion=rf", "model=dit", "steps=3")


def test_steps_without_a_finite_gradient_are_skipped_counted_and_too_many_stop_the_run(shapes, tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "MAX_SKIPPED", 6)
    run, often = tmp_path / "run", ("log.every=2", "checkpoint.every=2", "checkpoint.keep_last=2")
    trained(run, shapes, "steps=6", *often)
    said = refusal(run, shapes, "optimizer.lr=1e30", *often)
    skipped = [row["skipped"] for row in rows(run)]
    assert skipped == sorted(skipped) and skipped[-1] >= 6 and rows(run)[-1]["loss"] is None
    good = checkpoints.step_folder(run, 6)  # the last one from before the learning rate that was too high
    assert f"Move checkpoints newer than {good} away to resume from it; and lower optimizer.lr" in said


def test_a_run_whose_every_step_is_skipped_does_not_finish_however_short_it_is(shapes, tmp_path, monkeypatch):
    loss = EDM.loss
    monkeypatch.setattr(EDM, "loss", lambda *args, **options: loss(*args, **options) * torch.nan)
    said = refusal(tmp_path / "run", shapes, "steps=4", "model.depth=3", "model.routes=[]")
    assert "the last 4 steps had no finite gradient" in said
    assert f"There is no good checkpoint: move {tmp_path}/run away, or set name=<another>; and lower optimi" in said


class Plain(torch.nn.Linear):
    """A network, a diffusion and an objective in one, without noise: its loss depends on weights, images and labels."""

    num_classes, terms = 4, ("half", "label")

    @property
    def net(self):
        return self

    def forward(self, x, y, weight):
        losses = weight.flatten() * (super().forward(x.flatten(1))[:, 0] - y).square()
        return losses, {"half": losses / 2, "label": y.float()}


@pytest.mark.parametrize("parts", [1, 4])
def test_a_step_in_parts_equals_the_step_of_the_full_batch(fresh_accelerator, parts):
    """Clipping, AdamW, averages and dropped labels are compared with published trainers'."""
    torch.manual_seed(0)
    model, x, y, weight = Plain(12, 1), torch.randn(8, 3, 2, 2), torch.arange(8) % 4, torch.rand(8, 1, 1, 1)
    accelerator = speed.make_accelerator("fp32", parts, tf32=False, cpu=True)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.5, fused=True))
    before, whole = model.weight.detach().clone(), model(x, y, weight)[0].mean()
    [gradient] = torch.autograd.grad(whole, [model.weight])
    loss, _, _, terms = train_step(accelerator, model, model, optimizer, x, y, {"weight": weight},
                                   label_dropout=0.0, clip_norm=None, num_parts=parts)
    torch.testing.assert_close(before - model.weight.detach(), 0.5 * gradient)
    torch.testing.assert_close(loss, whole.detach())
    torch.testing.assert_close(terms, torch.stack([whole.detach() / 2, y.float().mean()]))  # means, not sums


def test_a_run_takes_the_steps_that_its_settings_name(shapes, tmp_path):
    """The learning rate's schedule and the average's warm-up."""
    trained(tmp_path, shapes, "steps=6", "log.every=1", "checkpoint.every=1", "checkpoint.keep_last=9",
            "ema.warmup=true", "ema.decay=0.3", "optimizer.lr=0.01", "optimizer.warmup_steps=2",
            "optimizer.schedule=cosine")
    lr = [0.005, 0.01, *(0.01 * (1 + np.cos(np.pi * i / 4)) / 2 for i in range(4))]
    assert [row["lr"] for row in rows(tmp_path)] == pytest.approx(lr)
    saved = [{name: checkpoints.load(folder, name) for name in ("model", "ema")}
             for folder in checkpoints.all_steps(tmp_path)]
    name = "final_layer.linear.weight"
    decays = [2 / 11, 3 / 12, 0.3, 0.3, 0.3]  # (1 + step) / (10 + step), at most 0.3
    for before, after, decay in zip(saved, saved[1:], decays, strict=False):
        torch.testing.assert_close(after["ema"][name], decay * before["ema"][name] + (1 - decay) * after["model"][name],
                                   rtol=1e-4, atol=1e-7)


def test_a_null_label_that_was_never_trained_guides_nothing(shapes, tmp_path):
    def is_trained(run: Path) -> bool:
        return checkpoints.read_meta(checkpoints.latest(run))["null_label"]

    run, small = tmp_path / "run", ("model.depth=3", "model.routes=[]", "label_dropout=0", "log.every=1")
    trained(run, shapes, "steps=1", *small)
    with pytest.raises(SystemExit, match="they were trained with label_dropout=0"):
        run_command(sample.main, "sample.py", f"checkpoint={run}", "guidance=cfg", f"out={tmp_path}/x.png", "cpu=true")
    assert not is_trained(run)
    trained(run, shapes, "steps=2", *small, "label_dropout=0.5")
    trained(run, shapes, "steps=3", *small)  # whose null label is the one of the step before
    trained(tmp_path / "grandchild", shapes, "steps=1", *small, f"init_from={run}")
    assert is_trained(run) and is_trained(tmp_path / "grandchild")


@pytest.fixture(scope="module")
def shown(shapes, pixel_reference, tmp_path_factory) -> Path:
    """A run as `reference` with grids, scores and TensorBoard's events."""
    run = tmp_path_factory.mktemp("shown") / "run"
    trained(run, shapes, "log.trackers=[tensorboard]", "samples.every=10", "samples.seeds=0-5", "samples.num_steps=2",
            "samples.batch_size=20000", "evaluate.every=10", f"evaluate.reference={pixel_reference}",
            "evaluate.num_samples=6", "evaluate.num_steps=2", "evaluate.batch_size=4",
            "evaluate.guidance_scales=[null,1.5]")
    return run


def test_scores_and_grids_are_made_on_time_from_the_untrained_network_on_and_do_not_change_the_run(shown, reference):
    scored = files.read_rows(shown / "results.jsonl")
    assert [(row["source"]["step"], (row["source"]["guidance"] or {}).get("scale")) for row in scored] == [
        (step, scale) for step in (0, 10, 20, 24) for scale in (None, 1.5)]
    assert {row["source"]["decode_precision"] for row in scored} == {"fp32"}
    assert {row["source"]["evaluations"] for row in scored} == {3, 6} and all(row["images"] == 6 for row in scored)
    assert {path.name for path in (shown / "samples").iterdir()} == {f"step-{step:08d}.png" for step in (0, 10, 20, 24)}
    assert_same_end(shown, reference)


def test_scores_in_training_are_of_the_average(shown, pixel_reference, tmp_path, fresh_accelerator):
    for weights in ("ema", "model"):
        run_command(fid.main, "fid.py", checkpoint=shown, weights=weights, reference=pixel_reference,
                    features="pixels", num_samples=6, num_steps=2, seed=100_000, cpu=True, results=tmp_path / "scores")
    scored, again = ([row["metrics"] for row in files.read_rows(file)]
                     for file in (shown / "results.jsonl", tmp_path / "scores"))
    assert again[0] == pytest.approx(scored[-2], rel=1e-6) and again[1] != pytest.approx(scored[-2], rel=1e-6)


def test_tensorboard_shows_the_rows_the_grids_and_the_scores(shown):
    events = EventAccumulator(str(shown / "tread"), {"images": 0}).Reload()
    for name in ("loss", "grad_norm", "img_per_sec"):
        values = {event.step: event.value for event in events.Scalars(name)}
        assert values == pytest.approx({row["step"]: row[name] for row in files.read_rows(shown / "metrics.jsonl")})
    grids = {event.step: event.encoded_image_string for event in events.Images("samples")}
    assert [*grids] == [0, 10, 20, 24]  # of the untrained network, too
    for step, png in grids.items():
        assert np.array_equal(Image.open(io.BytesIO(png)), Image.open(shown / f"samples/step-{step:08d}.png"))
    scored = files.read_rows(shown / "results.jsonl")
    for first, suffix in enumerate(("", "_guided_1.5")):
        for name in scored[0]["metrics"]:
            values = [event.value for event in events.Scalars(f"{name}_ema_2_steps{suffix}")]
            assert values == pytest.approx([row["metrics"][name] for row in scored[first::2]])


def test_tensorboards_curves_do_not_go_back_where_a_killed_run_resumes(shapes, tmp_path):
    """tensorflow/tensorboard#3732: steps after the last checkpoint are logged twice, and curves zigzag."""
    run, options = tmp_path / "run", ("log.trackers=[tensorboard]", "log.every=1", "checkpoint.every=4")
    trained(run, shapes, *options, "steps=7")
    files.remove(checkpoints.step_folder(run, 7))  # as if killed after step 7
    trained(run, shapes, *options, "steps=9")
    events = EventAccumulator(str(run / "tread")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [*range(1, 10)]


def test_classes_without_images_are_neither_scored_nor_shown(shapes, reference, pixel_reference, tmp_path):
    data, run = shutil.copytree(shapes, tmp_path / "data"), tmp_path / "run"
    for file in data.glob("labels-*.npy"):
        labels = np.load(file)
        np.save(file, np.where(labels == 2, 3, labels))
    with_new_hashes(data)
    trained(run, data, "steps=2", "data.num_classes=8", "samples.every=2", "samples.seeds=0-9", "samples.num_steps=2",
            "evaluate.every=2", f"evaluate.reference={pixel_reference}", "evaluate.num_samples=6",
            "evaluate.num_steps=2")
    here = [0, 1, 3, 4, 5]
    assert checkpoints.read_meta(checkpoints.latest(run))["data"]["classes"] == here
    assert checkpoints.read_meta(checkpoints.latest(reference))["data"]["classes"] is None
    assert Image.open(run / "samples/step-00000002.png").height == len(here) * (4 * 16 + 2)
    assert files.read_rows(run / "results.jsonl")[-1]["source"]["classes"] == here


def test_a_score_counts_only_for_the_network_and_the_settings_that_it_was_made_with(shapes, pixel_reference, tmp_path):
    options = (f"evaluate.reference={pixel_reference}", "evaluate.num_samples=6", "evaluate.num_steps=2",
               "evaluate.batch_size=4")

    def scores(*changed, run=tmp_path / "run") -> list[dict]:
        trained(run, shapes, *options, *changed)
        return files.read_rows(run / "results.jsonl")

    # A run without a checkpoint begins again, maybe with another network, and so do its scores.
    [first], [deeper] = (scores("steps=0", "evaluate.every=10", f"model.depth={depth}") for depth in (6, 7))
    assert first["source"]["multiply_adds"] != deeper["source"]["multiply_adds"]
    saved = scores("steps=1", "evaluate.every=1")
    assert [row["source"]["step"] for row in saved] == [0, 1]
    assert scores("steps=1", "evaluate.every=1", "evaluate.num_samples=4") == saved  # a line sends to fid.py
    (tmp_path / "run").rename(tmp_path / "moved")
    assert scores("steps=1", "evaluate.every=1", run=tmp_path / "moved") == saved


@pytest.mark.parametrize("how", ["true", "reduce-overhead"])
def test_each_block_is_compiled_and_its_cuda_graphs_begin_anew_at_each_step_not_each_part(
        shapes, tmp_path, monkeypatch, how):
    modes, begun = [], []
    monkeypatch.setattr(torch, "compile", lambda forward, dynamic, mode: modes.append((dynamic, mode)) or forward)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(True))
    trained(tmp_path / "run", shapes, f"compile={how}", "steps=2", "grad_accum_steps=2")
    assert modes == 6 * [(False, None if how == "true" else how)] and len(begun) == 2 * (how != "true")


def test_a_disk_without_room_for_a_checkpoint_is_found_before_training(shapes, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert "disk has 0.001 MB free: a checkpoint: make room" in refusal(tmp_path / "run", shapes, "steps=4")


def test_the_time_of_a_step_has_no_pauses(shapes, tmp_path, monkeypatch):
    clock = [0.0]

    def taking(seconds: int, work):
        return lambda *arguments, **options: clock.insert(0, clock[0] + seconds) or work(*arguments, **options)

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    for name, seconds in (("train_step", 2), ("save", 60)):
        monkeypatch.setattr(train, name, taking(seconds, getattr(train, name)))
    trained(tmp_path / "run", shapes, "steps=4", "log.every=2", "checkpoint.every=1")
    seconds = [(row["sec_per_step"], row["elapsed_s"]) for row in files.read_rows(tmp_path / "run/metrics.jsonl")]
    assert seconds == [(2, 64), (2, 188)]


@pytest.mark.parametrize(("count", "ranks", "batch_size", "steps"), [
    (60, 1, 15, 5000), (60, 4, 12, 5000), (3, 2, 2, 5000), (5000, 1, 64, 15625), (10**6, 8, 64, 100_000),
])
def test_batch_and_steps_follow_from_the_number_of_latents(count, ranks, batch_size, steps):
    settings = TrainSettings.model_construct(batch_size=None, steps=None, grad_accum_steps=1)
    cfg = choose_sizes(settings, SimpleNamespace(num_processes=ranks, print=lambda line: None), count)
    assert (cfg.batch_size, cfg.steps) == (batch_size, steps)


def test_a_run_takes_the_sizes_that_are_not_typed_from_the_weights_that_it_starts_from(shapes, tmp_path):
    """Fine-tuning by another experiment: width, depth, heads, patch and classes are the weights', and it resumes."""
    trained(tmp_path / "first", shapes, "steps=2", "model.patch_size=8")
    plain = ["experiment=small_cpu", f"data.path={shapes}", f"run_dir={tmp_path / 'tuned'}", "compile=false",
             "samples.every=0", "log.trackers=[]", "batch_size=8", "precision=fp32", f"init_from={tmp_path / 'first'}",
             "optimizer.warmup_steps=0", "optimizer.schedule=constant", "checkpoint.every=1", "cpu=true",
             "diffusion.sigma_data=0.8"]
    main(*plain, "steps=1")
    network = json.loads((tmp_path / "tuned/checkpoints/step-00000001/meta.json").read_text())["network"]
    assert [network[key] for key in ("hidden_size", "depth", "num_heads", "patch_size", "num_classes")] == [
        32, 6, 2, 8, 6]
    (tmp_path / "first").rename(tmp_path / "moved")
    main(*plain, "steps=2")
    assert (tmp_path / "tuned/checkpoints/step-00000002").is_dir()
    with pytest.raises(ValueError, match="'hidden_size': 32} there, {'hidden_size': 64} here"):
        main(*(word.replace("first", "moved").replace("tuned", "other") for word in plain), "steps=1",
             "model.hidden_size=64")
