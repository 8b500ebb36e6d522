"""A sharded run is the same run: losses, images, scores and checkpoints are DDP's, with less memory."""

import json
import os
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._dynamo  # these three once, for all the ranks that are forked
import torch.distributed.fsdp
import torch.distributed.tensor
from accelerate.state import AcceleratorState
from conftest import run_command
from forked import Ended, Life, ranks_of
from PIL import Image
from safetensors import SafetensorError
from torch._dynamo.testing import CompileCounterWithBackend
from training_runs import assert_same_end, command, killed, rows, trained

import train
from latents.folder import open_latents
from latents.loader import batches
from runtime import sharding
from weights import checkpoints
from weights.loading import load_trained
from weights.records import build_network

STEPS = 8
RAMPS = ("route_schedule.dense_before=1", "route_schedule.dense_after=4",
         "route_schedule.selection_ratios=[0.25,0.5,0.75]")
SMALL = ("model.depth=3", "model.routes=[{start_layer_idx:1,end_layer_idx:1,selection_ratio:0.5}]")


def fork(world: int, *works, before=lambda rank: None) -> Ended:
    """Does one work after the other on forked ranks, each in a process group of its own."""
    groups = [ranks_of(world) for _ in works]

    def live() -> None:
        rank = int(os.environ["RANK"])
        before(rank)
        for group, work in zip(groups, works, strict=True):
            os.environ.update(group[rank])
            AcceleratorState._reset_state(reset_partial_state=True)
            torch._dynamo.reset()
            work()

    return Life(live, *({"RANK": str(rank)} for rank in range(world))).wait()


def on_ranks(world: int, *runs, before=lambda rank: None) -> Ended:
    """Trains one run after the other on forked ranks; each of `runs` is the overrides of a command."""
    return fork(world, *(partial(run_command, train.main, "train.py", *run) for run in runs), before=before)


def all_well(ended: Ended) -> None:
    assert ended.code == 0, ended.printed[-3000:]


def losses(run: Path) -> torch.Tensor:
    return torch.tensor([[row["loss"], row["grad_norm"]] for row in rows(run)], dtype=torch.float64)


def assert_same_losses(run: Path, other: Path, steps: int) -> None:
    assert len(losses(run)) == steps
    torch.testing.assert_close(losses(run), losses(other), rtol=1e-6, atol=1e-6)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {f"{name}/{key}": value for name in ("model", "ema", "training")
            for key, value in checkpoints.load(folder, name).items()}


# ---- what ranks do beside training ----------------------------------------------------------------------------------


def echo_what_is_loaded(rank: int) -> None:
    """Saves what a run has loaded, as it is, into a run of its own, `<run>/echo-<ranks>-<sharding>`."""
    resume = train.resume

    def resume_and_echo(run):
        resumed, folder = resume(run), run.folder
        if resumed is not None:
            run.folder, run.saved = folder / f"echo-{run.accelerator.num_processes}-{run.cfg.sharding}", None
            train.save(run)
            run.folder = folder
        return resumed

    train.resume = resume_and_echo


def weigh(rank: int) -> None:
    """Writes the bytes that a rank holds of weights, average and moments at a save, into `<run>/bytes-<rank>`."""
    save = train.save

    def weigh_and_save(run):
        state = [value for of_one in run.optimizer.state.values() for value in of_one.values() if value.ndim]
        held = sharding.local_tensors([*run.model.parameters(), *run.averages["ema"].parameters(), *state])
        (run.folder / f"bytes-{rank}").write_text(str(sum(local.untyped_storage().nbytes() for local in held)))
        save(run)

    train.save = weigh_and_save


def tell_what_is_taken(home: Path, rank: int) -> None:
    """Writes the seed, the labels and the routes of each step of a rank into `<home>/taken-<rank>.json`."""
    step, taken = train.train_step, []

    def tell(*arguments, **options):
        taken.append((torch.initial_seed(), arguments[5].tolist(), str(arguments[2].routes)))
        (home / f"taken-{rank}.json").write_text(json.dumps(taken))
        return step(*arguments, **options)

    train.train_step = tell


# ---- the same run ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def routed(shapes, pixel_reference, tmp_path_factory) -> Path:
    """The same run with DDP and with FSDP on two ranks, in `none` and `fsdp` of the folder."""
    folder = tmp_path_factory.mktemp("routed")
    sampled = [f"samples.every={STEPS}", "samples.seeds=0-4", "samples.num_steps=2", f"evaluate.every={STEPS}",
             f"evaluate.reference={pixel_reference}", "evaluate.num_samples=7", "evaluate.num_steps=2",
             "evaluate.batch_size=2", "evaluate.guidance_scales=[null,1.5]"]
    all_well(on_ranks(2, *(command(folder / how, shapes, *SMALL, f"sharding={how}", f"steps={STEPS}", "log.every=1",
                                   "checkpoint.every=100", *sampled)[1:] for how in ("none", "fsdp")), before=weigh))
    return folder


def test_losses_and_norms_are_ddps_and_so_is_the_checkpoint(routed):
    assert_same_losses(routed / "none", routed / "fsdp", STEPS)
    one, two = (checkpoints.latest(routed / how) for how in ("none", "fsdp"))
    assert {path.name for path in one.iterdir()} == {path.name for path in two.iterdir()}
    ddp, fsdp = tensors_of(one), tensors_of(two)
    assert ddp.keys() == fsdp.keys()
    for key, value in ddp.items():
        assert (value.shape, value.dtype) == (fsdp[key].shape, fsdp[key].dtype), key
        difference = (value - fsdp[key]).abs()
        if ".qkv.bias" in key and value.ndim:
            # Keys' biases have no gradient but rounding, which Adam makes as large as others'.
            difference.chunk(3)[1].zero_()
        assert difference.max() <= 1e-6, key


def test_ranks_divide_each_batch_take_the_same_routes_and_sample_from_their_own_seeds(shapes, tmp_path):
    all_well(on_ranks(2, command(tmp_path / "run", shapes, *SMALL, *RAMPS, "steps=6", "checkpoint.every=100")[1:],
                      before=partial(tell_what_is_taken, tmp_path)))
    first, second = (json.loads((tmp_path / f"taken-{rank}.json").read_text()) for rank in (0, 1))
    assert len({seed for seed, *_ in (*first, *second)}) == 2 * 6
    of_one_process = batches(open_latents(shapes), 8, seed=0)
    for (_, one, routes), (_, two, other_routes) in zip(first, second, strict=True):
        assert one + two == next(of_one_process)[1].tolist() and routes == other_routes
    of_one_process.close()
    assert len({routes for *_, routes in first}) >= 3


def test_grids_and_scores_of_the_sharded_average_are_ddps(routed):
    pictures = [Image.open(routed / how / f"samples/step-{STEPS:08d}.png") for how in ("none", "fsdp")]
    grids = [torch.tensor(list(picture.convert("L").getdata())).float() for picture in pictures]
    assert (grids[0] - grids[1]).abs().max() <= 1 and grids[0].std() > 0
    scores = [[json.loads(line) for line in (routed / how / "results.jsonl").read_text().splitlines()]
              for how in ("none", "fsdp")]
    scored = [(row["source"]["step"], (row["source"]["guidance"] or {}).get("scale")) for row in scores[1]]
    assert scored == [(step, scale) for step in (0, STEPS) for scale in (None, 1.5)]
    for ddp, fsdp in zip(*scores, strict=True):
        assert ddp["source"]["multiply_adds"] == fsdp["source"]["multiply_adds"]
        assert fsdp["metrics"] == pytest.approx(ddp["metrics"], rel=1e-3)


def test_a_rank_holds_half_of_weights_average_and_moments(routed):
    size = 16 * sharding.size(load_trained(routed / "fsdp").net)    # in float32
    held = [[int((routed / how / f"bytes-{rank}").read_text()) for rank in (0, 1)] for how in ("none", "fsdp")]
    assert held[0] == [size, size]
    assert 0.49 * size < held[1][1] < held[1][0] < 0.51 * size  # the second has a row less of 7 labels


# ---- from one to the other ------------------------------------------------------------------------------------------


def test_a_run_resumes_sharded_or_not_on_any_number_of_ranks_bit_for_bit(shapes, tmp_path):
    run = tmp_path / "run"

    def on(steps: int, sharded: str) -> list[str]:
        return command(run, shapes, *SMALL, f"steps={steps}", f"sharding={sharded}", "checkpoint.every=1",
                       "checkpoint.keep_last=9")[1:]

    all_well(on_ranks(2, on(1, "none"), before=echo_what_is_loaded))
    all_well(on_ranks(4, on(2, "fsdp"), before=echo_what_is_loaded))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "resume", train.resume)  # which is taken back
        echo_what_is_loaded(0)
        trained(run, shapes, *SMALL, "steps=3", "checkpoint.every=1", "checkpoint.keep_last=9")
    all_well(on_ranks(2, on(4, "fsdp"), before=echo_what_is_loaded))

    echoes = {"echo-4-fsdp": 1, "echo-1-none": 2, "echo-2-fsdp": 3}
    assert {path.name for path in run.glob("echo-*")} == {*echoes}
    for name, step in echoes.items():
        saved, loaded = (tensors_of(checkpoints.step_folder(folder, step)) for folder in (run, run / name))
        assert saved.keys() == loaded.keys()
        different = [key for key, value in saved.items() if not torch.equal(value, loaded[key])]
        assert different in ([], ["training/sums"]), name  # each rank has loaded the sums of all


@pytest.mark.parametrize(("recipe", "part", "most"), [
    (["optimizer=muon"], "blocks.0.attn.qkv.weight", 1e-6),
    (["model=sprint", "ema.decay=[0.9,0.5]"], "fusion", 1e-6), (RAMPS, "blocks", 1e-6),
    (["objective=alignment", "objective.block=1"], "projector", 1e-3),  # a CPU adds its 4 million squares in float32
])
def test_a_recipe_trains_the_same_sharded_or_not_and_resumes_bit_for_bit(taught, tmp_path, recipe, part, most):
    def on(name: str, sharded: str) -> list[str]:
        return command(tmp_path / name, taught, *SMALL, *recipe, f"sharding={sharded}", "steps=5", "log.every=1",
                       "checkpoint.every=2", "checkpoint.keep_last=9")[1:]

    ddp, whole, parts = (tmp_path / name for name in ("none", "whole", "parts"))
    all_well(on_ranks(2, on("none", "none"), on("whole", "fsdp")))
    all_well(on_ranks(2, on(killed(whole, 2, parts).name, "fsdp")))
    assert (losses(ddp) - losses(whole)).abs().max() <= most
    one, two = (tensors_of(checkpoints.latest(run)) for run in (ddp, whole))
    assert one.keys() == two.keys() and any(part in key for key in one)
    assert_same_end(parts, whole)


def spoil(rank: int) -> None:
    """The first images of the second rank are no numbers, and the disk is full in the middle of the second save."""
    write, to_latent, taken = checkpoints.save_file, train.to_latent, []

    def fail(tensors, path):
        if "step-00000002" in str(path) and path.name == "model.safetensors":
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        write(tensors, path)

    def no_numbers(stored, kind):
        taken.append(stored)
        return to_latent(stored, kind) * (float("nan") if rank == 1 and len(taken) == 1 else 1)

    checkpoints.save_file, train.to_latent = fail, no_numbers


@pytest.fixture(scope="module")
def spoiled(shapes, tmp_path_factory) -> tuple[Path, Ended]:
    run = tmp_path_factory.mktemp("spoiled") / "run"
    return run, on_ranks(2, command(run, shapes, "sharding=fsdp", *SMALL, "steps=9", "log.every=1",
                                    "checkpoint.every=1")[1:], before=spoil)


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(spoiled):
    run, _ = spoiled
    first, second = rows(run)[:2]
    assert (first["skipped"], first["loss"], second["skipped"]) == (1, None, 1) and second["loss"] > 0
    saved = checkpoints.load(checkpoints.step_folder(run, 1), "model")
    torch.manual_seed(0)
    initial = build_network(checkpoints.read_meta(checkpoints.step_folder(run, 1))["network"]).state_dict()
    assert all(torch.equal(value, initial[key]) for key, value in saved.items())  # those of DDP, too


def test_a_full_disk_ends_all_ranks_and_keeps_earlier_checkpoints(spoiled):
    run, ended = spoiled
    assert ended.code == 1 and "MiB are free" in ended.stderr and not ended.has_traceback and not ended.out_of_time
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000001"]
    assert checkpoints.check(run / "checkpoints/step-00000001")["step"] == 1


# ---- together with what makes it fast -------------------------------------------------------------------------------


def count_graphs(home: Path, rank: int) -> None:
    """Writes at each step how many graphs a rank has compiled, without making kernels, into `<home>/graphs-<rank>`.

    What torch is going to change or remove is an error.
    """
    warnings.simplefilter("error", FutureWarning)
    counter, compiled, step = CompileCounterWithBackend("aot_eager"), torch.compile, train.train_step
    torch.compile = lambda function, **how: compiled(function, backend=counter, fullgraph=True, **how)

    def tell(*arguments, **options):
        taken = step(*arguments, **options)
        (home / f"graphs-{rank}").write_text(str(counter.frame_count))
        return taken

    train.train_step = tell


def test_bf16_parts_clipping_recomputation_and_compiled_blocks_are_the_same_run(shapes, tmp_path):
    wide = ["model.hidden_size=256", "model.init=xavier", "precision=bf16", "log.every=1", "steps=2",
            "grad_accum_steps=2", "optimizer.clip_norm=0.1", *SMALL, "model.depth=2"]  # a block exceeds DDP's bucket
    runs = {"plain": [], "replicas": ["compile=true"],
            "fast": ["sharding=fsdp", "compile=true", "activation_checkpointing=true"]}
    all_well(on_ranks(2, *(command(tmp_path / name, shapes, *wide, *options)[1:]
                           for name, options in runs.items()), before=partial(count_graphs, tmp_path)))
    for name in ("replicas", "fast"):
        assert_same_losses(tmp_path / "plain", tmp_path / name, 2)
    # Each of the two compiles one graph for each number of tokens.
    assert [(tmp_path / f"graphs-{rank}").read_text() for rank in (0, 1)] == ["4", "4"]
