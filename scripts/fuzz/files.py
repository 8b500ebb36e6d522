"""Files of data that are damaged, lie, or mean harm, for every reader of them; what `scripts/fuzz.py` draws from.

Each reader's cases begin with files that are whole, made once, and change some of them (scripts/fuzz/damage.py).
"""

import contextlib
import io
import json
import tempfile
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save

from latents import loader, tars
from latents.folder import NUM_PROBED, Latents, open_latents
from latents.images import UnreadableImage, open_source
from scoring import image_sets
from scripts import import_latents, prepare_latents
from scripts.fuzz import Accepted, Reader
from scripts.fuzz.damage import (
    OF_BYTES,
    OF_FILES,
    OF_IMAGES,
    OF_JSON,
    OF_NPY,
    OF_PAGES,
    TARS,
    ZIPS,
    Files,
    changed,
    changes,
    lay,
    npy,
    tarred,
    zipped,
)

COUNT, SIDE = 6, 4      # of latents in a set that is whole
OUTSIDE = {"outside/secret": b"a secret that no reader may take\n", "outside/0.npy": npy(np.zeros(3))}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def moments(count: int = COUNT) -> np.ndarray:
    """Means and deviations of a VAE, as they are before they are scaled."""
    deviations = np.abs(normal(count, 4, SIDE, SIDE, seed=1)) * 0.2
    return np.concatenate([normal(count, 4, SIDE, SIDE) * 5, deviations], axis=1)


LABELS = np.arange(COUNT) // 2

# ---- sets that are whole --------------------------------------------------------------------------------------------


@cache
def latent_folder(variant: str) -> Files:
    """A latent folder of two shards: samples, mirrored moments, or samples with masks."""
    channels = 8 if variant == "moments" else 4
    files: Files = {}
    shards = []
    for number in range(2):
        rows = normal(COUNT, channels, SIDE, SIDE, seed=number)
        rows[:, 4:] = np.abs(rows[:, 4:])
        files[f"latents-{number:05d}.npy"] = npy(rows.astype("<f2"))
        files[f"labels-{number:05d}.npy"] = npy(LABELS.astype("<i8"))
        shards.append({"latents": f"latents-{number:05d}.npy", "labels": f"labels-{number:05d}.npy", "count": COUNT})
        if variant == "moments":
            shards[-1]["mirrored"] = f"mirrored-{number:05d}.npy"
            files[f"mirrored-{number:05d}.npy"] = npy(rows.astype("<f2"))
        if variant == "masks":
            files[f"masks-{number:05d}.npy"] = npy(np.ones((COUNT, SIDE, SIDE), np.uint8))
    files["metadata.json"] = json.dumps({
        "format": 1, "count": 2 * COUNT, "shape": [4, SIDE, SIDE], "dtype": "float16",
        "kind": "moments" if variant == "moments" else "sample", "mirrored": variant == "moments", "num_classes": 3,
        "class_names": ["a", "b", "c"], "display_names": ["A", "B", "C"], "autoencoder": "sd_vae_ema", "scale": 0.18215,
        "shift": 0.0, "latents_mean": None, "latents_std": None, "pixels": [-1, 1], "shards": shards,
    }).encode()
    return files


@cache
def tread(variant: str) -> Files:
    rows = normal(COUNT, 8 if variant == "moments" else 4, SIDE, SIDE)
    return {name: content for i in range(COUNT) for name, content in (
        (f"{i:07d}.cls", str(LABELS[i]).encode()), (f"{i:07d}.latent.npy", npy(rows[i])))}


@cache
def listed(variant: str) -> Files:
    """REPA's and EDM2's moments, SR-DiT's samples, and dataset.json, in their folder or at the top."""
    if variant == "srdit":
        rows, name, prefix = normal(COUNT, 1, 32, 2, 2) * 3, "00000/img-latents-{:08d}.npy", "vae-in/"
    else:
        rows, name, prefix = moments(), "00000/img-mean-std-{:08d}.npy", "vae-sd/" if variant == "repa" else ""
    files = {name.format(i): npy(row) for i, row in enumerate(rows)}
    pairs = [[file, int(label)] for file, label in zip(files, LABELS, strict=True)]
    files["dataset.json"] = json.dumps({"labels": pairs}).encode()
    return {prefix + name: content for name, content in files.items()}


@cache
def pairs() -> Files:
    rows = normal(COUNT, 1, 4, SIDE, SIDE)
    return {f"{part}/{i}.npy": npy(array) for i in range(COUNT) for part, array in (
        (forms.FEATURES, rows[i]), (forms.LABELS, LABELS[i : i + 1].astype("<i8")))}


@cache
def lmdb_of(count: int) -> Files:
    """MaskDiT's lmdb; of many latents its tree has branches, too."""
    import lmdb

    rows = moments(count)
    with tempfile.TemporaryDirectory() as folder:
        with lmdb.open(folder, map_size=2**26) as environment, environment.begin(write=True) as transaction:
            for i, row in enumerate(rows):
                transaction.put(f"z-{i}".encode(), row.tobytes())
                transaction.put(f"y-{i}".encode(), str(i * 3 // count).encode())
            transaction.put(b"length", str(count).encode())
        return {"data.mdb": (Path(folder) / "data.mdb").read_bytes()}


@cache
def safetensors() -> Files:
    files = {}
    for number in range(2):
        rows = torch.from_numpy(normal(COUNT, 6, SIDE, SIDE, seed=number) * 3 + 1)
        files[f"latents_rank00_shard{number:03d}.safetensors"] = save(
            {"latents": rows, "latents_flip": rows.flip(3).contiguous(), "labels": torch.from_numpy(LABELS)})
    stream = io.BytesIO()
    torch.save({"mean": torch.ones(1, 6, 1, 1), "std": torch.full((1, 6, 1, 1), 3.0)}, stream)
    return files | {"latents_stats.pt": stream.getvalue()}


def picture(kind: str, mode: str, side: int = 16, **how: Any) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    image = Image.fromarray(pixels).convert("L" if mode in ("I", "I;16", "F") else mode)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
    elif mode in ("I", "F"):
        image = image.convert(mode)
    stream = io.BytesIO()
    image.save(stream, kind, **how)
    return stream.getvalue()


@cache
def pictures() -> Files:
    """Two classes of images in each format and mode, one of several frames."""
    modes = {"png": ["RGB", "RGBA", "P", "LA", "I;16", "1"], "jpeg": ["RGB", "CMYK", "L"], "gif": ["P"], "bmp": ["RGB"],
             "tiff": ["RGB", "F", "I", "CMYK", "LAB"], "webp": ["RGBA"], "ppm": ["RGB"], "avif": ["RGB"]}
    files: Files = {f"{'ab'[len(mode) % 2]}/{kind}-{mode.replace(';', '')}.{kind}": picture(kind, mode)
                    for kind, some in modes.items() for mode in some}
    frames = [Image.fromarray(np.full((16, 16), value, np.uint8)) for value in (0, 128, 255)]
    stream = io.BytesIO()
    frames[0].save(stream, "gif", save_all=True, append_images=frames[1:])
    return files | {"b/moving.gif": stream.getvalue(), "a/notes.txt": b"no image"}


@cache
def few_pictures() -> Files:
    kinds = ("png", "jpeg", "png", "gif")
    return {f"{'ab'[i % 2]}/{i}.{kind}": picture(kind, "RGB", 12 + i) for i, kind in enumerate(kinds)}


@cache
def samples() -> Files:
    """Webdataset's samples of images, with a class in a .cls, a .json or a .txt."""
    labels = {"cls": "{}", "json": '{{"label": {}, "caption": "a cat"}}', "txt": "{}\n"}
    return {f"{i}.{part}": content for i, (image, (ending, text)) in enumerate(
                zip(few_pictures().values(), [*labels.items(), ("cls", "{}")], strict=True))
            for part, content in (("png", image), (ending, text.format(i % 2).encode()))}


# ---- building and running -------------------------------------------------------------------------------------------


def in_folder(whole: Callable[..., Files]) -> Callable[[Any, Path], None]:
    def build(case: dict, folder: Path) -> None:
        files = changed(whole(*([case["variant"]] if "variant" in case else [])), case["changes"])
        lay(OUTSIDE | {f"source/{name}": content for name, content in files.items()}, folder)
        (folder / "source").mkdir(exist_ok=True)
    return build


def in_archive(whole: Callable[..., Files], pack: Callable[..., bytes], name: str) -> Callable[[Any, Path], None]:
    """Changes the members, packs them, and changes the archive."""
    def build(case: dict, folder: Path) -> None:
        files = changed(whole(*([case["variant"]] if "variant" in case else [])), case["changes"])
        archive = changed({name: pack(files, **case["pack"])}, case["after"])
        lay(OUTSIDE | {f"source/{name}": content for name, content in archive.items()}, folder)
        (folder / "source").mkdir(exist_ok=True)
    return build


def all_of(latents: Latents) -> None:
    """Reads all of a data set; raises Accepted where it is not what its record says."""
    for start in range(0, latents.count, 256):
        indices = np.arange(start, min(start + 256, latents.count))
        rows, labels, weights = latents.read_weighted(indices, np.full(len(indices), latents.mirrored))
        if not (0 <= labels.min() and labels.max() < latents.num_classes):
            raise Accepted(f"labels from {labels.min()} to {labels.max()} of {latents.num_classes} classes")
        if rows.shape[2:] != latents.shape[1:] or weights.shape[0] != len(rows):
            raise Accepted(f"rows of {rows.shape} and weights of {weights.shape}")
        if latents.count <= NUM_PROBED and not latents.mirrored and not np.isfinite(rows).all():
            raise Accepted("latents that are not finite")
    next(batches := loader.batches(latents, 1, seed=0))
    batches.close()


def open_folder(case: dict, folder: Path) -> None:
    all_of(open_latents(folder / "source"))


def open_tars(case: dict, folder: Path) -> None:
    named = folder / "source" / ("train.tar" if case["named"] else "")
    all_of(open_latents(named, kind=case["variant"], scale=1.0, num_classes=case["num_classes"]))


def importer(format: str | None, name: str = "", **how: Any) -> Callable[[Any, Path], None]:
    """Imports as the command does; a set that came in must be one that opens, and a bad one leaves nothing."""
    def run(case: dict, folder: Path) -> None:
        out = folder / "out"
        form = case.get("variant") if format is None else format
        try:
            import_latents.import_latents(f"{folder}/source/{name}".rstrip("/"), out, shard_size=4,
                                          format="auto" if case["auto"] else form, **how)
        except ValueError:
            if out.exists():
                raise Accepted(f"{sorted(path.name for path in out.iterdir())} were left behind") from None
            raise
        opened(out)
    return run


def opened(out: Path) -> None:
    """Opens a latent folder that we have written; raises Accepted where it is none."""
    try:
        all_of(open_latents(out))
    except ValueError as error:
        raise Accepted(f"what was written does not open: {error}") from None


def preparer(name: str = "") -> Callable[[Any, Path], None]:
    def run(case: dict, folder: Path) -> None:
        source, out = f"{folder}/source/{name}".rstrip("/"), folder / "out"
        prepare_latents.prepare(source, out, 16, "identity", mirror=case["mirror"], batch_size=4, num_workers=1)
        opened(out)
    return run


def read_pictures(case: dict, folder: Path) -> None:
    """Decodes every image of a folder, as it is and as a square."""
    source = open_source(f"{folder}/source")
    for index in range(len(source)):
        for resolution in (None, 16):
            try:
                pixels = source.pixels(index, resolution)
            except UnreadableImage as error:
                if not str(error) or len(str(error)) > 1000:
                    raise Accepted("an image that is unreadable for no reason") from None
                continue
            if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
                raise Accepted(f"pixels {pixels.dtype} {pixels.shape}")


def score(name: str = "") -> Callable[[Any, Path], None]:
    """Reads images as fid.py images= does."""
    def run(case: dict, folder: Path) -> None:
        images = image_sets.open_images("images", f"{folder}/source/{name}".rstrip("/"), case.get("resolution"))
        for start in range(0, images.count, 4):
            pixels = images.read(np.arange(start, min(start + 4, images.count)))
            if pixels.dtype != torch.uint8 or list(pixels.shape[1:]) != [*images.record["size"], 3]:
                raise Accepted(f"pixels {pixels.dtype} {tuple(pixels.shape)} of size {images.record['size']}")
    return run


def build_options(case: dict, folder: Path) -> None:
    options = {"words": b"a Anton, a name\nb\tBerta\n", "map": b'{"a": 1, "b": 0}'}
    lay(OUTSIDE | {f"source/{name}": content for name, content in few_pictures().items()}
        | {f"options/{name}": content for name, content in changed(options, case["changes"]).items()}, folder)


def prepare_with_options(case: dict, folder: Path) -> None:
    """Prepares with the files that label_map= and words= name."""
    prepare_latents.prepare(f"{folder}/source", folder / "out", 8, "identity", label_map=folder / "options/map",
                            words=folder / "options/words", num_workers=1)
    opened(folder / "out")


@cache
def unfinished() -> Files:
    """A folder that an import of pairs() was killed in, with its last shard to be written."""
    with tempfile.TemporaryDirectory() as place:
        lay({f"source/{name}": content for name, content in pairs().items()}, Path(place))
        out = Path(place) / "out"
        import_latents.import_latents(f"{place}/source", out, "fastdit", shard_size=2)
        files = {file.name: file.read_bytes() for file in out.iterdir() if file.suffix in (".npy", ".json")}
    del files["metadata.json"], files["latents-00002.npy"]
    return files | {f"record-{number:05d}.json": b'{"count": 2, "unreadable": []}' for number in range(2)}


def build_unfinished(case: dict, folder: Path) -> None:
    lay(OUTSIDE | {f"source/{name}": content for name, content in pairs().items()}
        | {f"out/{name}": content for name, content in changed(unfinished(), case["changes"]).items()}, folder)


def was_changed(out: Path) -> bool:
    """Tells whether somebody put masks into an unfinished folder, or changed values in shards that were whole.

    Going on does not look at either again; opening the folder does, and says so.
    """
    rows = [np.load(out / f"latents-{shard:05d}.npy") for shard in range(COUNT // 2)]
    return any(out.glob("masks-*")) or not all(np.abs(part.astype(np.float32)).max() < 10 for part in rows)


def go_on(case: dict, folder: Path) -> None:
    import_latents.import_latents(f"{folder}/source", folder / "out", "fastdit", shard_size=2)
    with contextlib.suppress(Accepted) if was_changed(folder / "out") else contextlib.nullcontext():
        opened(folder / "out")


def images_npz() -> Files:
    pixels = np.random.default_rng(0).integers(0, 256, (COUNT, 8, 8, 3), np.uint8)
    return {"arr_0.npy": npy(pixels), "mu.npy": npy(np.zeros(4))}


def build_index(case: dict, folder: Path) -> None:
    """Lays whole tars and an index of them whose key is right and whose arrays are not."""
    source = folder / "source"
    lay(OUTSIDE | {"source/train.tar": tarred(tread("sample"), [], [])}, folder)
    tars.tar_index([source / "train.tar"])
    with zipfile.ZipFile(source / tars.TAR_INDEX) as archive:
        members = {name: archive.read(name) for name in archive.namelist() if name != "key.npy"}
        key = {"key.npy": archive.read("key.npy")}
    index = changed({tars.TAR_INDEX: zipped(changed(members, case["changes"]) | key, **case["pack"])}, case["after"])
    (source / tars.TAR_INDEX).unlink()
    lay({f"source/{name}": content for name, content in index.items()}, folder)


# ---- the table ------------------------------------------------------------------------------------------------------


def cases(*kinds: list, most: int = 3, **parts: st.SearchStrategy) -> st.SearchStrategy:
    return st.fixed_dictionaries({"changes": changes(*kinds, most=most)} | parts)


def archives(pack: st.SearchStrategy, *kinds: list, **parts: st.SearchStrategy) -> st.SearchStrategy:
    """Half of the cases change the archive alone, where the members are whole."""
    members = st.one_of(st.just([]), changes(*kinds))
    after = st.one_of(st.just([]), st.just([]), changes(OF_BYTES, most=1))
    return st.fixed_dictionaries({"changes": members, "pack": pack, "after": after} | parts)


AUTO = st.sampled_from([False, False, True])
# Stored but for a few cases: most would else be refused for their compression alone.
STORED = ZIPS.map(lambda pack: pack | {"method": pack["method"] * (len(pack["fields"]) > 1)})
INDEX = ("out", tars.TAR_INDEX, f".{tars.TAR_INDEX}.lock")
LISTED = st.sampled_from(["repa", "edm2", "srdit"])
KINDS = st.sampled_from(["sample", "moments"])


def same_pictures() -> Files:
    return {f"{i}.png": picture("png", "RGB") for i in range(COUNT)}


READERS = [
    Reader("latent_folder",
           cases(OF_BYTES, OF_FILES, OF_JSON, OF_JSON, OF_NPY, variant=st.sampled_from(["sample", "moments", "masks"])),
           in_folder(latent_folder), open_folder),
    Reader("latent_tars",
           archives(TARS, OF_BYTES, OF_FILES, OF_NPY, variant=KINDS, named=st.booleans(),
                    num_classes=st.sampled_from([None, 3, 1, 10**6, 2**40])),
           in_archive(tread, tarred, "train.tar"), open_tars, may_write=INDEX),
    Reader("tar_index",
           archives(STORED, OF_BYTES, OF_NPY, OF_NPY, variant=st.just("sample"), named=st.just(False),
                    num_classes=st.just(None)),
           build_index, open_tars, may_write=INDEX),
    Reader("import_listed",
           cases(OF_BYTES, OF_FILES, OF_JSON, OF_NPY, auto=AUTO, variant=LISTED),
           in_folder(listed), importer(None), "import_latents"),
    Reader("import_zip",
           archives(STORED, OF_BYTES, OF_FILES, OF_JSON, OF_NPY, auto=AUTO, variant=LISTED),
           in_archive(listed, zipped, "set.zip"), importer(None, "set.zip"), "import_latents"),
    Reader("import_pairs",
           cases(OF_BYTES, OF_FILES, OF_NPY, auto=AUTO),
           in_folder(pairs), importer("fastdit"), "import_latents"),
    Reader("import_tars",
           archives(TARS, OF_BYTES, OF_FILES, OF_NPY, auto=AUTO, variant=st.just("sample")),
           in_archive(tread, tarred, "train.tar"), importer("tread"), "import_latents", INDEX),
    Reader("import_lmdb",
           cases(OF_BYTES, OF_PAGES, OF_PAGES, OF_FILES, auto=AUTO, variant=st.sampled_from([COUNT, 60])),
           in_folder(lmdb_of), importer("maskdit"), "import_latents"),
    Reader("import_safetensors",
           cases(OF_BYTES, OF_BYTES, OF_FILES, auto=AUTO),
           in_folder(safetensors), importer("lightningdit"), "import_latents"),
    Reader("import_going_on",
           cases(OF_BYTES, OF_FILES, OF_JSON, OF_NPY),
           build_unfinished, go_on, "import_latents"),
    Reader("image_files",
           cases(OF_BYTES, OF_BYTES, OF_IMAGES, most=4),
           in_folder(pictures), read_pictures, "prepare_latents"),
    Reader("image_folder",
           cases(OF_BYTES, OF_FILES, OF_IMAGES, mirror=st.booleans()),
           in_folder(few_pictures), preparer(), "prepare_latents"),
    Reader("image_zip",
           archives(ZIPS, OF_BYTES, OF_FILES, OF_IMAGES, mirror=st.booleans()),
           in_archive(few_pictures, zipped, "set.zip"), preparer("set.zip"), "prepare_latents"),
    Reader("image_tars",
           archives(TARS, OF_BYTES, OF_FILES, OF_IMAGES, OF_JSON, mirror=st.booleans()),
           in_archive(samples, tarred, "set.tar"), preparer(), "prepare_latents"),
    Reader("prepare_options",
           cases(OF_BYTES, OF_FILES, OF_JSON),
           build_options, prepare_with_options, "prepare_latents"),
    Reader("scored_folder",
           cases(OF_BYTES, OF_FILES, OF_IMAGES, resolution=st.sampled_from([None, 8])),
           in_folder(same_pictures), score(), "fid"),
    Reader("scored_zip",
           archives(ZIPS, OF_BYTES, OF_FILES, OF_IMAGES, resolution=st.sampled_from([None, 8])),
           in_archive(same_pictures, zipped, "set.zip"), score("set.zip"), "fid"),
    Reader("scored_npz",
           archives(ZIPS, OF_BYTES, OF_FILES, OF_NPY),
           in_archive(images_npz, zipped, "set.npz"), score("set.npz"), "fid"),
]
