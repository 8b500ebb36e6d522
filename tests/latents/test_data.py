"""What a latent folder promises: every image once an epoch, on any number of ranks, from any start, memory-mapped."""

import gzip
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import threading

import forked
import numpy as np
import pytest
import torch
from conftest import ROOT, change_record
from spoils import array, as_it_is, both, cut, gone, put, record, refused

from autoencoder import Convention
from latents import folder as latent_folder
from latents import loader
from latents.folder import Latents, open_latents
from latents.loader import _plan, batches, find_damaged, to_latent
from latents.tars import TAR_INDEX
from routing_module import kept_tokens

COUNT = 103  # three shards of 40, 40 and 23 images, and a batch size that leaves a rest


def write_folder(folder, latents, labels, mirrored=None, shard=40, **record):
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
    channels = latents.shape[1] // (2 if record.get("kind") == "moments" else 1)
    record = {
        "format": 1, "count": len(latents), "shape": [channels, *latents.shape[2:]], "dtype": "float16",
        "kind": "sample", "mirrored": mirrored is not None, "num_classes": 7, "class_names": None,
        "autoencoder": "sd_vae_ema", "scale": 0.18215, "shift": 0.0, "resolution": 32, "shards": shards,
        "source": "here", "unreadable": [], **record,
    }  # fmt: skip
    (folder / "metadata.json").write_text(json.dumps(record))
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
    return [batch[:2] for batch in take_weighted(latents, num, batch_size, **how)]


def take_weighted(latents, num, batch_size, **how):
    stream = batches(latents, batch_size, arrays=["weight"], **how)
    taken = [(stored, y, *arrays.values()) for stored, y, arrays in itertools.islice(stream, num)]
    stream.close()
    return taken


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "set", numbered(), labels_of())


@pytest.fixture(scope="module")
def written_tars(tmp_path_factory):
    return write_tars(tmp_path_factory.mktemp("tars") / "set", numbered(), labels_of())


@pytest.fixture
def tars(written_tars, tmp_path):
    return shutil.copytree(written_tars, tmp_path / "tars")


# --- folders and batches


def test_a_folder_reports_what_it_contains(tmp_path):
    names, shown = list("abcdefg"), list("ABCDEFG")
    bare, latents, for_people = (open_latents(write_folder(tmp_path / str(number), numbered(), labels_of(), **record))
                                 for number, record in enumerate(({}, {"class_names": names},
                                                                  {"class_names": names, "display_names": shown})))
    assert (latents.count, latents.shape, latents.kind, latents.mirrored) == (COUNT, (4, 4, 4), "sample", False)
    assert (latents.num_classes, latents.class_names, latents.autoencoder) == (7, names, "sd_vae_ema")
    assert latents.convention == Convention(0.18215)
    assert (bare.display_names, latents.display_names, for_people.display_names) == (None, names, shown)
    assert for_people.class_names == names and for_people.fingerprint == latents.fingerprint


def test_every_image_is_seen_once_an_epoch_with_its_label_and_only_the_rest_is_dropped(folder, tmp_path):
    for latents, batch_size in ((open_latents(folder), 10),
                                (open_latents(write_folder(tmp_path / "even", numbered(100), labels_of(100))), 20)):
        epochs = []
        for epoch in range(3):
            taken = take(latents, 100 // batch_size, batch_size, seed=3, start=100 // batch_size * epoch)
            assert (taken[0][0].dtype, taken[0][0].shape, taken[0][1].dtype) == (torch.float16, (batch_size, 4, 4, 4),
                                                                                 torch.int64)
            for stored, y in taken:
                np.testing.assert_array_equal(y.numpy(), labels_of()[numbers(stored)])
            epochs.append([n for stored, _ in taken for n in numbers(stored)])
            assert len(set(epochs[-1])) == 100
        assert epochs[0] != epochs[1]


def test_the_order_is_global_and_the_one_that_was_written_down(folder):
    """A change here breaks the resumption of every run there is."""
    latents = open_latents(folder)
    assert numbers(take(latents, 1, 8, seed=0)[0][0]) == [85, 37, 20, 5, 86, 16, 74, 96]  # of all three shards
    assert numbers(take(latents, 1, 8, seed=1)[0][0]) != [85, 37, 20, 5, 86, 16, 74, 96]


@pytest.mark.parametrize(("world", "start"), [(1, 1), (1, 12), (1, 25), (2, 0), (4, 11)])
def test_ranks_and_a_resumed_run_see_the_batches_of_one_rank_that_was_not_stopped(tmp_path, world, start):
    latents = open_latents(write_folder(tmp_path / "set", numbered(), labels_of(), mirrored=numbered(seed=9)))
    whole = take(latents, 28, 8, seed=5)[start:]  # twelve batches an epoch
    parts = [take(latents, 28 - start, 8, seed=5, rank=rank, world=world, start=start) for rank in range(world)]
    for g, (stored, y) in enumerate(whole):
        assert torch.equal(torch.cat([part[g][0] for part in parts]), stored)
        assert torch.equal(torch.cat([part[g][1] for part in parts]), y)


# --- mirrored copies


def test_mirrored_copies_are_sampled_about_half_the_time_and_never_change_the_order(tmp_path):
    plain, copies = numbered(1000), numbered(1000)
    plain[:, 1, 0, 0], copies[:, 1, 0, 0] = 0, 1
    alone = open_latents(write_folder(tmp_path / "a", plain, labels_of(1000), shard=300))
    both = open_latents(write_folder(tmp_path / "b", plain, labels_of(1000), mirrored=copies, shard=300))
    flips = []
    for (x, y), (x_both, y_both) in zip(take(alone, 20, 100, seed=2), take(both, 20, 100, seed=2), strict=True):
        assert numbers(x) == numbers(x_both) and torch.equal(y, y_both)
        flips.append(x_both[:, 1, 0, 0].numpy())
    flips = np.concatenate(flips)
    assert abs(flips.mean() - 0.5) < 4 * 0.5 / np.sqrt(len(flips))
    assert (flips[:1000] != flips[1000:]).any()  # a fresh coin each epoch
    assert flips[:16].astype(int).tolist() == [1, 1, 1, 0, 1, 0, 0, 0, 0, 1, 0, 1, 1, 0, 1,
                                               1]  # which a resumed run draws again


def test_a_mirrored_row_is_the_mirror_of_its_own_image(tmp_path):
    plain, copies = numbered(), numbered(seed=9)
    latents = open_latents(write_folder(tmp_path / "set", plain, labels_of(), mirrored=copies))
    indices, mirror = np.array([90, 5, 41, 5]), np.array([True, False, True, True])
    stored, labels = latents.read(indices, mirror)
    np.testing.assert_array_equal(stored, np.where(mirror[:, None, None, None], copies[indices], plain[indices]))
    np.testing.assert_array_equal(labels, labels_of()[indices])


# --- moments


@pytest.mark.parametrize("kind",
                         ["folder", "mirrored", "masks", "mirrored with masks", "tars of samples", "tars of moments"])
def test_batches_made_on_a_device_are_those_of_the_mapped_files_bit_for_bit(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(latent_folder, "CHUNK", 32)  # four copies, the last one short
    if kind.startswith("tars"):
        logvar = [numbered(seed=1)] * kind.endswith("moments")
        write_tars(tmp_path, np.concatenate([numbered() / 0.18215, *logvar], axis=1), labels_of())
        latents = open_latents(tmp_path, kind="moments" if logvar else "sample", scale=0.18215)
    else:
        write_folder(tmp_path, numbered(), labels_of(), -numbered() if "mirrored" in kind else None)
        latents = open_latents(write_masks(tmp_path, masks_of()) if "masks" in kind else tmp_path)
    for start, rank in ((0, 0), (13, 1)):  # 10 batches an epoch
        how = dict(seed=3, start=start, rank=rank, world=2)
        for ours, theirs in zip(take_weighted(latents, 21, 10, device="cpu", **how),
                                take_weighted(latents, 21, 10, **how), strict=True):
            assert all(torch.equal(one, other) and one.dtype == other.dtype
                       for one, other in zip(ours, theirs, strict=True))
    assert not readers()


def test_moments_are_sampled_with_their_mean_and_standard_deviation_and_samples_are_only_widened():
    stored = torch.empty(20_000, 2, 2, 2, dtype=torch.float16)
    stored[:, 0], stored[:, 1] = 1.5, 0.25
    torch.manual_seed(0)
    x = to_latent(stored, "moments")
    assert x.dtype == torch.float32 and x.shape == (20_000, 1, 2, 2)
    assert abs(x.mean().item() - 1.5) < 0.005 and abs(x.std().item() - 0.25) < 0.005
    torch.manual_seed(0)
    assert torch.equal(to_latent(stored, "moments"), x)  # the default generator and nothing else
    assert not torch.equal(to_latent(stored, "moments"), x)
    x = to_latent(stored, "sample")
    assert x.dtype == torch.float32 and torch.equal(x, stored.float())


# --- tars


def write_tars(folder, latents, labels, maxcount=40):
    """Writes tars as TREAD's users do, with webdataset's own writer; as many do, the keys begin again in each tar."""
    import webdataset

    folder.mkdir(parents=True, exist_ok=True)
    with webdataset.ShardWriter(str(folder / "shard-%06d.tar"), maxcount=maxcount, verbose=0) as writer:
        for i, (latent, label) in enumerate(zip(latents, labels, strict=True)):
            writer.write({"__key__": f"n{i % maxcount:08d}", "latent.npy": latent, "cls": int(label), "json": {"i": i}})
    return folder


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("kind", ["sample", "moments"])
def test_webdataset_tars_read_back_as_the_folder_with_the_same_latents(tmp_path, kind, dtype):
    raw = (numbered().astype(np.float64) / 0.18215).astype(dtype)
    stored = torch.from_numpy(raw).float() * 0.18215
    if kind == "moments":
        logvar = np.random.default_rng(1).uniform(-20, 1, raw.shape).astype(dtype)
        stored = torch.cat([stored, torch.from_numpy(logvar).float().div(2).exp() * 0.18215], dim=1)
        raw = np.concatenate([raw, logvar], axis=1)
    folder = open_latents(write_folder(tmp_path / "set", stored.half().numpy(), labels_of(), kind=kind))
    tars = open_latents(write_tars(tmp_path / "tars", raw, labels_of()), kind=kind,
                        scale=0.18215 if kind == "sample" else None)
    assert (tars.count, tars.shape, tars.kind) == (COUNT, (4, 4, 4), kind)
    assert (tars.num_classes, tars.convention) == (1000, Convention(0.18215))
    for (x, y), (x_tar, y_tar) in zip(take(folder, 15, 10, seed=4), take(tars, 15, 10, seed=4), strict=True):
        assert x_tar.dtype == torch.float16 and torch.equal(y, y_tar)
        torch.testing.assert_close(x, x_tar, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("pattern", ["", "*.tar", "shard-{000000..000002}.tar"])
def test_tars_are_named_by_a_folder_a_glob_or_braces(tars, pattern):
    latents = open_latents(f"{tars}/{pattern}", kind="sample")  # which are the network's own as they are
    np.testing.assert_array_equal(latents.read(np.arange(COUNT))[0], numbered())
    np.testing.assert_array_equal(latents.read(np.arange(COUNT))[1], labels_of())


def test_the_tar_index_is_kept_and_made_again_when_the_tars_change(tars, monkeypatch):
    (tars / TAR_INDEX).write_bytes(b"half an index")
    first = open_latents(tars, kind="sample", scale=1)
    with monkeypatch.context() as patch:
        patch.setattr("latents.tars.tar_members", None)  # a second indexing would fail
        assert open_latents(tars, kind="sample", scale=1).fingerprint == first.fingerprint
    write_tars(tars, numbered(seed=8), labels_of()[::-1])  # files of the same names and sizes
    stored, labels = open_latents(tars, kind="sample", scale=1).read(np.arange(COUNT))
    np.testing.assert_array_equal(stored, numbered(seed=8))
    np.testing.assert_array_equal(labels, labels_of()[::-1])
    assert sorted(file.suffix for file in tars.iterdir()) == [".npz", ".tar", ".tar", ".tar"]


def test_tars_in_a_folder_that_cannot_be_written_are_read_all_the_same(tars, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError("read-only")

    monkeypatch.setattr("runtime.files.os.fsync", refuse)
    assert open_latents(tars, kind="sample", scale=1).count == COUNT
    assert {file.suffix for file in tars.iterdir()} == {".tar"}


# --- masks


def write_rows(folder, name, rows, shard=40):
    """Writes an array beside the latents of `write_folder`."""
    for s, start in enumerate(range(0, len(rows), shard)):
        np.save(folder / f"{name}-{s:05d}.npy", rows[start : start + shard])
    return folder


def write_masks(folder, masks):
    return write_rows(folder, "masks", masks)


def record_teacher(folder, shape, mirror="files"):
    change_record(folder, arrays={"teacher": {"shape": shape, "dtype": "float16", "mirror": mirror}})
    return folder


def masks_of(count=COUNT, dtype=np.float16):
    """Masks (n, h, w) that tell the image's number in a corner, and are neither 0 nor symmetrical elsewhere."""
    masks = np.random.default_rng(5).integers(0, 2, (count, 4, 4)).astype(dtype)
    if dtype == np.float16:
        masks[:, 0, 0] = np.arange(count) / 512
    return masks


@pytest.mark.parametrize("dtype", [np.float16, np.uint8])
@pytest.mark.parametrize("channel", [False, True])
def test_a_mask_goes_with_its_image(folder, dtype, channel):
    masks = masks_of(dtype=dtype)
    latents = open_latents(write_masks(folder, masks[:, None] if channel else masks))
    assert [*latents.arrays] == ["weight"]
    for stored, _, weights in take_weighted(latents, 12, 10, seed=1):
        assert (weights.numpy().dtype, tuple(weights.shape)) == (dtype, (10, 1, 4, 4))
        np.testing.assert_array_equal(weights[:, 0].numpy(), masks[numbers(stored)])


@pytest.mark.parametrize(("mirror", "device"), [("same", None), ("flip", None), ("files", None), ("files", "cpu")])
def test_an_extra_array_follows_its_image_and_mirrors_as_its_metadata_says(tmp_path, mirror, device):
    plain, copies = numbered(), numbered()
    plain[:, 1, 0, 0], copies[:, 1, 0, 0] = 0, 1
    out = write_folder(tmp_path / "set", plain, labels_of(), mirrored=copies)
    tokens = np.random.default_rng(0).normal(size=(2, COUNT, 3, 5)).astype(np.float16)  # of images and of their copies
    for name, rows in (("teacher", tokens[0]), *[("teacher_mirrored", tokens[1])] * (mirror == "files")):
        write_rows(out, name, rows)
    before = open_latents(out).fingerprint
    latents = open_latents(record_teacher(out, [3, 5], mirror))
    assert latents.fingerprint != before
    stream = batches(latents, 10, seed=1, arrays=["weight", "teacher"], device=device)
    for stored, _, arrays in itertools.islice(stream, 12):
        assert [*arrays] == ["teacher"] and arrays["teacher"].dtype == torch.float16
        flipped, image = stored[:, 1, 0, 0].numpy().astype(int), numbers(stored)
        wanted = {"same": tokens[0][image], "files": tokens[flipped, image],
                  "flip": np.where(flipped[:, None, None] == 1, tokens[0][image][..., ::-1], tokens[0][image])}[mirror]
        np.testing.assert_array_equal(arrays["teacher"].numpy(), wanted)
        assert 0 < flipped.sum() < 10
    stream.close()


def test_the_mask_of_a_mirrored_copy_is_mirrored(tmp_path):
    plain, copies, masks = numbered(), numbered(), masks_of()
    plain[:, 1, 0, 0], copies[:, 1, 0, 0] = 0, 1
    latents = open_latents(write_masks(write_folder(tmp_path / "set", plain, labels_of(), mirrored=copies), masks))
    for stored, _, weights in take_weighted(latents, 10, 10, seed=1):
        flipped = stored[:, 1, 0, 0].numpy()[:, None, None] == 1
        mask = masks[numbers(stored)]
        np.testing.assert_array_equal(weights[:, 0].numpy(), np.where(flipped, mask[..., ::-1], mask))
        assert 0 < flipped.sum() < 10


def test_a_token_is_kept_where_more_than_half_of_its_patch_is():
    masks = torch.zeros(2, 1, 4, 4)
    masks[0, 0, :2, 2:] = 1                                  # the second patch of four
    masks[1, 0, 2:, 0], masks[1, 0, 2, 2], masks[1, 0, 3, 2:] = 1, 1, 0.6  # half of the third, more of the fourth
    assert kept_tokens(masks, 2).tolist() == [[False, True, False, False], [False, False, False, True]]


def test_the_fullest_mask_is_found_in_all_of_the_data(folder, monkeypatch):
    monkeypatch.setattr(latent_folder, "CHUNK", 32)
    masks = np.zeros((COUNT, 4, 4), np.uint8)
    masks[7, :2], masks[71] = 1, np.tri(4)
    assert open_latents(write_masks(folder, masks)).most_kept(2) == (3, 71)


# --- the record


@pytest.mark.parametrize("array", ["latents", "teacher", "masks"])
@pytest.mark.parametrize("mirrored", [False, True])
def test_a_value_that_is_not_finite_is_found_in_the_batches_that_held_it_with_its_file_and_row(tmp_path, array,
                                                                                               mirrored):
    write_folder(tmp_path, numbered(), labels_of(), -numbered() if mirrored else None)
    names = {"latents": "mirrored"}.get(array, f"{array}_mirrored") if mirrored and array != "masks" else array
    for name, shape in (("teacher", (3,)), ("teacher_mirrored", (3,)), ("masks", (4, 4))):
        write_rows(tmp_path, name, np.ones((COUNT, *shape), np.float16))
    latents = open_latents(record_teacher(tmp_path, [3]))
    indices, copies = next(_plan(latents, 10, 0, 0, 1, 3))
    image = int(indices[np.argmax(copies) if mirrored else 4])
    file = tmp_path / f"{names}-{image // 40:05d}.npy"
    np.load(file, mmap_mode="r+")[image % 40].flat[-1] = np.inf
    read = ["teacher", "weight"]
    assert find_damaged(latents, 10, 0, range(2, 5),
                        read) == [f"{file}, row {image % 40} (image {image} of the data set)"]
    assert find_damaged(latents, 10, 0, range(3), read) == find_damaged(latents, 10, 0, range(4, 10), read) == []


def test_a_moved_folder_is_the_same_data_set_and_other_content_is_not(tmp_path):
    here, elsewhere, *others = (open_latents(folder).fingerprint for folder in (
        write_folder(tmp_path / "a", numbered(), labels_of()),
        write_folder(tmp_path / "b" / "c", numbered(), labels_of(), source="elsewhere"),
        write_folder(tmp_path / "d", numbered(seed=1), labels_of()),
        write_folder(tmp_path / "e", numbered(), labels_of()[::-1].copy()),
        write_folder(tmp_path / "f", numbered(), labels_of(), num_classes=8),
        write_masks(write_folder(tmp_path / "g", numbered(), labels_of()), masks_of()),
        write_masks(write_folder(tmp_path / "h", numbered(), labels_of()), 1 - masks_of())))
    assert here == elsewhere and len({here, *others}) == 6 and int(here, 16)


# --- what is refused on opening


def latents(values, mirrored=None, **record):
    return lambda folder: write_folder(folder, values.astype(np.float16), labels_of(), mirrored, **record)


def moments(mean, std):
    return latents(np.concatenate([mean, std], axis=1), kind="moments")


def masks(values):
    return lambda folder: write_masks(folder, values)


def teacher(folder):
    record_teacher(write_rows(folder, "teacher", np.ones((COUNT, 3), np.float16)), [3])


def in_tar(old, new):
    """Renames members of the second tar."""
    def damage(folder):
        with tarfile.open(folder / TAR) as tar, tarfile.open(folder / "new", "w") as out:
            for member in tar.getmembers():
                content = tar.extractfile(member)
                member.name = member.name.replace(old, new)
                out.addfile(member, content)
        os.replace(folder / "new", folder / TAR)
    return damage


def without_end_mark(folder):
    """Cuts a tar exactly behind a member, where tarfile itself sees nothing wrong."""
    with tarfile.open(folder / TAR) as tar:
        cut = tar.getmembers()[30].offset
    os.truncate(folder / TAR, cut)


def compressed(folder):
    (folder / TAR).write_bytes(gzip.compress((folder / TAR).read_bytes()))


def labelled(label):
    return lambda folder: write_tars(folder, numbered(), [label, *labels_of()[1:]])


def one_more(latent):
    return lambda folder: write_tars(folder, [*numbered(), latent], labels_of(COUNT + 1))


LATENTS, LABELS, MASKS, TEACHER = (f"{name}-00001.npy" for name in ("latents", "labels", "masks", "teacher"))
INFINITE = numbered()
INFINITE[41, 1, 2, 2] = np.inf
BAD = [  # what is wrong with a folder, arguments, words
    (gone("metadata.json"), {}, "set: preparation has not finished; rerun the same command"),
    (put("metadata.json", "{"), {}, "metadata.json is not JSON"),
    (record(shards=[{"latents": "a", "labels": "b"}]), {}, "shards.0.count is missing"),
    (record(count=104), {}, "says 104, but its shards have 103"),
    (record(class_names=["a"]), {}, "says 7, but its class_names have 1"),
    (record(display_names=["a"]), {}, "says 7, but its display_names have 1"),
    (record(kind="moments"), {}, "metadata.json says float16 (40, 8, 4, 4)"),
    (as_it_is, {"kind": "moments"}, "data.kind is 'moments'"), (as_it_is, {"scale": 1.0}, "data.scale is 1.0, but"),
    (gone(LATENTS), {}, LATENTS), (cut(LATENTS), {}, f"{LATENTS} is not a complete npy file"),
    (array(LATENTS, lambda a: a.astype(np.float32)), {}, "has float32 (40, 4, 4, 4), but metadata.json says float16"),
    (array(LABELS, lambda a: a.astype(np.int32)), {}, f"{LABELS} has int32 (40,), but"),
    (array(LABELS, lambda a: a + 1), {}, "label 7"),
    (array(LATENTS, lambda a: a * np.nan), {}, "40 hold NaN or infinity, such as image 40"),
    (latents(numbered(), INFINITE), {}, "1 hold NaN or infinity, such as image 41"),
    (latents(numbered() * 99, autoencoder="identity", scale=1.0), {}, "lie in -1..1: store image / 127.5 - 1"),
    (latents(numbered() * 9), {}, "looks unscaled: 0.18215 times"),
    (latents(numbered() * 0.2), {}, "looks scaled twice: divided by 0.18215"),
    (moments(numbered(), numbered() - 9), {}, "is never negative, so these look like [mean, logvar]"),
    (moments(numbered() * 4.7, abs(numbered()) * 0.01), {}, "looks unscaled"),
    (masks(0 * masks_of()), {}, "masks range from 0 to 0, but weights of the loss must lie in 0..1 and not all be 0"),
    (masks(np.full((COUNT, 4, 4), 255, np.uint8)), {}, "masks range from 255 to 255"),
    (both(masks(masks_of()), array(MASKS, lambda a: a * np.nan)), {}, "masks range from nan"),
    (both(masks(masks_of()), array(MASKS, lambda a: a[:, :2])), {}, f"{MASKS} has float16 (40, 2, 4), but"),
    (both(masks(masks_of()), gone(MASKS)), {}, MASKS),
    (both(teacher, array(TEACHER, lambda a: a[:39])), {},
     f"{TEACHER} has float16 (39, 3), but metadata.json says float16 (40, 3)"),
    (both(teacher, gone(TEACHER)), {}, TEACHER), (both(teacher, cut(TEACHER)), {}, f"{TEACHER} is not a complete npy"),
]  # fmt: skip
TAR, SAMPLE = "shard-000001.tar", {"kind": "sample", "scale": 1}
BAD_TARS = [  # what is wrong with tars, arguments, words
    (as_it_is, {}, "tars do not record their kind: set data.kind=moments"),
    (as_it_is, {"kind": "sample", "scale": 5}, "data.scale is 5: set data.scale=0.18215."),
    (as_it_is, {"kind": "sample", "scale": 0.18215}, "data.scale is 0.18215: set data.scale=1."),
    (as_it_is, {**SAMPLE, "num_classes": 6}, "label 6 (row 4), outside 0..5: set data.num_classes above it"),
    (as_it_is, {**SAMPLE, "name": "shard-{000000..000003}.tar"}, "names 4 tars, but 1 of them are missing, "),
    (without_end_mark, SAMPLE, f"{TAR} is not a complete, uncompressed tar (it has no end mark"),
    (cut(TAR), SAMPLE, f"{TAR} is not a complete, uncompressed tar"),
    (compressed, SAMPLE, f"{TAR} is not a complete, uncompressed tar"),
    (in_tar("latent.npy", "jpg"), SAMPLE, "no '<key>.latent.npy': if it has images, use scripts/prepare_latents.py"),
    (in_tar("n00000010.cls", "n00000010.txt"), SAMPLE, "lack either '.latent.npy' or '.cls', such as 'n00000010'"),
    (in_tar("10.json", "10b.cls"), SAMPLE, f"{TAR}: n00000010b.cls: invalid literal"),
    (labelled(2**31), SAMPLE, ".cls: Python integer 2147483648 out of bounds"),
    (in_tar("10.json", "10b.latent.npy"), SAMPLE, f"{TAR}: n00000010b.latent.npy: the magic string"),
    (one_more(np.zeros((4, 8, 8), np.float16)), SAMPLE, "(4, 8, 8), but the latents before it are float16 (4, 4, 4)"),
    (one_more(np.zeros((4, 4), np.float16)), SAMPLE, "float16 (4, 4) in"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "arguments", "words"), BAD, ids=[words for *_, words in BAD])
def test_a_bad_folder_raises_a_one_line_error(folder, change, arguments, words):
    change(folder)
    refused(lambda: open_latents(folder, **arguments), words)


@pytest.mark.parametrize(("change", "arguments", "words"), BAD_TARS, ids=[words for *_, words in BAD_TARS])
def test_bad_tars_raise_a_one_line_error(tars, change, arguments, words):
    change(tars)
    name, arguments = arguments.get("name", ""), {key: value for key, value in arguments.items() if key != "name"}
    refused(lambda: open_latents(tars / name, **arguments), words)


def test_tars_that_do_not_fit_the_network_are_refused(tars, tmp_path):
    as_samples = open_latents(write_tars(tmp_path / "moments", numbered(channels=8), labels_of()), kind="sample")
    with pytest.warns(UserWarning,
                      match="set data.kind=sample, unless they are the moments of a 2-channel autoencoder"):
        as_moments = open_latents(tars, kind="moments", scale=1)
    wide = open_latents(write_tars(tmp_path / "wide", numbered()[:, :, :2], labels_of()), kind="sample")
    for opened, *words in (
            (as_samples, "(8, 4, 4), but the network is set up for (4, 4, 4)", "or data.kind=moments"),
            (as_moments, "(2, 4, 4), but the network is set up for (4, 4, 4)", "or data.kind=sample"),
            # google-deepmind/representations4d#13, Zhendong-Wang/Patch-Diffusion#2
            (wide, "move the channels to the front, or crop the images to squares")):
        refused(lambda opened=opened: opened.require(shape=(4, 4, 4), num_classes=1000), *words)


def test_arguments_that_agree_with_the_folder_are_accepted(folder):
    assert open_latents(folder, kind="sample", scale=0.18215, num_classes=1000).num_classes == 7


@pytest.mark.parametrize("values, autoencoder", [
    (numbered() * 0.1, "my/own_vae"),  # a local autoencoder may be so
    (np.clip(abs(numbered()), 0, 1), "identity"),  # light pictures may be so
])  # fmt: skip
def test_what_may_be_right_only_warns(tmp_path, values, autoencoder):
    with pytest.warns(UserWarning, match="looks|may be"):
        open_latents(write_folder(tmp_path / "set", values, labels_of(), autoencoder=autoencoder))


@pytest.mark.parametrize("written", ["folder", "tars"])
def test_a_data_set_knows_which_classes_have_images(tmp_path, written):
    labels = np.array([4, 1, 1, 900, 4] * 20)
    if written == "folder":
        latents = open_latents(write_folder(tmp_path / "set", numbered(100), labels, num_classes=1000))
    else:
        latents = open_latents(write_tars(tmp_path / "set", numbered(100), labels), kind="sample")
    assert (latents.num_classes, latents.classes) == (1000, [1, 4, 900])


# --- the reading thread, and memory


def readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def test_the_reading_thread_runs_ahead_a_little_and_ends_with_the_iterator(folder, monkeypatch):
    latents, reads, waiting = open_latents(folder), [], threading.Event()
    read = latents.read
    monkeypatch.setattr(latents, "read", lambda *a: (reads.append(1), waiting.set(), read(*a))[2])
    stream = batches(latents, 10, seed=0)
    assert not reads and not readers()  # nothing starts before the first batch is asked for
    next(stream)
    while len(reads) <= loader.NUM_AHEAD:
        threading.Event().wait(0.005)
    threading.Event().wait(0.1)
    assert len(reads) <= loader.NUM_AHEAD + 2 and len(readers()) == 1
    stream.close()
    assert not readers()


def test_an_error_in_the_reading_thread_reaches_the_one_who_waits_for_the_batch(folder, monkeypatch):
    latents, read, reads = open_latents(folder), Latents.read, []

    def fail_at_the_third(*args):
        reads.append(1)
        if len(reads) == 3:
            raise OSError("the disk went away")
        return read(latents, *args)

    monkeypatch.setattr(latents, "read", fail_at_the_third)
    stream = batches(latents, 10, seed=0)
    assert len([next(stream), next(stream)]) == 2  # what was read before is still good
    with pytest.raises(OSError, match="the disk went away"):
        next(stream)
    assert not readers()


def test_a_program_that_leaves_its_batches_open_still_ends(folder):
    program = (
        "import json\nfrom latents.folder import open_latents\nfrom latents.loader import batches\n"
        f"stream = json.stream = batches(open_latents({str(folder)!r}), 10, seed=0)\n"  # outlives `data`
        "next(stream)\n"
        "print('left')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does")
def test_a_folder_far_larger_than_the_memory_used_is_mapped_and_not_read(tmp_path):
    count = 200_000  # 1.2 GB of latents in holes of a sparse file
    write_folder(tmp_path, np.zeros((1, 3, 32, 32), np.float16), np.zeros(1, np.int64), autoencoder="identity",
                 scale=1.0)
    for name, dtype, shape in (("latents", "<f2", (count, 3, 32, 32)), ("labels", "<i8", (count,))):
        with open(tmp_path / f"{name}-00000.npy", "wb") as stream:
            header = {"descr": dtype, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(stream, header)
            stream.truncate(stream.tell() + np.dtype(dtype).itemsize * int(np.prod(shape)))
    shard = {"latents": "latents-00000.npy", "labels": "labels-00000.npy", "count": count}
    change_record(tmp_path, count=count, shards=[shard])
    program = (
        "import resource\nfrom latents.folder import open_latents\nfrom latents.loader import batches\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux\n"
        "before = peak()\n"
        f"stream = batches(open_latents({str(tmp_path)!r}), 32, seed=0)\n"
        "for _ in range(10): next(stream)\n"
        "print(peak() - before)"
    )
    done = forked.run("-c", program)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.4, f"memory grew by {done.stdout} GB"


def test_more_files_than_a_process_may_open_at_first_are_opened_all_the_same(tmp_path):
    write_folder(tmp_path, numbered(300), labels_of(300), shard=1)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
        assert open_latents(tmp_path).read(np.arange(300))[0].shape == (300, 4, 4, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
