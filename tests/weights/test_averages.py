"""Several averages of one run: EDM2's numbers, what is tracked, saved, resumed, kept, made after training, and chosen
by name.
"""

import itertools
import json
import shutil

import pytest
import torch
import training_runs
from conftest import run_command
from safetensors.torch import load_file
from test_published_parity import published, wave
from test_sharding import SMALL, all_well, on_ranks
from torch import nn
from training_runs import assert_same_end, command, train_here

import fid
import sample
from runtime import files
from train import update_ema
from weights import averages
from weights import checkpoint as checkpoints
from weights.loading import find_checkpoint, load_trained
from weights.records import build_network

THEIRS = published("averages")
SEVERAL = ("ema.decay=[0.9,0.5]", "ema.std=[0.05,0.10]", "ema.warmup=false")
NAMES = ["ema", "ema-0.5", "ema-std0.05", "ema-std0.10"]


# ---- EDM2's numbers -------------------------------------------------------------------------------------------------


class Walk(nn.Module):
    """Two parameters that go the way of the published side's."""

    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.zeros(4, 5)), nn.Parameter(torch.zeros(7))
        self.to(0)

    @torch.no_grad()
    def to(self, step: int) -> None:
        for k, p in enumerate((self.b, self.w)):
            p.copy_(wave(tuple(p.shape), k + 0.31 * step) + 0.05 * step)


def tracked(stds, steps=THEIRS["steps"], every=THEIRS["every"]) -> dict:
    """Follows the walk as a run does; returns the averages after each `every` steps by (step, width)."""
    net, nets, kept = Walk(), {averages.power_name(std): Walk() for std in stds}, {}
    for step in range(steps):
        net.to(step + 1)
        for name, decay in averages.decays(step, 0.5, stds).items():
            if name != "ema":
                update_ema(nets[name], net, decay)
        if (step + 1) % every == 0:
            kept |= {(step + 1, std): {key: value.double().clone() for key, value in one.state_dict().items()}
                     for std, one in zip(stds, nets.values(), strict=True)}
    return kept


def test_exponents_and_decays_equal_edm2s():
    for std, exponent in THEIRS["exp"].items():
        assert averages.exponent(float(std)) == pytest.approx(exponent, abs=1e-9)
    for std, step, beta in THEIRS["beta"]:
        assert averages.decays(step - 1, 0.9, [std])[averages.power_name(std)] == pytest.approx(beta, abs=1e-12)


def test_tracked_and_reconstructed_averages_equal_edm2s():
    kept = tracked(THEIRS["stds"])
    for step, std, values in THEIRS["tracked"]:
        for key, value in values.items():
            assert kept[step, std][key].flatten().tolist() == pytest.approx(value, abs=1e-5)
    for std, theirs in THEIRS["coefficients"].items():
        shares, _ = averages.coefficients([*kept], THEIRS["steps"], float(std))
        assert shares.tolist() == pytest.approx(theirs, abs=1e-8) and shares.sum() == pytest.approx(1)
        for key, value in THEIRS["reconstructed"][std].items():
            ours = sum(share * one[key] for share, one in zip(shares, kept.values(), strict=True))
            assert ours.flatten().tolist() == pytest.approx(value, abs=1e-5)


def test_snapshots_past_a_step_are_dropped_and_folders_of_other_names_are_not(tmp_path):
    names = ("step-00000002", "step-00000004-std0.10", "step-00000006", "step-00000006-std0.10", "step-foo", "step-9")
    for name in names:
        (tmp_path / "averages" / name).mkdir(parents=True)
    averages.delete_snapshots_after(tmp_path, 4)
    assert {path.name for path in (tmp_path / "averages").iterdir()} == {*names[:2], *names[4:]}


def test_an_untracked_width_is_close_to_the_tracked_one_and_closer_with_more_snapshots():
    sought = tracked([0.07], every=40)[40, 0.07]
    distances = []
    for every in (40, 8, 2):
        kept = tracked([0.05, 0.10], every=every)
        shares, off = averages.coefficients([*kept], 40, 0.07)
        made = {key: sum(share * one[key] for share, one in zip(shares, kept.values(), strict=True)) for key in sought}
        distances.append((off, max((made[key] - sought[key]).abs().max().item() for key in sought)))
    for values in zip(*distances, strict=True):
        assert [*values] == sorted(values, reverse=True)
    assert distances[0][1] > 0.03 and distances[-1][0] < 0.01 and distances[-1][1] < 0.02


@pytest.mark.parametrize(("given", "name"), [
    ("model", "model"), ("ema", "ema"), ("ema-0.9990", "ema-0.999"), ("ema-std0.1", "ema-std0.10"),
    ("ema-std0.075", "ema-std0.075"),
])  # fmt: skip
def test_names_have_one_spelling(given, name):
    assert averages.known_weights(given) == name


@pytest.mark.parametrize("name",
                         ["ema-", "ema-std0.5", "ema-std0.0", "last", "ema-2.5", "ema-std", "../ema", "training"])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match=r"neither model|must lie between"):
        averages.known_weights(name)


# ---- a run ----------------------------------------------------------------------------------------------------------


def trained(run, data, *overrides):
    return training_runs.trained(run, data, "log.every=1", *overrides)


def held(folder, name):
    return load_file(folder / f"{name}.safetensors")


@pytest.fixture(scope="module")
def several(shapes, tmp_path_factory):
    """A run of 12 steps with four averages, which was stopped twice, and pruned to its last checkpoint."""
    run = tmp_path_factory.mktemp("several") / "run"
    for steps in (4, 7, 12):
        trained(run, shapes, *SEVERAL, f"steps={steps}", "checkpoint.every=2", "checkpoint.keep_last=1",
                "checkpoint.keep_every=0")
    return run


def test_a_run_with_several_resumes_bit_for_bit_and_its_first_one_is_that_of_a_run_with_one(several, shapes, tmp_path):
    whole, plain = tmp_path / "whole", tmp_path / "plain"
    trained(whole, shapes, *SEVERAL, "steps=12", "checkpoint.every=100")
    trained(plain, shapes, "ema.decay=0.9", "ema.warmup=false", "steps=12", "checkpoint.every=100")
    assert_same_end(several, whole)
    ends = [checkpoints.latest(run) for run in (whole, plain)]
    for name in ("ema", "model"):
        one, other = (held(end, name) for end in ends)
        assert all(torch.equal(one[key], other[key]) for key in other)
    assert {path.stem for path in ends[0].glob("*.safetensors")} == {*NAMES, "model", "training"}
    assert {path.stem for path in ends[1].glob("*.safetensors")} == {"ema", "model", "training"}
    assert not (plain / "averages").exists()


def test_each_average_is_that_of_its_decay(shapes, tmp_path):
    trained(tmp_path, shapes, *SEVERAL, "steps=5", "checkpoint.every=1", "checkpoint.keep_last=9")
    torch.manual_seed(0)
    first = build_network(checkpoints.read_meta(checkpoints.step_folder(tmp_path, 1))["network"]).state_dict()
    found = dict.fromkeys(NAMES, first)
    for step in range(5):
        weights = held(checkpoints.step_folder(tmp_path, step + 1), "model")
        powers = {f"ema-std{std:.2f}": (step / (step + 1)) ** (averages.exponent(std) + 1) for std in (0.05, 0.10)}
        for name, decay in {"ema": 0.9, "ema-0.5": 0.5, **powers}.items():
            found[name] = {key: decay * found[name][key] + (1 - decay) * weights[key] for key in weights}
    for name, expected in found.items():
        saved = held(checkpoints.step_folder(tmp_path, 5), name)
        assert max((saved[key] - expected[key]).abs().max() for key in saved) <= 1e-6


def test_snapshots_outlast_pruning_and_cost_no_second_copy_while_their_checkpoint_is_there(several):
    assert [folder.name for folder in checkpoints.all_steps(several)] == ["step-00000012"]
    kept = sorted((several / "averages").glob("step-????????"))
    assert [checkpoints.step_of(folder) for folder in kept] == [2, 4, 6, 8, 10, 12]  # none at the stop in step 7
    for folder in kept:
        names = {path.name for path in folder.iterdir()}
        assert names == {"meta.json", "ema-std0.05.safetensors", "ema-std0.10.safetensors"}
        assert checkpoints.problem(folder) is None
    last = several / "checkpoints/step-00000012"
    assert (kept[-1] / "ema-std0.05.safetensors").samefile(last / "ema-std0.05.safetensors")


def test_a_width_of_after_training_is_loaded_by_its_name_alone_and_made_once(several, tmp_path, capfd):
    run = shutil.copytree(several, tmp_path / "run")
    found = load_trained(run, "ema-std0.07")
    assert "is built from 12 stored averages" in capfd.readouterr().out
    assert (found.weights, found.step, found.checkpoint.run) == ("ema-std0.07", 12, run)
    stored = [(checkpoints.step_of(folder), std) for folder in sorted((run / "averages").glob("step-????????"))
              for std in (0.05, 0.10)]
    shares, off = averages.coefficients(stored, 12, 0.07)
    key = "blocks.0.attn.qkv.weight"
    made = sum(share * held(run / f"averages/step-{step:08d}", averages.power_name(std))[key].double()
               for share, (step, std) in zip(shares, stored, strict=True))
    torch.testing.assert_close(found.net.state_dict()[key].double(), made, rtol=0, atol=1e-6)
    narrow, wide = (held(checkpoints.latest(run), name)[key] for name in ("ema-std0.05", "ema-std0.10"))
    assert (made - narrow).norm() < (wide - narrow).norm() and (made - wide).norm() < (wide - narrow).norm()
    assert found.checkpoint.meta["reconstructed"] == {"averages": 12, "distance": pytest.approx(off)}
    file = found.checkpoint.file
    written = file.stat().st_mtime_ns
    assert find_checkpoint(checkpoints.latest(run), "ema-std0.07").file == file and file.stat().st_mtime_ns == written
    damaged = file.read_bytes()[:-1] + b"x"
    file.write_bytes(damaged)
    assert find_checkpoint(run, "ema-std0.07").file.read_bytes() != damaged
    assert find_checkpoint(run, "ema-std0.05").file.parent.parent.name == "checkpoints"  # which is stored


def test_a_snapshot_that_a_kill_or_a_full_disk_left_out_is_made_up_for_and_later_ones_go_with_their_steps(several,
        shapes, tmp_path):
    run = shutil.copytree(several, tmp_path / "run")
    shutil.rmtree(run / "averages/step-00000012")
    find_checkpoint(run, "ema-std0.07")
    trained(run, shapes, *SEVERAL, "steps=12", "checkpoint.every=2")  # takes no step
    assert (run / "averages/step-00000012/meta.json").is_file()
    (run / "averages/step-00000099").mkdir()
    trained(run, shapes, *SEVERAL, "steps=13", "checkpoint.every=2", "ema.snapshot_every=4")
    names = {folder.name for folder in (run / "averages").iterdir()}
    assert "step-00000012-std0.07" in names and not names & {"step-00000099", "step-00000013"}


def test_a_stopped_run_ends_with_the_files_of_an_undisturbed_one_and_the_same_reconstruction(shapes, tmp_path):
    options = (*SEVERAL, "checkpoint.every=4", "checkpoint.keep_every=4", "checkpoint.keep_last=1",
               "ema.snapshot_every=4")
    trained(tmp_path / "whole", shapes, *options, "steps=13")
    for steps in (2, 5, 6, 8, 11, 13):  # stops, except for 8 and 13
        trained(tmp_path / "parts", shapes, *options, f"steps={steps}")
    assert_same_end(tmp_path / "parts", tmp_path / "whole")
    made = [find_checkpoint(tmp_path / name, "ema-std0.07") for name in ("parts", "whole")]
    assert made[0].file.read_bytes() == made[1].file.read_bytes()
    names = [sorted(str(path.relative_to(tmp_path / name)) for path in (tmp_path / name).rglob("*"))
             for name in ("parts", "whole")]
    assert names[0] == names[1] and "checkpoints/step-00000008" in names[0]


def test_a_killed_snapshot_leaves_nothing_once_the_run_starts_again_and_a_reconstruction_is_left_alone(several, shapes,
                                                                                                       tmp_path):
    run = shutil.copytree(several, tmp_path / "run")
    shutil.copytree(run / "averages/step-00000012", run / "averages/.step-00000012.77.tmp")
    (run / "averages/.step-00000012-std0.07.77.tmp").mkdir()  # of a process that may still be writing it
    trained(run, shapes, *SEVERAL, "steps=12", "checkpoint.every=2")
    assert [path.name for path in (run / "averages").glob(".*")] == [".step-00000012-std0.07.77.tmp"]


def test_an_average_is_made_beside_a_run_that_saves_and_prunes_and_beside_another_that_makes_it(several, tmp_path,
                                                                                                monkeypatch):
    run = shutil.copytree(several, tmp_path / "run")
    expected = find_checkpoint(several, "ema-std0.07").file.read_bytes()
    newest, find, moments = checkpoints.latest(run), averages.coefficients, []

    def pruned(*arguments):
        moments.append(checkpoints.problem(newest))
        shutil.rmtree(newest, ignore_errors=True)
        return find(*arguments)

    monkeypatch.setattr(averages, "coefficients", pruned)
    meta = checkpoints.read_meta(newest)
    made = averages.reconstruct(newest, meta, 0.07)
    assert (made / "ema-std0.07.safetensors").read_bytes() == expected and moments == [None]
    shutil.rmtree(made)
    shutil.copytree(several / "checkpoints", run / "checkpoints", dirs_exist_ok=True)
    shutil.rmtree(run / "averages/step-00000012")

    def kept_and_pruned(*arguments):  # after the look for snapshots
        averages.keep_snapshots(run)
        return pruned(*arguments)

    monkeypatch.setattr(averages, "coefficients", kept_and_pruned)
    assert (averages.reconstruct(newest, meta, 0.07) / "ema-std0.07.safetensors").read_bytes() == expected
    shutil.rmtree(made)
    write = checkpoints.write_tensors

    def made_meanwhile(*arguments):
        monkeypatch.setattr(checkpoints, "write_tensors", write)
        averages.reconstruct(newest, meta, 0.07)
        write(*arguments)

    monkeypatch.setattr(checkpoints, "write_tensors", made_meanwhile)
    pids = itertools.count(100)
    monkeypatch.setattr(files.os, "getpid", lambda: next(pids))  # of two processes
    assert (averages.reconstruct(newest, meta, 0.07) / "ema-std0.07.safetensors").read_bytes() == expected
    shutil.rmtree(made), shutil.rmtree(run / "averages/step-00000012")
    with pytest.raises(ValueError, match="has deleted .* meanwhile: take a newer one"):
        averages.reconstruct(newest, meta, 0.07)


@pytest.mark.parametrize(("overrides", "says"), [
    (("ema.decay=[0.9,0.5,0.99]",), "ema-0.99 begins at step 12 with the weights of that step"),
    (("ema.decay=[0.5,0.9]",), "ema.decay was [0.9, 0.5] and is now [0.5, 0.9]"),
    (("ema.decay=0.9", "ema.std=[]"), "ema.std was [0.05, 0.1] and is now []"),
], ids=["one more", "in another order", "fewer"])  # fmt: skip
def test_a_run_resumes_with_other_averages(several, shapes, tmp_path, overrides, says):
    run = shutil.copytree(several, tmp_path / "run")
    assert says in trained(run, shapes, *SEVERAL, *overrides, "steps=13", "optimizer.lr=0", "optimizer.warmup_steps=0",
                           "checkpoint.every=100")
    before, after = (checkpoints.step_folder(run, step) for step in (12, 13))
    model = held(before, "model")["pos_embed"], held(before, "model")["blocks.0.attn.qkv.weight"]
    expected = {"ema-0.99": ("model", 0.99), "ema-0.9": ("ema", 0.9),
                "ema": ("ema-0.5", 0.5) if overrides == ("ema.decay=[0.5,0.9]",) else ("ema", 0.9)}
    for file in after.glob("ema*.safetensors"):
        if file.stem in expected:
            source, decay = expected[file.stem]
            old = held(before, source)["blocks.0.attn.qkv.weight"]
            torch.testing.assert_close(load_file(file)["blocks.0.attn.qkv.weight"],
                                       decay * old + (1 - decay) * model[1])


def test_a_power_function_average_cannot_start_in_the_middle(shapes, tmp_path):
    trained(tmp_path, shapes, "steps=2")
    result = train_here(tmp_path, shapes, "ema.std=[0.05]", "steps=4")
    assert result.returncode == 1 and "ema-std0.05 averages over all steps" in result.stderr
    assert "took 2 without it" in result.stderr
    result = train_here(tmp_path, shapes, "ema.decay=[0.998,0.9]", "steps=4")
    assert result.returncode == 0 and "ema-0.9 begins at step 2" in result.stdout


def test_a_width_of_a_run_without_power_functions_raises_a_one_line_error(shapes, tmp_path):
    trained(tmp_path, shapes, "steps=1")
    with pytest.raises(ValueError,
                       match=r"has no ema-std0.07: .* has no power-function averages to .*, as with ema.std=\[0.05"):
        find_checkpoint(tmp_path, "ema-std0.07")
    with pytest.raises(ValueError, match="holds no weights=ema-0.5, but ema.safetensors"):
        find_checkpoint(tmp_path, "ema-0.5")


# ---- chosen by name -------------------------------------------------------------------------------------------------


def test_one_command_scores_averages_and_scales_into_rows_and_a_table(several, pixel_reference, tmp_path, capfd):
    given = (f"checkpoint={several}", f"reference={pixel_reference}", "features=pixels", "num_samples=4", "num_steps=2",
             f"results={tmp_path}/results.jsonl")
    line = ("fid.py", *given, "weights=[ema,ema-0.5,ema-std0.1,ema-std0.07,model]", "guidance_scales=[null,1.5]",
            "cpu=true")
    run_command(fid.main, *line)
    rows = [json.loads(row) for row in (tmp_path / "results.jsonl").read_text().splitlines()]
    names = ["ema", "ema-0.5", "ema-std0.10", "ema-std0.07", "model"]
    assert [(row["source"]["weights"], row["source"]["guidance"] is not None) for row in rows] == [
        (name, guided) for name in names for guided in (False, True)]
    assert [row["source"]["ema"] for row in rows[::2]] == [True] * 4 + [False]
    assert len({row["source"]["weights_sha256"] for row in rows}) == 5
    assert len({row["metrics"]["fd_pixels"] for row in rows[::2]}) == 5
    table = capfd.readouterr().out.split("weights  ")[-1].splitlines()
    assert [line.split()[0] for line in table[1:11]] == [name for name in names for _ in range(2)]
    run_command(fid.main, *line, "table=latex")
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 10  # none is sampled again
    assert r"\begin{tabular}{llr" in capfd.readouterr().out


def test_grids_and_evaluations_in_training_are_of_the_averages_that_are_named(shapes, pixel_reference, tmp_path):
    drawn = ("samples.every=2", "samples.seeds=0-1", "samples.num_steps=1", "evaluate.every=2",
             f"evaluate.reference={pixel_reference}", "evaluate.features=pixels", "evaluate.num_samples=4",
             "evaluate.num_steps=1", "evaluate.weights=[ema,ema-std0.05]", "steps=2", "checkpoint.every=2")
    grids = {}
    for name in ("ema", "ema-0.5"):
        trained(tmp_path / name, shapes, *SEVERAL, *drawn, f"samples.weights={name}", "optimizer.warmup_steps=0",
                "optimizer.lr=1e-2")
        rows = [json.loads(row)["source"] for row in (tmp_path / name / "results.jsonl").read_text().splitlines()]
        assert [(row["step"], row["weights"]) for row in rows] == [
            (step, which) for step in (0, 2) for which in ("ema", "ema-std0.05")]
        grids[name] = (tmp_path / name / "samples/step-00000002.png").read_bytes()
        run_command(sample.main, "sample.py", f"checkpoint={tmp_path / name}", f"weights={name}", "seeds=0-1",
                    "num_steps=1", "cpu=true", "precision=fp32", f"out={tmp_path}/{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size
    assert grids["ema"] != grids["ema-0.5"]


# ---- several ranks --------------------------------------------------------------------------------------------------


def test_two_ranks_and_shards_keep_the_same_averages_over_a_stop(shapes, tmp_path):
    all_well(on_ranks(2,
                      *(command(tmp_path / how, shapes, *SMALL, *SEVERAL, f"sharding={how}", f"steps={steps}",
                                "checkpoint.every=2", "log.every=1")[1:]
                           for how in ("none", "fsdp") for steps in (3, 6))))
    ends = [checkpoints.latest(tmp_path / how) for how in ("none", "fsdp")]
    for name in NAMES:
        ddp, fsdp = (held(end, name) for end in ends)
        assert max((ddp[key] - fsdp[key]).abs().max() for key in ddp if ".qkv.bias" not in key) <= 1e-6
    made = [load_trained(tmp_path / how, "ema-std0.07").net.state_dict() for how in ("none", "fsdp")]
    assert max((made[0][key] - made[1][key]).abs().max() for key in made[0] if ".qkv.bias" not in key) <= 1e-5
