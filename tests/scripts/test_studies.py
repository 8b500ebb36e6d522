"""The studies: each table of docs/results.md from the committed rows, and the commands of scripts/studies/*.sh."""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys

import pytest
from conftest import ROOT, change_record
from training_runs import write_run

import fid
from latents.folder import open_latents
from runtime.command import by_key, compose, parse_options
from runtime.files import read_rows
from runtime.schema import read
from scripts import compare
from scripts.studies import held_out
from training.settings import TrainSettings, check_settings

RESULTS = ROOT / "docs/results"


def runs_of(study: str, *variants: str, file: str = "study") -> list[dict]:
    """The committed runs of variants."""
    return [run for run in compare.read_file(RESULTS / f"study-{study}/{file}.jsonl") if run["variant"] in variants]


def scores(study: str, variant: str, step: int, images: int = 1000, metric: str = "fd_resnet56") -> list[float]:
    """A variant's scores in the committed rows, by seed."""
    wanted = {"metric": metric, "num_samples": str(images), "guidance": "unguided"}.items()
    return [score["value"] for run in runs_of(study, variant) for score in run["scores"]
            if score["step"] == step and wanted <= score["measure"].items()]


def at_flops(study: str, one: str, other: str, step: int) -> list[list[float]]:
    """Scores of two variants at the FLOPs of the second's step, the first interpolated."""
    runs = runs_of(study, one, other)
    place = next(score["flops"] for run in runs if run["variant"] == other for score in run["scores"]
                 if score["step"] == step)
    [found] = [each for measure, variants in compare.by_measure(runs).items() if ("num_samples", "1000") in measure
               for each in compare.compared(variants, (one, other)) if (each.axis, each.place) == ("flops", place)]
    return [*map(list, zip(*found.values.values(), strict=True))]


def losses(study: str, variant: str, step: int) -> str:
    rows = read_rows(RESULTS / f"study-{study}/losses.jsonl")
    return f"""{statistics.mean(row['losses']['emoji-held-out32']['0.5'] for row in rows if row['step'] == step
                                and row['run'].startswith(f'{variant}-seed')):.3f}"""


def flops(study: str, variant: str, dense: str, step: int) -> str:
    one, other = ({score["flops"] for run in runs_of(study, name) for score in run["scores"] if score["step"] == step}
                  for name in (variant, dense))
    return f"{statistics.mean(one) / statistics.mean(other):.2f}".replace("1.00", "1")


def number(value: float, digits: int = 1) -> str:
    text = f"{value:.{digits}f}"
    return f"{value:.2f}".replace("-0.00", "0.0").replace("-", "−") if text == "-0.0" else text.replace("-", "−")


def spread(values: list[float], digits: int = 1) -> str:
    return f"{number(statistics.mean(values), digits)} ± {number(statistics.stdev(values), digits)}"


def apart(dense: list[float], routed: list[float], digits: int = 1) -> str:
    differences = [second - first for first, second in zip(dense, routed, strict=True)]
    low, high = compare.interval(differences)
    return f"{number(statistics.mean(differences), digits)} ({number(low, digits)}, {number(high, digits)})"


def pair(study: str, step: int, *variants: str, images: int = 1000, digits: int = 1, **of: str) -> list[str]:
    """Dense, routed and their difference."""
    dense, routed = (scores(study, variant, step, images, **of) for variant in variants)
    return [spread(dense, digits), spread(routed, digits), apart(dense, routed, digits)]


def guided(study: str, file: str, variant: str, guidance: str) -> dict:
    """The score of a variant's last step by this guidance."""
    [run] = runs_of(study, variant, file=file)
    [score] = [score for score in run["scores"] if re.fullmatch(guidance, score["measure"]["guidance"])
               and score["step"] == max(each["step"] for each in run["scores"])]
    return score


def rows_of_the_page():
    """The rows of all tables of docs/results.md, from the committed rows."""
    pays, tuning, cifar = "when-it-pays", "fine-tuning", "cifar10-cpu"
    for label, variant, step in (
            ("emoji, 13 epochs (`long`)", "long", 1400), ("emoji, 65 epochs (`long`)", "long", 7000),
            ("5,000 of CIFAR-10, 9 epochs (`cifar5k`)", "cifar5k", 1400),
            ("5,000 of CIFAR-10, 45 epochs", "cifar5k", 7000), ("all CIFAR-10, 0.9 epochs (`cifar`)", "cifar", 1400)):
        yield [label, *pair(pays, step, f"{variant}-dit", f"{variant}-tread")]
    for epochs, images in ((2, 1000), (10, 1000), (20, 1000), (20, 5000)):
        yield [f"{epochs} epochs, {images:,} images", *pair("length", 1562 * epochs, "dit", "tread", images=images)]
    for label, study, *names in (("64 tokens, patch 4", "tokens", "dit-64", "tread-64"),
                                 ("256 tokens, patch 2", "tokens", "dit-256-2e-3", "tread-256"),
                                 ("width 64", "width", "dit-64", "tread-64"),
                                 ("width 128", "width", "dit-128", "tread-128"),
                                 ("width 256", "width", "dit-256-1e-3", "tread-256-2e-3")):
        yield [label, *pair(study, 3124, *names, images=2500), apart(*at_flops(study, *names, 3124))]
    for label, name in (("dense", "edm-dit"), ("TREAD, 2→8, ratio 0.5", "edm-tread")):
        yield [label, *(spread(scores(cifar, name, step), 2) for step in (2000, 4000, 6000, 8000)),
               f"{runs_of(cifar, name)[0]['sec_per_step']:.3f}"]
    for label, name in (("dense", "rf-dit"), ("TREAD", "rf-tread")):
        yield [label, *(number(guided("length", "flow-matching", name, text)["value"]) for text in (
            "unguided", "scale 1.5, .*label true", "scale 1.0, gamma1 0.5, .*", "scale 1.5, gamma1 0.5, .*"))]
    for label, variant, of in (
            ("emoji, AdamW", "emoji", {}), ("emoji, Muon", "emoji-muon", {}),
            ("emoji, Muon, EfficientNet-lite0", "emoji-muon", {"metric": "fd_lite0", "digits": 0}),
            ("CIFAR-10, AdamW", "cifar", {}), ("CIFAR-10, Muon", "cifar-muon", {})):
        names, more = [f"{variant}-dit", f"{variant}-tread"], ["", ""]
        if label.endswith("Muon"):
            dense, routed = at_flops(pays, *names, 1400)
            more = [spread(dense), apart(dense, routed)]
        dense, routed, difference = pair(pays, 1400, *names, **of)
        yield [label, routed, dense, difference, *more]
    dense, tread = (scores(pays, f"emoji-{model}", 1400) for model in ("dit", "tread"))
    for label, variant in (("dense", "dit"), ("TREAD", "tread"), ("TREAD, dense for the last 15 %", "off-15"),
                           ("TREAD, dense for the last 30 %", "off-30"), ("TREAD, random ratio", "random")):
        values = scores(pays, f"emoji-{variant}", 1400)
        yield [label, spread(values), *(apart(base, values) if values != base else "" for base in (dense, tread)),
               losses(pays, f"emoji-{variant}", 1400), flops(pays, f"emoji-{variant}", "emoji-dit", 1400)]
    for label, name in (("dense", "dit"), ("ratio 0.25", "25"), ("ratio 0.5", "50"), ("ratio 0.25, off-ramp", "25-off"),
                        ("ratio 0.5, off-ramp", "50-off")):
        (_, full, more), (_, lora, more_lora) = (
            pair(tuning, 400, f"{kind}-dit", f"{kind}-{name}") for kind in ("full", "lora"))
        yield [label, full, more * (name != "dit"), lora, more_lora * (name != "dit"),
               ", ".join(losses(tuning, f"{kind}-{name}", 400) for kind in ("full", "lora")),
               flops(tuning, f"full-{name}", "full-dit", 400)]
    tuned = ("edm-dit-finetuned", "edm-tread-finetuned")
    for label, text in (("none", "unguided"), ("CFG", "label, scale {}"),
                        ("SG, ratios 0.3 and 0.7 on 2→8", "scale {}, .*"),
                        ("CFG + SG, ratios 0.2 and 0.7 on 2→8", "label, scale {}, .*")):
        cost, alone = (int(guided(cifar, "study", tuned[0], each)["where"]["multiply_adds_an_image"])
                       for each in (text.format(2), "unguided"))
        yield [label, f"{cost / alone:.2f}".removesuffix(".00"), *(", ".join(
            number(guided(cifar, "study", name, text.format(scale))["value"], 2)
            for scale in (("1.25", "1.5", "2") if "{}" in text else [""])) for name in tuned)]


def test_each_table_of_the_results_is_made_of_the_committed_rows():
    lines = (RESULTS.parent / "results.md").read_text(encoding="utf-8").splitlines()
    tables = [line for number, line in enumerate(lines) if line.startswith("| ")
              and not lines[number + 1].startswith("|---")]
    assert tables == [re.sub("  +", " ", f"| {' | '.join(cells)} |") for cells in rows_of_the_page()]
    for study, *names, step, words in (
            ("coarse", "coarse-dit", "coarse-tread", 1400, "dense by {} at equal images and by {} at equal FLOPs"),
            ("cifar10-cpu", "edm-dit", "edm-tread", 8000,
             "costs {} at equal images**, where 3 of 4 intervals exclude 0. At equal FLOPs it costs {},")):
        found = pair(study, step, *names)[2], apart(*at_flops(study, *names, step))
        assert words.format(*found) in " ".join(lines)
    costs = [[*map(float.__sub__, *(scores("width", f"{model}-{width}", 3124, 2500) for model in ("tread", "dit")))]
             for width in (64, 128)]
    assert f"changed by {apart(*costs).replace(',', ' to')} at equal images" in " ".join(lines)
    early = [[*map(float.__sub__, *(scores("width", name, 1562) for name in names))]
             for names in (("tread-64", "dit-64"), ("tread-256-2e-3", "dit-256-1e-3"))]
    assert f"costs {apart([0, 0, 0], early[1])}, which is {apart(early[1], early[0])} less than" in " ".join(lines)


STUDIES = [file for file in sorted((ROOT / "scripts/studies").glob("*.sh")) if "common.sh" in file.read_text()]


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_each_study_is_at_most_40_lines_of_commands_that_are_accepted(file, tmp_path):
    """A python that only writes down what it is called with; it makes no row, so each score is asked for."""
    (tmp_path / "python").write_text(f"""#!{sys.executable}
import json, sys
open({str(tmp_path / "told")!r}, "a").write(json.dumps(sys.argv[1:]) + chr(10))""")
    (tmp_path / "python").chmod(0o755)
    subprocess.run(["bash", str(file)], check=True, cwd=tmp_path, env=os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SEEDS": "0"})
    assert len(file.read_text().splitlines()) <= 40
    runs: dict[str, list[str]] = {}
    for script, *typed in map(json.loads, (tmp_path / "told").read_text().splitlines()):
        if script == "train.py":
            cfg = read(TrainSettings, compose("config", TrainSettings, typed))
            check_settings(cfg, by_key(parse_options(typed)[1]))
            assert cfg.name.endswith(f"-seed{cfg.seed}") and runs.setdefault(cfg.name, typed) == typed
        elif script == "fid.py":
            cfg = read(fid.ScoringSettings, compose("fid", fid.ScoringSettings, typed))
            fid.check_settings(cfg, by_key(parse_options(typed)[1]))
            assert cfg.checkpoint.partition("/checkpoints/")[0].rpartition("/")[2] in runs


def test_held_out_losses_are_made_once_and_not_of_classes_that_the_run_lacks(shapes, tmp_path, monkeypatch):
    names, data = open_latents(shapes).class_names, shutil.copytree(shapes, tmp_path / "data")
    write_run(tmp_path / "run", {"input_size": 16, "patch_size": 4, "in_channels": 3, "hidden_size": 8, "depth": 2,
                                 "num_heads": 2, "num_classes": len(names)}, class_names=names)
    typed = f"{tmp_path}/run --data {data} --out {tmp_path}/out"
    monkeypatch.setattr(sys, "argv", ["held_out.py", *typed.split()])
    held_out.main()
    held_out.main()
    [row] = read_rows(tmp_path / "out")
    assert (row["run"], row["step"], row["images"], len(row["losses"][str(data)])) == ("run", 1, 300, 6)
    change_record(data, class_names=[*names[1:], "x"])
    (tmp_path / "out").unlink()
    with pytest.raises(SystemExit, match="has classes that the run's data lack: x"):
        held_out.main()
