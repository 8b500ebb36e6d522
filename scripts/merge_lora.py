"""Adds an adapter (LoRA) to the weights that it was trained on, in a checkpoint folder that needs no base and no PEFT.

Both the average and the trained weights are merged. Every command that accepts a checkpoint accepts the folder.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from runtime.command import command
from runtime.schema import Location, Settings, as_argument
from weights import checkpoint as checkpoints
from weights.loading import find_checkpoint, load_trained


class MergeSettings(Settings):
    """configs/merge_lora.yaml."""

    checkpoint: Location
    out: Location


@command("merge_lora", MergeSettings)
def main(cfg: MergeSettings) -> None:
    out = Path(cfg.out)
    if out.exists():
        raise ValueError(f"out={out} is there already: name another folder.")
    checkpoint = find_checkpoint(cfg.checkpoint)
    folder, meta = checkpoint.folder, checkpoint.meta or {}
    if not meta.get("lora"):
        raise ValueError(f"checkpoint={cfg.checkpoint} holds complete weights and no adapter to merge.")
    held = {Path(file).stem for file in meta["files"]} - {"training"}
    nets = {weights: load_trained(folder, weights).net for weights in sorted(held)}
    merged = {key: value for key, value in meta.items() if key not in ("lora", "files")} | {"merged": meta["lora"]}
    checkpoints.save(out, {weights: net.state_dict() for weights, net in nets.items()}, merged)
    print(f"{folder} on {meta['lora']['base']}: {out}. Next: python sample.py {as_argument('checkpoint', out)}")


if __name__ == "__main__":
    main()
