"""Situations from public reports, latents of others: the source, the situation, what comes out."""

import json
import tarfile
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from test_import_latents import (
    COUNT,
    LABELS,
    import_latents,
    log_moments,
    moments,
    normal,
    npy,
    write_edm2,
    write_fastdit,
    write_lightningdit,
    write_maskdit,
    write_repa,
    write_tar,
    write_tread,
)
from test_prepare_latents import prepare, read_folder

from latents.folder import open_latents
from training.run import open_data


def write_pairs(root, name="imagenet256", batch=1, file="{}.npy"):
    """fast-DiT's folders of normal values and LABELS, `batch` images a file."""
    values = normal(COUNT, 4, 8, 8)
    for part, rows in (("features", values), ("labels", LABELS)):
        (root / f"{name}_{part}").mkdir(parents=True)
        for i in range(COUNT // batch):
            np.save(root / f"{name}_{part}" / file.format(i, rank=i % 2, step=i // 2),
                    rows[i * batch : i * batch + batch])
    return root


def in_fortran_order(root):
    """Arrays whose last axis varies slowest on disk, as of a transposed one."""
    for file in (source := write_pairs(root)).glob("imagenet256_features/*.npy"):
        np.save(file, np.asfortranarray(np.load(file)))
    return source


def without(write, *names):
    """Writes a set of latents and removes files of it."""
    def bring(root):
        source, _ = write(root)
        for name in names:
            (source / name).unlink()
        return source
    return bring


def listed_in_any_order(root):
    """Labels that were created in another order than the latents."""
    source = write_pairs(root)
    for i in reversed(range(COUNT)):
        label = np.load(source / f"imagenet256_labels/{i}.npy")
        (source / f"imagenet256_labels/{i}.npy").unlink()
        np.save(source / f"imagenet256_labels/{i}.npy", label)
    return source


def left_over(root):
    source, _ = write_lightningdit(root, sizes=(4, 4, 4))
    (source / "latents_rank00_shard002.safetensors").rename(source / "latents_rank01_shard000.safetensors")
    return source


def no_arrays(root):
    (root / "vae-sd").mkdir()
    (root / "vae-sd/dataset.json").write_text('{"labels": null}')
    return root


def one_hot(root):
    source, _ = write_repa(root)
    file = source / "vae-sd/dataset.json"
    rows = [[name, [float(label == c) for c in range(3)]] for name, label in json.loads(file.read_text())["labels"]]
    file.write_text(json.dumps({"labels": rows}))
    return source


def sample_of(name, values):
    return {f"{name}.cls": b"1", f"{name}.latent.npy": npy(values)}


def same_key_twice(root):
    (root / "tars").mkdir()
    write_tar(root / "tars/a.tar", sample_of("000", normal(4, 8, 8)))
    with tarfile.open(root / "tars/a.tar",
                      "a") as tar, tarfile.open(write_tar(root / "b",
                                                          sample_of("000", normal(4, 8, 8, seed=1)))) as other:
        for member in other:
            tar.addfile(member, other.extractfile(member))
    return root / "tars"


def with_validation(root):
    source, _ = write_tread(root)
    write_tar(source / "val-0000.tar", sample_of("a", normal(4, 8, 8)))
    return source


def sdxl_scaled(root):
    (root / "sdxl").mkdir()
    (root / "sdxl/config.json").write_text('{"_class_name": "AutoencoderKL", "scaling_factor": 0.13025}')
    return write_pairs(root / "set")


def open_for_training(path, **settings):
    """Opens latents as train.py does with these settings of data."""
    data = {"path": str(path), "kind": None, "scale": None, "num_classes": None, "autoencoder": None} | settings
    return open_data(SimpleNamespace(data=SimpleNamespace(**data)),
                     SimpleNamespace(local_main_process_first=nullcontext))


def tread(values):
    return lambda root: write_tread(root, values)[0]


def first(write):
    return lambda root: write(root)[0]


MISSING = "(1 of {} are missing): compare the number of latents"
IMPORTED = [  # source, situation, what was brought, settings, values of metadata.json, words of a warning
    ("chuanyangjin/fast-DiT#4", "files in another order on disk than their numbers", listed_in_any_order, {},
     {"scale": 0.18215}, None),
    ("chuanyangjin/fast-DiT#14", "named by rank and step", partial(write_pairs, file="{rank}-{step}.npy"), {}, {},
     None),
    ("chuanyangjin/fast-DiT#21", "several images a file", partial(write_pairs, batch=4), {}, {"shape": [4, 8, 8]},
     None),
    ("OpenChemistry/tomviz#1809", "arrays in Fortran's order", in_fortran_order, {}, {}, None),
    ("YuchuanTian/U-DiT#13", "features of 512 pixels",
     partial(write_pairs, name="imagenet512", file="{step}_{rank}.npy"), {}, {}, None),
    ("sihyun-yu/REPA#28", "encoded by -mse, decoded by -ema", first(write_repa), {},
     {"autoencoder": "sd_vae_mse", "kind": "moments"}, None),
    ("NVlabs/edm2#9", "pixels in 0..1", first(write_edm2), {"format": "edm2"}, {"pixels": [0, 1], "scale": 0.5}, None),
    ("hustvl/LightningDiT#34", "VA-VAE's are normalised by channel", first(write_lightningdit), {},
     {"latents_std": pytest.approx([3] * 6, rel=0.2)}, None),
    ("MochiDiffusion/MochiDiffusion#315", "scaled for SDXL's VAE", sdxl_scaled, {"autoencoder": "sdxl"},
     {"scale": 0.13025}, None),
    ("JustVugg/colibri#1317", "a shard was not downloaded",
     without(partial(write_lightningdit, sizes=(4, 4, 4)), "latents_rank00_shard001.safetensors"),
     {}, {"count": 8}, "latents_rank00_shard001.safetensors " + MISSING.format(3)),
    ("JustVugg/colibri#586", "the last shards of a rank are missing", left_over, {}, {},
     "unequal numbers of shards per rank"),
    ("chuanyangjin/fast-DiT#19", "a number is missing",
     without(write_fastdit, "imagenet256_features/5.npy", "imagenet256_labels/5.npy"), {},
     {"count": 11}, "5.npy " + MISSING.format(12)),
]  # fmt: skip


@pytest.mark.parametrize(("report", "situation", "bring", "settings", "recorded", "words"), IMPORTED,
                         ids=[row[0] for row in IMPORTED])
@pytest.mark.filterwarnings("default")
def test_what_was_stored_comes_in_with_its_labels(report, situation, bring, settings, recorded, words, tmp_path,
                                                  recwarn):
    source = bring(tmp_path)
    settings = settings | ({"autoencoder": str(tmp_path / "sdxl")} if "autoencoder" in settings else {})
    import_latents(source, tmp_path / "out", **settings)
    metadata, arrays = read_folder(tmp_path / "out")
    assert {key: metadata[key] for key in recorded} == recorded
    # Files of an earlier test, which Python closes now, are not of this one.
    said = [str(warning.message) for warning in recwarn if warning.category is not ResourceWarning]
    assert any(words in message for message in said) if words else not said
    if words is None:
        assert sorted(arrays["labels"].tolist()) == LABELS.tolist()
    if (source / "imagenet256_features").is_dir() and words is None:  # each latent with its own label
        label_of = dict(zip(normal(COUNT, 4, 8, 8).astype(np.float16)[:, 0, 0, 0].tolist(), LABELS.tolist(),
                            strict=True))
        assert [label_of[value] for value in arrays["latents"][:, 0, 0, 0].tolist()] == arrays["labels"].tolist()


REFUSED = [  # source, situation, what was brought, settings, words
    ("CompVis/tread#13", "[mean, log-variance] as samples", tread(log_moments()), {"kind": "sample"},
     "look like [mean, log-variance], not samples: set kind=moments"),
    ("CompVis/tread#13", "the same, scaled", tread(log_moments()), {"kind": "sample", "scale": 0.18215},
     "look like [mean, log-variance]"),
    ("soran-ghaderi/torchebm#304", "[mean, std] as [mean, log-variance]", tread(moments()), {"kind": "moments"},
     "write 2 * log(std) instead"),
    ("soran-ghaderi/torchebm#304", "the same in an lmdb", lambda root: write_maskdit(root, moments())[0], {},
     "write 2 * log(std) instead"),
    ("facebookresearch/DiT#13", "scaled twice", first(write_fastdit), {"scale": 0.18215}, "root mean square is 0.182"),
    ("google-deepmind/representations4d#13", "channels last", tread(normal(COUNT, 8, 8, 4)), {}, "channels come first"),
    ("Zhendong-Wang/Patch-Diffusion#2", "images that are not square", tread(normal(COUNT, 4, 8, 16)), {},
     "images that are not square"),
    ("NVlabs/stylegan3#189", "labels: null, and no arrays", no_arrays, {"format": "repa"}, "no .npy files of latents"),
    ("NVlabs/stylegan2-ada-pytorch#147", "several classes an image", one_hot, {}, "labels of type float64"),
    ("webdataset/webdataset#157", "two samples of one key", same_key_twice, {}, "a second sample of that key"),
    ("huggingface/diffusers#7188", "NaN of an encoder in half precision",
     tread(np.full((COUNT, 4, 8, 8), np.nan, np.float32)), {}, "not finite"),
    ("LTH14/mar#52", "MAR's npz files", lambda root: (root / "n01").mkdir() or root, {},
     "Write any other as examples/write_latents.py does"),
]  # fmt: skip


@pytest.mark.parametrize(("report", "situation", "bring", "settings", "words"), REFUSED,
                         ids=[f"{row[0]}: {row[1]}" for row in REFUSED])
def test_what_would_be_read_wrongly_is_refused_before_anything_is_written(report, situation, bring, settings, words,
                                                                          tmp_path):
    (tmp_path / "set").mkdir()
    with pytest.raises(ValueError) as error:
        import_latents(bring(tmp_path / "set"), tmp_path / "out", **settings)
    assert words in str(error.value) and not (tmp_path / "out").exists()


TRAINED = [  # source: people with such a set; situation, what was brought, settings of data, words
    ("CompVis/tread#13", "[mean, log-variance] as samples", tread(log_moments()), {"kind": "sample"},
     "set data.kind=moments for tars"),
    ("CompVis/tread#13", "the same, scaled", tread(log_moments()), {"kind": "sample", "scale": 0.18215},
     "set data.kind=moments for tars"),
    ("soran-ghaderi/torchebm#304", "[mean, std] as [mean, "
                                   "log-variance]", tread(moments()), {"kind": "moments"}, "write 2 * log(std) "
                                                                                           "instead"),
    ("CompVis/tread#5", "training and validation tars in a folder", with_validation, {"kind": "sample"}, "*train*.tar"),
    ("hustvl/LightningDiT#93", "shards of another code as data.path", first(write_lightningdit), {},
     "scripts/import_latents.py source="),
    ("sihyun-yu/REPA#19", "a folder of another code as data.path", first(write_repa), {},
     "scripts/import_latents.py source="),
    ("NVlabs/edm2#11", "a zip of another code as data.path", first(write_edm2), {},
     "set format=repa (VAE input in -1..1) of scripts/import_latents.py"),
]  # fmt: skip


@pytest.mark.parametrize(("report", "situation", "bring", "settings", "words"), TRAINED,
                         ids=[f"{row[0]}: {row[1]}" for row in TRAINED])
def test_training_refuses_what_it_would_read_wrongly(report, situation, bring, settings, words, tmp_path):
    with pytest.raises(ValueError) as error:
        open_for_training(bring(tmp_path), **settings)
    assert words in str(error.value)


def test_latents_that_are_not_square_are_named_as_such(tmp_path):
    """google-deepmind/representations4d#13 and Zhendong-Wang/Patch-Diffusion#2: data.path=<tars> data.kind=sample."""
    with pytest.raises(ValueError, match="move the channels to the front, or crop the images to squares"):
        open_latents(tread(normal(COUNT, 8, 8, 4))(tmp_path), kind="sample").require(shape=(8, 8, 8), num_classes=10)


def test_tars_scaled_for_another_autoencoder_are_not_decoded_by_their_usual_scale(tmp_path):
    """MochiDiffusion/MochiDiffusion#315: train.py data.path=<tars> data.kind=sample data.autoencoder=<SDXL's>."""
    sdxl_scaled(tmp_path)
    with pytest.raises(ValueError,
                       match="scaled otherwise than data.autoencoder=.*import_latents.py with autoencoder="):
        open_for_training(write_tread(tmp_path)[0], kind="sample", autoencoder=str(tmp_path / "sdxl"))


def test_latents_are_not_taken_for_images(tmp_path):
    """sihyun-yu/REPA#19 the other way round: prepare_latents.py source=<latents>."""
    with pytest.raises(ValueError, match="LightningDiT's safetensors: run `python scripts/import_latents.py source="):
        prepare(write_lightningdit(tmp_path)[0], tmp_path / "out", resolution=8)
