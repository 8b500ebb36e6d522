"""Writes a trained network as a folder for diffusers, a .pt for facebookresearch/DiT, or a folder for a hub.

`sample.py checkpoint=` reads each of them. Options: configs/export.yaml; commands and formats: docs/interop.md.
"""

import json
import math
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from latents.writer import write_json
from runtime.command import command
from runtime.device import DTYPES
from runtime.files import atomic_write, is_inside, sha256
from runtime.schema import Location, Text, as_argument, one_of, refuse
from sampling.options import WeightsSettings
from scoring.results import read_results
from scripts.presentation import table
from weights import autoencoders
from weights import checkpoint as checkpoints
from weights.loading import EXPORTED, Trained, fit
from weights.others import to_diffusers
from weights.records import build_diffusion

# What samples, with torch and diffusers alone.
SCIENCE = ("routing_module.py", "guidance.py", "edm.py", "rf.py", "autoencoder.py", "sampling/checks.py")
DIFFUSION_TITLES = {"edm": "EDM", "ddpm": "DDPM", "rf": "flow matching", "rf_clean": "flow matching"}


class ExportSettings(WeightsSettings):
    """configs/export.yaml."""

    checkpoint: Location
    to: one_of(["diffusers", "dit", "hub"])
    out: Location | None
    overwrite: bool
    dtype: one_of(list(DTYPES))
    repo: Text | None
    license: Text
    upload: bool
    private: bool


def stored(tensors: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Returns tensors in the precision of the file; raises ValueError if it cannot hold a value."""
    held = {name: value.to(DTYPES[dtype]).clone(memory_format=torch.contiguous_format)
            for name, value in tensors.items()}
    if not all(value.isfinite().all() for value in held.values()):
        raise ValueError(f"dtype={dtype} cannot hold these weights, as some are above 65,504: set dtype=bf16.")
    return held


# ---- to=diffusers ---------------------------------------------------------------------------------------------------


def check_plain(trained: Trained, to: str) -> None:
    """Raises ValueError for a network that is not the DiT of facebookresearch/DiT and diffusers."""
    plain = {"block": "dit", "qk_norm": False, "fusion": False}
    plain |= {"mlp_ratio": 4, "null_label": True} if to == "diffusers" else {}
    network = trained.recorded["network"]
    if other := [f"{key}={network[key]}" for key, usual in plain.items() if network.get(key, usual) != usual]:
        raise ValueError(f"to={to} holds DiT's own blocks and weights, and this network has {', '.join(other)}: to=hub "
                         f"accepts any.")


def without_head(trained: Trained) -> Trained:
    """Returns the network without the head of guidance=internal, if it has one, which no other code reads."""
    network = dict(trained.recorded["network"])
    if network.pop("head_block", None) is None:
        return trained
    print("The head of guidance=internal is left out: to=hub keeps it.")
    state = {key: value for key, value in trained.net.state_dict().items() if not key.startswith("internal_head.")}
    net = fit(state, network, trained.checkpoint.file).eval()
    net.null_label = trained.net.null_label  # False if its row exists but was never trained
    return replace(trained, net=net, recorded={**trained.recorded, "network": network})


def write_diffusers(trained: Trained, folder: Path, dtype: str) -> dict:
    """Writes a folder that diffusers alone can load and sample; returns meta.json's entries about decoding."""
    net, network = trained.net, trained.recorded["network"]
    if autoencoders.runs_code(trained.autoencoder):
        raise ValueError(f"autoencoder={trained.autoencoder} is code of your own, which the folder cannot hold: name "
                         f"one of diffusers' with autoencoder=.")
    decoder = autoencoders.load_decoder(trained.autoencoder, (net.in_channels, net.input_size, net.input_size),
                                        trained.convention)
    vae = getattr(decoder, "vae", None)
    (folder / "transformer").mkdir(parents=True)
    tensors = to_diffusers(net.state_dict(), len(net.blocks))
    save_file(stored(tensors, dtype), folder / EXPORTED[1], metadata={"format": "pt"})
    write_json(folder / "transformer" / "config.json", {
        "_class_name": "DiTTransformer", "num_attention_heads": network["num_heads"],
        "attention_head_dim": network["hidden_size"] // network["num_heads"], "num_layers": len(net.blocks),
        "in_channels": net.in_channels, "out_channels": net.out_channels, "sample_size": net.input_size,
        "patch_size": net.patch_size, "num_embeds_ada_norm": net.num_classes,
    })
    if vae is not None:
        vae.save_pretrained(folder / "vae")
    write_json(folder / "model_index.json", {
        "_class_name": ["pipeline", "LatentDiTPipeline"], "transformer": ["dit_transformer", "DiTTransformer"],
        "vae": [None, None] if vae is None else ["diffusers", type(vae).__name__],
        "diffusion": trained.recorded["diffusion"], "convention": decoder.convention.record(),
        "class_names": trained.class_names, "null_label": net.null_label,
        # What stands in meta.json alone, so that it outlasts `save_pretrained`.
        "record": {"step": trained.step, "weights": trained.weights, "routes": network.get("routes", []),
                   "published": trained.recorded.get("published"), "display_names": trained.display_names,
                   "classes": classes_of(trained)},
    })
    shutil.copy(ROOT / "scripts/export/dit_transformer.py", folder / "transformer")
    shutil.copy(ROOT / "scripts/export/pipeline.py", folder)
    shutil.copy(ROOT / "LICENSE.txt", folder / "LICENSE-code.txt")
    for name in SCIENCE:
        (folder / Path(name).name).write_text(as_part(ROOT / name), encoding="utf-8")
    if vae is None or trained.autoencoder in autoencoders.HUB_NAMES:
        return {}
    return {"autoencoder": "vae", "convention": decoder.convention.record()}  # of this folder, wherever it is copied to


def as_part(file: Path) -> str:
    """Returns a module's text as it stands in a package with the others, without its entry."""
    text = file.read_text(encoding="utf-8").split('\n\nif __name__ == "__main__":')[0].rstrip() + "\n"
    modules = "|".join(Path(name).stem for name in SCIENCE)
    return re.sub(rf"^from ({modules}) import", r"from .\1 import", text, flags=re.M)


# ---- to=dit ---------------------------------------------------------------------------------------------------------


def write_dit(trained: Trained, path: Path, dtype: str) -> None:
    with atomic_write(path) as partial:
        torch.save(stored(trained.net.state_dict(), dtype), partial)


def command_to_sample(trained: Trained, out: Path) -> str:
    """Returns the command that samples a bare state dict here, and the settings that the command cannot express."""
    recorded = dict(trained.recorded["diffusion"])
    name, heads = recorded.pop("name"), trained.recorded["network"]["num_heads"]
    usual = vars(build_diffusion({"name": name}))
    lost = [f"{key}={value}" for key, value in recorded.items() if usual.get(key, value) != value]
    if trained.convention not in (None, autoencoders.own_convention(trained.autoencoder)):
        convention = ", ".join(f"{key}={value}" for key, value in trained.convention.record().items())
        lost.append(f"the convention of its latents ({convention}; the autoencoder's own is used)")
    if trained.recorded["network"].get("null_label") is False:
        heads = f"{heads} num_classes={trained.net.num_classes}"
    elif not trained.net.null_label:
        lost.append("that its null label was never trained (do not use guidance by the label)")
    own = f"\nThe command cannot express {', '.join(lost)}: keep the run to sample exactly as it does." if lost else ""
    return (f"The file holds only tensors (docs/interop.md). Here: python sample.py {as_argument('checkpoint', out)} "
            f"diffusion_name={name} num_heads={heads} {as_argument('autoencoder', trained.autoencoder)}{own}")


# ---- to=hub ---------------------------------------------------------------------------------------------------------


def scores_of(trained: Trained) -> list[dict]:
    """Reads the rows of a run's results.jsonl that are of these weights, without this machine's paths.

    A link out of the run is not followed. Training's rows have no hash, and training drops them where it goes back.
    """
    run, digest, wanted = trained.checkpoint.run, trained.checkpoint.sha256, (trained.step, trained.weights)
    if not run or not is_inside(run / "results.jsonl", run):
        return []
    return [without_paths(row) for row in read_results(run / "results.jsonl")
            for source in [row["source"]]
            if (source.get("step"), source.get("weights")) == wanted
            and (source.get("in_training") or source.get("weights_sha256") == digest)]


def without_paths(value: Any) -> Any:
    """Returns a record in which absolute paths are reduced to names, as the folders are those of this machine."""
    if isinstance(value, dict):
        return {key: without_paths(part) for key, part in value.items()}
    if isinstance(value, list):
        return [without_paths(part) for part in value]
    is_path = isinstance(value, str) and (value.startswith(("/", "~")) or PureWindowsPath(value).is_absolute())
    return PureWindowsPath(value).name if is_path else value


def find_grid(trained: Trained) -> Path | None:
    """Finds the grid of these weights, that of sample.py or that of training."""
    run = trained.checkpoint.run
    if not run:
        return None
    grid = run / "samples" / f"step-{trained.step or 0:08d}"
    names = [f"{grid}-{trained.weights}.png", *([f"{grid}.png"] if trained.weights == "ema" else [])]
    return next((Path(name) for name in names if Path(name).is_file() and is_inside(Path(name), run)), None)


def table_of_scores(rows: list[dict]) -> str:
    """Tabulates scores and what they depend on most; the complete record is in scores.jsonl."""
    lines = []
    for row in rows:
        source, reference = row["source"], Path(row["reference"]["path"]).name
        guidance, features = source.get("guidance"), row["extractor"]["name"]
        scale = f"scale {guidance.get('scale')}" if guidance else "none"
        lines += [[metric, f"{value:.6g}", f"{row['images']:,}", scale, source.get("num_steps"), features, reference]
                  for metric, value in row["metrics"].items() if value is not None]
    return table(["metric", "value", "images", "guidance", "steps", "features", "reference"], lines)


def model_card(trained: Trained, cfg: ExportSettings, name: str, rows: list[dict], has_grid: bool) -> str:
    """Returns a hub's README.md: facts about the weights, a grid, scores, commands to sample and score, the licence."""
    net, network, diffusion = trained.net, trained.recorded["network"], trained.recorded["diffusion"]
    routes = "; ".join(f"blocks {route['start_layer_idx']} to {route['end_layer_idx']} without "
                       f"{route['selection_ratio']:.0%} of the tokens" for route in network.get("routes", []))
    place = cfg.repo or name
    facts = {
        "Network": f"{network.get('block', 'dit')} blocks, {len(net.blocks)} × {network['hidden_size']}, "
                   f"{network['num_heads']} heads, patch {net.patch_size}; "
                   f"{sum(p.numel() for p in net.parameters()) / 1e6:.4g} M parameters",
        "Input": f"latents {net.in_channels} × {net.input_size} × {net.input_size} of autoencoder "
                 f"`{without_paths(trained.autoencoder)}`, {net.num_classes} classes",
        "Diffusion": ", ".join([DIFFUSION_TITLES[diffusion["name"]],
                                *(f"{key} {value}" for key, value in diffusion.items() if key != "name")]),
        "Route in training (TREAD, arXiv 2501.04765)": routes or "none",
        "Step, weights": f"{'unknown' if trained.step is None else f'{trained.step:,}'}, {trained.weights}",
    }
    scores = table_of_scores(rows) + "\n\n`scores.jsonl` records everything that each number depends on." if rows else (
        "These weights have not been scored.")
    grid = "![one row a class](grid.png)" if has_grid else "There is no grid yet: `python sample.py` makes one."
    head = yaml.safe_dump({"license": cfg.license, "pipeline_tag": "unconditional-image-generation",
                           "tags": ["diffusion", "dit", "tread", "class-conditional"]},
                          sort_keys=False, allow_unicode=True, width=math.inf)
    return f"""---
{head}---

# {name}

A class-conditional diffusion transformer.

{grid}

{table(["", ""], facts.items())}

## Scores

{scores}

## Use

The weights have the keys of a DiT state dict (`weights.safetensors`), and `meta.json` says how to build the network.
They are sampled by the code that trained them, a PyTorch reproduction of TREAD:

```
hf download {shlex.quote(place)} --local-dir {shlex.quote(name)}
python sample.py {as_argument('checkpoint', name)}
python fid.py {as_argument('checkpoint', name)} reference=<statistics>.npz num_samples=50000
```

## Licence

Licence of the weights: {cfg.license}.
"""


def write_hub(trained: Trained, folder: Path, cfg: ExportSettings, name: str) -> None:
    """Writes weights, record, card, grid and scores."""
    folder.mkdir(parents=True)
    save_file(stored(trained.net.state_dict(), cfg.dtype), folder / EXPORTED[0])
    rows, grid = scores_of(trained), find_grid(trained)
    if grid:
        shutil.copy(grid, folder / "grid.png")
    if rows:
        (folder / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "README.md").write_text(model_card(trained, cfg, name, rows, grid is not None), encoding="utf-8")


# ---- entry ----------------------------------------------------------------------------------------------------------


def check_settings(cfg: ExportSettings, cli_overrides: Mapping[str, str]) -> ExportSettings:
    """Completes `out`; raises ValueError for settings that contradict, or if `out` must not be replaced."""
    if cfg.to != "hub":
        refuse(cli_overrides, "repo", "license", "private", "upload", why="it is for to=hub")
    if cfg.upload and not cfg.repo:
        raise ValueError("upload=true needs repo=user/name.")
    if cfg.out is None and not cfg.repo:
        raise ValueError(f"to={cfg.to} needs out=<{'a file .pt' if cfg.to == 'dit' else 'a folder'}>.")
    out = Path(cfg.out or Path(cfg.repo).name)
    if (out.suffix == ".pt") != (cfg.to == "dit"):
        raise ValueError(f"out={out}: to=dit writes a file whose name ends in .pt, the other forms a folder.")
    if out.exists() and not (cfg.overwrite and (out.is_file() or is_export(out))):
        raise ValueError(f"out={out} exists already: choose another name. overwrite=true replaces a .pt, and a folder "
                         f"that an export has made.")
    return cfg.model_copy(update={"out": str(out)})


def is_export(folder: Path) -> bool:
    return (folder / "meta.json").is_file() and "exported" in checkpoints.read_meta(folder)


def write_folder(trained: Trained, out: Path, cfg: ExportSettings) -> None:
    """Writes a folder of either form and its record, all of it or nothing."""
    with atomic_write(out) as partial:
        decoding = {}
        if cfg.to == "diffusers":
            decoding = write_diffusers(trained, partial, cfg.dtype)
        else:
            write_hub(trained, partial, cfg, out.name)
        files = {file.relative_to(partial).as_posix(): {
            "bytes": file.stat().st_size, "sha256": sha256(file),
        } for file in sorted(partial.rglob("*.safetensors"))}
        checkpoints.write_meta(partial, {
            **trained.recorded, **({} if trained.net.null_label else {"null_label": False}),
            "step": trained.step, "weights": trained.weights, "exported": cfg.to, "files": files,
            "data": {"autoencoder": trained.autoencoder, "class_names": trained.class_names,
                     "display_names": trained.display_names, "classes": classes_of(trained),
                     "convention": trained.convention and trained.convention.record(), **decoding},
        })


def classes_of(trained: Trained) -> list[int] | None:
    """Returns the classes that had images in training; None for all."""
    return trained.classes if len(trained.classes) < trained.net.num_classes else None


@command("export", ExportSettings, check=check_settings)
def main(cfg: ExportSettings) -> None:
    out, trained = Path(cfg.out), cfg.load()
    if trained.inferred:
        print(trained.inferred)
    if trained.checkpoint.file.resolve().is_relative_to(out.resolve()):
        raise ValueError(f"out={out} holds the weights that are to be exported: name another.")
    if cfg.autoencoder is not None:
        autoencoders.samples_only(cfg.autoencoder)  # raises ValueError for a name without an autoencoder
    if cfg.to != "hub":
        trained = without_head(trained)
        check_plain(trained, cfg.to)
    if cfg.to == "dit":
        write_dit(trained, out, cfg.dtype)
        print(f"{out}\n{command_to_sample(trained, out)}")
        return
    if cfg.upload:
        from huggingface_hub import HfApi

        HfApi().create_repo(cfg.repo, private=cfg.private, exist_ok=True)  # before anything is written: it may refuse
    write_folder(trained, out, cfg)
    if cfg.to == "diffusers":
        written = json.dumps(str(out), ensure_ascii=False)
        print(f"{out}: diffusers.DiffusionPipeline.from_pretrained({written}, trust_remote_code=True)")
    elif cfg.upload:
        HfApi().upload_folder(repo_id=cfg.repo, folder_path=str(out), commit_message="Weights and model card")
        print(f"{out}: https://huggingface.co/{cfg.repo}")
    else:
        print(f"{out}: read README.md, then run this again with overwrite=true upload=true")


if __name__ == "__main__":
    main()
