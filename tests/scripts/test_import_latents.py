"""Others' latents, each written from its documented layout, are imported with their labels and values, or raise a one-
line error.

Remarks such as CompVis/tread#13 name public reports of what is tested.
"""

import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, run_command
from omegaconf import OmegaConf
from safetensors.torch import save_file
from spoils import cut, gone, put, refused
from test_labels import put_tar
from test_prepare_latents import prepare, read_folder, same_folder

from latents.folder import open_latents
from runtime.schema import CONFIGS
from scripts import import_latents as script
from training.run import open_data

COUNT, SIDE, SCALE = 12, 8, np.float32(0.18215)
LABELS = np.arange(COUNT) // 5  # 0 0 0 0 0 1 1 1 1 1 2 2


def import_latents(source, out, format="auto", **settings) -> tuple[dict, dict[str, np.ndarray]]:
    """Imports with the settings of configs/import_latents.yaml but for those that are given; returns what it wrote."""
    plain = OmegaConf.to_container(OmegaConf.load(CONFIGS / "import_latents.yaml"))
    plain = {key: plain[key] for key in script.ImportSettings.model_fields}
    script.main.__wrapped__(script.ImportSettings(**plain | {"source": str(source), "out": str(out), "format": format}
                                                  | settings))
    return read_folder(Path(out))


def normal(*shape, seed=0, mean=0.0, std=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * std + mean).astype(np.float32)


def npy(array) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def moments(count=COUNT, seed=0, mean=0.0, std=5.0):
    """Means and standard deviations of a 4-channel VAE, unscaled."""
    return np.concatenate([normal(count, 4, SIDE, SIDE, seed=seed, mean=mean, std=std),
                           np.abs(normal(count, 4, SIDE, SIDE, seed=seed + 1, std=0.2))], axis=1)


def log_moments(count=COUNT, seed=0):
    """Means and log-variances of the same."""
    values = moments(count, seed)
    values[:, 4:] *= -20
    return values


# ---- the forms, as their writers' code has them ---------------------------------------------------------------------


def write_listed(place: Path, arrays, labels=LABELS, name="img-mean-std-{:08d}.npy", zipped=False, prefix="", extra=()):
    """NVIDIA's dataset_tool.py encode: 00000/<name>.npy and dataset.json, in a folder or a stored zip."""
    files = {f"00000/{name.format(i)}": npy(array) for i, array in enumerate(arrays)}
    pairs = [[file, int(label)] for file, label in zip(files, labels, strict=True)]
    files["dataset.json"] = json.dumps({"labels": pairs}).encode()
    files |= dict(extra)
    if zipped:
        with zipfile.ZipFile(place, "w") as archive:  # stored
            for file, content in files.items():
                archive.writestr(prefix + file, content)
    else:
        for file, content in files.items():
            (place / prefix / file).parent.mkdir(parents=True, exist_ok=True)
            (place / prefix / file).write_bytes(content)
    return place


def write_repa(tmp_path, zipped=False, values=None, **how):
    values = moments() if values is None else values
    if zipped:
        return write_listed(tmp_path / "vae.zip", values, zipped=True, **how), values
    (tmp_path / "repa" / "images").mkdir(parents=True)
    write_listed(tmp_path / "repa", values, prefix="vae-sd/", **how)
    return tmp_path / "repa", values


def write_edm2(tmp_path):
    values = moments(mean=2.0)
    return write_listed(tmp_path / "img512-sd.zip", values, zipped=True), values


def write_srdit(tmp_path):
    """SR-DiT's dataset_tools.py: one sample of the posterior, the batch axis left on."""
    values = normal(COUNT, 1, 32, 4, 4, std=3.0)
    return write_listed(tmp_path / "sr", values, name="img-latents-{:08d}.npy", prefix="vae-in/"), values[:, 0]


def write_fastdit(tmp_path, name="imagenet256", batch=1, file="{}.npy"):
    """fast-DiT's extract_features.py: (1, 4, h, w) and (1,) int64, each a file, or a batch of them."""
    values = normal(COUNT, 4, SIDE, SIDE)
    for part, rows in (("features", values), ("labels", LABELS)):
        (folder := tmp_path / "fast" / f"{name}_{part}").mkdir(parents=True)
        for i in range(COUNT // batch):
            np.save(folder / file.format(i, rank=i % 2, step=i // 2), rows[i * batch : (i + 1) * batch])
    return tmp_path / "fast", values


def write_maskdit(tmp_path, values=None, flips=None, labels=LABELS, length=None):
    """MaskDiT's extract_latent.py: z-i raw float32 of mean and log-variance, y-i text, length; xflip appends."""
    import lmdb

    values = log_moments() if values is None else values
    (tmp_path / "lmdb" / "train").mkdir(parents=True)
    with lmdb.open(str(tmp_path / "lmdb" / "train"), map_size=2**26) as env, env.begin(write=True) as txn:
        rows = [*values, *([] if flips is None else flips)]
        for i, z in enumerate(rows):
            txn.put(f"z-{i}".encode(), z.tobytes())
            txn.put(f"y-{i}".encode(), str(labels[i % len(labels)]).encode())
        txn.put(b"length", str(len(rows) if length is None else length).encode())
    return tmp_path / "lmdb", values


def write_tread(tmp_path, values=None):
    values = normal(COUNT, 4, SIDE, SIDE) if values is None else values
    (tmp_path / "tars").mkdir(parents=True)
    for shard in range(2):
        rows = range(shard * 6, shard * 6 + 6)
        put_tar(tmp_path / "tars" / f"train-{shard:04d}.tar",
                  {f"{i:07d}.{key}": value for i in rows
                   for key, value in (("cls", str(LABELS[i]).encode()), ("latent.npy", npy(values[i])))})
    return tmp_path / "tars", values


def write_lightningdit(tmp_path, channels=6, flip=True, stats=True, sizes=(7, 5), **tensors):
    """LightningDiT's extract_features.py: a shard a rank and number; latents_stats.pt of its loader."""
    folder = tmp_path / "vavae"
    folder.mkdir()
    values = normal(COUNT, channels, 4, 4, mean=1.0, std=3.0)
    flips = normal(COUNT, channels, 4, 4, seed=9, mean=1.0, std=3.0)
    start = 0
    for number, size in enumerate(sizes):
        rows = slice(start, start + size)
        held = {"latents": torch.tensor(values[rows]), "labels": torch.tensor(LABELS[rows])}
        held |= {"latents_flip": torch.tensor(flips[rows])} if flip else {}
        if number == len(sizes) - 1:
            held |= tensors
        save_file(held, folder / f"latents_rank00_shard{number:03d}.safetensors")
        start += size
    if stats:
        z = torch.tensor(values)
        torch.save({"mean": z.mean((0, 2, 3), keepdim=True), "std": z.std((0, 2, 3), keepdim=True)},
                   folder / "latents_stats.pt")
    return folder, (values, flips)


def same_bits(found: np.ndarray, expected: np.ndarray):
    expected = expected.astype(np.float16)
    assert found.dtype == np.float16 and np.array_equal(found.view(np.int16), expected.view(np.int16))


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["repa/vae-sd", "bare", "zip", "zip/vae-sd"])
def test_repas_mean_and_std_come_in_times_the_scale(tmp_path, place):
    how = {"prefix": "vae-sd/"} if place == "zip/vae-sd" else {}
    source, values = write_repa(tmp_path, zipped="zip" in place, **how)
    if place == "bare":
        source = (source / "vae-sd").rename(tmp_path / "bare")
    metadata, arrays = import_latents(source, tmp_path / "out", "auto" if "vae-sd" in place else "repa", shard_size=5)
    same_bits(arrays["latents"], values * SCALE)
    assert arrays["labels"].tolist() == LABELS.tolist() and arrays["labels"].dtype == np.int64
    assert [shard["count"] for shard in metadata["shards"]] == [5, 5, 2]
    assert (metadata["kind"], metadata["autoencoder"], metadata["scale"]) == ("moments", "sd_vae_mse", 0.18215)
    assert (metadata["shape"], metadata["num_classes"], metadata["resolution"]) == ([4, 8, 8], 3, 64)
    assert metadata["imported"]["format"] == "repa"  # sihyun-yu/REPA#28: encoded by -mse


def test_edm2s_come_in_by_their_own_statistics(tmp_path):
    """NVlabs/edm2#9: pixels in 0..1."""
    source, values = write_edm2(tmp_path)
    metadata, arrays = import_latents(source, tmp_path / "out", "edm2")
    # EDM2's encoders.py: x * scale + bias, scale = final_std / raw_std, bias = final_mean - raw_mean * scale; std
    # = d.std.
    scale = np.float32(0.5) / np.float32([4.17, 4.62, 3.71, 3.28])
    bias = np.float32(0) - np.float32([5.81, 3.25, 0.12, -2.15]) * scale
    shaped = (1, 4, 1, 1)
    same_bits(arrays["latents"][:, :4], values[:, :4] * scale.reshape(shaped) + bias.reshape(shaped))
    same_bits(arrays["latents"][:, 4:], values[:, 4:] * scale.reshape(shaped))
    assert metadata["latents_mean"] == [5.81, 3.25, 0.12, -2.15] and metadata["latents_std"] == [4.17, 4.62, 3.71, 3.28]
    assert metadata["scale"] == 0.5 and metadata["autoencoder"] == "sd_vae_mse" and metadata["pixels"] == [0, 1]


@pytest.mark.parametrize("format", ["repa", "edm2"])
@pytest.mark.parametrize("zipped", [False, True])
def test_a_set_without_labels_is_one_class(tmp_path, format, zipped):
    source, _ = write_repa(tmp_path, zipped=zipped, values=moments(mean=2.0),
                           extra={"dataset.json": b'{"labels": null}'}.items())
    metadata, arrays = import_latents(source, tmp_path / "out", format)
    assert metadata["num_classes"] == 1 and metadata["count"] == COUNT and not arrays["labels"].any()


def test_srdits_samples_come_in_times_their_scale_without_the_batch_axis(tmp_path):
    source, values = write_srdit(tmp_path)
    metadata, arrays = import_latents(source, tmp_path / "out")
    same_bits(arrays["latents"], values * np.float32(0.3099))
    assert (metadata["kind"], metadata["shape"], metadata["scale"]) == ("sample", [32, 4, 4], 0.3099)


@pytest.mark.parametrize("copies", ["none", "counted in length", "beyond length"])
def test_maskdits_log_variance_becomes_a_standard_deviation_and_flips_are_mirrored_copies(tmp_path, copies):
    values, flips = log_moments(), log_moments(seed=7)
    values[0, 4:], values[1, 4:] = -100, 1.5  # beyond the clamp, and within
    source, _ = write_maskdit(tmp_path, values, None if copies == "none" else flips,
                              length=COUNT if copies == "beyond length" else None)
    metadata, arrays = import_latents(source, tmp_path / "out")
    for part, rows in (("latents", values), ("mirrored", flips)) if copies != "none" else (("latents", values),):
        std = (0.5 * torch.tensor(rows[:, 4:]).clamp(-30, 20)).exp().numpy() * SCALE
        same_bits(arrays[part], np.concatenate([rows[:, :4] * SCALE, std], axis=1))
    assert metadata["count"] == COUNT and metadata["mirrored"] == (copies != "none")
    assert arrays["labels"].tolist() == LABELS.tolist()


def test_labels_that_only_repeat_are_no_sign_of_mirrored_copies(tmp_path):
    source, _ = write_maskdit(tmp_path, labels=[0, 2, 1])
    assert import_latents(source, tmp_path / "out")[0]["count"] == COUNT
    assert import_latents(source, tmp_path / "asked", mirrored=True)[0]["count"] == COUNT // 2


def test_treads_tars_come_in_as_they_are_or_as_moments_when_asked(tmp_path):
    source, values = write_tread(tmp_path)
    metadata, arrays = import_latents(source, tmp_path / "out")
    same_bits(arrays["latents"], values)
    assert arrays["labels"].tolist() == LABELS.tolist() and (metadata["scale"], metadata["kind"]) == (0.18215, "sample")
    arrays = import_latents(f"{source}/*.tar", tmp_path / "scaled", scale=0.5)[1]  # the autoencoder's own values
    same_bits(arrays["latents"], values * np.float32(0.5))
    source, values = write_tread(tmp_path / "eight", log_moments())
    std = (0.5 * torch.tensor(values[:, 4:])).exp().numpy() * SCALE
    same_bits(import_latents(source, tmp_path / "moments", kind="moments")[1]["latents"],
              np.concatenate([values[:, :4] * SCALE, std], axis=1))


def test_lightningdits_shards_are_normalised_by_channel_and_their_flips_are_mirrored_copies(tmp_path):
    """hustvl/LightningDiT#34."""
    source, (values, flips) = write_lightningdit(tmp_path)
    metadata, arrays = import_latents(source, tmp_path / "out", shard_size=5)
    stats = torch.load(source / STATS, weights_only=True)
    for part, rows in (("latents", values), ("mirrored", flips)):  # (feature - mean) / std * multiplier
        same_bits(arrays[part], ((torch.tensor(rows) - stats["mean"]) / stats["std"] * 1.0).numpy())
    assert arrays["labels"].tolist() == LABELS.tolist() and metadata["mirrored"] and metadata["scale"] == 1
    # What decodes can invert it by metadata.json alone.
    mean, std = (np.float32(metadata[f"latents_{key}"]).reshape(1, -1, 1, 1) for key in ("mean", "std"))
    np.testing.assert_allclose(arrays["latents"] / metadata["scale"] * std + mean, values, atol=1e-2)


def test_lightningdits_sd_vae_latents_are_scaled_and_not_normalised(tmp_path):
    source, (values, _) = write_lightningdit(tmp_path, channels=4, flip=False, stats=False)
    metadata, arrays = import_latents(source, tmp_path / "out", latent_norm=False)
    same_bits(arrays["latents"], values * SCALE)
    assert metadata["autoencoder"] == "sd_vae_ema" and "latents_mean" not in metadata and not metadata["mirrored"]


# ---- sets as people have them ---------------------------------------------------------------------------------------


def made(write, change=None, **how):
    """Writes a set of latents as its own code does, and changes it; returns where it is."""
    def bring(root):
        source, _ = write(root, **how)
        if change:
            change(source)
        return source
    return bring


def each(folder, change):
    """Writes every array of a folder anew."""
    return lambda source: [file.write_bytes(npy(change(np.load(file)))) for file in (source / folder).iterdir()]


def relabel(change):
    """Changes the labels of a dataset.json, which it gets as [name, label]."""
    def spoil(source):
        pairs = json.loads((source / JSON).read_text())["labels"]
        (source / JSON).write_text(json.dumps({"labels": [[name, change(name, label)] for name, label in pairs]}))
    return spoil


def only(number, label):
    return relabel(lambda name, old: label if f"{number:08d}" in name else old)


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)


def stats(mean, std):
    return lambda source: torch.save({"mean": mean, "std": std}, source / STATS)


def without_vae_sd(source):
    for file in (source / "vae-sd").iterdir():
        file.rename(source / file.name)
    (source / "vae-sd").rmdir()


def sdxl_scaled(bring):
    """Brings a set beside the config.json of SDXL's autoencoder, which settings name as sdxl."""
    def both(root):
        (root / "sdxl").mkdir()
        (root / "sdxl/config.json").write_text('{"_class_name": "AutoencoderKL", "scaling_factor": 0.13025}')
        return bring(root)
    return both


def in_place(settings, root):
    return settings | ({"autoencoder": str(root / "sdxl")} if "autoencoder" in settings else {})


MISSING = "(1 of {} are missing): compare the number of latents"
IMPORTED = {  # report: what was brought, settings, values of metadata.json, words of a warning
    "chuanyangjin/fast-DiT#4, in the order of numbers": (made(write_fastdit), {}, {"scale": 0.18215}, None),
    "chuanyangjin/fast-DiT#14, named by rank and step": (made(write_fastdit, file="{rank}-{step}.npy"), {}, {}, None),
    "chuanyangjin/fast-DiT#21, several images a file": (made(write_fastdit, batch=4), {}, {"shape": [4, 8, 8]}, None),
    "OpenChemistry/tomviz#1809, in Fortran's order": (
        made(write_fastdit, each("imagenet256_features", np.asfortranarray)), {}, {}, None),
    "YuchuanTian/U-DiT#13, features of 512 pixels": (
        made(write_fastdit, name="imagenet512", file="{step}_{rank}.npy"), {}, {}, None),
    "MochiDiffusion/MochiDiffusion#315, scaled for SDXL's VAE": (
        sdxl_scaled(made(write_fastdit)), {"autoencoder": "sdxl"}, {"scale": 0.13025}, None),
    "JustVugg/colibri#1317, a shard was not downloaded": (
        made(write_lightningdit, gone("latents_rank00_shard001.safetensors"), sizes=(4, 4, 4)), {}, {"count": 8},
        "latents_rank00_shard001.safetensors " + MISSING.format(3)),
    "JustVugg/colibri#586, the last shards of a rank are missing": (
        made(write_lightningdit, lambda source: (source / "latents_rank00_shard002.safetensors").rename(
            source / "latents_rank01_shard000.safetensors"), sizes=(4, 4, 4)), {}, {},
        "unequal numbers of shards per rank"),
    "chuanyangjin/fast-DiT#19, a number is missing": (
        made(write_fastdit, gone("imagenet256_features/5.npy", "imagenet256_labels/5.npy")), {}, {"count": 11},
        "5.npy " + MISSING.format(12)),
}


@pytest.mark.parametrize("report", IMPORTED)
@pytest.mark.filterwarnings("default")
def test_what_was_stored_comes_in_with_its_labels(report, tmp_path, recwarn):
    bring, settings, recorded, words = IMPORTED[report]
    metadata, arrays = import_latents(bring(tmp_path), tmp_path / "out", **in_place(settings, tmp_path))
    assert {key: metadata[key] for key in recorded} == recorded
    # Files of an earlier test, which Python closes now, are not of this one.
    said = [str(warning.message) for warning in recwarn if warning.category is not ResourceWarning]
    assert any(words in message for message in said) if words else not said
    if words is None:  # each latent with its own label
        values = normal(COUNT, 4, SIDE, SIDE).astype(np.float16)
        label_of = dict(zip(values[:, 0, 0, 0].tolist(), LABELS.tolist(), strict=True))
        assert sorted(arrays["labels"].tolist()) == LABELS.tolist() and not metadata["mirrored"]
        assert [label_of[value] for value in arrays["latents"][:, 0, 0, 0].tolist()] == arrays["labels"].tolist()
        if report.endswith("order of numbers"):
            same_bits(arrays["latents"], values)


def sample_of(name, values):
    return {f"{name}.cls": b"1", f"{name}.latent.npy": npy(values)}


def with_key_twice(root):
    with tarfile.open(put_tar(root / "a.tar", sample_of("000", normal(4, 8, 8))), "a") as tar, tarfile.open(
            put_tar(root / "b", sample_of("000", normal(4, 8, 8, seed=1)))) as other:
        for member in other:
            tar.addfile(member, other.extractfile(member))
    return root / "a.tar"


def with_validation(source):
    put_tar(source / "val-0000.tar", sample_of("a", normal(4, 8, 8)))


def no_arrays(root):
    (root / "vae-sd").mkdir()
    (root / JSON).write_text('{"labels": null}')
    return root


LISTED, LAST, JSON = "vae-sd/00000", "vae-sd/00000/img-mean-std-00000011.npy", "vae-sd/dataset.json"
STATS, SHARD = "latents_stats.pt", "latents_rank00_shard000"
REFUSED = [  # what was brought, settings, words
    # which form
    (made(write_repa, without_vae_sd), {}, "both REPA and EDM2 write"),
    (made(write_edm2), {}, "both REPA and EDM2 write: set format=repa"),
    (lambda root: root, {}, "has none of these formats"),
    (lambda root: root / "absent", {}, "does not exist (looked from"),
    (lambda root: root / "absent", {"format": "fastdit"}, "absent does not exist"),
    (lambda root: root / "{0..1}.tar", {"format": "tread"}, "1}.tar does not exist"),
    (lambda root: (root / "n01").mkdir() or root, {}, "Convert any other as examples/write_latents.py"),  # LTH14/mar#52
    (made(write_fastdit, put("metadata.json", "{}")), {}, "latent folder already"),
    (made(write_fastdit, lambda source: (source / "vae-in").mkdir()), {}, "could be fastdit (imagenet256_features"),
    (made(write_tread, with_validation), {}, "with and without train in their names"),
    # listed arrays; NVlabs/stylegan3#189, NVlabs/stylegan2-ada-pytorch#147
    (no_arrays, {"format": "repa"}, "no .npy files of latents"),
    (made(write_repa, relabel(lambda _, label: [float(label == c) for c in range(3)])), {},
     "labels of type float64 and shape (12, 3), not one integer each"),
    (made(write_repa, relabel(lambda _, label: [int(label == c) for c in range(3)])), {}, "labels of type int64 and"),
    (made(write_repa, put(LAST, npy(moments()[0, :4]))), {}, "shape (4, 8, 8), but 00000/img-mean-std-"),
    (made(write_repa, each(LISTED, lambda z: z[:6])), {},
     "arrays of shape (6, 8, 8), but REPA's vae-sd has (8, R, R)"),
    (made(write_repa, each(LISTED, lambda z: z[:, :4])), {}, "shape (8, 4, 8)"),
    (made(write_repa, put(LAST, npy(np.full((8, 8, 8), 1e6, np.float32)))), {},
     "latent 11 that is not finite or overflows float16"),
    (made(write_repa, each(LISTED, lambda z: -z)), {}, "a standard deviation is never negative"),
    (made(write_repa, each(LISTED, lambda z: z * 50)), {}, "root mean square is"),
    (made(write_repa, only(3, 1_700_000_000)), {}, "label 1700000000 (row 3), outside 0..999999"),
    (made(write_repa, only(3, -9)), {}, "label -9 (row 3)"), (made(write_repa, only(3, "cat")), {}, "integer each"),
    (made(write_repa, gone(LAST)), {}, "labelled but missing"), (made(write_repa, gone(JSON)), {}, "dataset.json"),
    (made(write_repa, put("vae-sd/00000/more.npy", npy(moments()[0]))), {}, "not labelled"),
    (made(write_repa, flip_a_bit, zipped=True), {"format": "repa"}, "Bad CRC-32"),
    (made(write_repa, cut(), zipped=True), {"format": "repa"}, "vae.zip is not a complete zip"),
    # pairs; facebookresearch/DiT#13
    (made(write_fastdit, each("imagenet256_features", lambda z: z * 5.5)), {}, "root mean square is 5"),
    (made(write_fastdit), {"scale": 0.18215}, "root mean square is 0.182"),
    # lmdb; soran-ghaderi/torchebm#304
    (made(write_maskdit, values=moments()), {}, "write 2 * log(std) instead"),
    (made(write_maskdit, labels=[0]), {}, "set mirrored=true or mirrored=false"),
    (made(write_maskdit, length=13), {}, "holds 25 entries"),
    (made(write_maskdit, labels=["cat"]), {}, "invalid literal for int()"),
    (made(write_maskdit, values=[*moments(11), normal(8, 4, 4)]), {}, "cannot reshape array of size 128"),
    (made(write_maskdit, flips=moments(COUNT), labels=range(24), length=COUNT), {}, "holds no mirrored copies"),
    (made(write_maskdit, lambda source: os.truncate(source / "train/data.mdb", 20_000)), {}, "copy it again"),
    # safetensors
    (made(write_lightningdit, channels=4, flip=False, stats=False), {}, "latent_norm=false"),
    (made(write_lightningdit, labels=torch.arange(3)), {}, "has 3 labels"),
    (made(write_lightningdit, latents_flip=torch.zeros(5, 6, 8, 8)), {}, "(5, 6, 8, 8)"),
    (made(write_lightningdit, cut(f"{SHARD}.safetensors")), {}, f"{SHARD}.safetensors is not a complete safetensors"),
    (made(write_lightningdit, cut(STATS)), {}, STATS),
    (made(write_lightningdit, stats(torch.zeros(3), torch.ones(3))), {},
     "3 numbers each, but the latents have 6 channels"),
    (made(write_lightningdit, stats(torch.zeros(6), torch.zeros(6))), {}, "numbers above 0"),
    # tars; CompVis/tread#13, soran-ghaderi/torchebm#304, google-deepmind/representations4d#13,
    # Zhendong-Wang/Patch-Diffusion#2, webdataset/webdataset#157, huggingface/diffusers#7188
    (made(write_tread, values=log_moments()), {}, "set kind=moments"),
    (made(write_tread, values=log_moments()), {"kind": "sample"},
     "look like [mean, log-variance], not samples: set kind=moments"),
    (made(write_tread, values=log_moments()), {"kind": "sample", "scale": 0.18215}, "look like [mean, log-variance]"),
    (made(write_tread, values=moments()), {"kind": "moments"}, "write 2 * log(std) instead"),
    (made(write_tread, values=normal(COUNT, 8, 8, 4)), {}, "R, R), channels first"),
    (made(write_tread, values=normal(COUNT, 4, 8, 16)), {}, "images that are not square"),
    (with_key_twice, {}, "its key occurs twice in this tar"),
    (made(write_tread, values=np.full((COUNT, 4, 8, 8), np.nan, np.float32)), {}, "not finite"),
]  # fmt: skip


@pytest.mark.parametrize(("bring", "settings", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_what_would_be_read_wrongly_is_refused_before_anything_is_written(tmp_path, bring, settings, words):
    (tmp_path / "set").mkdir()
    source = bring(tmp_path / "set")
    refused(lambda: import_latents(source, tmp_path / "out", **settings), words)
    assert not (tmp_path / "out").exists()


TRAINED = [  # people with such a set, what was brought, settings of data, words
    ("CompVis/tread#13", made(write_tread, values=log_moments()), {"kind": "sample"}, "set data.kind=moments for tars"),
    ("CompVis/tread#13, scaled", made(write_tread, values=log_moments()), {"kind": "sample", "scale": 0.18215},
     "set data.kind=moments for tars"),
    ("soran-ghaderi/torchebm#304", made(write_tread, values=moments()), {"kind": "moments"},
     "write 2 * log(std) instead"),
    ("CompVis/tread#5", made(write_tread, with_validation), {"kind": "sample"}, "*train*.tar"),
    ("MochiDiffusion/MochiDiffusion#315", sdxl_scaled(made(write_tread)), {"kind": "sample", "autoencoder": "sdxl"},
     "scaled differently from data.autoencoder="),
    ("hustvl/LightningDiT#93", made(write_lightningdit), {}, "scripts/import_latents.py source="),
    ("sihyun-yu/REPA#19", made(write_repa), {}, "scripts/import_latents.py source="),
    ("NVlabs/edm2#11", made(write_edm2), {}, "set format=repa (VAE input in -1..1) for scripts/import_latents.py"),
]  # fmt: skip


@pytest.mark.parametrize(("report", "bring", "settings", "words"), TRAINED, ids=[row[0] for row in TRAINED])
def test_training_refuses_what_it_would_read_wrongly(report, bring, settings, words, tmp_path):
    data = {"path": str(bring(tmp_path)), "kind": None, "scale": None, "num_classes": None, "autoencoder": None}
    cfg = SimpleNamespace(data=SimpleNamespace(**data | in_place(settings, tmp_path)))
    refused(lambda: open_data(cfg, SimpleNamespace(local_main_process_first=nullcontext)), words)  # as train.py does


def test_latents_are_not_taken_for_images(tmp_path):
    """sihyun-yu/REPA#19 the other way round."""
    refused(lambda: prepare(write_lightningdit(tmp_path)[0], tmp_path / "out", resolution=8),
            "LightningDiT's safetensors: run `python scripts/import_latents.py source=")


def test_the_lines_that_rewrite_pickles_one_trusts_make_tars_that_are_read(tmp_path, monkeypatch):
    import pickle
    import re

    values, page = log_moments(), (ROOT / "docs/interop.md").read_text()
    put_tar(tmp_path / "latent_imagenet_512_train-0000.tar",
            {f"{i:07d}.{key}": content for i in range(COUNT) for key, content in
             (("latent", pickle.dumps(values[i])), ("cls", str(LABELS[i]).encode()))})
    monkeypatch.chdir(tmp_path)
    [code] = [lines for lines in re.findall(r"```python\n(.*?)```", page, flags=re.S) if "pickle" in lines]
    exec(compile(code, "docs/interop.md", "exec"), {})
    arrays = import_latents("rewritten", tmp_path / "out", kind="moments")[1]
    same_bits(arrays["latents"][:, :4], values[:, :4] * SCALE)


def test_a_full_disk_names_no_setting_that_only_images_have(tmp_path, monkeypatch):
    source, _ = write_fastdit(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(ValueError, match=r"has 0.0001 MB free: choose another disk with out=\.$"):
        import_latents(source, tmp_path / "out")


# ---- resuming, the command, training --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "change"), [
    ("latents-00000.npy", lambda content: content[:-8]), ("labels-00000.npy", lambda content: b""),
    ("record-00000.json", lambda content: None)])
def test_a_shard_that_is_not_as_it_was_written_is_written_again(tmp_path, name, change):
    source, _ = write_fastdit(tmp_path)
    out, complete = tmp_path / "out", tmp_path / "complete"
    for place in (out, complete):
        import_latents(source, place, shard_size=5)
    (out / "metadata.json").unlink()  # as a kill leaves it, with a shard to be written
    (out / "latents-00002.npy").unlink()
    for number in range(2):
        (out / f"record-{number:05d}.json").write_text('{"count": 5, "unreadable": []}')
    content = change((out / name).read_bytes())
    (out / name).unlink() if content is None else (out / name).write_bytes(content)
    import_latents(source, out, shard_size=5)
    assert same_folder(out, complete)


def test_a_source_with_damage_beyond_the_probe_resumes_once_it_is_corrected(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "NUM_PROBED", 2)
    source, values = write_repa(tmp_path)
    file = "vae-sd/00000/img-mean-std-00000007.npy"
    put(file, npy(np.full((8, 8, 8), np.inf, np.float32)))(source)
    refused(lambda: import_latents(source, tmp_path / "out", shard_size=2), "latent 7 that is not finite")
    put(file, npy(values[7]))(source)
    same_bits(import_latents(source, tmp_path / "out", shard_size=2)[1]["latents"], values * SCALE)
    assert "resuming: 3 of 6 shards are complete" in capsys.readouterr().out


def test_imported_latents_train(tmp_path, fresh_accelerator):
    import train

    source, _ = write_repa(tmp_path)
    run_command(script.main, "import_latents.py", source=source, out=tmp_path / "out", num_classes=4)
    latents = open_latents(tmp_path / "out")
    assert (latents.shape, latents.num_classes, latents.kind) == ((4, 8, 8), 4, "moments")
    run_command(train.main, "train.py", "experiment=small", "cpu=true", "data.path=" + str(tmp_path / "out"),
                "model.hidden_size=32", "model.num_heads=2",
                "model.depth=6", "samples.every=0", "steps=2", "batch_size=4", run_dir=tmp_path / "run")
    losses = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1]["step"] == 2


def test_an_installed_package_named_scripts_is_not_imported_instead_of_ours(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/__init__.py").write_text("")
    ended = subprocess.run([sys.executable, ROOT / "scripts/import_latents.py", "--cfg=job"],
                           env=os.environ | {"PYTHONPATH": str(tmp_path)},
                           capture_output=True, text=True)
    assert ended.returncode == 0 and "source: null" in ended.stdout, ended.stderr
