"""Others' latents, each written from its documented layout, are imported with their labels and values, or raise a one-
line error.
"""

import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, run_command
from omegaconf import OmegaConf
from safetensors.torch import save_file
from test_prepare_latents import read_folder, same_folder

from latents.folder import open_latents
from runtime.schema import CONFIGS
from scripts import import_latents as script

COUNT, SIDE, SCALE = 12, 8, np.float32(0.18215)
LABELS = np.arange(COUNT) // 5  # 0 0 0 0 0 1 1 1 1 1 2 2


def import_latents(source, out, format="auto", **settings) -> None:
    """Imports with the settings of configs/import_latents.yaml but for those that are given."""
    plain = OmegaConf.to_container(OmegaConf.load(CONFIGS / "import_latents.yaml"))
    plain = {key: plain[key] for key in script.ImportSettings.model_fields}
    script.main.__wrapped__(script.ImportSettings(**plain | {"source": str(source), "out": str(out), "format": format}
                                                  | settings))


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


def write_fastdit(tmp_path, count=COUNT):
    """fast-DiT's extract_features.py: (1, 4, h, w) and (1,) int64, each a file."""
    values = normal(count, 1, 4, SIDE, SIDE)
    for part, arrays in (("imagenet256_features", values), ("imagenet256_labels", np.arange(count)[:, None] // 5)):
        (tmp_path / "fast" / part).mkdir(parents=True)
        for i, array in enumerate(arrays):
            (tmp_path / "fast" / part / f"{i}.npy").write_bytes(npy(array))
    return tmp_path / "fast", values[:, 0]


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


def write_tar(path: Path, members: dict[str, bytes]):
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def write_tread(tmp_path, values=None):
    values = normal(COUNT, 4, SIDE, SIDE) if values is None else values
    (tmp_path / "tars").mkdir()
    for shard in range(2):
        rows = range(shard * 6, shard * 6 + 6)
        write_tar(tmp_path / "tars" / f"train-{shard:04d}.tar",
                  {f"{i:07d}.{key}": value for i in rows
                   for key, value in (("cls", str(LABELS[i]).encode()), ("latent.npy", npy(values[i])))})
    return tmp_path / "tars", values


def write_lightningdit(tmp_path, channels=6, flip=True, stats=True, sizes=(7, 5), **tensors):
    """LightningDiT's extract_features.py: a shard a rank and number; latents_stats.pt of its loader."""
    folder = tmp_path / "vavae"
    folder.mkdir()
    values, flips = normal(COUNT, channels, 4, 4, mean=1.0, std=3.0), normal(COUNT, channels, 4, 4, seed=9, mean=1.0,
                                                                             std=3.0)
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
    assert found.dtype == np.float16 and np.array_equal(found.view(np.int16),
                                                        expected.astype(np.float16).view(np.int16))


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [False, True, "vae-sd/"])
def test_repas_mean_and_std_come_in_times_the_scale(tmp_path, zipped):
    source, values = write_repa(tmp_path, zipped=bool(zipped), **({"prefix": "vae-sd/"} if zipped == "vae-sd/" else {}))
    import_latents(str(source), tmp_path / "out", "repa" if zipped is True else "auto", shard_size=5)
    metadata, arrays = read_folder(tmp_path / "out")
    same_bits(arrays["latents"], values * SCALE)
    assert arrays["labels"].tolist() == LABELS.tolist() and arrays["labels"].dtype == np.int64
    assert [shard["count"] for shard in metadata["shards"]] == [5, 5, 2]
    assert (metadata["kind"], metadata["autoencoder"], metadata["scale"], metadata["shape"]) == ("moments",
            "sd_vae_mse", 0.18215, [4, 8, 8])
    assert metadata["num_classes"] == 3 and metadata["resolution"] == 64 and metadata["imported"]["format"] == "repa"


def test_edm2s_come_in_by_their_own_statistics_and_only_by_name(tmp_path):
    source, values = write_edm2(tmp_path)
    with pytest.raises(ValueError, match="set format=repa .* format=edm2"):
        import_latents(str(source), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    import_latents(str(source), tmp_path / "out", "edm2")
    metadata, arrays = read_folder(tmp_path / "out")
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
    import_latents(str(source), tmp_path / "out", format)
    metadata, arrays = read_folder(tmp_path / "out")
    assert metadata["num_classes"] == 1 and metadata["count"] == COUNT and not arrays["labels"].any()


def test_srdits_samples_come_in_times_their_scale_without_the_batch_axis(tmp_path):
    source, values = write_srdit(tmp_path)
    import_latents(str(source), tmp_path / "out")
    metadata, arrays = read_folder(tmp_path / "out")
    same_bits(arrays["latents"], values * np.float32(0.3099))
    assert (metadata["kind"], metadata["shape"], metadata["scale"]) == ("sample", [32, 4, 4], 0.3099)


def test_fastdits_pairs_come_in_as_they_are_in_the_order_of_their_numbers(tmp_path):
    source, values = write_fastdit(tmp_path)
    import_latents(str(source), tmp_path / "out")
    metadata, arrays = read_folder(tmp_path / "out")
    same_bits(arrays["latents"], values)
    assert arrays["labels"].tolist() == LABELS.tolist() and metadata["scale"] == 0.18215 and not metadata["mirrored"]


@pytest.mark.parametrize("copies", ["none", "counted in length", "beyond length"])
def test_maskdits_log_variance_becomes_a_standard_deviation_and_flips_are_mirrored_copies(tmp_path, copies):
    values, flips = log_moments(), log_moments(seed=7)
    values[0, 4:], values[1, 4:] = -100, 1.5  # beyond the clamp, and within
    source, _ = write_maskdit(tmp_path, values, None if copies == "none" else flips,
                              length=COUNT if copies == "beyond length" else None)
    import_latents(str(source), tmp_path / "out")
    metadata, arrays = read_folder(tmp_path / "out")
    for part, rows in (("latents", values), ("mirrored", flips)) if copies != "none" else (("latents", values),):
        std = (0.5 * torch.tensor(rows[:, 4:]).clamp(-30, 20)).exp().numpy() * SCALE
        same_bits(arrays[part], np.concatenate([rows[:, :4] * SCALE, std], axis=1))
    assert metadata["count"] == COUNT and metadata["mirrored"] == (copies != "none")
    assert arrays["labels"].tolist() == LABELS.tolist()


def test_labels_that_only_repeat_are_no_sign_of_mirrored_copies(tmp_path):
    source, _ = write_maskdit(tmp_path, labels=[0, 2, 1])
    import_latents(str(source), tmp_path / "out")
    assert read_folder(tmp_path / "out")[0]["count"] == COUNT
    import_latents(str(source), tmp_path / "asked", mirrored=True)
    assert read_folder(tmp_path / "asked")[0]["count"] == COUNT // 2
    source, _ = write_maskdit(tmp_path / "one", labels=[0])
    with pytest.raises(ValueError, match="set mirrored=true or mirrored=false"):
        import_latents(str(source), tmp_path / "other")


def test_treads_tars_come_in_as_they_are_or_as_moments_when_asked(tmp_path):
    source, values = write_tread(tmp_path)
    import_latents(str(source), tmp_path / "out")
    metadata, arrays = read_folder(tmp_path / "out")
    same_bits(arrays["latents"], values)
    assert arrays["labels"].tolist() == LABELS.tolist() and (metadata["scale"], metadata["kind"]) == (0.18215, "sample")
    import_latents(f"{source}/*.tar", tmp_path / "scaled", scale=0.5)  # the autoencoder's own values
    same_bits(read_folder(tmp_path / "scaled")[1]["latents"], values * np.float32(0.5))

    source, values = write_tread(tmp_path / "eight", log_moments()) if (tmp_path / "eight").mkdir() is None else None
    with pytest.raises(ValueError, match="set kind=moments"):
        import_latents(str(source), tmp_path / "unknown")
    import_latents(str(source), tmp_path / "moments", kind="moments")
    std = (0.5 * torch.tensor(values[:, 4:])).exp().numpy() * SCALE
    same_bits(read_folder(tmp_path / "moments")[1]["latents"], np.concatenate([values[:, :4] * SCALE, std], axis=1))


def test_lightningdits_shards_are_normalised_by_channel_and_their_flips_are_mirrored_copies(tmp_path):
    source, (values, flips) = write_lightningdit(tmp_path)
    import_latents(str(source), tmp_path / "out", shard_size=5)
    metadata, arrays = read_folder(tmp_path / "out")
    stats = torch.load(source / "latents_stats.pt", weights_only=True)
    for part, rows in (("latents", values), ("mirrored", flips)):  # (feature - mean) / std * multiplier
        same_bits(arrays[part], ((torch.tensor(rows) - stats["mean"]) / stats["std"] * 1.0).numpy())
    assert arrays["labels"].tolist() == LABELS.tolist() and metadata["mirrored"] and metadata["scale"] == 1
    # What decodes can invert it by metadata.json alone.
    mean, std = (np.float32(metadata[f"latents_{key}"]).reshape(1, -1, 1, 1) for key in ("mean", "std"))
    np.testing.assert_allclose(arrays["latents"] / metadata["scale"] * std + mean, values, atol=1e-2)


def test_lightningdits_sd_vae_latents_are_scaled_and_not_normalised(tmp_path):
    source, (values, _) = write_lightningdit(tmp_path, channels=4, flip=False, stats=False)
    with pytest.raises(ValueError, match="latent_norm=false"):
        import_latents(str(source), tmp_path / "out")
    import_latents(str(source), tmp_path / "out", latent_norm=False)
    metadata, arrays = read_folder(tmp_path / "out")
    same_bits(arrays["latents"], values * SCALE)
    assert metadata["autoencoder"] == "sd_vae_ema" and "latents_mean" not in metadata and not metadata["mirrored"]


# ---- sources that are not sets of latents, but for what tests/test_mistakes.py has -----------------------------------


def put(name, content):
    return lambda source: (source / name).write_bytes(content if isinstance(content, bytes) else npy(content))


def each(folder, change):
    """Writes every array of a folder anew."""
    return lambda source: [file.write_bytes(npy(change(np.load(file)))) for file in (source / folder).iterdir()]


def relabel(label, name="00000/img-mean-std-00000003.npy"):
    def spoil(source):
        pairs = json.loads((source / JSON).read_text())["labels"]
        (source / JSON).write_text(json.dumps({"labels": [[file, label if file == name else old]
                                                          for file, old in pairs]}))
    return spoil


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)


def nothing(source):
    pass


def saved(file, value):
    return lambda source: torch.save(value, source / file)


LISTED, LAST, JSON = "vae-sd/00000", "vae-sd/00000/img-mean-std-00000011.npy", "vae-sd/dataset.json"
STATS, NORMS = "latents_stats.pt", {"mean": torch.zeros(6), "std": torch.ones(6)}
BAD = [
    (write_repa, put(LAST, moments()[0, :4]), "shape (4, 8, 8), but 00000/img-mean-std-"),
    (write_repa, each(LISTED, lambda z: z[:6]), "arrays of shape (6, 8, 8), where REPA's vae-sd has (8, R, R)"),
    (write_repa, each(LISTED, lambda z: z[:, :4]), "shape (8, 4, 8)"),
    (write_repa, put(LAST, np.full((8, 8, 8), 1e6, np.float32)), "latent 11 is not finite, or beyond float16"),
    (write_repa, each(LISTED, lambda z: -z), "a standard deviation is never negative"),
    (write_repa, each(LISTED, lambda z: z * 50), "root mean square is"),
    (write_repa, relabel(1_700_000_000), "label 1700000000 (row 3), outside 0..999999"),
    (write_repa, relabel("cat"), "integers"),
    (write_repa, lambda s: (s / LAST).unlink(), "labelled but missing"),
    (write_repa, put("vae-sd/00000/more.npy", moments()[0]), "not labelled"),
    (partial(write_repa, zipped=True), flip_a_bit, "Bad CRC-32"),
    (write_fastdit, each("imagenet256_features", lambda z: z * 5.5), "root mean square is 5"),
    (partial(write_maskdit, length=13), nothing, "holds 25 entries"),
    (partial(write_maskdit, labels=["cat"]), nothing, "invalid literal for int()"),
    (partial(write_maskdit, values=[*moments(11), normal(8, 4, 4)]), nothing, "cannot reshape array of size 128"),
    (partial(write_maskdit, flips=moments(COUNT), labels=range(24), length=COUNT), nothing, "holds no mirrored copies"),
    (write_maskdit, lambda s: os.truncate(s / "train/data.mdb", 20_000), "copy it again"),
    (partial(write_lightningdit, labels=torch.arange(3)), nothing, "has 3 labels"),
    (partial(write_lightningdit, latents_flip=torch.zeros(5, 6, 8, 8)), nothing, "(5, 6, 8, 8)"),
    (write_lightningdit, saved(STATS, {"mean": torch.zeros(3), "std": torch.ones(3)}),
     "3 numbers each, but the latents have 6 channels"),
    (write_lightningdit, saved(STATS, NORMS | {"std": torch.zeros(6)}), "numbers above 0"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "spoil", "sentence"), BAD, ids=[sentence for *_, sentence in BAD])
def test_a_bad_source_raises_a_one_line_error_before_anything_is_written(tmp_path, form, spoil, sentence):
    source, _ = form(tmp_path)
    spoil(source)
    with pytest.raises(ValueError) as error:
        import_latents(str(source), tmp_path / "out", "repa" if source.suffix == ".zip" else "auto", shard_size=4)
    assert sentence in str(error.value) and not (tmp_path / "out").exists()


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
    put("vae-sd/00000/img-mean-std-00000007.npy", np.full((8, 8, 8), np.inf, np.float32))(source)
    with pytest.raises(ValueError, match="latent 7 is not finite"):
        import_latents(str(source), tmp_path / "out", shard_size=2)
    put("vae-sd/00000/img-mean-std-00000007.npy", values[7])(source)
    import_latents(str(source), tmp_path / "out", shard_size=2)
    assert "resuming: 3 of 6 shards are complete" in capsys.readouterr().out
    same_bits(read_folder(tmp_path / "out")[1]["latents"], values * SCALE)


def test_the_lines_that_rewrite_pickles_one_trusts_give_tars_that_are_read(tmp_path, monkeypatch):
    import pickle
    import re

    values, page = log_moments(), (ROOT / "docs/interop.md").read_text()
    write_tar(tmp_path / "latent_imagenet_512_train-0000.tar",
              {f"{i:07d}.{key}": content for i in range(COUNT) for key, content in
               (("latent", pickle.dumps(values[i])), ("cls", str(LABELS[i]).encode()))})
    monkeypatch.chdir(tmp_path)
    [code] = [lines for lines in re.findall(r"```python\n(.*?)```", page, flags=re.S) if "pickle" in lines]
    exec(compile(code, "docs/interop.md", "exec"), {})
    import_latents("rewritten", tmp_path / "out", kind="moments")
    same_bits(read_folder(tmp_path / "out")[1]["latents"][:, :4], values[:, :4] * SCALE)


# ---- which form -----------------------------------------------------------------------------------------------------


def test_auto_does_not_guess(tmp_path):
    source, values = write_repa(tmp_path)
    bare = tmp_path / "bare"
    os.rename(source / "vae-sd", bare)
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "metadata.json").write_text("{}")
    both, _ = write_fastdit(tmp_path / "both")
    (both / "vae-in").mkdir()
    mixed, _ = write_tread(tmp_path)
    write_tar(mixed / "val-0000.tar", {"a.latent.npy": npy(normal(4, 8, 8)), "a.cls": b"0"})
    for place, sentence in ((bare, "both REPA and EDM2 write"), (tmp_path / "empty", "none of these forms"),
                            (tmp_path / "folder", "latent folder already"),
                            (both, "could be fastdit .* and srdit"), (tmp_path / "absent", "does not exist"),
                            (mixed, "with and without train in their names")):
        with pytest.raises(ValueError, match=sentence):
            import_latents(str(place), tmp_path / "out")
    import_latents(str(bare), tmp_path / "out", "repa")
    same_bits(read_folder(tmp_path / "out")[1]["latents"], values * SCALE)


# ---- kills, the command, training -----------------------------------------------------------------------------------


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
