"""A plain record, a checkpoint or anybody's weights -> network, diffusion, sampler settings, guidance."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from torch import Tensor

from autoencoder import Convention, read_tensors
from dit import DiT, infer_architecture
from edm import EDM
from rf import RF
from runtime import files, ranks
from runtime.schema import read_record
from weights import checkpoint as checkpoints
from weights import lora as adapters
from weights.others import FAMILIES, as_ours, detect_family, plain_keys, unknown_family
from weights.records import (
    CheckpointRecord,
    DataRecord,
    ParentRecord,
    build_diffusion,
    build_network,
    with_objective,
)


@dataclass
class Trained:
    """A network and what its checkpoint records about it: all that drawing needs."""

    net: DiT
    diffusion: EDM | RF
    autoencoder: str
    convention: Convention | None        # by which its latents were made; None: the autoencoder's own
    class_names: list[str] | None
    display_names: list[str] | None      # of the classes, for people
    classes: list[int]                   # of its training images
    step: int | None
    weights: str             # ema or model; file for a state dict that does not say
    folder: Path | None      # the checkpoint folder, None for a bare weights file
    file: Path               # of the weights
    recorded: dict           # `network` and `diffusion` as plain keywords, and `published` if there is any
    inferred: str | None     # a sentence that says what was read off weights without a record
    family: str | None       # of weights without a record: a name of FAMILIES
    recorded_sha256: str | None      # of the file, which was checked by it; None without a record

    @property
    def weights_sha256(self) -> str:
        """The file's hash; a recorded one is known even after training has pruned the file."""
        return self.recorded_sha256 or files.sha256(self.file)

    @property
    def run_folder(self) -> Path | None:
        """The run of the checkpoint, or None for weights or a folder outside a run."""
        folder = self.folder
        return folder.parent.parent if folder is not None and folder.parent.name == "checkpoints" else None


WEIGHT_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Under these keys a published .pt has its average and its trained weights.
STATE_KEYS = {"ema": ("ema", "ema_state_dict"), "model": ("model", "model_state_dict", "state_dict")}


def read_weights(path: Path, weights: str | None = None) -> tuple[dict[str, Tensor], str, str | None]:
    """Reads a state dict from .safetensors, or from a .pt as published, of which only tensors are ever unpickled.

    Of a training checkpoint with several, `weights` names one: ema, model, or None, the average if there is one.
    Returns it under our keys, without the prefixes of wrappers; which it is: ema, model, or file where the file does
    not say; and the family that the file shows, or None.
    Raises ValueError for a file without a state dict, without the one named, or with values that are not finite.
    """
    state, which, around = read_tensors(path), "file", {}
    held = {key: name for name, keys in STATE_KEYS.items() for key in keys
            if isinstance(state, dict) and isinstance(state.get(key), dict)}
    if held:
        key = next((key for key, name in held.items() if weights in (None, name)), None)
        if key is None:
            raise ValueError(f"{path} holds {', '.join(held)}, and no weights={weights}.")
        state, which, around = state[key], held[key], state
    if not isinstance(state, dict) or not all(isinstance(key, str) and isinstance(value, Tensor)
                                              for key, value in state.items()):
        raise ValueError(f"{path} does not hold a state dict, that is, a dictionary of tensors by name.")
    for key, value in state.items():
        if (value.dtype not in WEIGHT_TYPES or value.layout is not torch.strided or value.is_meta
                or value.numel() * value.element_size() > value.untyped_storage().nbytes()):      # one, for terabytes
            raise ValueError(f"{path} holds {key} as {value.dtype}, {value.layout}, on {value.device}, of shape "
                             f"{tuple(value.shape)}: weights are plain floating-point numbers in memory, each by "
                             f"itself. Save its state dict so.")
    damaged = [key for key, value in state.items() if not value.isfinite().all()]
    if damaged:
        raise ValueError(f"{path} holds values that are not finite in {len(damaged)} of {len(state)} tensors, "
                         f"{damaged[0]} first: its training has diverged. Choose an earlier checkpoint.")
    # DDP, torch.compile and EDM's preconditioner each add a prefix to every key.
    for prefix in ("module.", "_orig_mod.", "model."):
        bare = {key.removeprefix(prefix): value for key, value in state.items()}
        preconditioned, state = prefix == "model." and bare.keys() != state.keys(), bare
    try:
        return plain_keys(state), which, detect_family(state, around, preconditioned)
    except ValueError as error:
        raise ValueError(f"{path} is not read: {error}") from None


EXPORTED = ("weights.safetensors", "transformer/diffusion_pytorch_model.safetensors")      # of scripts/export.py


def latest_checkpoint(run: Path, names: tuple[str, ...] | None = None) -> Path | None:
    """Returns a run's latest whole checkpoint, as the main rank finds it, or None.

    A run in training may save another meanwhile. Raises ValueError where a rank does not see the one found.
    """
    state = PartialState()
    found = checkpoints.latest(run, names) if state.is_main_process else None
    step = ranks.broadcast_from_main(state, -1 if found is None else checkpoints.step_of(found))
    if step < 0:
        return None
    folder = checkpoints.step_folder(run, step)
    if not folder.is_dir():
        raise ValueError(f"Rank {state.process_index} does not see {folder}, which the main rank found: {run} must lie "
                         f"on a disk that all nodes share. Set run_dir or checkpoint.")
    return folder


def is_run(path: Path) -> bool:
    """Tells a run's folder, which stands for its latest checkpoint, from a checkpoint or weights."""
    return (path / "checkpoints").is_dir() and not (path / "meta.json").is_file()


def resolve_run(path: str, weights: str = "ema") -> str:
    """Returns the latest checkpoint of the run at `path`, and any other path as it is.

    Raises ValueError for a run without a whole checkpoint.
    """
    if not is_run(Path(path)):
        return path
    folder = latest_checkpoint(Path(path), (weights,))
    if folder is None:
        raise ValueError(f"The run {path} holds no whole checkpoint yet; wait for its first save.")
    return str(folder)


def find_weights(path: Path, weights: str) -> tuple[Path, Path | None]:
    """Finds the weights file that `path` names, and its checkpoint folder or None; raises ValueError for none."""
    path = Path(resolve_run(str(path), weights))
    if path.is_file():
        return path, path.parent if (path.parent / "meta.json").is_file() else None
    if (path / "meta.json").is_file():
        exported = (path / name for name in EXPORTED)
        return next((file for file in exported if file.is_file()), path / f"{weights}.safetensors"), path
    if path.parent.name == "checkpoints" and path.name.startswith("step-"):
        raise ValueError(f"There is no checkpoint {path}. Training deletes all but the newest checkpoint.keep_last and "
                         f"those of checkpoint.keep_every: name another one, or the run.")
    raise ValueError(f"There is no run, checkpoint folder or weights file at {path}. "
                     f"Set checkpoint=runs/<name>, runs/<name>/checkpoints/step-…, or a .safetensors or .pt file.")


def load_trained(
    path: str | Path,                       # a run, a checkpoint folder or a weights file
    weights: str | None = None,             # ema | model; None: the average, or what the file holds
    diffusion: str | None = None,           # of weights without a record, FAMILIES' name
    autoencoder: str | None = None,         # overrules what is recorded
    device: torch.device | str = "cpu",
    num_heads: int | None = None,           # of a bare weights file, which does not tell
) -> Trained:
    """Loads a network and what its checkpoint records about it.

    A weights file in a folder with meta.json is built by that record; an adapter (LoRA) is merged into its base.
    Without a meta.json the architecture is read off the shapes, `diffusion` names the family where the file does not
    show it, and the weights are rewritten for an ordinary network of ours. Of a run all ranks must call it.
    Raises ValueError for a path without a whole checkpoint, or for weights that are not a DiT's or of no known family.
    """
    path = Path(path)
    while True:
        file, folder = find_weights(path, weights or "ema")
        trained = None
        try:
            trained = read_trained(path, file, folder, weights, diffusion, autoencoder, device, num_heads)
        except (OSError, ValueError):
            if not is_run(path) or folder.is_dir():
                raise      # else training has pruned it meanwhile, and saved a newer one
        if not is_run(path) or ranks.all_ranks_agree(PartialState(), trained is not None):
            return trained


def read_trained(
    path: Path, file: Path, folder: Path | None, weights: str | None, diffusion: str | None, autoencoder: str | None,
    device: torch.device | str, num_heads: int | None,
) -> Trained:
    """Reads the weights `file` of the checkpoint `folder`, if any, for `load_trained`, which names the errors."""
    if folder is not None:
        check_recorded(path, file, folder, weights, num_heads)
    state, which, family = read_weights(file, weights)
    published = recorded_sha256 = inferred = None
    if folder is not None:
        meta = read_record(CheckpointRecord, folder / "meta.json",
                           "It does not describe a checkpoint; move the weights elsewhere.")
        network, recorded, data, step, family = meta.network, meta.diffusion, meta.data, meta.step, None
        published, which = meta.published, meta.weights or file.stem
        recorded_sha256 = checkpoints.read_meta(folder)["files"].get(str(file.relative_to(folder)), {}).get("sha256")
        if diffusion not in (None, recorded.get("name")):
            raise ValueError(f"diffusion_name={diffusion} is for weights without a record; {folder} records "
                             f"{recorded.get('name')}: leave it out.")
        if meta.weights is not None and weights not in (None, which):
            raise ValueError(f"{folder} holds weights={which} alone, not weights={weights}.")
        if meta.lora is not None:
            base = load_base(meta, folder).net.state_dict()
            state = adapters.merge(base, state, meta.lora.alpha / meta.lora.rank)
        check_fit(state, network, path)
    else:
        network, step, family = infer_architecture(state, num_heads), None, diffusion or family
        check_fit(state, network, path)
        if family not in FAMILIES:
            raise ValueError(unknown_family(file, network))
        state, network = as_ours(state, network, FAMILIES[family])
        recorded = {"name": FAMILIES[family].diffusion}
        data = DataRecord(autoencoder="identity" if network["in_channels"] == 3 else "sd_vae_ema", class_names=None)
        inferred = (f"{file} carries no record: taken as {family} ({FAMILIES[family].meaning}), {network['num_heads']} "
                    f"heads, decoded by {autoencoder or data.autoencoder}. Otherwise set diffusion_name=, num_heads=, "
                    f"autoencoder=.")
    with torch.device("meta"):
        net = build_network(network)
    net.load_state_dict(state, assign=True)
    return Trained(
        net=net.to(device).float().eval(),      # not frozen: autocast keeps its casts of trainable weights only
        diffusion=build_diffusion(recorded), autoencoder=autoencoder or data.autoencoder,
        convention=data.convention and Convention.read(data.convention),
        class_names=data.class_names, display_names=data.display_names or data.class_names,
        classes=data.classes or list(range(net.num_classes)),
        step=step, weights=which, folder=folder, file=file,
        recorded={"network": network, "diffusion": with_objective(recorded, {})[0],
                  **({"published": published} if published else {})},
        inferred=inferred, family=family, recorded_sha256=recorded_sha256,
    )


def check_recorded(path: Path, file: Path, folder: Path, weights: str | None, num_heads: int | None) -> None:
    """Raises ValueError for a damaged checkpoint, or for settings that contradict its files."""
    if why := checkpoints.problem(folder, (file.stem,)):
        raise ValueError(f"The checkpoint {folder} is damaged: {why}. Choose another of its run.")
    if path.is_file() and weights not in (None, file.stem):
        raise ValueError(f"checkpoint={path} is the file of weights={file.stem}, not of weights={weights}.")
    if num_heads is not None:
        raise ValueError(f"num_heads={num_heads} is for weights without a record; {folder} has one.")


def check_fit(state: Mapping[str, Tensor], network: dict, path: Path) -> None:
    """Raises ValueError where the weights of the file at `path` are not those of a network of these keywords."""
    with torch.device("meta"):
        expected = build_network(network).state_dict()
    missing = [key for key, value in expected.items() if key not in state or state[key].shape != value.shape]
    unexpected = [key for key in state if key not in expected]
    if missing or unexpected:
        raise ValueError(f"The weights at {path} do not fit their network: {len(missing)} are missing or of another "
                         f"shape ({', '.join(missing[:3])} …), {len(unexpected)} are unknown "
                         f"({', '.join(unexpected[:3])} …).")


def load_base(meta: CheckpointRecord, folder: Path) -> Trained:
    """Loads the weights that the adapter in `folder` was trained on; raises ValueError where they differ."""
    base = Path(meta.lora.base)
    if not base.is_file():
        raise ValueError(f"{folder} holds an adapter (LoRA) alone, and its base {base} is not there: put it back, or "
                         f"run this where it is. scripts/merge_lora.py makes weights that need no base.")
    parent = meta.parent or ParentRecord()
    if files.sha256(base) != parent.weights_sha256:
        raise ValueError(f"{folder} holds an adapter (LoRA) alone, and its base {base} is not the file that it was "
                         f"trained on: its SHA-256 differs. Put that file back.")
    return load_parent(base, meta.network, parent.diffusion_name or meta.diffusion.get("name"))


def load_parent(path: Path, network: dict, diffusion: str | None) -> Trained:
    """Loads the weights that a run of `network` starts from; `diffusion` is the family of weights without a record."""
    if find_weights(path, "ema")[1] is not None:
        return load_trained(path)
    return load_trained(path, diffusion=diffusion, num_heads=network["num_heads"])
