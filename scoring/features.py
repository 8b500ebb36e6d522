"""Images -> features: Inception of 2015 as ADM's graph or in PyTorch, DINOv2, timm, pixels, a TorchScript file.

Every extractor takes uint8 images (B, H, W, 3), and resizes and scales them itself.
"""

import contextlib
import difflib
import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import AfterValidator
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, interpolate

from runtime import files
from runtime.schema import first_line
from scoring.metrics import Distances, distances_in_half, exact_float32, squared_distances
from weights.reading import WHEELS, from_hub, in_wheel, load_torchscript, read_tensors, read_timm

ADM_GRAPH_URL = "https://openaipublic.blob.core.windows.net/diffusion/jul-2021/ref_batches/classify_image_graph_def.pb"
INCEPTION_URL = ("https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/"
                 "weights-inception-2015-12-05-6726825d.pth")
DINOV2_REPO = "timm/vit_large_patch14_dinov2.lvd142m"
TIMM = "timm:"
NUM_SPATIAL = 7  # channels of mixed_6/conv that sFID uses: 17 × 17 × 7 = 2023 values


@dataclass(frozen=True)
class Extractor:
    """Named features of images, and what must agree for two scores to be compared.

    `compute` maps uint8 images (B, H, W, 3), on any device, to float32 features: "pool" (B, D), for every
    distance and neighbourhood, and for Inception also "spatial" (B, 2023) and "probs" (B, classes).
    """

    name: str
    space: str                  # features can be compared within a space; adm and inception share one
    distance: str               # the name of the Fréchet distance between its "pool" features
    sizes: dict[str, int]       # length of each feature
    input: str                  # input size, resize rule and value range, in words
    compute: Callable[[Tensor], dict[str, Tensor]]
    weights: str | None = None  # path of the weights; None: it has none
    sha256: str | None = None   # of the weights
    library: str | None = None  # the package whose version matters
    neighbours: Distances = squared_distances   # for precision and recall

    @property
    def kid_name(self) -> str:
        """The name of the kernel distance on its "pool" features: KID for Inception, KDD for DINOv2."""
        return {"fid": "kid", "fd_dinov2": "kdd"}.get(self.distance, f"kd_{self.distance[3:]}")

    @property
    def mind_name(self) -> str:
        """The name of MIND on its "pool" features."""
        return "mind" if self.distance == "fid" else f"mind_{self.distance[3:]}"

    @property
    def metrics(self) -> set[str]:
        """Names all metrics on these features, whatever the reference is."""
        return {self.distance, *self.sample_metrics, *(("sfid", "inception_score") if "spatial" in self.sizes else ())}

    @property
    def sample_metrics(self) -> set[str]:
        """Names the metrics that need the images' features, not their statistics alone."""
        return {"precision", "recall", self.kid_name, self.mind_name}


def versions(extractor: Extractor) -> dict[str, str]:
    names = filter(None, ["numpy", "scipy", "accelerate", extractor.library])
    return {"python": platform.python_version(), "torch": torch.__version__,  # including its CUDA, as in +cu130
            **{name: importlib.metadata.version(name) for name in names}}


def describe_extractor(extractor: Extractor) -> dict:
    return {key: getattr(extractor, key) for key in ("name", "space", "input", "weights", "sha256")}


def load_extractor(
    name: str, weights: str | Path | None = None, sha256: str | None = None, device: torch.device | str = "cpu",
) -> Extractor:
    """Loads one of EXTRACTORS, or `timm:<name>`.

    `weights` is a local path; without it they are downloaded once. `sha256` must be theirs. The caller's random
    generators are unchanged. Raises ValueError or OSError for weights that cannot be read or fetched, or another hash.
    """
    with torch.random.fork_rng(devices=[]):  # a network has random weights before its own are read
        if name.startswith(TIMM):
            return timm_extractor(name, weights and Path(weights), sha256, device)
        return EXTRACTORS[name](weights and Path(weights), sha256, device)


def extract(
    extractor: Extractor, batches: Iterable[tuple[Tensor, Tensor]],
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Turns (indices (B,), images (B, H, W, 3) uint8) into (indices, named features); images of index -1 are dropped.

    Raises ValueError where a feature is not finite.
    """
    for indices, images in batches:
        assert images.dtype == torch.uint8 and images.ndim == 4 and images.shape[3] == 3, (images.dtype, images.shape)
        real = indices.to(images.device) >= 0
        if not real.any():
            continue
        with torch.no_grad(), exact_float32():
            features = extractor.compute(images[real])
        indices = indices[indices >= 0].cpu()
        for name, values in features.items():
            if not (finite := values.isfinite().all(1).cpu()).all():
                raise ValueError(f"The {extractor.name} features ({name}) of {int((~finite).sum())} of {len(finite)} "
                                 f"images are not finite, first of image {int(indices[~finite][0])}.")
        yield indices, features


# ---- the weights ----------------------------------------------------------------------------------------------------


def fetch(url: str, hash_prefix: str | None = None) -> Path:
    """Downloads a file once into torch.hub's folder (TORCH_HOME moves it); raises ValueError if it cannot."""
    path = Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            torch.hub.download_url_to_file(url, str(path), hash_prefix)
        except Exception as error:  # urllib, ssl and socket each have their own errors
            raise ValueError(f"{url} could not be downloaded ({error}): download it elsewhere and set "
                             f"features_weights=path/to/{path.name}.") from error
    return path


def hub_weights(repo: str, wheel: str | None = None) -> Path:
    remedy = "fetch it elsewhere and set features_weights=path/to/it" + (f", or pip install {wheel}." if wheel else ".")
    return from_hub(repo, "model.safetensors", remedy=remedy) / "model.safetensors"


@contextlib.contextmanager
def reading(path: Path, sha256: str | None, what: str) -> Iterator[str]:
    """Yields the SHA-256 of weights; raises ValueError if it is not `sha256`.

    Any error of the library that reads them becomes a ValueError that they are not `what`.
    """
    files.refuse_pointer(path)
    found = files.sha256(path)
    if sha256 is not None and found != sha256.lower():
        raise ValueError(f"{path} has SHA-256 {found}, but the setting is sha256={sha256}.")
    try:
        yield found
    except Exception as error:
        raise ValueError(f"{path} is not {what}: {first_line(error)}.") from error


# ---- Inception of 2015 ----------------------------------------------------------------------------------------------


def adm(weights: Path | None, sha256: str | None, device: torch.device | str) -> Extractor:
    """Loads the frozen graph that OpenAI's evaluator runs; TensorFlow runs it on the CPU and never sees a GPU."""
    path = weights or fetch(ADM_GRAPH_URL)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        import tensorflow as tf
    except ModuleNotFoundError as error:
        raise ValueError("features=adm needs TensorFlow: pip install -r requirements.txt, or set features=inception, "
                         "the same weights in PyTorch.") from error
    tf.config.set_visible_devices([], "GPU")
    with contextlib.suppress(RuntimeError):  # already running in this process
        tf.config.threading.set_intra_op_parallelism_threads(torch.get_num_threads())

    @tf.function(input_signature=[tf.TensorSpec([None, None, None, 3], tf.float32)])
    def run(images: object) -> tuple:
        nodes = ["pool_3:0", "mixed_6/conv:0", "softmax/logits/MatMul"]
        # The graph's own input is a batch of one. From this node on, its resize to 299 and the rest take any batch.
        pool, spatial, product = tf.graph_util.import_graph_def(graph, {"ExpandDims:0": images}, nodes, name="")
        pool = tf.reshape(pool, [-1, pool.shape[-1]])
        logits = tf.matmul(pool, product.inputs[1])  # without the bias, as ADM does
        return pool, tf.reshape(spatial[..., :NUM_SPATIAL], [tf.shape(pool)[0], -1]), tf.nn.softmax(logits)

    with reading(path, sha256, "the Inception graph that ADM's evaluator runs") as digest:
        graph = tf.compat.v1.GraphDef.FromString(path.read_bytes())
        sizes = [value.shape[1] for value in run(tf.zeros([1, 8, 8, 3]))]

    def compute(images: Tensor) -> dict[str, Tensor]:
        values = run(tf.constant(images.cpu().numpy(), tf.float32))
        return {name: torch.from_numpy(value.numpy().copy()).to(device)
                for name, value in zip(("pool", "spatial", "probs"), values, strict=True)}

    return Extractor(
        "adm", "inception-2015", "fid", dict(zip(("pool", "spatial", "probs"), sizes, strict=True)),
        "299x299 by TensorFlow 1's bilinear (no antialiasing, corners not aligned), (x - 128) / 128, inside the graph",
        compute, str(path), digest, "tensorflow", distances_in_half,
    )


def inception(weights: Path | None, sha256: str | None, device: torch.device | str) -> Extractor:
    """Loads torch-fidelity's inception-v3-compat: the weights and the resize of ADM's graph, on the training device."""
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    path = weights or fetch(INCEPTION_URL, hash_prefix="6726825d")
    with reading(path, sha256, "torch-fidelity's weights-inception-2015-12-05 as weights alone") as digest:
        # torch-fidelity reads the file as a pickle. A file that passes here holds only tensors, and cannot run code.
        torch.load(path, map_location="cpu", weights_only=True)
        network = FeatureExtractorInceptionV3("inception-v3-compat", ["2048", "logits_unbiased"],
                                              feature_extractor_weights_path=str(path))
    network, hooked = network.to(device), {}
    # mixed_6/conv is the first branch of the third block after the reduction to 17 × 17, after its ReLU.
    network.Mixed_6d.branch1x1.register_forward_hook(lambda module, args, output: hooked.update(spatial=output))

    def compute(images: Tensor) -> dict[str, Tensor]:
        pool, logits = network(images.to(device).permute(0, 3, 1, 2).contiguous())
        spatial = hooked.pop("spatial")[:, :NUM_SPATIAL].permute(0, 2, 3, 1).flatten(1)  # channels last
        return {"pool": pool, "spatial": spatial, "probs": logits.softmax(1)}

    return Extractor(
        "inception", "inception-2015", "fid",
        {"pool": 2048, "spatial": 17 * 17 * NUM_SPATIAL, "probs": len(network.fc.weight)},
        "299x299 by TensorFlow 1's bilinear (no antialiasing, corners not aligned), (x - 128) / 128",
        compute, str(path), digest, "torch-fidelity", distances_in_half,
    )


# ---- other features -------------------------------------------------------------------------------------------------


def dinov2(
    weights: Path | None, sha256: str | None, device: torch.device | str,
    architecture: str = "vit_large_patch14_dinov2",
) -> Extractor:
    """Loads DINOv2's ViT-L/14 through timm; FD-DINOv2 is measured on its normalised class token (1024)."""
    import timm

    weights = weights or hub_weights(DINOV2_REPO)
    with reading(weights, sha256, f"timm's {architecture} in safetensors") as digest:
        state = read_tensors(weights)
        state["pos_embed"] = positions_at_224(state["pos_embed"])
        network = timm.create_model(architecture, pretrained=False, img_size=224, num_classes=0)
        network.load_state_dict(state)
    compute = resized(network, (224, 224), "bicubic", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), device)
    return Extractor("dinov2", "dinov2", "fd_dinov2", {"pool": network.num_features},
                     "224x224 by antialiased bicubic, clipped to [0, 255], ImageNet's mean and std",
                     compute, str(weights), digest, "timm")


def resized(
    network: nn.Module, size: tuple[int, int], mode: str, mean: tuple, std: tuple, device: torch.device | str,
) -> Callable[[Tensor], dict[str, Tensor]]:
    """Makes `compute` for a network that takes normalised images of one size; resizes them with antialiasing."""
    network = network.to(device).eval().requires_grad_(False)
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (mean, std))

    def compute(images: Tensor) -> dict[str, Tensor]:
        x = images.to(device).permute(0, 3, 1, 2).float()
        if x.shape[2:] != size:
            x = interpolate(x, size, mode=mode, antialias=True).clamp(0, 255)
        return {"pool": network((x / 255 - mean) / std)}

    return compute


def timm_extractor(name: str, weights: Path | None, sha256: str | None, device: torch.device | str) -> Extractor:
    """Loads any network of timm; features come from before the classifier, and images follow its data config.

    Complete images are resized, without timm's crop_pct. Weights may come from an installed wheel (WHEELS).
    """
    import timm

    model = name.removeprefix(TIMM)
    cfg = timm.get_pretrained_cfg(model) if timm.is_model(model) else None
    if cfg is None:
        near = difflib.get_close_matches(model, timm.list_models(), n=3)
        raise ValueError(f"features={name}: timm has no such "
                         f"network{'; did you mean ' + ', '.join(near) + '?' if near else '.'}")
    weights = weights or in_wheel(model) or hub_weights(cfg.hf_hub_id or model, WHEELS.get(model))
    with reading(weights, sha256, f"timm's {model} in safetensors, or a .pth of tensors") as digest:
        state = read_timm(model, weights)
        # With as many classes as the file has, timm requires all tensors. With fewer, missing ones would be random.
        heads = [cfg.classifier] if isinstance(cfg.classifier, str) else cfg.classifier or ()
        classes = cfg.num_classes if any(f"{head}.weight" in state for head in heads) else 0
        network = timm.create_model(model, pretrained=True, num_classes=classes,
                                    pretrained_cfg_overlay={"state_dict": state, "num_classes": classes})
        network.reset_classifier(0)
    cfg = timm.data.resolve_data_config(model=network)
    size, mode = tuple(cfg["input_size"][1:]), "bilinear" if cfg["interpolation"] == "bilinear" else "bicubic"
    return Extractor(name, name, f"fd_{model}",
                     {"pool": getattr(network, "head_hidden_size", network.num_features)},
                     f"{size[0]}x{size[1]} by antialiased {mode}, clipped to [0, 255], mean {cfg['mean']}, "
                     f"std {cfg['std']}", resized(network, size, mode, cfg["mean"], cfg["std"], device),
                     str(weights), digest, "timm")


def positions_at_224(positions: Tensor) -> Tensor:
    """Resamples DINOv2's position embeddings (1, 1 + 37², C) to 16 × 16 patches as its own code does.

    That is bicubic without antialiasing at a scale of (16 + 0.1) / 37; timm's resampling gives other features.
    """
    token, grid = positions[:, :1], positions[:, 1:]
    side = round(grid.shape[1] ** 0.5)
    grid = grid.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    grid = interpolate(grid, scale_factor=(16 + 0.1) / side, mode="bicubic")
    return torch.cat([token, grid.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)


def pixels(weights: Path | None, sha256: str | None, device: torch.device | str) -> Extractor:
    """Averages the image to 8 × 8 as its features; they have no weights or semantics, so never call this FID."""
    if weights or sha256:
        raise ValueError("features=pixels has no weights: leave features_weights= and sha256= out.")

    def compute(images: Tensor) -> dict[str, Tensor]:
        small = adaptive_avg_pool2d(images.permute(0, 3, 1, 2).float() / 255, 8)
        return {"pool": small.permute(0, 2, 3, 1).flatten(1)}

    return Extractor("pixels", "pixels-8x8", "fd_pixels", {"pool": 8 * 8 * 3},
                     "8x8 by averaging over boxes, [0, 1]: 192 values", compute)


def torchscript(weights: Path | None, sha256: str | None, device: torch.device | str) -> Extractor:
    """Loads a user's TorchScript file, which maps uint8 (B, 3, H, W) of any size to features (B, D).

    TorchScript is a program: load only files that you trust.
    """
    if weights is None:
        raise ValueError("features=torchscript needs features_weights=path/to/file.pt, a TorchScript file of your own.")
    what = "TorchScript from uint8 images (B, 3, H, W) of any size to (B, D)"
    with reading(weights, sha256, what) as digest, torch.no_grad():
        network = load_torchscript(weights, device)
        images = torch.arange(3 * 3 * 256 * 256).view(3, 3, 256, 256).sqrt().byte().to(device)  # three different ones
        features = network(images).float()
        _, size = features.shape
        changed = (features[:2] - network(images[:2]).float()).abs().max()
        if changed > 0.01 * (features[0] - features[1]).abs().max():
            raise ValueError("the features of an image depend on the others in its batch, as in training mode (trace "
                             "or script the network after .eval())")

    def compute(images: Tensor) -> dict[str, Tensor]:
        return {"pool": network(images.to(device).permute(0, 3, 1, 2).contiguous()).float()}

    return Extractor("torchscript", f"torchscript {digest}", "fd_torchscript", {"pool": size},
                     "uint8 as it is; the file resizes and scales", compute, str(weights), digest)


EXTRACTORS = {"adm": adm, "inception": inception, "dinov2": dinov2, "pixels": pixels, "torchscript": torchscript}


def check_extractors(names: str | list[str]) -> str | list[str]:
    for name in [names] if isinstance(names, str) else names:
        if name not in EXTRACTORS and not name.startswith(TIMM):
            raise ValueError(f"features={name}: there are {', '.join(EXTRACTORS)} and {TIMM}<a network of timm's>.")
    return names


Features = Annotated[str, AfterValidator(check_extractors)]
