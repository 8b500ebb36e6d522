"""What a latent folder promises: every image once an epoch, on any number of ranks, from any start, memory-mapped."""

import hashlib
import itertools
import json
import os
import resource
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import change_record
from hypothesis import given, settings
from hypothesis import strategies as st
from spoils import array, as_it_is, both, cut, gone, record, refused, without_hashes

from latents import folder as latent_folder
from latents.folder import open_latents
from latents.loader import NUM_AHEAD, _plan, batches, read_ahead

COUNT = 103  # three shards of 40, 40 and 23 images, and a batch size that leaves a rest
ONES = np.ones((COUNT, 3), np.float16)


def write_folder(folder, latents, labels, mirrored=None, shard=40, hashed=False, **changes):
    """Writes a latent folder by its documented format, with no code of ours."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    for s, start in enumerate(range(0, len(latents), shard)):
        names = {"latents": f"latents-{s:05d}.npy", "labels": f"labels-{s:05d}.npy"}
        parts = {"latents": latents, "labels": labels}
        if mirrored is not None:
            names["mirrored"], parts["mirrored"] = f"mirrored-{s:05d}.npy", mirrored
        for part, name in names.items():
            np.save(folder / name, parts[part][start : start + shard])
        shards.append({**names, "count": len(latents[start : start + shard])})
        if hashed:
            shards[-1]["sha256"] = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
                                    for name in names.values()}
    channels = latents.shape[1] // (2 if changes.get("kind") == "moments" else 1)
    metadata = {
        "format": 1, "count": len(latents), "shape": [channels, *latents.shape[2:]], "dtype": "float16",
        "kind": "sample", "mirrored": mirrored is not None, "num_classes": 7, "class_names": None,
        "autoencoder": "sd_vae_ema", "scale": 0.18215, "shift": 0.0, "resolution": 32, "shards": shards,
        "source": "here", "unreadable": [], **changes,
    }  # fmt: skip
    (folder / "metadata.json").write_text(json.dumps(metadata))
    return folder


def with_teacher(folder, rows=ONES, copies=None):
    """Adds a teacher's rows to a folder of `write_folder`."""
    for name, part in {"teacher": rows, "teacher_mirrored": rows[:0] if copies is None else copies}.items():
        for s, start in enumerate(range(0, len(part), 40)):
            np.save(folder / f"{name}-{s:05d}.npy", part[start : start + 40])
    change_record(folder, arrays={"teacher": {"shape": [*rows.shape[1:]], "dtype": "float16"}})
    return folder


def numbered(count=COUNT, channels=4, size=4, seed=0):
    """Latents of unit spread whose first value tells the image's number, exactly in float16."""
    latents = np.random.default_rng(seed).standard_normal((count, channels, size, size)).astype(np.float16)
    latents[:, 0, 0, 0] = np.arange(count) / 512 - 1
    return latents


def numbers(stored):
    """Tells which images of `numbered` these are."""
    return np.rint((np.asarray(stored)[:, 0, 0, 0].astype(np.float64) + 1) * 512).astype(int).tolist()


def labels_of(count=COUNT):
    return np.arange(count, dtype=np.int64) * 5 % 7


def take(latents, num, batch_size, **how):
    """Returns that many batches: stored, labels and the teacher's rows, if there is a teacher."""
    stream = batches(latents, batch_size, arrays=["teacher", "absent"], **how)
    taken = [(stored, y, *arrays.values()) for stored, y, arrays in itertools.islice(stream, num)]
    stream.close()
    return taken


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "set", numbered(), labels_of())


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory):
    """A folder with mirrored copies, whose second channel begins with 0, or 1 in a copy; and a teacher's rows."""
    plain, copies = numbered(), numbered(seed=9)
    plain[:, 1, 0, 0], copies[:, 1, 0, 0] = 0, 1
    out = write_folder(tmp_path_factory.mktemp("mirrored") / "set", plain, labels_of(), mirrored=copies)
    teacher = np.random.default_rng(0).normal(size=(2, COUNT, 3, 5)).astype(np.float16)  # of images, of their copies
    return with_teacher(out, *teacher), np.stack([plain, copies]), teacher


# --- folders and batches


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_each_epoch_is_a_permutation_that_ranks_divide_and_that_a_resumed_run_continues(data):
    world, share = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    batch = world * share
    latents = SimpleNamespace(count=data.draw(st.integers(batch, 40)), mirrored=data.draw(st.booleans()))
    seed, start = data.draw(st.integers(0, 2**31)), data.draw(st.integers(0, 14))

    def plan(rank=0, world=1, start=0, num=24, of=latents):
        jobs = itertools.islice(_plan(of, batch, seed, rank, world, start), num)
        return [(order.tolist(), None if mirror is None else mirror.tolist()) for order, mirror in jobs]

    complete, per_epoch = plan(), latents.count // batch
    for first in range(0, 24 - per_epoch, per_epoch):  # each image at most once, and only the rest is left out
        images = [image for order, _ in complete[first : first + per_epoch] for image in order]
        assert len({*images}) == len(images) == per_epoch * batch and 0 <= min(images) <= max(images) < latents.count
    for step, parts in enumerate(zip(*[plan(rank, world, start, 10) for rank in range(world)], strict=True), start):
        order, mirror = complete[step]
        assert [image for part, _ in parts for image in part] == order
        assert mirror is None or [flip for _, part in parts for flip in part] == mirror
    other = SimpleNamespace(count=latents.count, mirrored=not latents.mirrored)  # copies do not change the order
    assert [order for order, _ in plan(of=other)] == [order for order, _ in complete]


@pytest.mark.parametrize(("world", "start"), [(1, 0), (2, 13), (4, 11)])
def test_ranks_see_the_images_of_their_plan_each_with_its_label_copy_and_teacher(mirrored, world, start):
    folder, sides, teacher = mirrored
    latents = open_latents(folder)
    for rank in range(world):
        plan = _plan(latents, 8, 5, rank, world, start)
        for stored, y, rows in take(latents, 14, 8, seed=5, rank=rank, world=world, start=start):
            order, flips = next(plan)
            assert (stored.dtype, y.dtype, rows.dtype) == (torch.float16, torch.int64, torch.float16)
            np.testing.assert_array_equal(stored.numpy(), sides[flips.astype(int), order])
            np.testing.assert_array_equal(y.numpy(), labels_of()[order])
            np.testing.assert_array_equal(rows.numpy(), teacher[flips.astype(int), order])
    assert not readers()


def test_the_order_and_the_copies_are_those_that_were_written_down(folder, mirrored):
    """A change here breaks the resumption of every run there is."""
    plain, copies = open_latents(folder), open_latents(mirrored[0])
    first = [85, 37, 20, 5, 86, 16, 74, 96]  # of all three shards
    assert numbers(take(plain, 1, 8, seed=0)[0][0]) == numbers(take(copies, 1, 8, seed=0)[0][0]) == first
    assert numbers(take(plain, 1, 8, seed=1)[0][0]) != first
    big = SimpleNamespace(count=1000, mirrored=True)
    flips = np.concatenate([mirror for _, mirror in itertools.islice(_plan(big, 100, 2, 0, 1, 0), 20)])
    assert flips[:16].astype(int).tolist() == [1, 1, 1, 0, 1, 0, 0, 0, 0, 1, 0, 1, 1, 0, 1, 1]
    assert abs(flips.mean() - 0.5) < 4 * 0.5 / np.sqrt(len(flips)) and (flips[:1000] != flips[1000:]).any()


# --- the fingerprint, and damage


def test_a_moved_folder_is_the_same_data_set_and_other_content_is_not(tmp_path):
    unprobed = numbered(1200)
    unprobed[701, 1] += 1  # one of the latents that are not read on opening
    here, elsewhere, *others = (open_latents(folder).fingerprint for folder in (
        write_folder(tmp_path / "a", numbered(), labels_of()),
        write_folder(tmp_path / "b" / "c", numbered(), labels_of(), source="elsewhere"),
        write_folder(tmp_path / "d", numbered(seed=1), labels_of()),
        write_folder(tmp_path / "e", numbered(), labels_of()[::-1].copy()),
        write_folder(tmp_path / "f", numbered(), labels_of(), num_classes=8),
        with_teacher(write_folder(tmp_path / "g", numbered(), labels_of())),
        write_folder(tmp_path / "h", numbered(1200), labels_of(1200), hashed=True),
        write_folder(tmp_path / "i", unprobed, labels_of(1200), hashed=True)))
    assert here == elsewhere and len({here, *others}) == 7 and int(here, 16)


def test_a_folder_without_a_hash_of_its_content_has_the_fingerprint_that_checkpoints_have_of_it(tmp_path):
    folder = write_folder(tmp_path, numbered(), labels_of(), mirrored=numbered(seed=9))
    assert open_latents(folder).fingerprint == "4d1c822a81fef89d66c2ce5364d4e360"  # by 1b14537


def age(name, seconds):
    """Makes a file so much older than metadata.json, or newer where that is negative."""
    return lambda folder: os.utime(folder / name, ns=(
        time := (folder / "metadata.json").stat().st_mtime_ns - seconds * 10**9, time))


SAME, CHANGED = age("latents-00001.npy", 0), array("latents-00001.npy", np.negative)


@pytest.mark.parametrize(("change", "num_compared"), [
    # what happened to a folder, how many files are compared; None: it is refused
    (as_it_is, 0), (age("latents-00001.npy", -9), 1), (age("metadata.json", 9), 9),
    (CHANGED, None), (both(CHANGED, age("latents-00001.npy", 9)), None),
    (both(CHANGED, SAME), 0), (both(CHANGED, SAME, age("metadata.json", 9)), None), (both(CHANGED, without_hashes), 0),
])  # fmt: skip
def test_files_of_another_time_than_the_record_are_compared_with_their_hashes(
    tmp_path, monkeypatch, change, num_compared,
):
    folder = write_folder(tmp_path, numbered(), labels_of(), numbered(seed=9), hashed=True)
    for file in folder.glob("*.npy"):
        age(file.name, 0)(folder)
    change(folder)
    compared, sha256 = [], latent_folder.sha256
    monkeypatch.setattr(latent_folder, "sha256", lambda file: (compared.append(file), sha256(file))[1])
    if num_compared is None:
        return refused(lambda: open_latents(folder), ".npy is not as it was written", 'remove "sha256"')
    open_latents(folder)
    assert len(compared) == num_compared
    open_latents(folder)
    assert len(compared) == num_compared, "the next start is quick"


# --- what is refused on opening


def latents(values, mirrored=None, **changes):
    return lambda folder: write_folder(folder, values.astype(np.float16), labels_of(), mirrored, **changes)


def moments(mean, std):
    return latents(np.concatenate([mean, std], axis=1), kind="moments")


LATENTS, LABELS, TEACHER = (f"{name}-00001.npy" for name in ("latents", "labels", "teacher"))
INFINITE = numbered()
INFINITE[41, 1, 2, 2] = np.inf
BAD = [  # what is wrong with a folder, words
    (gone("metadata.json"), "holds no metadata.json, which marks a complete latent folder: rerun the command that"),
    (record(count=104), "metadata.json: it says 104, but its shards have 103"),
    (record(class_names=["a"]), "says 7, but its class_names have 1"),
    (record(latents_mean=[0.0], latents_std=[1.0]), "1 numbers each, but the latents have 4 channels"),
    (record(kind="moments"), "instead of the float16 (40, 8, 4, 4) of metadata.json"),
    (gone(LATENTS), LATENTS), (cut(LATENTS), f"{LATENTS} is not a complete npy file"),
    (array(LATENTS, lambda a: a.astype(np.float32)), "has float32 (40, 4, 4, 4), instead of the float16"),
    (array(LABELS, lambda a: a + 1), "label 7"),
    (both(with_teacher, array(TEACHER, lambda a: a * np.nan)), "40 teacher hold NaN or infinity, such as image 40"),
    (latents(numbered(), INFINITE), "1 latents hold NaN or infinity, such as image 41"),
    (latents(numbered() * 99, autoencoder="identity", scale=1.0), "lie in -1..1: store image / 127.5 - 1"),
    *((latents(numbered() * factor), "instead of about 1: a latent folder needs latents * scale, or [mean")
      for factor in (9, 0.2)),
    (moments(numbered(), numbered() - 9), "is never negative, so these look like [mean, logvar]"),
    (moments(numbered() * 4.7, abs(numbered()) * 0.01), "a standard deviation of 4.68, instead of about 1"),
    (latents(np.concatenate([numbered(), -abs(numbered()) - 0.1], axis=1)), "look like [mean, log-variance], not"),
    (both(with_teacher, array(TEACHER, lambda a: a[:39])),
     f"{TEACHER} has float16 (39, 3), instead of the float16 (40, 3)"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), BAD, ids=[words for _, words in BAD])
def test_a_bad_folder_raises_a_one_line_error(folder, change, words):
    change(folder)
    refused(lambda: open_latents(folder), words)


@pytest.mark.parametrize("values, autoencoder", [
    (numbered() * 0.1, "my/own_vae"),  # a local autoencoder may be so
    (np.clip(abs(numbered()), 0, 1), "identity"),  # light pictures may be so
])  # fmt: skip
def test_what_may_be_right_only_warns(tmp_path, values, autoencoder):
    with pytest.warns(UserWarning, match="instead of about 1|but must lie in -1..1"):
        open_latents(write_folder(tmp_path / "set", values, labels_of(), autoencoder=autoencoder))


# --- the reading thread, and memory


def readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def test_reading_runs_a_few_batches_ahead_and_ends_with_the_iterator_or_with_its_error():
    def read(job):
        if job == 9:
            raise OSError("the disk went away")
        return job

    jobs = iter(range(100))
    stream = read_ahead(read, jobs)
    assert next(stream) == 0 and len(readers()) == 1
    assert next(jobs) == NUM_AHEAD + 1
    with pytest.raises(OSError, match="the disk went away"):
        list(stream)
    assert not readers()


def test_more_files_than_a_process_may_open_at_first_are_opened_all_the_same(tmp_path):
    write_folder(tmp_path, numbered(300), labels_of(300), shard=1)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        for one in [open_latents(tmp_path) for _ in range(3)]:
            assert one.read(np.arange(300))[0].shape == (300, 4, 4, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
