"""Adds an adapter (LoRA) to the weights that it was trained on: a checkpoint folder that needs neither base nor PEFT.

    python scripts/merge_lora.py checkpoint=runs/mine out=merged/mine
    python sample.py checkpoint=merged/mine

The average and the weights behind it are both merged. train.py, sample.py and fid.py take the folder as any other.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from runtime.command import command
from runtime.schema import Location, Settings
from weights import checkpoint as checkpoints
from weights.loading import load_trained


class MergeSettings(Settings):
    """configs/merge_lora.yaml."""

    checkpoint: Location | None
    out: Location | None


@command("merge_lora", MergeSettings)
def main(cfg: MergeSettings) -> None:
    if cfg.checkpoint is None or cfg.out is None:
        raise ValueError("Say what to merge, and where to: checkpoint=runs/<name> out=<folder>.")
    out = Path(cfg.out)
    if out.exists():
        raise ValueError(f"out={out} is there already: name a folder that is not, or move it away.")
    place = out.resolve().parent
    if place.name == "checkpoints" and checkpoints.all_steps(place.parent):
        raise ValueError(f"out={out} is among a run's checkpoints, from which training resumes and which it deletes: "
                         f"name another folder, as merged/{out.name}.")
    folder = load_trained(cfg.checkpoint).folder
    meta = checkpoints.read_meta(folder) if folder else {}
    if not meta.get("lora"):
        raise ValueError(f"checkpoint={cfg.checkpoint} is no adapter: its weights are whole, and nothing is to be "
                         f"merged.")
    nets = {weights: load_trained(folder, weights).net for weights in ("ema", "model")}
    merged = {key: value for key, value in meta.items() if key not in ("lora", "files")} | {"merged": meta["lora"]}
    checkpoints.save(out, {weights: net.state_dict() for weights, net in nets.items()}, merged)
    print(f"{folder} on {meta['lora']['base']}: {out}. Next: python sample.py checkpoint={out}")


if __name__ == "__main__":
    main()
