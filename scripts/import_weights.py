"""Converts weights of other code to a checkpoint folder, which every command then reads. Nothing is unpickled.

configs/import_weights.yaml shows the commands, docs/interop.md lists the formats, and weights/foreign.py reads them.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from runtime import files
from runtime.command import command
from runtime.schema import Classes, Location, Settings, Size, Text, as_recorded, typed
from weights import checkpoints
from weights.foreign import FormatName, find_file, how_to_import, read
from weights.reading import check_finite, read_tensors
from weights.records import diffusion_keywords

SETTINGS = ("weights", "num_heads", "num_classes", "autoencoder")  # that formats may need


class ImportSettings(Settings):
    """configs/import_weights.yaml."""

    source: Location
    out: Location
    format: FormatName | None
    weights: Text | None
    num_heads: Size | None
    num_classes: Classes | None
    autoencoder: Location | None
    diffusion: dict[str, Any] | None


@command("import_weights", ImportSettings)
def main(cfg: ImportSettings) -> None:
    """Writes `source` to `out` as a checkpoint. Raises ValueError for weights that the format does not have."""
    out = Path(cfg.out)
    if cfg.format is None:
        raise ValueError(how_to_import(Path(cfg.source)))
    if (cfg.format == "ours") != bool(cfg.diffusion):
        raise ValueError("diffusion= is for format=ours, which needs it: set diffusion= as its run had it, or leave it "
                         "out for another format.")
    if out.exists():
        raise ValueError(f"out={out} exists: name another folder, or remove it.")
    diffusion, file = cfg.diffusion and diffusion_keywords(cfg.diffusion), find_file(Path(cfg.source))
    content = read_tensors(file)
    try:
        with as_recorded(file):
            foreign = read(file, content, cfg.format, **{name: getattr(cfg, name) for name in SETTINGS})
            if foreign.missing:
                raise ValueError("; and ".join(foreign.missing.values()))
    except ValueError as error:
        raise ValueError(f"{file} cannot be imported with format={cfg.format}: {str(error).rstrip('.')}.") from error
    check_finite(foreign.state, file)
    state, network = {key: value.float() for key, value in foreign.state.items()}, foreign.network
    record = {"file": file.name, "sha256": files.sha256(file), "format": cfg.format, "weights": foreign.weights or None,
              "num_heads": network["num_heads"], "dropped": foreign.dropped}
    meta = {"step": None, "network": network, "diffusion": foreign.form.diffusion or diffusion,
            "null_label": network.get("null_label", True), "imported": record, "data": foreign.data}
    needed = sum(4 * tensor.numel() for tensor in state.values())
    files.require_room(out, needed, "make room, or set out= to a folder on another disk.")
    checkpoints.save(out, {"ema": state}, meta)
    print(f"{file}: {foreign.describe(cfg.format)}. {out} takes {needed / 1e6:,.1f} MB. next: python sample.py "
          f"{typed('checkpoint', out)}{' autoencoder=…' * (foreign.data['autoencoder'] == 'none')}")


if __name__ == "__main__":
    main()
