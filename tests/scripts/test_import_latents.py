"""Others' latents, each written from its documented layout, are imported with their labels and values, or refused.

Remarks such as CompVis/tread#13 name public reports of what is tested.
"""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from safetensors.torch import save_file
from spoils import cut, gone, put, refused
from test_labels import put as put_files
from test_labels import put_tar, put_zip
from test_prepare_latents import read_folder

from scripts import import_latents as script

COUNT, SIDE, SCALE = 12, 8, np.float32(0.18215)
LABELS = np.arange(COUNT) // 5  # 0 0 0 0 0 1 1 1 1 1 2 2
LAST, JSON = "00000/img-mean-std-00000011.npy", "dataset.json"
SHARD = "latents_rank00_shard000"


def import_latents(source, out, format=None, **settings) -> tuple[dict, dict[str, np.ndarray]]:
    script.main(source=str(source), out=str(out), format=format, **settings)
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


def write_repa(tmp_path, zipped=False, values=None, prefix=""):
    """NVIDIA's dataset_tool.py encode: 00000/<name>.npy and dataset.json, in a folder or a stored zip."""
    values = moments() if values is None else values
    files = {f"00000/img-mean-std-{i:08d}.npy": npy(array) for i, array in enumerate(values)}
    pairs = [[file, int(label)] for file, label in zip(files, LABELS, strict=True)]
    files["dataset.json"] = json.dumps({"labels": pairs}).encode()
    files = {prefix + file: content for file, content in files.items()}
    return put_zip(tmp_path / "vae.zip", files) if zipped else put_files(tmp_path / "vae-sd", files), values


def write_fastdit(tmp_path, batch=1):
    """fast-DiT's extract_features.py: (1, 4, h, w) and (1,) int64, each a file, or a batch of them."""
    values = normal(COUNT, 4, SIDE, SIDE)
    for part, rows in (("features", values), ("labels", LABELS)):
        (folder := tmp_path / "fast" / f"imagenet256_{part}").mkdir(parents=True)
        for i in range(COUNT // batch):
            np.save(folder / f"{i}.npy", rows[i * batch : (i + 1) * batch])
    return tmp_path / "fast", values


def write_tread(tmp_path, values=None):
    values = normal(COUNT, 4, SIDE, SIDE) if values is None else values
    (tmp_path / "tars").mkdir(parents=True)
    for shard in range(2):
        rows = range(shard * 6, shard * 6 + 6)
        put_tar(tmp_path / "tars" / f"train-{shard:04d}.tar",
                {f"{i % 6:07d}.{key}": value for i in rows  # as many do, the keys begin again in each tar
                 for key, value in (("cls", str(LABELS[i]).encode()), ("latent.npy", npy(values[i])))})
    return tmp_path / "tars", values


def write_lightningdit(tmp_path, channels=6, flip=True, stats=True):
    """LightningDiT's extract_features.py: a shard a rank and number; latents_stats.pt of its loader."""
    folder = tmp_path / "vavae"
    folder.mkdir()
    values = normal(COUNT, channels, 4, 4, mean=1.0, std=3.0)
    flips = normal(COUNT, channels, 4, 4, seed=9, mean=1.0, std=3.0)
    for number, rows in enumerate((slice(7), slice(7, COUNT))):
        content = {"latents": torch.tensor(values[rows]), "labels": torch.tensor(LABELS[rows])}
        content |= {"latents_flip": torch.tensor(flips[rows])} if flip else {}
        save_file(content, folder / f"latents_rank00_shard{number:03d}.safetensors")
    if stats:
        z = torch.tensor(values)
        torch.save({"mean": z.mean((0, 2, 3), keepdim=True), "std": z.std((0, 2, 3), keepdim=True)},
                   folder / "latents_stats.pt")
    return folder, (values, flips)


# ---- sets as people have them ---------------------------------------------------------------------------------------


def made(write, change=None, place="", **how):
    """Writes a set of latents as its own code does, and changes it; returns where it is, and the stored values."""
    def bring(root):
        source, values = write(root, **how)
        if change:
            change(source)
        return source / place if place else source, values
    return bring


def relabel(change):
    """Changes the labels of a dataset.json, which it gets as [name, label]."""
    def spoil(source):
        pairs = json.loads((source / JSON).read_text())["labels"]
        (source / JSON).write_text(json.dumps({"labels": [[name, change(name, label)] for name, label in pairs]}))
    return spoil


# ---- what comes in --------------------------------------------------------------------------------------------------


def of_repa(values):
    return values * SCALE


def of_edm2(values):
    """EDM2's encoders.py: x * scale + bias, scale = final_std / raw_std, bias = final_mean - raw_mean * scale."""
    scale = np.float32(0.5) / np.float32([4.17, 4.62, 3.71, 3.28])
    bias = np.float32(0) - np.float32([5.81, 3.25, 0.12, -2.15]) * scale
    scale, bias = scale.reshape(1, 4, 1, 1), bias.reshape(1, 4, 1, 1)
    return np.concatenate([values[:, :4] * scale + bias, values[:, 4:] * scale], axis=1)


def of_log_variance(values, scale=0.18215):
    std = (0.5 * torch.tensor(values[:, 4:]).clamp(-30, 20)).exp().numpy() * np.float32(scale)
    return np.concatenate([values[:, :4] * np.float32(scale), std], axis=1)


def of_lightningdit(values):
    """(feature - mean) / std * multiplier, by the statistics of all."""
    z = torch.tensor(normal(COUNT, 6, 4, 4, mean=1.0, std=3.0))
    mean, std = (each((0, 2, 3), keepdim=True) for each in (z.mean, z.std))
    return ((torch.tensor(values) - mean) / std * 1.0).numpy()


REPA, EDM2, FAST = ({"format": format} for format in ("repa", "edm2", "fastdit"))
TREAD, LIGHT = {"format": "tread", "kind": "sample"}, {"format": "lightningdit"}
OF_REPA = {"kind": "moments", "autoencoder": "sd_vae_mse", "scale": 0.18215, "shape": [4, 8, 8]}
BEYOND = log_moments()  # values beyond the clamp, and within
BEYOND[0, 4:], BEYOND[1, 4:] = -100, 1.5
OF_INVAE = made(write_tread, values=normal(COUNT, 16, SIDE, SIDE))
IMPORTED = {  # what was brought, settings, what the stored values become, values of the record
    "REPA": (write_repa, REPA, of_repa, OF_REPA),  # sihyun-yu/REPA#28: encoded by -mse
    "REPA's zip of vae-sd": (made(write_repa, place="vae-sd", zipped=True, prefix="vae-sd/"), REPA, of_repa, OF_REPA),
    "NVlabs/edm2#9, pixels in 0..1": (made(write_repa, zipped=True, values=moments(mean=2.0)), EDM2, of_edm2, {
        "kind": "moments", "autoencoder": "sd_vae_mse", "scale": 0.5, "pixels": [0, 1],
        "latents_mean": [5.81, 3.25, 0.12, -2.15], "latents_std": [4.17, 4.62, 3.71, 3.28]}),
    "TREAD's tars": (write_tread, TREAD | {"num_classes": 4}, np.copy,
                     {"kind": "sample", "scale": 0.18215, "autoencoder": "sd_vae_ema", "num_classes": 4}),
    "scaled tars of an unknown autoencoder": (
        OF_INVAE, TREAD | {"autoencoder": "none", "scale": 1}, np.copy, {"scale": 1.0, "shape": [16, 8, 8]}),
    "unscaled tars of an SD-VAE": (made(write_tread, values=normal(COUNT, 4, SIDE, SIDE, std=5.49)), TREAD | {
        "scale": 0.18215}, of_repa, {"kind": "sample", "scale": 0.18215, "autoencoder": "sd_vae_ema"}),
    "raw moments of SDXL's": (
        made(write_tread, values=log_moments()), TREAD | {"kind": "moments", "autoencoder": "sdxl"},
        lambda z: of_log_variance(z, 0.13025), {"scale": 0.13025}),
    "tars of moments": (made(write_tread, values=BEYOND, place="train-000[01].tar"), TREAD | {"kind": "moments"},
                        of_log_variance, {"kind": "moments", "scale": 0.18215, "shape": [4, 8, 8]}),
    "hustvl/LightningDiT#34": (write_lightningdit, LIGHT, of_lightningdit,
                               {"kind": "sample", "mirrored": True, "scale": 1.0, "autoencoder": "none"}),
    "LightningDiT's SD-VAE": (made(write_lightningdit, channels=4, flip=False, stats=False),
                              LIGHT | {"latent_norm": False}, of_repa,
                              {"mirrored": False, "scale": 0.18215, "autoencoder": "sd_vae_ema"}),
    "chuanyangjin/fast-DiT#4, in the order of numbers": (
        write_fastdit, FAST, np.copy, {"kind": "sample", "scale": 0.18215, "mirrored": False}),
}


@pytest.mark.parametrize("form", IMPORTED)
def test_stored_values_become_what_the_codes_own_loader_makes_of_them_with_their_labels(form, tmp_path, monkeypatch):
    bring, settings, expected, recorded = IMPORTED[form]
    source, values = bring(tmp_path)
    put_files(tmp_path / "sdxl", {"config.json": '{"_class_name": "AutoencoderKL", "scaling_factor": 0.13025}'})
    monkeypatch.chdir(tmp_path)
    sides = [expected(rows).astype(np.float16) for rows in (values if isinstance(values, tuple) else (values,))]
    metadata, arrays = import_latents(source, tmp_path / "out", shard_size=5, **settings)
    place = {row.tobytes(): i for i, row in enumerate(sides[0])}
    order = [place[row.tobytes()] for row in arrays["latents"]]  # bit for bit
    assert order == [*range(COUNT)]
    assert arrays["labels"].tolist() == LABELS.tolist() and arrays["labels"].dtype == np.int64
    if metadata["mirrored"]:
        assert arrays["mirrored"].tobytes() == sides[1].tobytes()
    assert {key: metadata[key] for key in recorded} == recorded and metadata["imported"]["format"] == settings["format"]
    if form.startswith("hustvl"):  # what decodes inverts it by the record alone
        mean, std = (np.float32(metadata[f"latents_{key}"]).reshape(1, -1, 1, 1) for key in ("mean", "std"))
        np.testing.assert_allclose(arrays["latents"] / metadata["scale"] * std + mean, values[0], atol=1e-2)


def test_a_set_without_labels_is_one_class(tmp_path):
    source, _ = write_repa(tmp_path)
    put(JSON, '{"labels": null}')(source)
    metadata, arrays = import_latents(source, tmp_path / "out", **REPA)
    assert metadata["num_classes"] == 1 and metadata["count"] == COUNT and not arrays["labels"].any()


# ---- what is refused ------------------------------------------------------------------------------------------------


def tar_of(files):
    return lambda root: (put_tar(root / "a.tar", files), None)


def empty(root):
    return root, None


SAMPLE = npy(normal(4, 8, 8))
REFUSED = [  # what was brought, settings, words
    # which form
    (empty, {"format": None}, "does not record its format: set format=tread kind=sample (scaled latents; unscaled ones "
     "need scale=0.18215, too) or kind=moments ([mean, log-variance]); format=lightningdit (latent_norm=false "),
    # a scale that is typed, and the autoencoder's own
    *((made(write), settings | {"scale": 1}, f"scale=1 is typed, but autoencoder={name} decodes latents of scale 0.18")
      for write, settings, name in ((write_tread, TREAD, "sd_vae_ema"), (write_repa, REPA, "sd_vae_mse"))),
    (made(write_repa), REPA | {"autoencoder": "none"}, "are scaled: leave it out if by an SD-VAE's 0.18215, name a"),
    (made(write_fastdit), FAST | {"latent_norm": False}, "latent_norm=false would change nothing: only fo"),
    # listed arrays; NVlabs/stylegan3#189, NVlabs/stylegan2-ada-pytorch#147
    (made(empty, put(JSON, '{"labels": null}')), REPA, "no .npy files of latents. Pickles, such as MaskDiT's .latent"),
    (made(write_repa, relabel(lambda _, label: [float(label == c) for c in range(3)])), REPA, "not one integer each"),
    (made(write_repa, put(LAST, npy(moments()[0, :4]))), REPA, "shape (4, 8, 8), but 00000/img-mean-std-"),
    (made(write_repa, gone(LAST)), REPA, "11 latents and 12 labels: '00000/img-mean-std-00000011' has no latent"),
    (made(write_repa, gone(JSON)), REPA, "holds no dataset.json: name the folder that does, such as source="),
    (made(write_repa, relabel(lambda _, label: label / 1)), REPA, "of type float64"),
    (made(write_repa, put(JSON, '{"labels": []}')), REPA, "dataset.json is not a file of labels (it is not EDM's"),
    # pairs; facebookresearch/DiT#13, chuanyangjin/fast-DiT#21
    (made(write_fastdit, batch=4), FAST, "arrays of shape (4, 4, 8, 8), but latents have (C, R, R)"),
    # safetensors
    (made(write_lightningdit, channels=4, flip=False, stats=False), LIGHT, "latent_norm=false"),
    (made(write_lightningdit, lambda source: save_file(
        {"latents": torch.ones(5, 6, 4, 4), "labels": torch.arange(3)}, source / f"{SHARD}.safetensors")), LIGHT,
     "has 3 labels"),
    (made(write_lightningdit, cut(f"{SHARD}.safetensors")), LIGHT, f"{SHARD}.safetensors is not a complete"),
    # tars; CompVis/tread#13, soran-ghaderi/torchebm#304, google-deepmind/representations4d#13,
    # Zhendong-Wang/Patch-Diffusion#2, webdataset/webdataset#157, huggingface/diffusers#7188
    (made(write_tread), {"format": "tread"}, "tars do not record what they hold: set kind=sample"),
    (made(write_tread, values=moments()), TREAD | {"kind": "moments"}, "write 2 * log(std) instead"),
    (made(write_tread), TREAD | {"kind": "moments"}, "latents of 2 channels, read with kind=moments, but sd_vae_ema's"),
    (made(write_tread, values=normal(COUNT, 4, 8, 8, std=5.5)), TREAD, "values as stored: a standard deviation of 5"),
    (made(write_tread, values=normal(COUNT, 4, 8, 16)), TREAD, "images that are not square"),
    (made(write_tread, values=np.full((COUNT, 4, 8, 8), 1e6, np.float32)), TREAD, "not finite or overflow float16"),
    (tar_of({"a.cls": b"1", "a.latent.npy": SAMPLE, "./a.latent.npy": SAMPLE}), TREAD, "two files called ./a.latent"),
    (made(write_tread, values=normal(COUNT, 4, 8, 8).astype(np.complex64)), TREAD, "complex numbers (torch.complex64)"),
    (tar_of({"a.cls": b"cat", "a.latent.npy": SAMPLE}), TREAD, "a.cls is not a class number (invalid literal"),
]  # fmt: skip


@pytest.mark.parametrize(("bring", "settings", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_what_would_be_read_wrongly_is_refused_before_anything_is_written(tmp_path, bring, settings, words):
    (tmp_path / "set").mkdir()
    source, _ = bring(tmp_path / "set")
    refused(lambda: import_latents(source, tmp_path / "out", **settings), words)
    assert not (tmp_path / "out").exists()


def test_the_lines_that_rewrite_mars_cache_make_tars_that_are_read(tmp_path, monkeypatch):
    """LTH14/mar#52: main_cache.py's moments and moments_flip, [mean, log-variance] of 16 channels, scaled by 0.2325."""
    sides = {key: np.concatenate([normal(COUNT, 16, 8, 8, seed=i, std=4.3), np.full((COUNT, 16, 8, 8), -9, np.float32)],
                                 axis=1) for i, key in enumerate(("moments", "moments_flip"))}
    for i, label in enumerate(LABELS):
        (tmp_path / f"cached/n{label}").mkdir(parents=True, exist_ok=True)
        np.savez(tmp_path / f"cached/n{label}/{i:02d}.JPEG.npz", **{key: values[i] for key, values in sides.items()})
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/interop.md").read_text(), flags=re.S)
    [code] = [lines for lines in blocks if "mar.tar" in lines]
    exec(compile(code, "docs/interop.md", "exec"), {})
    settings = {"kind": "moments", "scale": 0.2325, "autoencoder": "none"}
    metadata, arrays = import_latents("mar.tar", tmp_path / "out", "tread", **settings)
    assert metadata["scale"] == 0.2325 and arrays["labels"].tolist() == np.repeat(LABELS, 2).tolist()
    for side, values in enumerate(sides.values()):
        assert np.array_equal(arrays["latents"][side::2, :16], (values[:, :16] * np.float32(0.2325)).astype(np.float16))


# ---- resuming -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("write", "settings", "file"), [
    (write_repa, REPA, "00000/img-mean-std-00000007.npy"), (write_fastdit, FAST, "imagenet256_features/7.npy"),
    (write_tread, TREAD, "train-0001.tar"), (write_lightningdit, LIGHT, f"{SHARD}.safetensors")])
def test_a_source_whose_files_have_changed_is_not_the_one_that_was_begun(tmp_path, monkeypatch, write, settings, file):
    monkeypatch.setattr("latents.forms.NUM_PROBED", 2)
    source, _ = write(tmp_path)
    import_latents(source, tmp_path / "out", **settings)
    import_latents(source, tmp_path / "out", **settings)  # already complete
    (source / file).write_bytes((source / file).read_bytes())  # at another time
    refused(lambda: import_latents(source, tmp_path / "out", **settings), "sizes or times of the source's files differ")
