"""What fuzzing has found in settings, records, weights and references, at its smallest; and a short run of it anew."""

import json
import os
import stat
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import adapter as adapters
import autoencoder as autoencoders
import checkpoint as checkpoints
import features
import scoring
from dit import DiT
from scripts import report
from scripts.export import is_score
from settings import Record, read_record, read_text
from trained import read_weights

FEW = settings(max_examples=40, deadline=None, database=None, derandomize=True)


class Note(Record):
    text: str


# ---- places that are no files ---------------------------------------------------------------------------------------


def refusal(call, *arguments) -> str:
    """Calls what must refuse, and returns the one sentence that it says."""
    with pytest.raises((ValueError, OSError)) as error:
        call(*arguments)
    assert "\n" not in str(error.value).strip()
    return str(error.value)


def test_a_record_that_never_ends_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "meta.json")
    assert "no ordinary file" in refusal(read_text, tmp_path / "meta.json")
    assert "no ordinary file" in refusal(read_text, Path("/dev/zero"))
    assert "no ordinary file" in refusal(read_record, Note, tmp_path / "meta.json", "Make it anew.")
    assert "missing or unreadable" in checkpoints.problem(tmp_path) and not checkpoints.is_sound(tmp_path)


@pytest.mark.parametrize(("content", "words"), [
    (b"\xff", "UTF-8"), (b'{"text": "\\ud800"}', "not JSON"), (b"[" * 10**5, "not JSON"), (b"1" * 5000, "not JSON"), (b"[]", "is not a group"),
])  # fmt: skip
def test_a_record_is_a_group_of_whole_characters(content, words, tmp_path):
    (tmp_path / "x.json").write_bytes(content)
    assert words in refusal(read_record, Note, tmp_path / "x.json", "Make it anew.")


@pytest.mark.parametrize("write", [lambda path: checkpoints.write_text(path, "x"), lambda path: checkpoints.append_row(path, {}),
                                   lambda path: report.checkpoints.write_text(path.with_name("link"), "x")])
def test_a_pipe_or_a_device_is_never_replaced_by_a_file(write, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    with pytest.raises(OSError, match="a device, a pipe or a socket"):
        write(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode) and (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("thing", ["empty", "blank", "dangling", "loop", "folder", "pipe", "long"])
def test_a_hash_beside_weights_that_says_nothing_is_a_sentence_and_stays(thing, tmp_path):
    (tmp_path / "w").write_text("weights")
    record = tmp_path / "w.sha256"
    match thing:
        case "empty" | "blank" | "long":
            record.write_text({"empty": "", "blank": " \n", "long": "0" * 10**6}[thing])
        case "dangling" | "loop":
            record.symlink_to({"dangling": "nothing", "loop": "w.sha256"}[thing])
        case "folder":
            record.mkdir()
        case "pipe":
            os.mkfifo(record)
    before = os.lstat(record)
    assert len(refusal(features.verified, tmp_path / "w", None)) < 1000
    assert os.path.samestat(before, os.lstat(record)) and os.lstat(record).st_mtime_ns == before.st_mtime_ns


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tensors", "words"), [
    ({"a": torch.ones(2)}, "b is missing"), ({"a": torch.ones(2), "b": torch.ones(()), "c": torch.ones(1)}, "c is unknown"),
    ({"a": torch.ones(3), "b": torch.ones(())}, "(3,) there"), ({"a": torch.ones(2, dtype=torch.int64), "b": torch.ones(())}, "int64"),
    ({"a": torch.tensor([1, torch.nan]), "b": torch.ones(())}, "not finite"), ({}, "a is missing"), (b"", "no whole safetensors"),
    (b"\xff" * 100, "no whole safetensors"), (b"\x02\0\0\0\0\0\0\0{}", "a is missing"),
])  # fmt: skip
def test_a_training_state_of_another_run_is_a_sentence(tensors, words, tmp_path):
    if isinstance(tensors, bytes):
        (tmp_path / "x.safetensors").write_bytes(tensors)
    else:
        save_file(tensors, tmp_path / "x.safetensors")
    assert words in refusal(checkpoints.load, tmp_path, "x", {"a": torch.zeros(2), "b": torch.zeros(())})


def test_the_outline_of_an_optimizer_is_what_a_step_makes_of_it():
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    made, outline = checkpoints.optimizer_tensors(net, optimizer), checkpoints.optimizer_outline(net)
    assert {key: value.shape for key, value in made.items()} == {key: value.shape for key, value in outline.items()}


def test_a_link_in_a_checkpoints_place_is_passed_over_and_set_aside(tmp_path):
    checkpoints.save(checkpoints.step_folder(tmp_path, 2), {"model": {"a": torch.ones(1)}}, {"step": 2})
    place = checkpoints.step_folder(tmp_path, 4)
    place.symlink_to("nothing")
    with pytest.warns(UserWarning, match="step-00000004 is damaged"):
        assert checkpoints.latest(tmp_path) == checkpoints.step_folder(tmp_path, 2)
    checkpoints.set_aside_after(tmp_path, 2)
    checkpoints.save(place, {"model": {"a": torch.ones(1)}}, {"step": 4})
    assert checkpoints.problem(place) is None and place.with_name("damaged-step-00000004").is_symlink()


@pytest.mark.parametrize("adapter", [
    {"x.lora_A.weight": torch.ones(2, 3)}, {"x.lora_A.weight": torch.ones(2, 3), "x.lora_B.weight": torch.ones(4, 1)},
    {"x.lora_A.weight": torch.ones(2, 3), "x.lora_B.weight": torch.ones(4, 2), "odd": torch.ones(1)},
    {"x.lora_A.weight": torch.ones(3), "x.lora_B.weight": torch.ones(4, 2)}, {"y.lora_A.weight": torch.ones(2, 3)},
])  # fmt: skip
def test_an_adapter_of_other_layers_is_a_sentence(adapter):
    assert refusal(adapters.merge, {"x.weight": torch.zeros(4, 3)}, adapter, 1.0).startswith("The adapter")


# ---- weights: nothing in them is ever run ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fuzzed():
    from scripts.fuzz import records  # which imports every command
    return records


@pytest.fixture(scope="module")
def tiny():
    return DiT(input_size=4, patch_size=2, in_channels=4, hidden_size=8, depth=1, num_heads=2, num_classes=2).state_dict()


def test_wrong_weights_are_sentences_and_their_code_is_never_run(fuzzed, tiny, tmp_path):
    harmful = 0

    @seed(1)
    @settings(FEW, max_examples=120)
    @given(st.sampled_from([how for how in fuzzed.PT_DAMAGE if how != "bomb"]), st.integers(0, 10**6), st.integers(0, 50))
    def reads(how, number, second):
        nonlocal harmful
        harmful += how in ("harm", "plain pickle", "legacy")
        (tmp_path / "x.pt").write_bytes(fuzzed.damaged_weights(tiny, how, number, second, tmp_path / "executed"))
        try:
            state, _, _ = read_weights(tmp_path / "x.pt")
        except ValueError as error:
            assert str(error).startswith(str(tmp_path / "x.pt"))
        else:
            assert all(value.isfinite().all() for value in state.values())
        assert not (tmp_path / "executed").exists()

    reads()
    assert harmful > 5


def test_the_pickles_that_fuzzing_plants_would_run_elsewhere(fuzzed, tiny, tmp_path):
    (tmp_path / "x.pt").write_bytes(fuzzed.damaged_weights(tiny, "harm", 2, 0, tmp_path / "executed"))
    torch.load(tmp_path / "x.pt", weights_only=False)      # our own pickle: else no test above could fail
    assert (tmp_path / "executed").exists()


# ---- references, kept features ----------------------------------------------------------------------------------------


def reference() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0).normal(size=(300, 192))
    return {"mu": random.mean(0), "sigma": np.cov(random, rowvar=False), "space": np.array("pixels-8x8"), "count": np.array(300),
            "weights_sha256": np.array("pixels:None"), "arr_0": np.zeros((4, 8, 8, 3), np.uint8)}


@pytest.mark.parametrize(("sigma", "is_one"), [
    (np.eye(3), True), (np.zeros((3, 3)), True), (np.ones((3, 3)), True), (np.ones((3, 3)) - 1e-7 * np.eye(3), True), (-np.eye(3), False),
    (np.diag([1.0, 1, -1e-3]), False), (np.ones((3, 3)) - np.eye(3), False), (np.eye(3) + np.triu(np.full((3, 3), 1e-3), 1), False),
    (1e300 * np.eye(3), True), (np.diag([1e-300, 0, 0]), True),
])  # fmt: skip
def test_a_covariance_is_symmetric_and_has_no_negative_eigenvalue(sigma, is_one):
    assert scoring.is_covariance(sigma) is is_one


def test_wrong_references_are_sentences(fuzzed, tmp_path):
    pixels = features.load("pixels")

    @seed(1)
    @settings(FEW, max_examples=80)
    @given(fuzzed.NPZ.filter(lambda case: case["how"] != "bomb"))
    def opens(case):
        content, why = fuzzed.damaged_npz(reference(), case, tmp_path / "executed")
        (tmp_path / "x.npz").write_bytes(content)
        try:
            scoring.open_reference(tmp_path / "x.npz", pixels)
        except ValueError as error:
            assert str(error).startswith("reference=")
        else:
            assert why is None or case["key"] == "arr_0", why
        assert not (tmp_path / "executed").exists()

    opens()


def test_kept_features_that_are_damaged_are_passed_over(tmp_path, capsys, fresh_accelerator):
    keep = scoring.Kept(tmp_path, {}, {"pool": 3}, 6)
    for first in (0, 2, 4):
        keep.save(torch.arange(first, first + 2), {"pool": torch.ones(2, 3)})
    good = {"indices": torch.arange(4, 6), "pool": torch.ones(2, 3)}
    for wrong in (good | {"pool": torch.ones(2, 4)}, {"pool": torch.ones(2, 3)}, good | {"indices": torch.tensor([4, 9])}, good | {"odd": torch.ones(1)},
                  good | {"indices": torch.tensor([4.0, 5])}, good | {"pool": torch.full((2, 3), torch.nan)}, good | {"indices": torch.tensor([4, 4])}):
        save_file(wrong, keep.folder / "00000004.safetensors")
        again = scoring.Kept(tmp_path, {}, {"pool": 3}, 6)
        assert again.missing(6).tolist() == [4, 5] and "00000004.safetensors is damaged" in capsys.readouterr().out
        assert [indices.tolist() for indices, _ in again.load()] == [[0, 1], [2, 3]]
    (keep.folder / "00000004.safetensors").unlink()
    os.mkfifo(keep.folder / "00000004.safetensors")
    assert scoring.Kept(tmp_path, {}, {"pool": 3}, 6).count == 4


# ---- rows and pages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [
    {"metrics": {"fid": "x"}, "source": {}}, {"metrics": {"fid": float("nan")}, "source": {}}, {"metrics": [], "source": {}},
    {"metrics": {"fid": 1.0}, "source": 3}, {"metrics": {"fid": 1.0}, "source": {}, "images": "many"},
    {"metrics": {"fid": 1.0}, "source": {}, "reference": 7},
])  # fmt: skip
def test_a_row_that_is_no_score_does_not_stand_in_a_card(row):
    assert not is_score(row) and is_score({"metrics": {"fid": 1.0}, "source": {}})


def test_a_page_has_null_for_numbers_that_json_lacks():
    odd = {"a": float("nan"), "b": [1.5, float("inf"), {"c": -float("inf")}], "d": (True, "NaN", 3)}
    assert json.loads(json.dumps(report.finite(odd), allow_nan=False)) == {"a": None, "b": [1.5, None, {"c": None}], "d": [True, "NaN", 3]}


def test_settings_of_another_kind_are_refused_in_a_sentence(fuzzed):
    from scripts.fuzz import commands

    @seed(1)
    @settings(FEW, max_examples=150)
    @given(st.sampled_from(["train", "fid", "sample", "scripts.export"]), st.integers(0, 10**6), commands.ODD_PLAIN)
    def reads(program, number, value):
        try:
            _, why = commands.read_changed(program, 0, [(number, value, 0)], Path("/nowhere"))
        except ValueError as error:
            assert str(error).endswith(".") and len(str(error)) < 2000
        else:
            assert why is None

    reads()


@pytest.mark.parametrize("argument", ["--experimental-rerun=x.pkl", "--experimental-rerun", "--exp=x"])
def test_a_pickle_of_a_run_is_not_run_again(argument, monkeypatch):
    import settings as ours

    monkeypatch.setattr("sys.argv", ["train.py", argument])
    assert "pickle" in refusal(ours.compose, "config")


def test_weights_that_claim_more_than_they_hold_are_a_sentence(tmp_path):
    torch.save({"blocks.0.x": torch.zeros(1).expand(2**40)}, tmp_path / "x.pt")
    assert "blocks.0.x" in refusal(read_weights, tmp_path / "x.pt")


@pytest.mark.parametrize("content", [b"", b"\x80", b"words"])
def test_weights_of_which_torch_says_nothing_are_a_sentence(content, tmp_path):
    (tmp_path / "x.pt").write_bytes(content)
    assert "cannot be read as weights alone" in refusal(read_weights, tmp_path / "x.pt")


def test_a_sentence_about_5000_letters_is_short_and_keeps_its_remedy(capsys, monkeypatch):
    import settings as ours

    monkeypatch.setattr("sys.argv", ["small.py"])
    monkeypatch.setattr(ours, "compose", lambda _: [{"text": "a" * 5000}])

    def main(cfg):
        raise ValueError(f"text={cfg.text} is no such thing: name another.")

    with pytest.raises(SystemExit) as stop:
        ours.command("small", Note)(main)()
    assert len(stop.value.code) <= 2000 and stop.value.code.endswith("name another.")


def test_a_study_knows_its_runs_by_settings_and_whole_numbers():
    from scripts import study
    from settings import read

    plain = {"train": ["steps"], "seeds": None, "at_end": []}
    assert "key=value" in refusal(read, study.Variant, plain)
    assert read(study.Variant, plain | {"train": ["steps=5"]}).train == ["steps=5"]
    run = study.Run(variant="a", seed=0, folder=Path("a"), train=["steps=1e4"], at_end=[])
    assert "steps=1e4" in refusal(study.asked_steps, run)


def test_weights_with_compressed_parts_are_not_unpacked(tmp_path):
    torch.save({"x": torch.zeros(4)}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as old, zipfile.ZipFile(tmp_path / "y.pt", "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert "compressed" in refusal(read_weights, tmp_path / "y.pt")
    (tmp_path / "y.pt").rename(tmp_path / "latents_stats.pt")
    assert "compressed" in refusal(autoencoders._statistics_beside, tmp_path / "x.pt")
    assert read_weights(tmp_path / "x.pt")[0].keys() == {"x"}
