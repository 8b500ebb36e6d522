"""Seeds -> images, over ranks: a labelled grid, a folder of PNGs, or one npz.

    python sample.py checkpoint=runs/quickstart-tread                     # a grid, one row a class
    python sample.py checkpoint=runs/x seeds=0-63 classes=[207,360] num_steps=40 out=dogs.png
    accelerate launch sample.py checkpoint=runs/x seeds=100000-149999 out=samples.npz guidance=cfg scale=1.5

`checkpoint` is a run, a checkpoint folder, or a weights file (ours, facebookresearch/DiT's or CompVis/tread's). Each
image is a function of its own seed: the same picture on any number of ranks and at any batch size. See
configs/sample.yaml for every option.
"""

import argparse
import contextlib
import inspect
import io
import math
import os
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import hydra
import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather
from omegaconf import DictConfig, OmegaConf
from PIL import Image, ImageDraw, ImageFont
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

import autoencoder as autoencoders
import checkpoint as checkpoints
from dit import DiT, infer_architecture, multiply_adds
from edm import DDPM, EDM
from guidance import Guidance
from rf import RF
from routing_module import Route

DIFFUSIONS = {"edm": EDM, "ddpm": DDPM, "rf": RF}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Batch = tuple[Tensor, Tensor, Tensor]     # seeds (B,) int64, labels (B,) int64, images (B, H, W, 3) uint8


@dataclass
class Trained:
    """What is needed to draw with a network: the network itself and what its checkpoint says about it."""

    net: DiT
    diffusion: EDM | RF
    autoencoder: str
    class_names: list[str] | None
    step: int | None
    folder: Path | None      # the checkpoint folder, None for a bare weights file
    file: Path               # of the weights
    recorded: dict           # `network` and `diffusion` as plain keywords


def build_network(network: dict) -> DiT:
    """Builds a DiT from plain keywords, `routes` a list of dicts, as a checkpoint's meta.json records them."""
    try:
        return DiT(**{**network, "routes": [Route(**route) for route in network.get("routes", [])]})
    except TypeError as error:
        raise ValueError(f"A network cannot be built from {network}: {error}. A route has the keys start_layer_idx, "
                         f"end_layer_idx and selection_ratio.") from error


def build_diffusion(diffusion: dict) -> EDM | RF:
    """Builds a diffusion from its name and keywords, as a checkpoint's meta.json records them."""
    keywords = dict(diffusion)
    name = keywords.pop("name")
    if name not in DIFFUSIONS:
        raise ValueError(f"There is no diffusion {name!r}; choose one of {', '.join(DIFFUSIONS)}.")
    try:
        return DIFFUSIONS[name](**keywords)
    except TypeError as error:
        raise ValueError(f"The diffusion {name!r} does not take these settings: {error}.") from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """Reads a state dict from .safetensors, or from a .pt as published, of which only tensors are ever unpickled.

    A training checkpoint that holds several state dicts gives its `ema` one. Wrapper prefixes are taken off the keys.
    """
    if path.suffix == ".safetensors":
        try:
            state = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is no whole safetensors file: {error}.") from error
    else:
        try:
            # DiT's train.py stores its argparse.Namespace beside the weights: a bag of plain values, safe to build.
            with torch.serialization.safe_globals([argparse.Namespace]):
                state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except Exception as error:
            raise ValueError(
                f"{path} cannot be read as weights alone ({str(error).splitlines()[0]}). Only tensors are loaded, "
                f"since unpickling anything else could run code; save its state dict as .safetensors."
            ) from error
        for key in ("ema", "ema_state_dict", "model", "model_state_dict", "state_dict"):
            if isinstance(state, dict) and isinstance(state.get(key), dict):
                state = state[key]
                break
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path} holds no state dict, that is, no dictionary of tensors by name.")
    # DDP, torch.compile and EDM's preconditioner each put their own word before every key.
    for prefix in ("module.", "_orig_mod.", "model."):
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def load_trained(
    path: str | Path, weights: str = "ema", diffusion: str | None = None, autoencoder: str | None = None,
    device: torch.device | str = "cpu",
) -> Trained:
    """Loads a run, a checkpoint folder or a weights file; `diffusion` and `autoencoder` overrule what is recorded.

    A weights file beside its meta.json is built as that says. Without one, the architecture is read off the shapes:
    with 2C output channels it is taken for one of facebookresearch/DiT's (diffusion `ddpm`), else for an `edm` one.
    Raises ValueError where there is no such path, no whole checkpoint, or weights that are not a DiT's.
    """
    path = Path(path)
    if weights not in ("ema", "model"):
        raise ValueError(f"weights={weights} is neither ema nor model.")
    if path.is_file():
        file, folder = path, path.parent if (path.parent / "meta.json").is_file() else None
    elif (path / "meta.json").is_file() or (path / "checkpoints").is_dir():
        folder = path
        if (path / "meta.json").is_file():
            if why := checkpoints.problem(path, (weights,)):
                raise ValueError(f"The checkpoint {path} is damaged: {why}. Choose another of its run.")
        else:
            folder = checkpoints.latest(path, (weights,))
        if folder is None:
            raise ValueError(f"The run {path} holds no whole checkpoint yet; let it train until its first save.")
        file = folder / f"{weights}.safetensors"
    else:
        raise ValueError(f"There is no run, checkpoint folder or weights file at {path}. "
                         f"Set checkpoint=runs/<name>, runs/<name>/checkpoints/step-…, or a .safetensors or .pt file.")
    state = read_weights(file)
    if folder is not None:
        meta = checkpoints.read_meta(folder)
        if not {"network", "diffusion", "data"} <= meta.keys():
            raise ValueError(f"{folder / 'meta.json'} describes no checkpoint of ours; move the weights elsewhere.")
        network, recorded, data = meta["network"], meta["diffusion"], meta["data"]
    else:
        network, meta = infer_architecture(state), {}
        recorded = {"name": "ddpm" if network["learn_sigma"] else "edm"}
        data = {"autoencoder": "identity" if network["in_channels"] == 3 else "sd_vae_ema", "class_names": None}
    with torch.device("meta"):
        net = build_network(network)
    expected = net.state_dict()
    missing = [key for key, value in expected.items() if key not in state or state[key].shape != value.shape]
    unexpected = [key for key in state if key not in expected]
    if missing or unexpected:
        raise ValueError(
            f"The weights at {path} do not fit the network they should: {len(missing)} are missing or of another shape "
            f"({', '.join(missing[:3])} …), {len(unexpected)} are unknown ({', '.join(unexpected[:3])} …)."
        )
    net.load_state_dict(state, assign=True)
    if diffusion and diffusion != recorded["name"]:
        recorded = {"name": diffusion}
    return Trained(
        net=net.to(device).float().eval(),      # not frozen: autocast keeps its casts of trainable weights only
        diffusion=build_diffusion(recorded),
        autoencoder=autoencoder or data["autoencoder"],
        class_names=data["class_names"], step=meta.get("step"), folder=folder, file=file,
        recorded={"network": network, "diffusion": recorded},
    )


def parse_range(what: str, given: str | int | Iterable[int]) -> list[int]:
    """Reads `5`, `0-63`, `"0-9,20"` or a list of them as a list of ints. Raises ValueError for anything else."""
    parts = str(given).split(",") if isinstance(given, str | int) else [str(part) for part in given]
    numbers: list[int] = []
    for part in parts:
        first, _, last = part.strip().partition("-")
        if not (first.isdigit() and (last.isdigit() or not last)) or (last and int(last) < int(first)):
            raise ValueError(f"{what}={given} is not understood at {part!r}: "
                             f"write {what}=7, {what}=0-63 or {what}=[1,5,9].")
        numbers.extend(range(int(first), int(last or first) + 1))
    if not numbers or max(numbers) >= 2**63:
        raise ValueError(f"{what}={given} names {'no number' if not numbers else 'a number past 2^63'}: "
                         f"write {what}=7, {what}=0-63 or {what}=[1,5,9].")
    return numbers


def parse_classes(
    what: str, given: str | int | Iterable | None, num_classes: int, class_names: list[str] | None,
) -> list[int]:
    """Reads class names, indices and ranges of indices; None is all. Raises ValueError for a class there is not."""
    if given is None:
        return list(range(num_classes))
    index = {name: i for i, name in enumerate(class_names or [])}
    parts = [str(given)] if str(given) in index or isinstance(given, int) else given
    parts = parts.split(",") if isinstance(parts, str) else [str(part) for part in parts]
    labels = []
    for part in (part.strip() for part in parts):
        if part not in index and not part[:1].isdigit():
            names = f"; the names are {', '.join(list(index)[:10])}{' …' if len(index) > 10 else ''}" if index else ""
            raise ValueError(f"{what}={given} asks for {part!r}, which is no class. Write indices, as in {what}=[0,5] "
                             f"or {what}=0-9, or names{names}.")
        labels += [index[part]] if part in index else parse_range(what, part)
    if not labels or max(labels) >= num_classes:
        wrong = f"class {max(labels)}" if labels else "none"
        raise ValueError(f"{what}={given} asks for {wrong}; there are {num_classes}, numbered from 0.")
    return labels


def labels_of(seeds: Iterable[int], classes: list[int]) -> list[int]:
    """Gives each seed its class, balanced and by the seed alone, so that an image never depends on its neighbours."""
    return [classes[seed % len(classes)] for seed in seeds]


def sampler_settings(diffusion: EDM | RF, given: Mapping[str, float | str | None]) -> dict[str, float | str]:
    """Completes the settings of a diffusion's sampler, of which None is the sampler's own value.

    Raises ValueError for a setting that the sampler lacks, or a value of another kind than its own.
    """
    own = {name: parameter.default for name, parameter in inspect.signature(diffusion.sample).parameters.items()
           if name != "num_steps" and isinstance(parameter.default, int | float | str)}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name not in own:
            raise ValueError(f"sampler.{name}={value}: the sampler of {type(diffusion).__name__} has no such setting; "
                             f"it has {', '.join(own)}.")
        if isinstance(value, str) != isinstance(own[name], str) or isinstance(value, bool):
            raise ValueError(f"sampler.{name}={value} is of another kind than its usual value, {own[name]}.")
    return own | given


GUIDANCE = ["scale", "gamma1", "gamma2", "drop_label", "weak", "interval", "routes"]     # the keys of configs/guidance


def build_guidance(
    settings: Mapping, trained: Trained, device: torch.device | str = "cpu",
) -> tuple[Guidance | None, dict | None]:
    """Builds guidance from plain settings, loading the weak network where there is one; None where `scale` is None.

    Returns it with its record: the settings, and which weights the weak network has. Raises ValueError, with the
    numbers and the knob, for settings that cannot work with `trained`.
    """
    settings = dict(settings)
    if settings["scale"] is None:
        others = {"gamma1": 0, "gamma2": 0, "weak": None, "interval": None}
        if changed := [key for key, value in others.items() if settings[key] != value]:
            raise ValueError(f"{', '.join(f'{key}={settings[key]}' for key in changed)} guides nothing without a "
                             f"scale: give scale=1.5, say, or none of these.")
        return None, None
    if settings["weak"] == "required":
        raise ValueError("This guidance needs weak=<an earlier or smaller checkpoint>, the network of its weak pass.")

    def number(value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    def pair(value: object) -> bool:
        return isinstance(value, list | tuple) and len(value) == 2 and all(map(number, value))

    if not number(settings["scale"]):
        raise ValueError(f"scale={settings['scale']} is not a number; null samples unguided.")
    for key in ("gamma1", "gamma2"):
        if not number(settings[key]) and not pair(settings[key]):
            raise ValueError(f"{key}={settings[key]} is neither a number nor a pair [first, last].")
    if settings["interval"] is not None and not pair(settings["interval"]):
        raise ValueError(f"interval={settings['interval']} is neither null nor a pair of noise levels [low, high].")
    if type(settings["drop_label"]) is not bool:
        raise ValueError(f"drop_label={settings['drop_label']} is neither true nor false.")
    is_flow = trained.recorded["diffusion"]["name"] == "rf"
    if is_flow and settings["interval"] and 1 < settings["interval"][1] < math.inf:
        raise ValueError(f"interval={settings['interval']} reaches past 1, but flow matching's noise levels t lie in "
                         f"[0, 1]. A sigma of EDM is t = sigma / (1 + sigma).")
    weak = None
    if settings["weak"] is not None:
        weak = load_trained(str(settings["weak"]), device=device)
        here, there = (getattr(one.diffusion, "sigma_data", None) for one in (trained, weak))
        if type(weak.diffusion) is not type(trained.diffusion) or here != there:
            raise ValueError(f"weak={settings['weak']} was trained with {type(weak.diffusion).__name__} "
                             f"(sigma_data {there}) and the checkpoint with {type(trained.diffusion).__name__} "
                             f"(sigma_data {here}): their predictions cannot be mixed.")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    if settings["routes"] is not None:
        if not isinstance(settings["routes"], list) or not all(
                isinstance(route, dict) and {"start_layer_idx", "end_layer_idx"} <= route.keys()
                for route in settings["routes"]):
            raise ValueError(f"routes={settings['routes']} is no list of routes. A route has the keys start_layer_idx "
                             f"and end_layer_idx; its ratios are gamma1 and gamma2.")
        values["routes"] = tuple(Route(route["start_layer_idx"], route["end_layer_idx"], 0.0)
                                 for route in settings["routes"])
    del values["weak"]
    guidance = Guidance(**values, net2=weak and weak.net)
    guidance.check(trained.net)
    source = weak and {"checkpoint": str(weak.folder or weak.file), "step": weak.step,
                       "weights_sha256": checkpoints.sha256(weak.file)}
    return guidance, {**guidance.record(), "weak": source}


class Meter:
    """Stands in for a network that is sampled, and counts the multiply-adds that its passes would take."""

    def __init__(self, net: DiT):
        self.net, self.passes, self.linear, self.attention = net, 0, 0, 0
        self.known: dict[tuple[Route, ...], tuple[int, int]] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self.net, name)

    def __call__(
        self, x: Tensor, t: Tensor, y: Tensor, routes: tuple[Route, ...] = (), mask_noise: Tensor | None = None,
    ) -> Tensor:
        if routes not in self.known:
            self.known[routes] = multiply_adds(self.net, routes)
        linear, attention = self.known[routes]
        self.passes += len(x)
        self.linear += len(x) * linear
        self.attention += len(x) * attention
        return torch.zeros_like(x)


def sampling_cost(
    net: DiT, diffusion: EDM | RF, num_steps: int, guidance: Guidance | None = None, **sampler: float | str,
) -> tuple[int, int, int]:
    """Runs the sampler on nothing; returns one image's passes and multiply-adds, of linear layers and of attention."""
    meters = [Meter(net)]
    if guidance is not None and guidance.net2 is not None:
        meters.append(Meter(guidance.net2))
        guidance = replace(guidance, net2=meters[-1])
    noise, y = torch.zeros(1, net.in_channels, net.input_size, net.input_size), torch.zeros(1, dtype=torch.int64)
    diffusion.sample(meters[0], noise, y, num_steps=num_steps, guidance=guidance, **sampler)
    return tuple(sum(getattr(meter, what) for meter in meters) for what in ("passes", "linear", "attention"))


class SeededNoise:
    """One random generator per image, so that an image does not depend on its batch; drawn on the CPU, then moved."""

    def __init__(self, seeds: list[int], device: torch.device | str):
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.device = device

    def randn(self, shape: tuple[int, ...]) -> Tensor:
        """Draws float32 unit noise (B, *shape)."""
        return torch.stack([torch.randn(shape, generator=g) for g in self.generators]).to(self.device)

    def randn_like(self, x: Tensor) -> Tensor:
        return self.randn(x.shape[1:]).to(x.dtype)


def generate(
    net: DiT, diffusion: EDM | RF, decode: Callable[[Tensor], Tensor], seeds: list[int], labels: list[int], *,
    batch_size: int, num_steps: int, guidance: Guidance | None = None, precision: str = "fp32",
    progress: str | None = None, **sampler: float | str,
) -> Iterator[Batch]:
    """Draws this rank's images batch by batch: of every round of world · batch_size seeds, rank r takes the r-th part.

    All batches are full, so that shapes, and with them the bits, are the same on one rank and on several: where seeds
    run out the rest are copies, whose seed is given as -1. `gathered` puts the ranks' parts together in order and drops
    the copies.
    """
    state = PartialState()
    device = next(net.parameters()).device
    bar = tqdm(total=len(seeds), desc=progress, unit="img", disable=progress is None or not state.is_main_process)
    for start in range(0, len(seeds), batch_size * state.num_processes):
        first = start + batch_size * state.process_index
        here = seeds[first : first + batch_size]
        pad = batch_size - len(here)
        drawn = here + [seeds[0]] * pad
        y = torch.tensor(labels[first : first + batch_size] + [labels[0]] * pad, device=device)
        noise = SeededNoise(drawn, device)
        churn = {"randn_like": noise.randn_like} if sampler.get("S_churn") else {}
        unit = noise.randn((net.in_channels, net.input_size, net.input_size))
        with torch.autocast(unit.device.type, DTYPES[precision], enabled=precision != "fp32"):
            latents = diffusion.sample(net, unit, y, num_steps=num_steps, guidance=guidance, **churn, **sampler)
        yield torch.tensor(here + [-1] * pad, device=device), y, decode(latents)
        bar.update(min(batch_size * state.num_processes, len(seeds) - start))
    bar.close()


def gathered(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Brings all ranks' batches together on every rank's CPU, in the order of the seeds and without the copies."""
    for batch in batches:
        seeds, labels, images = (gather(part.contiguous()).cpu() for part in batch)
        real = seeds >= 0
        yield seeds[real], labels[real], images[real]


def draw_grid(images: Tensor, labels: list[int], class_names: list[str] | None) -> Image.Image:
    """Lays out images (N, H, W, 3) uint8, one captioned row a class, or in rows of mixed classes where each has few."""
    images = images.numpy()
    height, width = images.shape[1:3]
    zoom = max(1, 64 // height)
    order = sorted(range(len(labels)), key=lambda i: labels[i])
    columns = max(labels.count(label) for label in set(labels))
    if columns < 4:      # too few images a class for a row each
        columns = min(8, len(labels))
        rows = [order[i : i + columns] for i in range(0, len(order), columns)]
    else:
        rows = [[i for i in order if labels[i] == label] for label in sorted(set(labels))]

    def name(label: int) -> str:
        return class_names[label] if class_names and label < len(class_names) else str(label)

    captions = [", ".join(dict.fromkeys(name(labels[i]) for i in row)) for row in rows]
    font = ImageFont.load_default(size=13)
    captions = [text if len(text) <= 40 else text[:39] + "…" for text in captions]
    margin = 12 + max(math.ceil(font.getlength(text)) for text in captions)
    cell_w, cell_h = width * zoom + 2, height * zoom + 2
    grid = Image.new("RGB", (margin + columns * cell_w, len(rows) * cell_h), "white")
    pen = ImageDraw.Draw(grid)
    for r, row in enumerate(rows):
        pen.text((6, r * cell_h + cell_h / 2), captions[r], fill="black", font=font, anchor="lm")
        for c, i in enumerate(row):
            picture = Image.fromarray(images[i]).resize((width * zoom, height * zoom), Image.Resampling.NEAREST)
            grid.paste(picture, (margin + c * cell_w + 1, r * cell_h + 1))
    return grid


def save_image(image: Image.Image, path: Path) -> None:
    """Writes a PNG beside and renames it, so that a kill leaves no half picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.tmp")
    image.save(beside, format="PNG")
    os.replace(beside, path)


def write_grid(batches: Iterable[Batch], path: Path, class_names: list[str] | None) -> None:
    """Consumes the gathered batches of all ranks; the main one writes the grid."""
    parts = list(batches)
    if PartialState().is_main_process:
        labels = torch.cat([labels for _, labels, _ in parts]).tolist()
        save_image(draw_grid(torch.cat([images for *_, images in parts]), labels, class_names), path)


def write_pngs(batches: Iterable[Batch], folder: Path) -> None:
    """Consumes the gathered batches of all ranks; the main one writes each image as `<seed>_<label>.png`."""
    for seeds, labels, images in batches:
        if PartialState().is_main_process:
            for seed, label, image in zip(seeds.tolist(), labels.tolist(), images.numpy(), strict=True):
                save_image(Image.fromarray(image), folder / f"{seed:06d}_{label}.png")


def write_npz(batches: Iterable[Batch], path: Path, count: int) -> None:
    """Consumes the gathered batches of all ranks; the main one streams them into an npz in ADM's keys.

    `arr_0` are the images (N, H, W, 3) uint8, `arr_1` the labels (N,), `seeds` the seeds (N,), both int64.
    """
    beside = path.with_name(f".{path.name}.tmp")
    is_main = PartialState().is_main_process
    small: dict[str, list[np.ndarray]] = {"arr_1": [], "seeds": []}
    with contextlib.ExitStack() as stack:
        if is_main:
            path.parent.mkdir(parents=True, exist_ok=True)
            archive = stack.enter_context(zipfile.ZipFile(beside, "w"))
            file = None
        for seeds, labels, images in batches:
            if is_main:
                if file is None:
                    file = archive.open("arr_0.npy", "w", force_zip64=True)
                    header = {"descr": "|u1", "fortran_order": False, "shape": (count, *images.shape[1:])}
                    np.lib.format.write_array_header_1_0(file, header)
                file.write(images.numpy().tobytes())
                small["arr_1"].append(labels.numpy())
                small["seeds"].append(seeds.numpy())
        if is_main:
            file.close()
            for key, values in small.items():
                buffer = io.BytesIO()
                np.save(buffer, np.concatenate(values))
                archive.writestr(f"{key}.npy", buffer.getvalue())
    if is_main:
        os.replace(beside, path)


def default_grid(given: Path, folder: Path | None, weights: str) -> Path:
    """Places a grid in the run's samples, or, for a checkpoint or weights that lie alone, beside them."""
    if folder is not None and folder.parent.name == "checkpoints":
        return folder.parent.parent / "samples" / f"{folder.name}-{weights}.png"
    return given / f"{weights}.png" if given.is_dir() else given.with_suffix(".png")


@dataclass
class Sampling:
    """What a command asks to be drawn: of what, of which seeds and classes, how guided, and to where."""

    trained: Trained
    guidance: Guidance | None
    seeds: list[int]
    sampler: dict[str, float | str]
    draw: Callable[[Guidance | None], Iterator[Batch]]      # gathered batches
    out: Path


def open_sampling(cfg: DictConfig, state: PartialState, seeds_per_class: int | None = None) -> Sampling:
    """Reads the settings of a command that draws, and loads what it needs, before anything slow.

    With `seeds_per_class`, seeds that are not given are so many for each class, and classes not given the first ten.
    Raises ValueError, with the numbers and the knob, for settings that cannot work.
    """
    if cfg.checkpoint is None:
        raise ValueError("Say what to sample from: checkpoint=runs/<name>, a checkpoint folder, or a weights file.")
    for key in ("precision", "decode_precision"):
        if cfg[key] not in DTYPES:
            raise ValueError(f"{key}={cfg[key]} is not one of {', '.join(DTYPES)}.")
    for key in ("batch_size", "num_steps"):
        if type(cfg[key]) is not int or cfg[key] < 1:
            raise ValueError(f"{key}={cfg[key]} is not a whole number of at least 1.")
    trained = load_trained(cfg.checkpoint, cfg.weights, cfg.diffusion_name, cfg.autoencoder, state.device)
    sampler = sampler_settings(trained.diffusion, OmegaConf.to_container(cfg.sampler))
    guidance, _ = build_guidance(guidance_settings(cfg), trained, state.device)
    sampling_cost(trained.net, trained.diffusion, 1, guidance, **sampler)     # refuses now what sampling would refuse
    num_classes = trained.net.num_classes
    wanted = f"0-{min(10, num_classes) - 1}" if seeds_per_class and cfg.classes is None else cfg.classes
    classes = parse_classes("classes", wanted, num_classes, trained.class_names)
    given = f"0-{seeds_per_class * len(classes) - 1}" if seeds_per_class and cfg.seeds is None else cfg.seeds
    seeds = parse_range("seeds", given)
    labels = labels_of(seeds, classes)
    decoder = autoencoders.load(trained.autoencoder, state.device, DTYPES[cfg.decode_precision])

    def draw(guidance: Guidance | None) -> Iterator[Batch]:
        return gathered(generate(
            trained.net, trained.diffusion, decoder.decode, seeds, labels, guidance=guidance,
            batch_size=min(cfg.batch_size, math.ceil(len(seeds) / state.num_processes)), num_steps=cfg.num_steps,
            precision=cfg.precision, progress="sampling" if guidance is None else "sampling, guided", **sampler,
        ))

    out = Path(cfg.out) if cfg.out else default_grid(Path(cfg.checkpoint), trained.folder, cfg.weights)
    return Sampling(trained, guidance, seeds, sampler, draw, out)


def guidance_settings(cfg: DictConfig) -> dict:
    """Takes the settings of guidance out of a command's, as plain values."""
    return OmegaConf.to_container(OmegaConf.masked_copy(cfg, GUIDANCE), resolve=True)


@hydra.main(config_path="configs", config_name="sample", version_base="1.3")
def main(cfg: DictConfig) -> None:
    # Several ranks on CPUs need to be told that they are.
    state = PartialState(cpu=cfg.cpu or not torch.cuda.is_available())
    try:
        sampling = open_sampling(cfg, state)
        trained, out = sampling.trained, sampling.out
        if out.suffix not in (".png", ".npz", ""):
            raise ValueError(f"out={out} is neither a grid (.png), nor an .npz, nor a folder, which has no suffix.")
    except ValueError as error:
        sys.exit(f"sample.py: {error}")
    batches = sampling.draw(sampling.guidance)
    try:
        if out.suffix == ".png":
            write_grid(batches, out, trained.class_names)
        elif out.suffix == ".npz":
            write_npz(batches, out, len(sampling.seeds))
        else:
            write_pngs(batches, out)
    except OSError as error:
        sys.exit(f"sample.py: out={out} cannot be written: {error}.")
    state.print(f"{len(sampling.seeds)} images from {trained.folder or cfg.checkpoint}: {out}")
    if state.num_processes > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
