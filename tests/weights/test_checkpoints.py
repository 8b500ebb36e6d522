"""A checkpoint is complete or does not exist."""

import hashlib
import resource
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weights import checkpoints


def save(run, step, value=1.0, sound=True, **meta):
    tensors = {"model": {"a": torch.full((3, 2), value), "b": torch.arange(4).to(torch.bfloat16)},
               "ema": {"a": torch.full((3, 2), -value)}}
    checkpoints.save(checkpoints.step_folder(run, step), tensors, {"step": step, "sound": sound, **meta})
    return checkpoints.step_folder(run, step)


def steps_of(run):
    return [checkpoints.step_of(folder) for folder in checkpoints.all_steps(run)]


def test_each_file_is_written_whole_and_recorded_with_its_hash(tmp_path):
    named = {"turned": torch.randn(4, 6).T, "empty": torch.empty(0, 3), "wéight": torch.randn(3, 5).half(),
             "scalar": torch.tensor(4, dtype=torch.int64)}
    folder = tmp_path / "step-00000001"
    checkpoints.save(folder, {"one": named, "two": {"a": torch.ones(3)}}, {"step": 1})
    loaded = checkpoints.load(folder, "one")
    assert loaded.keys() == named.keys() and all(torch.equal(loaded[name], value) for name, value in named.items())
    record = checkpoints.check(folder)["files"]["one.safetensors"]
    assert record == {"bytes": (folder / "one.safetensors").stat().st_size,
                      "sha256": hashlib.sha256((folder / "one.safetensors").read_bytes()).hexdigest()}


def test_a_full_disk_is_a_line_with_the_space_needed_and_leaves_the_earlier_checkpoint(tmp_path):
    good, limits = save(tmp_path, 1), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, limits[1]))
    try:
        with pytest.raises(OSError, match=r"step-00000002 could not be written \(.*File too .*needs 1 MiB and .* free"):
            checkpoints.save(checkpoints.step_folder(tmp_path, 2), {"model": {"a": torch.ones(2**18)}}, {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*(tmp_path / "checkpoints").iterdir()] == [good] and checkpoints.check(good)["step"] == 1


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    run = tmp_path_factory.mktemp("two")
    return save(run, 1), save(run, 2, images=16)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_a_newest_checkpoint_that_is_cut_or_changed_is_named_and_skipped(two, data):
    good, newest = two
    file = newest / data.draw(st.sampled_from(["ema.safetensors", "model.safetensors", "meta.json"]))
    whole, meta = file.read_bytes(), checkpoints.read_meta(newest)
    place, change = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 255))
    file.write_bytes(whole[:place] + (bytes([whole[place] ^ change]) + whole[place + 1 :] if change else b""))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if checkpoints.latest(good.parent.parent) == good:
                assert any("step-00000002 is damaged and is skipped: " in str(warning.message) for warning in caught)
            else:  # a space between two values, say
                assert checkpoints.read_meta(newest) == meta and file.name == "meta.json"
    finally:
        file.write_bytes(whole)


def test_damaged_checkpoints_that_were_skipped_do_not_crowd_out_good_ones(tmp_path):
    save(tmp_path, 10), save(tmp_path, 20)
    (tmp_path / "checkpoints/step-00000020/ema.safetensors").write_bytes(b"")
    checkpoints.set_aside_after(tmp_path, 10)
    save(tmp_path, 13)
    checkpoints.prune(tmp_path, 99, keep_last=2, keep_every=0)
    assert steps_of(tmp_path) == [10, 13]
    assert (tmp_path / "checkpoints/damaged-step-00000020").is_dir()


def test_the_last_good_checkpoint_is_older_than_the_trouble_and_complete(tmp_path):
    one, two, *_ = [save(tmp_path, step, sound=step != 3) for step in (1, 2, 3, 4)]
    assert checkpoints.last_sound(tmp_path, before=4) == two
    (two / "model.safetensors").write_bytes(b"")
    assert checkpoints.last_sound(tmp_path, before=4) == one
    assert checkpoints.last_sound(tmp_path, before=1) is None


def test_the_newest_and_the_first_from_each_multiple_are_kept(tmp_path):
    for step, expected in ((4, [4]), (8, [4, 8]), (12, [8, 12]), (16, [8, 12, 16]), (20, [8, 12, 16, 20]),
                           (24, [8, 12, 20, 24])):
        save(tmp_path, step)
        checkpoints.prune(tmp_path, step, keep_last=2, keep_every=6)
        assert steps_of(tmp_path) == expected


def test_pruning_spares_the_checkpoint_that_a_run_resumes_from_when_a_newer_one_is_damaged(tmp_path):
    good, bad = save(tmp_path, 4), save(tmp_path, 8)
    (bad / "ema.safetensors").write_bytes(b"")
    checkpoints.prune(tmp_path, 4, keep_last=1, keep_every=0)
    assert checkpoints.all_steps(tmp_path) == [good, bad]


def test_a_checkpoint_that_its_run_prunes_while_it_is_looked_for_is_not_called_damaged(tmp_path, monkeypatch, recwarn):
    old, whole = save(tmp_path, 4), checkpoints.check

    def pruned(folder, names=None):
        if folder == old and old.is_dir():
            save(tmp_path, 8)
            checkpoints.prune(tmp_path, 8, keep_last=1, keep_every=0)
        return whole(folder, names)

    monkeypatch.setattr(checkpoints, "check", pruned)
    assert checkpoints.step_of(checkpoints.latest(tmp_path)) == 8 and not recwarn.list
