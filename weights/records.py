"""Plain records, as meta.json and configs have them -> network, diffusion, objective."""

from dataclasses import asdict
from typing import Annotated, Literal

from pydantic import Field

from blocks import BLOCKS
from dit import DiT
from edm import DDPM, EDM
from rf import RF
from routing_module import Route, Router
from runtime.schema import Classes, Depth, NotNegative, Number, Record, Settings, Share, Size, Whole, one_of, read
from weights import lora as adapters

DIFFUSIONS = {"edm": EDM, "ddpm": DDPM, "rf": RF}
ROUTER_DEFAULTS = asdict(Router())      # what a record without them means


Level = Annotated[float, Field(ge=1e-6, le=1e6)]      # a noise level: squares and roots of it stay in float32

# ---- records -> network, diffusion ----------------------------------------------------------------------------------


class RouteSettings(Settings):
    """One of `routes`, as a config and a checkpoint's record have it."""

    start_layer_idx: int
    end_layer_idx: int
    selection_ratio: Annotated[float, Field(ge=0, lt=1)]
    x_T: Number = 0.0
    x_D_last: Number = 1.0


class NetworkRecord(Settings):
    """The keywords of a DiT, as a checkpoint records them; the last nine have not always been there.

    The last three are the router's, and are left out where tokens are chosen at random.
    """

    input_size: Size
    patch_size: Size
    in_channels: Size
    hidden_size: Size
    depth: Depth
    num_heads: Size
    num_classes: Classes
    mlp_ratio: Annotated[float, Field(gt=0, le=100)] = 4.0
    learn_sigma: bool = False
    init: Literal["adaln_zero", "xavier"] = "adaln_zero"
    routes: list[RouteSettings] = []
    block: one_of(BLOCKS) = "dit"
    qk_norm: bool = False
    selection: Literal["random", "l1"] = "random"
    l1_reg: Share = 0.5
    inverse: bool = False


class EDMRecord(Settings):
    name: Literal["edm"]
    P_mean: Annotated[float, Field(ge=-20, le=20)] = -1.2
    P_std: Annotated[float, Field(ge=0, le=20)] = 1.2
    sigma_data: Level = 0.5


class DDPMRecord(Settings):
    name: Literal["ddpm"]
    num_timesteps: Annotated[int, Field(ge=1, le=1_000_000)] = 1000
    beta_min: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    beta_max: Annotated[float, Field(gt=0, lt=1)] = 0.02


class RFRecord(Settings):
    name: Literal["rf"]
    timestep_sampling: Literal["logit_normal", "uniform"] = "logit_normal"
    cosine_weight: NotNegative = 0.0


DIFFUSION_RECORDS = {"edm": EDMRecord, "ddpm": DDPMRecord, "rf": RFRecord}


class DataRecord(Record):
    autoencoder: str
    class_names: list[str] | None
    display_names: list[str] | None = None
    convention: dict | None = None      # how its latents were made; of the first versions' runs as the autoencoder's
    classes: Annotated[list[Whole], Field(min_length=1)] | None = None      # that have images; None: all


class ParentRecord(Record):
    """Which weights a run began with."""

    step: Whole | None = None
    weights_sha256: str | None = None
    diffusion_name: str | None = None


class CheckpointRecord(Record):
    """What meta.json must say for a checkpoint to be sampled."""

    network: dict
    diffusion: dict
    data: DataRecord
    step: Whole | None
    parent: ParentRecord | None = None
    lora: adapters.LoRARecord | None = None      # of a checkpoint that holds an adapter alone
    weights: str | None = None                   # of an export, which they are; a checkpoint's file has it as its name
    published: dict | None = None                # fid.Published: the scores that the run's experiment is to reach


def build_network(network: dict) -> DiT:
    """Builds a DiT from plain keywords, `routes` a list of dicts; raises ValueError for keywords that make none."""
    keywords = read(NetworkRecord, network, "A network's record: ").model_dump()
    router = Router(**{key: keywords.pop(key) for key in ROUTER_DEFAULTS})
    return DiT(**{**keywords, "routes": [Route(**route) for route in keywords["routes"]]}, router=router)


def with_objective(diffusion: dict, objective: dict) -> tuple[dict, dict]:
    """Separates what was minimised from a diffusion that names it, as version 1's loss once was a part of EDM.

    Raises ValueError for a weight of a term that the loss does not have.
    """
    if diffusion.get("name") != "edm":
        return diffusion, objective
    kept, mae_weight = diffusion.get("routed_loss", "all"), diffusion.get("mae_weight", 0.0)
    if kept not in ("all", "kept") or (kept == "all" and mae_weight):
        raise ValueError(f"diffusion.routed_loss={kept} diffusion.mae_weight={mae_weight}: routed_loss is all or kept, "
                         f"and kept alone has the term that mae_weight weighs. Set objective=version1.")
    diffusion = {key: value for key, value in diffusion.items() if key not in ("routed_loss", "mae_weight")}
    return diffusion, {"version1": {"mae_weight": mae_weight}, **objective} if kept == "kept" else objective


def build_diffusion(diffusion: dict) -> EDM | RF:
    """Builds a diffusion from its name and keywords; raises ValueError for those that make none."""
    diffusion, _ = with_objective(diffusion, {})      # of a record
    name = diffusion.get("name")
    if name not in [*DIFFUSIONS]:      # which may be a list, say
        raise ValueError(f"There is no diffusion {name!r}; choose one of {', '.join(DIFFUSIONS)}.")
    keywords = read(DIFFUSION_RECORDS[name], diffusion, f"diffusion={name}: ").model_dump(exclude={"name"})
    return DIFFUSIONS[name](**keywords)
