"""Damaged files, beside those of test_mistakes.py: no code in them runs, and what can be rebuilt is."""

import io
import json
import os
import shutil

import numpy as np
import pytest
import torch
from conftest import one_rank
from PIL import Image
from test_data import labels_of, numbered, write_folder, write_tars
from test_import_latents import import_latents, write_fastdit

from dit import DiT
from latents import folder, images, tars
from runtime.typed import compose
from scoring import statistics
from training.settings import TrainSettings
from weights import checkpoint as checkpoints
from weights.others import read_weights


def refusal(call, *arguments) -> str:
    """Calls what must refuse, and returns the one sentence that it says."""
    with pytest.raises((ValueError, OSError)) as error:
        call(*arguments)
    assert "\n" not in str(error.value).strip()
    return str(error.value)


# ---- foreign code ---------------------------------------------------------------------------------------------------


class Harm:
    """A pickle of it makes a file named `executed` where it is loaded by a reader that trusts it."""

    def __reduce__(self):
        return os.system, ("touch executed",)


@pytest.mark.parametrize("place", [
    lambda state: Harm(), lambda state: [Harm()], lambda state: {"ema": state, "opt": Harm()},
    lambda state: {"ema": Harm(), "model": state}, lambda state: {**state, "pos_embed": Harm()},
])  # fmt: skip
@pytest.mark.parametrize("is_new", [True, False])
def test_a_pickle_among_weights_is_refused_and_never_run(place, is_new, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny = DiT(input_size=4, patch_size=2, in_channels=4, hidden_size=8, depth=1, num_heads=2, num_classes=2)
    torch.save(place(tiny.state_dict()), "x.pt", _use_new_zipfile_serialization=is_new)
    assert refusal(read_weights, tmp_path / "x.pt").startswith(str(tmp_path / "x.pt"))
    assert not (tmp_path / "executed").exists()
    torch.load("x.pt", weights_only=False)  # our own pickle: else the line above could not fail
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize("argument", ["--experimental-rerun=x.pkl", "--experimental-rerun", "--exp=x"])
def test_a_pickle_of_a_run_is_not_run_again(argument):
    assert "settings have no dashes" in refusal(compose, "config", TrainSettings, [argument])


def test_a_file_that_pillow_would_hand_to_another_program_is_no_image():
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\n"
    assert Image.open(io.BytesIO(postscript)).format == "EPS"
    with pytest.raises(images.UnreadableImage, match="of a known kind"):
        images.decode_image(postscript)


# ---- data -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "change"), [
    ("latents-00000.npy", lambda content: content[:-8]), ("labels-00000.npy", lambda content: b""),
    ("record-00000.json", lambda content: None)])
def test_a_shard_that_is_not_as_it_was_written_is_written_again(tmp_path, name, change):
    source, _ = write_fastdit(tmp_path)
    out, whole = tmp_path / "out", tmp_path / "whole"
    for place in (out, whole):
        import_latents(str(source), place, "fastdit", shard_size=5)
    (out / "metadata.json").unlink()  # as a kill leaves it, with a shard to be written
    (out / "latents-00002.npy").unlink()
    for number in range(2):
        (out / f"record-{number:05d}.json").write_text('{"count": 5, "unreadable": []}')
    content = change((out / name).read_bytes())
    (out / name).unlink() if content is None else (out / name).write_bytes(content)
    import_latents(str(source), out, "fastdit", shard_size=5)
    got, wanted = ({file.name: file.read_bytes() for file in place.iterdir()} for place in (out, whole))
    assert got == wanted


@pytest.mark.parametrize("changes", [
    {"offsets": lambda a: a + 2**40}, {"offsets": lambda a: a[:-1]}, {"labels": lambda a: a[1:]},
    {"dtype": lambda a: np.array("|O")},
    {"shape": lambda a: a * 10**6}, {"starts": lambda a: a[::-1]}, {"labels": lambda a: a.astype(object)},
    {"key": lambda a: np.array("of other tars")},
])  # fmt: skip
def test_an_index_of_tars_that_leads_elsewhere_is_made_again(tmp_path, changes):
    write_tars(tmp_path, numbered(), labels_of())
    first = folder.open_latents(tmp_path, kind="sample", scale=1.0).fingerprint
    index = dict(np.load(tmp_path / tars.TAR_INDEX))
    np.savez(tmp_path / tars.TAR_INDEX,
             **{name: changes.get(name, lambda a: a)(values) for name, values in index.items()})
    spoilt = (tmp_path / tars.TAR_INDEX).read_bytes()
    assert folder.open_latents(tmp_path, kind="sample", scale=1.0).fingerprint == first
    assert (tmp_path / tars.TAR_INDEX).read_bytes() != spoilt


@pytest.mark.parametrize("where", ["../outside.npy", "sub/../latents-00000.npy", "/absolute", "link"])
@pytest.mark.parametrize("part", ["latents", "labels"])
def test_a_record_names_files_of_its_folder_alone(tmp_path, where, part):
    out = tmp_path / "set"
    write_folder(out, numbered(), labels_of(), shard=1000)
    record = json.loads((out / "metadata.json").read_text())
    whole = out / record["shards"][0][part]
    if where == "link":
        whole.rename(tmp_path / "outside.npy")
        whole.symlink_to(tmp_path / "outside.npy")
    else:
        shutil.copy(whole, tmp_path / "outside.npy")
        record["shards"][0][part] = str(whole) if where == "/absolute" else where
    (out / "metadata.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="which is not a plain file in that folder"):
        folder.open_latents(out)


# ---- checkpoints and records ----------------------------------------------------------------------------------------


def test_a_link_instead_of_a_checkpoint_is_skipped_and_set_aside(tmp_path):
    checkpoints.save(checkpoints.step_folder(tmp_path, 2), {"model": {"a": torch.ones(1)}}, {"step": 2})
    place = checkpoints.step_folder(tmp_path, 4)
    place.symlink_to("nothing")
    with pytest.warns(UserWarning, match="step-00000004 is damaged"):
        assert checkpoints.latest(tmp_path) == checkpoints.step_folder(tmp_path, 2)
    checkpoints.set_aside_after(tmp_path, 2)
    checkpoints.save(place, {"model": {"a": torch.ones(1)}}, {"step": 4})
    assert checkpoints.problem(place) is None and place.with_name("damaged-step-00000004").is_symlink()


# ---- references and scores ------------------------------------------------------------------------------------------


def test_kept_features_that_are_damaged_are_passed_over(tmp_path, capsys, fresh_accelerator):
    features_of = statistics.FeatureCache(one_rank(), tmp_path, {}, 6)
    for first in (0, 2, 4):
        features_of.save(torch.arange(first, first + 2), {"pool": torch.ones(2, 3)})
    file = features_of.folder / "00000004.safetensors"
    for content in (b"", file.read_bytes()[:-5]):
        file.write_bytes(content)
        again = statistics.FeatureCache(one_rank(), tmp_path, {}, 6)
        assert again.missing().tolist() == [4, 5] and "00000004.safetensors is damaged" in capsys.readouterr().out
        assert [indices.tolist() for indices, _ in again.load()] == [[0, 1], [2, 3]]
