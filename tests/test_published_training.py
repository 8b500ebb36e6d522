"""Sixty steps of our train.py against sixty of the published trainers' own loops (tests/published/train_*.json).

Theirs ran on a CPU, checkpoint included, on the weights, the data and the random numbers of closed_forms.py; each JSON
names repository and commit, and what a CPU lacked and was replaced. Ours runs by its settings from a latent folder.
"""

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from closed_forms import Encoder, Replayed, begin, checksum, data_set, in_order, numbers, pictures, spread_of, values_of
from conftest import run_command
from safetensors.torch import load_file
from test_data import write_folder
from test_published_parity import published, wave
from torch import Tensor
from torch.nn import functional as F

import dit
import latents.loader
from blocks import BLOCKS
from blocks.transformer import DiTBlock, LightningBlock
from dit import DiT, DiT_models
from edm import EDM
from examples.own_teacher import prepared
from guidance import Guidance
from objectives import alignment
from objectives.teachers import Teacher
from rf import RF
from runtime.schema import as_text
from train import main
from weights import checkpoints
from weights.records import build_network

NAMES = {"train_step": "labels", "draw_sigma": "level", "draw_t": "level", "draw": "noise", "get_mask": "mask",
         "loss": "noise", "forward": "mask", "to_latent": "moments", "draw_dropped": "path"}


# ---- The published trainers ------------------------------------------------------------------------------------------


@dataclass
class Trainer:
    """What makes ours a published trainer: the diffusion, the network, settings, and what is replaced in our code."""

    diffusion: Mapping
    config: str
    network: Mapping = field(default_factory=dict)
    settings: Mapping = field(default_factory=dict)
    replace: Callable[[pytest.MonkeyPatch, dict], None] = lambda patch, case: None


def with_their_time(patch: pytest.MonkeyPatch, case: dict) -> None:
    """Has networks see time as SiT's do, whose data lie at t = 1 and whose velocity leads to them."""
    velocity, draw_t = RF.velocity, RF.draw_t
    patch.setattr(RF, "velocity", lambda self, net, z, t, y, routes=(): -velocity(self, net, z, 1 - t, y, routes))
    patch.setattr(RF, "draw_t", lambda self, x: 1 - draw_t(self, x))


def as_sit(patch: pytest.MonkeyPatch, case: dict) -> None:
    with_their_time(patch, case)
    # SiT has channels that it never reads.
    patch.setitem(DiT_models, "DiT-B/2", partial(DiT, block="dit", learn_sigma=True))


def with_their_projector(patch: pytest.MonkeyPatch, case: dict) -> None:
    projector = alignment.projector
    patch.setattr(alignment, "projector", lambda width, out: begin(projector(width, out, hidden=64)))
    if case["precision"] == "bf16":  # theirs brings the teacher's tokens to length 1 in bfloat16, ours in float32
        patch.setattr(F, "cosine_similarity", lambda a, b, dim, **_: (
            F.normalize(a, dim=dim) * F.normalize(b.bfloat16(), dim=dim)).sum(dim))


class SprintBlock(LightningBlock):
    """LightningDiT's block with the norms and the MLP of DiT's, as Sprint's is."""

    final_norm = staticmethod(DiTBlock.final_norm)

    def __init__(self, hidden_size: int, num_heads: int, mlp_ratio: float, grid_size: int, qk_norm: bool):
        super().__init__(hidden_size, num_heads, mlp_ratio, grid_size, qk_norm)
        plain = DiTBlock(hidden_size, num_heads, mlp_ratio, grid_size)
        self.norm1, self.norm2, self.mlp = plain.norm1, plain.norm2, plain.mlp


def with_sprints_block(patch: pytest.MonkeyPatch, case: dict) -> None:
    patch.setitem(BLOCKS, "lightning", SprintBlock)
    # Positions are rotary alone.
    patch.setattr(dit, "sincos_2d", lambda dim, grid_size: torch.zeros(1, grid_size**2, dim))


def with_a_steep_cosine(patch: pytest.MonkeyPatch, case: dict) -> None:
    """Ours fades where a velocity is shorter than 0.1."""
    with_their_time(patch, case)
    exact = F.cosine_similarity
    patch.setattr(F, "cosine_similarity", lambda a, b, dim, eps: exact(a, b, dim=dim))


NETWORK = dict(input_size=8, patch_size=2, in_channels=4, hidden_size=48, depth=8, num_heads=4, num_classes=10)
EDM_, RF_ = {"name": "edm", "sigma_data": 0.5}, {"name": "rf"}
TRAINERS = {
    "tread": Trainer(EDM_, "edm"),
    "tread_v1": Trainer(EDM_, "edm", settings={"objective": "version1"}),
    "sit": Trainer(RF_, "rf_uniform", {"learn_sigma": True}, replace=as_sit),
    "repa": Trainer(RF_, "rf_uniform", {"input_size": 32, "patch_size": 8}, {
        "objective": "alignment", "objective.block": 3}, with_their_projector),
    "sprint": Trainer(RF_, "rf", {"block": "lightning", "qk_norm": True, "fusion": True, "selection": "grid"}, {
        "model": "sprint", "model.backbone_type": "LightningDiT-B/2", "model.qk_norm": True}, with_sprints_block),
    "lightning": Trainer(RF_, "rf_lightning", {"block": "lightning"}, {"model.backbone_type": "LightningDiT-B/2"},
                         with_a_steep_cosine),
}


def train(home: Path, case: dict, trainer: Trainer, command: Callable = run_command) -> tuple[dict, dict, list[float]]:
    """Runs train.py on the weights and the data of both sides; returns its weights, their average, and the losses."""
    network = NETWORK | trainer.network
    side = network["input_size"]
    x, y = data_set(shape=(4, side, side))
    stored = torch.cat([x, spread_of(x)], dim=1) if case.get("kind") == "moments" else x
    teacher = {"teacher": {"shape": [16, 24], "dtype": "float32"}} if "projector" in case else {}
    write_folder(home / "data", stored.half().numpy(), y.numpy(), kind=case.get("kind", "sample"), num_classes=10,
                 autoencoder="none", scale=1.0, shard=len(x), arrays=teacher)
    if teacher:
        encoder = Encoder()
        tokens = Teacher(lambda images: encoder(prepared(images, 224)), 4)(pictures())
        np.save(home / "data" / "teacher-00000.npy", tokens.numpy())
    recorded = network | ({"routes": case["routes"]} if network.get("fusion") else {})
    state = begin(build_network(recorded)).state_dict()
    data = {"autoencoder": "none", "convention": {"scale": 1.0}, "class_names": None, "display_names": None,
            "classes": None}
    meta = {"step": 1, "network": recorded, "diffusion": trainer.diffusion, "null_label": True, "data": data}
    checkpoints.save(checkpoints.step_folder(home / "start", 1), {"ema": state, "model": state}, meta)
    routes = ",".join("{" + ",".join(f"{key}: {value}" for key, value in route.items()) + "}"
                      for route in case["routes"])
    command(
        main, "train.py", f"model.routes=[{routes}]", f"diffusion={trainer.config}", run_dir=home / "run",
        **{"model": "dit", "data.path": home / "data", "init_from": home / "start", "steps": case["steps"],
           "log.every": 1, "compile": False, "batch_size": case["batch_size"], "precision": case["precision"],
           "samples.every": 0, "log.trackers": [], "ema.decay": case["ema_decay"], "cpu": True, "data.channels": 4,
           "data.input_size": side, "data.num_classes": 10,
           **{f"model.{key}": network[key] for key in ("hidden_size", "depth", "num_heads", "patch_size")},
           **{f"optimizer.{key}": value for key, value in case["optimizer"].items()}, **trainer.settings})
    end = checkpoints.latest(home / "run")
    losses = [json.loads(line)["loss"] for line in (home / "run" / "metrics.jsonl").read_text().splitlines()]
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


# ---- The comparisons -------------------------------------------------------------------------------------------------

# bfloat16 has 8 bits, and processors add in other orders: the first steps tell whether the same is cast.
BOUNDS = {"fp32": {"first": 1e-6, "loss": 5e-6, "weights": 1e-4, "ema": 1e-4},
          "lightning": {"first": 1e-6, "loss": 1e-3, "weights": 1e-3, "ema": 1e-3},  # a cosine is steep near velocity 0
          "bf16": {"first": 3e-4, "loss": 1e-2, "weights": 2e-2, "ema": 1e-2}}


def assert_same_training(case: dict, model: dict, ema: dict, losses: list[float]) -> None:
    assert len(losses) == case["steps"] >= 60 and case["moved"] > 0.4
    apart = np.abs(np.subtract(losses, case["loss"]))
    found = {"first": apart[:3].max(), "loss": apart.max(), "weights": deviation(model, case["model"]),
             "ema": deviation(ema, case["ema"])}
    bounds = BOUNDS[case.get("bounds", case["precision"])]
    assert all(found[part] <= bound for part, bound in bounds.items()), (case["name"], found)


def assert_same_samples(case: dict, trainer: Trainer, ema: dict) -> None:
    network = NETWORK | trainer.network
    net = build_network(network | {"routes": case["routes"]})
    net.load_state_dict(ema)
    side, calls = network["input_size"], itertools.count()
    how = {"unguided": dict(num_steps=18), "guided": dict(num_steps=18, guidance=Guidance(1.5)),
           "euler": dict(num_steps=20), "euler_shifted": dict(num_steps=20, shift=1 / 0.3),
           "path_drop": dict(num_steps=20, guidance=Guidance(1.5, gamma2=1)),
           "euler_maruyama": dict(num_steps=20, solver="euler_maruyama", randn_like=lambda z: numbers(
               "sde", next(calls), z.numel(), "randn").view(z.shape).to(z.dtype))}
    diffusion = EDM() if trainer.diffusion is EDM_ else RF()
    close = 5e-2 if case["precision"] == "bf16" else 1e-4
    for name, (total, *values) in case["samples"].items():
        ours = diffusion.sample(net.eval(), wave((2, 4, side, side), 2, 1.4), torch.tensor([3, 7]), **how[name])
        assert ours.flatten()[:: ours.numel() // len(values)].tolist() == pytest.approx(values, abs=close), name
        assert checksum(ours) == pytest.approx(total, abs=close * ours.numel() ** 0.5), name


@pytest.fixture
def replay(monkeypatch, fresh_accelerator):
    """Makes the random numbers, the order of the data and the code those of a case."""
    def by(case: dict, trainer: Trainer) -> None:
        Replayed(NAMES).replace(monkeypatch.setattr)
        monkeypatch.setattr(latents.loader, "_plan", in_order(case["order"]))
        trainer.replace(monkeypatch, case)
    return by


@pytest.mark.parametrize(("trainer", "case"), [
    pytest.param(trainer, case, id=f"{name}, {case['name']}")
    for name, trainer in TRAINERS.items() for case in published(f"train_{name}")["cases"]])
def test_train_py_ends_where_the_published_trainer_does(trainer, case, tmp_path, replay):
    replay(case, trainer)
    model, ema, losses = train(tmp_path, case, trainer)
    assert_same_training(case, model, ema, losses)
    if "projector" in case:
        saved = load_file(checkpoints.latest(tmp_path / "run") / "training.safetensors")
        theirs = {key.replace("projectors.0", "objective.projector"): values
                  for key, values in case["projector"].items()}
        assert deviation({key: saved[key] for key in theirs}, theirs) < BOUNDS[case["precision"]]["weights"]
    assert_same_samples(case, trainer, ema)


def test_two_ranks_of_train_py_end_where_two_of_compvis_tread_do(tmp_path):
    [case] = published("train_tread_two_ranks")["cases"]

    def on_two_ranks(_, program: str, *overrides: str, **settings) -> None:
        program = ("import json, sys, latents.loader, train; from closed_forms import Replayed, in_order; "
                   "names, order = map(json.loads, sys.argv[1:3]); del sys.argv[1:3]; Replayed(names).replace(); "
                   "latents.loader._plan = in_order(order); train.main()")
        assert forked.run("-c", program, json.dumps(NAMES), json.dumps(case["order"]), *overrides,
                              *(f"{key}={as_text(value)}" for key, value in settings.items()), ranks=2).returncode == 0

    model, ema, losses = train(tmp_path, case, TRAINERS["tread"], command=on_two_ranks)
    assert_same_training(case, model, ema, losses)
    assert_same_samples(case, TRAINERS["tread"], ema)


def test_the_cosine_term_of_ours_fades_where_that_of_lightningdit_is_steep(tmp_path, replay):
    [case] = published("train_lightning")["cases"]
    faded = replace(TRAINERS["lightning"], replace=with_their_time)
    replay(case, faded)
    _, _, losses = train(tmp_path, case | {"steps": 1}, faded)
    assert abs(losses[0] - case["loss"][0]) == pytest.approx(0.02, abs=0.005)   # as on docs/differences.md
    assert case["loss"][0] == pytest.approx(2.2, abs=0.05)
