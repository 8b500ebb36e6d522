"""What a latent folder promises: every image once an epoch, on any number of ranks, from any start, memory-mapped."""

import itertools
import json
import os
import resource
import subprocess
import sys
import tarfile
import threading

import forked
import numpy as np
import pytest
import torch
from conftest import ROOT

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


# --- folders and batches


def test_a_folder_reports_what_it_contains(tmp_path):
    names = ["a", "b", "c", "d", "e", "f", "g"]
    latents = open_latents(write_folder(tmp_path / "set", numbered(), labels_of(), class_names=names))
    assert (latents.count, latents.shape, latents.kind, latents.mirrored) == (COUNT, (4, 4, 4), "sample", False)
    assert (latents.num_classes, latents.class_names, latents.autoencoder) == (7, names, "sd_vae_ema")
    assert latents.convention == Convention(0.18215)


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
def test_tars_are_named_by_a_folder_a_glob_or_braces(tmp_path, pattern):
    write_tars(tmp_path, numbered(), labels_of())
    latents = open_latents(f"{tmp_path}/{pattern}", kind="sample")  # which are the network's own as they are
    np.testing.assert_array_equal(latents.read(np.arange(COUNT))[0], numbered())
    np.testing.assert_array_equal(latents.read(np.arange(COUNT))[1], labels_of())


def test_the_tar_index_is_kept_and_made_again_when_the_tars_change(tmp_path, monkeypatch):
    write_tars(tmp_path, numbered(), labels_of())
    first = open_latents(tmp_path, kind="sample", scale=1)
    with monkeypatch.context() as patch:
        patch.setattr("latents.tars.tar_members", None)  # a second indexing would fail
        assert open_latents(tmp_path, kind="sample", scale=1).fingerprint == first.fingerprint
    write_tars(tmp_path, numbered(seed=8), labels_of()[::-1])  # files of the same names and sizes
    stored, labels = open_latents(tmp_path, kind="sample", scale=1).read(np.arange(COUNT))
    np.testing.assert_array_equal(stored, numbered(seed=8))
    np.testing.assert_array_equal(labels, labels_of()[::-1])
    (tmp_path / TAR_INDEX).write_bytes(b"half an index")
    assert open_latents(tmp_path, kind="sample", scale=1).count == COUNT
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".npz", ".tar", ".tar", ".tar"]


def test_tars_in_a_folder_that_cannot_be_written_are_read_all_the_same(tmp_path, monkeypatch):
    write_tars(tmp_path, numbered(), labels_of())

    def refuse(*_, **__):
        raise PermissionError("read-only")

    monkeypatch.setattr("runtime.files.os.fsync", refuse)
    assert open_latents(tmp_path, kind="sample", scale=1).count == COUNT
    assert {file.suffix for file in tmp_path.iterdir()} == {".tar"}


# --- masks


def write_masks(folder, masks, shard=40):
    """Writes masks beside the latents of `write_folder`."""
    for s, start in enumerate(range(0, len(masks), shard)):
        np.save(folder / f"masks-{s:05d}.npy", masks[start : start + shard])
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
        for s, start in enumerate(range(0, COUNT, 40)):
            np.save(out / f"{name}-{s:05d}.npy", rows[start : start + 40])
    meta = json.loads((out / "metadata.json").read_text())
    meta["arrays"] = {"teacher": {"shape": [3, 5], "dtype": "float16", "mirror": mirror}}
    before = open_latents(out).fingerprint
    (out / "metadata.json").write_text(json.dumps(meta))
    latents = open_latents(out)
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
    np.save(out / "teacher-00001.npy", tokens[0][:39])
    with pytest.raises(ValueError,
                       match=r"teacher-00001.npy has float16 \(39, 3, 5\), but metadata.json says float16 \(40, 3, "
                             r"5\)"):
        open_latents(out)


def test_the_mask_of_a_mirrored_copy_is_mirrored(tmp_path):
    plain, copies, masks = numbered(), numbered(), masks_of()
    plain[:, 1, 0, 0], copies[:, 1, 0, 0] = 0, 1
    latents = open_latents(write_masks(write_folder(tmp_path / "set", plain, labels_of(), mirrored=copies), masks))
    for stored, _, weights in take_weighted(latents, 10, 10, seed=1):
        flipped = stored[:, 1, 0, 0].numpy()[:, None, None] == 1
        mask = masks[numbers(stored)]
        np.testing.assert_array_equal(weights[:, 0].numpy(), np.where(flipped, mask[..., ::-1], mask))
        assert 0 < flipped.sum() < 10


def test_masks_are_part_of_the_data_set(folder):
    prints = [open_latents(folder).fingerprint]
    prints += [open_latents(write_masks(folder, masks)).fingerprint for masks in (masks_of(), 1 - masks_of())]
    assert len(set(prints)) == 3


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
    write_folder(tmp_path, numbered(), labels_of(), -numbered() if mirrored else None,
                 arrays={"teacher": {"shape": [3], "dtype": "float16", "mirror": "files"}})
    names = {"latents": "mirrored"}.get(array, f"{array}_mirrored") if mirrored and array != "masks" else array
    for shard, start in enumerate(range(0, COUNT, 40)):
        for name, shape in (("teacher", (3,)), ("teacher_mirrored", (3,)), ("masks", (4, 4))):
            np.save(tmp_path / f"{name}-{shard:05d}.npy", np.ones((min(40, COUNT - start), *shape), np.float16))
    latents = open_latents(tmp_path)
    image = next(int(i)
                 for i, copy in zip(*next(_plan(latents, 10, 0, 0, 1, 3)), strict=True)
                 if copy == mirrored) if mirrored else (
        int(next(_plan(latents, 10, 0, 0, 1, 3))[0][4]))
    file = tmp_path / f"{names}-{image // 40:05d}.npy"
    np.load(file, mmap_mode="r+")[image % 40].flat[-1] = np.inf
    read = ["teacher", "weight"]
    assert find_damaged(latents, 10, 0, range(2, 5),
                        read) == [f"{file}, row {image % 40} (image {image} of the data set)"]
    assert find_damaged(latents, 10, 0, range(3), read) == find_damaged(latents, 10, 0, range(4, 10), read) == []


def test_a_moved_folder_is_the_same_data_set_and_other_content_is_not(tmp_path):
    prints = [
        open_latents(write_folder(tmp_path / "a", numbered(), labels_of())).fingerprint,
        open_latents(write_folder(tmp_path / "b" / "c", numbered(), labels_of(), source="elsewhere")).fingerprint,
        open_latents(write_folder(tmp_path / "d", numbered(seed=1), labels_of())).fingerprint,
        open_latents(write_folder(tmp_path / "e", numbered(), labels_of()[::-1].copy())).fingerprint,
        open_latents(write_folder(tmp_path / "f", numbered(), labels_of(), num_classes=8)).fingerprint,
    ]
    assert prints[0] == prints[1] and len(set(prints)) == 4 and int(prints[0], 16)


# --- what is refused on opening, but for what tests/test_mistakes.py has


def refused(words, function, *arguments, **options):
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        function(*arguments, **options)
    assert all(word in str(error.value) for word in words), error.value


def record(**changes):
    def edit(folder):
        plain = json.loads((folder / "metadata.json").read_text()) | changes
        (folder / "metadata.json").write_text(json.dumps({key: value
                                                          for key, value in plain.items() if value != "gone"}))
    return edit


def latents(values, mirrored=None, **record):
    return lambda folder: write_folder(folder, values.astype(np.float16), labels_of(), mirrored, **record)


def masks(array=None, name="masks-00001.npy"):
    """Writes masks that are whole, and then one file of them anew, or none of it."""
    def damage(folder):
        file = write_masks(folder, masks_of()) / name
        file.unlink() if array is None else np.save(file, array)
    return damage


def moments(mean, std):
    return np.concatenate([mean, std], axis=1)


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


def one_more(latent):
    return lambda folder: write_tars(folder, [*numbered(), latent], labels_of(COUNT + 1))


TAR, SAMPLE, MOMENTS = "shard-000001.tar", {"kind": "sample", "scale": 1}, {"kind": "moments"}
INFINITE = numbered()
INFINITE[41, 1, 2, 2] = np.inf
BAD = {
    "display names": (record(display_names=["a"]), {}, ["says 7", "display_names have 1"]),
    "kind argument": (None, {"kind": "moments"}, ["'moments'", "'sample'"]),
    "scale argument": (None, {"scale": 1.0}, ["1.0", "0.18215"]),
    "shard without a count": (record(shards=[{"latents": "a", "labels": "b"}]), {}, ["shards.0.count is missing"]),
    "masks that are all 0": (lambda folder: write_masks(folder, 0 * masks_of()), {},
                             ["masks range from 0 to 0", "not all be 0"]),
    "masks that are not numbers": (masks(np.full((40, 4, 4), np.nan, np.float16)), {}, ["masks range from nan"]),
    "one file of masks missing": (masks(), {}, ["No such file", "masks-00001.npy"]),
    "infinity in a mirrored copy": (latents(numbered(), INFINITE), {}, ["1 hold NaN or infinity", "image 41 first"]),
    "logvar for std": (latents(moments(numbered(), numbered() - 9), **MOMENTS), {},
                       ["never negative", "[mean, logvar]"]),
    "unscaled moments": (latents(moments(numbered() * 4.7, abs(numbered()) * 0.01), **MOMENTS), {}, ["unscaled"]),
}
BAD_TARS = {
    "unscaled": (None, {"kind": "sample", "scale": 5}, ["unscaled", "data.scale is 5", "data.scale=0.18215"]),
    "scaled twice": (None, {"kind": "sample", "scale": 0.18215},
                     ["scaled twice", "data.scale is 0.18215: set data.scale=1."]),
    "label too high": (None, {**SAMPLE, "num_classes": 6}, ["label 6", "0..5", "data.num_classes"]),
    "truncated between members": (without_end_mark, SAMPLE, [TAR, "not a complete, uncompressed tar"]),
    "one absent": (None, {**SAMPLE, "name": "shard-{000000..000003}.tar"},
                   ["names 4 tars, but 1 of them are missing, ", "shard-000003.tar first"]),
    "images": (in_tar("latent.npy", "jpg"), SAMPLE, ["no '<key>.latent.npy'", "prepare_latents"]),
    "no label": (in_tar("n00000010.cls", "n00000010.txt"), SAMPLE, ["1 samples lack", "n00000010"]),
    "label no number": (in_tar("10.json", "10b.cls"), SAMPLE, [TAR, "n00000010b.cls", "invalid literal"]),
    "not npy": (in_tar("10.json", "10b.latent.npy"), SAMPLE, [TAR, "n00000010b.latent.npy", "magic"]),
    "another shape": (one_more(np.zeros((4, 8, 8), np.float16)), SAMPLE, ["(4, 8, 8)", "(4, 4, 4)"]),
    "two axes": (one_more(np.zeros((4, 4), np.float16)), SAMPLE, ["(4, 4)", "(channels, height, width)"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_folder_raises_a_one_line_error(folder, case):
    damage, arguments, words = BAD[case]
    if damage:
        damage(folder)
    refused(words, open_latents, folder, **arguments)


@pytest.mark.parametrize("case", BAD_TARS)
def test_bad_tars_raise_a_one_line_error(tmp_path, case):
    damage, arguments, words = BAD_TARS[case]
    write_tars(tmp_path, numbered(), labels_of())
    if damage:
        damage(tmp_path)
    arguments = dict(arguments)
    refused(words, open_latents, tmp_path / arguments.pop("name", ""), **arguments)


def test_tars_of_another_kind_than_they_are_read_as_do_not_fit_the_network(tmp_path):
    write_tars(tmp_path / "moments", numbered(channels=8), labels_of())
    write_tars(tmp_path / "samples", numbered(), labels_of())
    as_samples = open_latents(tmp_path / "moments", kind="sample", scale=1)
    with pytest.warns(UserWarning,
                      match="set data.kind=sample, unless they are the moments of a 2-channel autoencoder"):
        as_moments = open_latents(tmp_path / "samples", kind="moments", scale=1)
    refused(["(8, 4, 4)", "(4, 4, 4)", "or data.kind=moments"], as_samples.require, shape=(4, 4, 4), num_classes=1000)
    refused(["(2, 4, 4)", "(4, 4, 4)", "or data.kind=sample"], as_moments.require, shape=(4, 4, 4), num_classes=1000)
    # google-deepmind/representations4d#13, Zhendong-Wang/Patch-Diffusion#2
    wide = open_latents(write_tars(tmp_path / "wide", numbered()[:, :, :2], labels_of()), kind="sample")
    refused(["move the channels to the front, or crop the images to squares"], wide.require, shape=(4, 4, 4),
            num_classes=1000)


def test_arguments_that_agree_with_the_folder_are_accepted(folder):
    assert open_latents(folder, kind="sample", scale=0.18215, num_classes=1000).num_classes == 7


@pytest.mark.parametrize("values, autoencoder", [
    (numbered() * 0.1, "my/own_vae"),  # a local autoencoder may be so
    (np.clip(abs(numbered()), 0, 1), "identity"),  # light pictures may be so
])  # fmt: skip
def test_what_may_be_right_only_warns(tmp_path, values, autoencoder):
    with pytest.warns(UserWarning, match="looks"):
        open_latents(write_folder(tmp_path / "set", values, labels_of(), autoencoder=autoencoder))


@pytest.mark.parametrize("written", ["folder", "tars"])
def test_a_data_set_knows_which_classes_have_images(tmp_path, written):
    labels = np.array([4, 1, 1, 900, 4] * 20)
    if written == "folder":
        latents = open_latents(write_folder(tmp_path / "set", numbered(100), labels, num_classes=1000))
    else:
        latents = open_latents(write_tars(tmp_path / "set", numbered(100), labels), kind="sample")
    assert (latents.num_classes, latents.classes) == (1000, [1, 4, 900])


def test_classes_are_shown_by_their_display_names_or_their_own(tmp_path):
    names, shown = list("abcdefg"), list("ABCDEFG")
    without, own, both = (open_latents(write_folder(tmp_path / str(number), numbered(), labels_of(), **record))
                          for number, record in enumerate(({}, {"class_names": names},
                                                           {"class_names": names, "display_names": shown})))
    assert (without.display_names, own.display_names, both.display_names) == (None, names, shown)
    assert both.class_names == names and both.fingerprint == own.fingerprint


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
    record(count=count, shards=[shard])(tmp_path)
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
