"""Sixty steps of our train.py against sixty of the published trainers' own loops (tests/published/train_*.json).

Theirs ran on a CPU, checkpoint included, on the weights, the data and the random numbers of closed_forms.py; each JSON
names repository and commit, and what a CPU lacked and was replaced. Ours runs by its settings from a latent folder.
"""

import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from closed_forms import (
    Encoder,
    Replayed,
    begin,
    checksum,
    data_set,
    in_order,
    numbers,
    pictures,
    spread_of,
    values_of,
    wave,
)
from conftest import run_command
from safetensors.torch import load_file
from test_data import write_folder
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

import dit
import latents.loader
from blocks import BLOCKS, BlockKind
from blocks.transformer import DiTBlock, LightningBlock
from dit import DiT, DiT_models
from edm import EDM
from guidance import Guidance
from objectives import alignment
from objectives.teachers import Teacher
from rf import RF
from runtime.schema import as_text
from train import main
from weights import checkpoint as checkpoints
from weights.records import build_network

NAMES = {"train_step": "labels", "draw_sigma": "level", "draw_t": "level", "draw": "noise", "get_mask": "mask",
         "loss": "noise", "draw_mask_noise": "mask", "to_latent": "moments", "draw_dropped": "path"}


def published(name: str) -> dict:
    return json.loads((Path(__file__).parent / "published" / f"train_{name}.json").read_text())


def cases(name: str, wanted: Callable[[dict], bool] = lambda case: True) -> pytest.MarkDecorator:
    chosen = [case for case in published(name)["cases"] if wanted(case)]
    return pytest.mark.parametrize("case", chosen, ids=[case["name"] for case in chosen])


@pytest.fixture
def replay(monkeypatch):
    """Makes the random numbers and the order of the data those of a case."""
    def by(case: dict) -> None:
        Replayed(NAMES).replace(monkeypatch.setattr)
        monkeypatch.setattr(latents.loader, "_plan", in_order(case["order"]))
    return by


@pytest.fixture
def their_time(monkeypatch):
    """Has networks see time as SiT's do, whose data lie at t = 1 and whose velocity leads to them."""
    velocity, draw_t = RF.velocity, RF.draw_t
    monkeypatch.setattr(RF, "velocity", lambda self, net, z, t, y, routes=(): -velocity(self, net, z, 1 - t, y, routes))
    monkeypatch.setattr(RF, "draw_t", lambda self, x: 1 - draw_t(self, x))


def train(
    tmp_path: Path, case: dict, network: dict, diffusion: dict, config: str, images: Tensor | None = None,
    model: str = "dit", command: Callable = run_command, **settings,
) -> tuple[dict, dict, list[float]]:
    """Runs train.py on the weights and the data that both sides had; returns its weights, their average, and the
    losses.
    """
    side = network["input_size"]
    x, y = data_set(shape=(4, side, side))
    stored = torch.cat([x, spread_of(x)], dim=1) if case.get("kind") == "moments" else x
    write_folder(tmp_path / "data", stored.half().numpy(), y.numpy(), kind=case.get("kind", "sample"), num_classes=10,
                 autoencoder="none", scale=1.0, shard=len(x),
                 arrays={} if images is None
                 else {"image": {"shape": [*images.shape[1:]], "dtype": "uint8", "mirror": "same"}})
    if images is not None:
        np.save(tmp_path / "data" / "image-00000.npy", images.numpy())
    state = begin(build_network(network)).state_dict()
    meta = {"step": 1, "network": network, "diffusion": diffusion, "data": {"autoencoder": "none", "class_names": None}}
    checkpoints.save(checkpoints.step_folder(tmp_path / "start", 1), {"ema": state, "model": state}, meta)
    routes = "[" + ",".join("{" + ",".join(f"{key}: {value}" for key, value in route.items()) + "}"
                            for route in case["routes"]) + "]"
    command(
        main, "train.py", f"model={model}", f"model.routes={routes}", f"diffusion={config}", run_dir=tmp_path / "run",
        **{"data.path": tmp_path / "data", "init_from": tmp_path / "start", "steps": case["steps"], "log.every": 1,
           "compile": False,
           "batch_size": case["batch_size"], "precision": case["precision"], "samples.every": 0,
           "ema.decay": case["ema_decay"],
           "cpu": True, "data.channels": 4, "data.input_size": side, "data.num_classes": 10,
           **{f"model.{key}": network[key] for key in ("hidden_size", "depth", "num_heads", "patch_size")},
           **{f"optimizer.{key}": value for key, value in case["optimizer"].items()}, **settings})
    end = checkpoints.latest(tmp_path / "run")
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    return load_file(end / "model.safetensors"), load_file(end / "ema.safetensors"), losses


def without_keys_bias(key: str, weight: Tensor) -> Tensor:
    """Softmax ignores what a bias adds to all keys: its gradient is rounding alone, of which AdamW makes full steps."""
    if not key.endswith("attn.qkv.bias"):
        return weight
    weight = weight.clone()
    weight[len(weight) // 3 : 2 * len(weight) // 3] = 0
    return weight


def deviation(ours: dict, theirs: dict) -> float:
    """Returns the largest difference of the weights that the JSON holds, and, for a checksum, that of its mean step."""
    largest = 0.0
    assert {key for key in ours if key != "pos_embed"} == theirs.keys()
    for key, (total, *values) in theirs.items():
        mine = values_of(without_keys_bias(key, ours[key]))
        largest = max(largest, abs(mine[0] - total) / ours[key].numel() ** 0.5,
                      *map(abs, np.subtract(mine[1:], values)))
    return largest


NETWORK = dict(input_size=8, patch_size=2, in_channels=4, hidden_size=48, depth=8, num_heads=4, num_classes=10)


# ---- The comparisons -------------------------------------------------------------------------------------------------

# bfloat16 has 8 bits, and processors add in other orders: the first steps tell whether the same is cast.
BOUNDS = {"fp32": {"first": 1e-6, "loss": 5e-6, "weights": 1e-4, "ema": 1e-4},
          "lightning": {"first": 1e-6, "loss": 1e-3, "weights": 1e-3, "ema": 1e-3},  # a cosine is steep near velocity 0
          "bf16": {"first": 1e-4, "loss": 1e-2, "weights": 2e-2, "ema": 1e-2}}


def assert_same_training(case: dict, model: dict, ema: dict, losses: list[float]) -> None:
    assert len(losses) == case["steps"] >= 60 and case["moved"] > 0.4
    apart = np.abs(np.subtract(losses, case["loss"]))
    found = {"first": apart[:3].max(), "loss": apart.max(), "weights": deviation(model, case["model"]),
             "ema": deviation(ema, case["ema"])}
    assert all(found[part] <= bound
               for part, bound in BOUNDS[case.get("bounds", case["precision"])].items()), (case["name"], found)


def network_of(case: dict, ema: dict, **network) -> DiT:
    net = build_network(network | {"routes": case["routes"]})
    net.load_state_dict(ema)
    return net.eval()


def assert_same_sample(case: dict, name: str, ours: Tensor) -> None:
    total, *values = case["samples"][name]
    close = 5e-2 if case["precision"] == "bf16" else 1e-4
    assert ours.flatten()[:: ours.numel() // len(values)].tolist() == pytest.approx(values, abs=close), name
    assert checksum(ours) == pytest.approx(total, abs=close * ours.numel() ** 0.5), name


@cases("tread")
def test_train_py_ends_where_that_of_compvis_tread_does(case, tmp_path, replay, fresh_accelerator):
    replay(case)
    model, ema, losses = train(tmp_path, case, NETWORK, {"name": "edm", "sigma_data": 0.5}, "edm")
    assert_same_training(case, model, ema, losses)
    net, noise, y = network_of(case, ema, **NETWORK), wave((2, 4, 8, 8), 2, 1.4), torch.tensor([3, 7])
    for name, guidance in (("unguided", None), ("guided", Guidance(1.5))):
        assert_same_sample(case, name, EDM().sample(net, noise, y, num_steps=18, guidance=guidance))


@cases("tread_two_ranks")
def test_two_ranks_of_train_py_end_where_two_of_compvis_tread_do(case, tmp_path):
    def on_two_ranks(_, program: str, *overrides: str, **settings) -> None:
        program = ("import json, sys, latents.loader, train; from closed_forms import Replayed, in_order; "
                   "names, order = map(json.loads, sys.argv[1:3]); del sys.argv[1:3]; Replayed(names).replace(); "
                   "latents.loader._plan = in_order(order); train.main()")
        assert forked.Command("-c", program, json.dumps(NAMES), json.dumps(case["order"]), *overrides,
                              *(f"{key}={as_text(value)}" for key, value in settings.items()), ranks=2).wait() == 0

    model, ema, losses = train(tmp_path, case, NETWORK, {"name": "edm", "sigma_data": 0.5}, "edm", command=on_two_ranks)
    assert_same_training(case, model, ema, losses)
    net, noise, y = network_of(case, ema, **NETWORK), wave((2, 4, 8, 8), 2, 1.4), torch.tensor([3, 7])
    for name, guidance in (("unguided", None), ("guided", Guidance(1.5))):
        assert_same_sample(case, name, EDM().sample(net, noise, y, num_steps=18, guidance=guidance))


@cases("sit")
def test_train_py_ends_where_that_of_sit_does(case, tmp_path, replay, their_time, monkeypatch, fresh_accelerator):
    replay(case)
    monkeypatch.setitem(DiT_models, "DiT-B/2",
                        partial(DiT, block="dit", learn_sigma=True))  # SiT has channels that it never reads
    network = NETWORK | {"learn_sigma": True}
    model, ema, losses = train(tmp_path, case, network, {"name": "rf"}, "rf_uniform")
    assert_same_training(case, model, ema, losses)
    net, noise, y, n = network_of(case, ema, **network), wave((2, 4, 8, 8), 2,
                                                              1.4), torch.tensor([3, 7]), itertools.count()
    assert_same_sample(case, "euler", RF().sample(net, noise, y, num_steps=20))
    assert_same_sample(case, "euler_maruyama", RF().sample(
        net, noise, y, num_steps=20, solver="euler_maruyama",
        randn_like=lambda z: numbers("sde", next(n), z.numel(), "randn").view(z.shape).to(z.dtype)))


@cases("repa")
def test_train_py_ends_where_that_of_repa_does(case, tmp_path, replay, monkeypatch, fresh_accelerator):
    replay(case)
    monkeypatch.setattr(alignment, "load_teacher", lambda name, grid: Teacher(
        encoder := Encoder(), encoder, grid, 224, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))
    monkeypatch.setitem(alignment.PROJECTORS, "mlp", lambda width, out: begin(alignment.MLP(width, out, hidden=64)))
    if case["precision"] == "bf16":  # theirs brings the teacher's tokens to length 1 in bfloat16, ours in float32
        def cosine(a: Tensor, b: Tensor, dim: int, **_) -> Tensor:
            unit = partial(torch.nn.functional.normalize, dim=dim)
            return (unit(a) * unit(b.bfloat16())).sum(dim)

        monkeypatch.setattr(torch.nn.functional, "cosine_similarity", cosine)
    network = NETWORK | {"input_size": 32, "patch_size": 8}
    model, ema, losses = train(tmp_path, case, network, {"name": "rf"}, "rf_uniform", images=pictures(),
                               objective="alignment",
                               **{"objective.alignment.teacher": "encoder", "objective.alignment.blocks": [3]})
    assert_same_training(case, model, ema, losses)
    beside = load_file(checkpoints.latest(tmp_path / "run") / "training.safetensors")
    projector = {key.replace("projectors.0", "objective.projector"): values
                 for key, values in case["projector"].items()}
    assert deviation({key: beside[key] for key in projector}, projector) < BOUNDS[case["precision"]]["weights"]
    net, noise, y, n = network_of(case, ema, **network), wave((2, 4, 32, 32), 2,
                                                              1.4), torch.tensor([3, 7]), itertools.count()
    assert_same_sample(case, "euler", RF().sample(net, noise, y, num_steps=20))
    assert_same_sample(case, "euler_maruyama", RF().sample(
        net, noise, y, num_steps=20, solver="euler_maruyama",
        randn_like=lambda z: numbers("sde", next(n), z.numel(), "randn").view(z.shape).to(z.dtype)))


class SprintBlock(LightningBlock):
    """LightningDiT's block with the norms and the MLP of DiT's, as Sprint's is."""

    def __init__(self, hidden_size: int, num_heads: int, mlp_ratio: float, grid_size: int, qk_norm: bool):
        super().__init__(hidden_size, num_heads, mlp_ratio, grid_size, qk_norm)
        plain = DiTBlock(hidden_size, num_heads, mlp_ratio, grid_size)
        self.norm1, self.norm2, self.mlp = plain.norm1, plain.norm2, plain.mlp


@cases("sprint")
def test_train_py_ends_where_that_of_sprint_does(case, tmp_path, replay, monkeypatch, fresh_accelerator):
    replay(case)
    monkeypatch.setitem(BLOCKS, "lightning", BlockKind(SprintBlock))
    monkeypatch.setattr(dit, "sincos_2d", lambda dim,
                        grid_size: torch.zeros(1, grid_size**2, dim))  # positions are rotary alone
    network = NETWORK | {"block": "lightning", "qk_norm": True, "fusion": True, "selection": "grid"}
    model, ema, losses = train(tmp_path, case, network | {"routes": case["routes"]}, {"name": "rf"}, "rf",
                               model="sprint",
                               **{"model.backbone_type": "LightningDiT-B/2", "model.qk_norm": True})
    assert_same_training(case, model, ema, losses)
    net, noise, y, n = network_of(case, ema, **network), wave((2, 4, 8, 8), 2,
                                                              1.4), torch.tensor([3, 7]), itertools.count()
    assert_same_sample(case, "euler", RF().sample(net, noise, y, num_steps=20))
    assert_same_sample(case, "path_drop", RF().sample(net, noise, y, num_steps=20, guidance=Guidance(1.5, gamma2=1)))
    assert_same_sample(case, "euler_maruyama", RF().sample(
        net, noise, y, num_steps=20, solver="euler_maruyama",
        randn_like=lambda z: numbers("sde", next(n), z.numel(), "randn").view(z.shape).to(z.dtype)))


@cases("tread_v1")
def test_train_py_ends_where_that_of_tread_nano_does(case, tmp_path, replay, fresh_accelerator):
    replay(case)
    model, ema, losses = train(tmp_path, case, NETWORK, {"name": "edm", "sigma_data": 0.5}, "edm", objective="version1")
    assert_same_training(case, model, ema, losses)
    net, noise, y = network_of(case, ema, **NETWORK), wave((2, 4, 8, 8), 2, 1.4), torch.tensor([3, 7])
    for name, guidance in (("unguided", None), ("guided", Guidance(1.5))):
        assert_same_sample(case, name, EDM().sample(net, noise, y, num_steps=18, guidance=guidance))


@cases("lightning")
@pytest.mark.parametrize("faded", [False, True])
def test_train_py_ends_where_that_of_lightningdit_does(case, faded, tmp_path, replay, their_time, monkeypatch,
                                                       fresh_accelerator):
    replay(case)
    if not faded:  # ours is, where a velocity is shorter than 0.1
        exact = torch.nn.functional.cosine_similarity
        monkeypatch.setattr(torch.nn.functional, "cosine_similarity", lambda a, b, dim, eps: exact(a, b, dim=dim))
    case = case | {"steps": 1} if faded else case
    network = NETWORK | {"block": "lightning"}
    model, ema, losses = train(tmp_path, case, network, {"name": "rf"}, "rf_lightning",
                               **{"model.backbone_type": "LightningDiT-B/2"})
    if faded:
        assert 1e-3 < abs(losses[0] - case["loss"][0]) < 5e-2
        return
    assert_same_training(case, model, ema, losses)
    net, noise, y = network_of(case, ema, **network), wave((2, 4, 8, 8), 2, 1.4), torch.tensor([3, 7])
    for name, shift in (("euler", None), ("euler_shifted", 1 / 0.3)):
        assert_same_sample(case, name, RF().sample(net, noise, y, num_steps=20, shift=shift))
