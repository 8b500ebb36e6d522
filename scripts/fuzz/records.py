"""Damaged and hostile checkpoints, records, weights and references, for every command that reads one.

What `scripts/fuzz.py` draws from. Files of a case are copies of what real commands have made once, with something
wrong in them; where what is wrong can be told without the reader, success counts as a failure.
"""

import argparse
import base64
import io
import json
import os
import pickle
import shutil
import struct
import zipfile
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from runtime import files
from scripts.fuzz import Reader
from scripts.fuzz.commands import (
    CANARY,
    GIVEN,
    SMALL,
    STUDY,
    at,
    at_home,
    composed,
    given,
    places_in,
    put,
    run_command,
)

STEP = "checkpoints/step-00000004"

# ---- who reads a checkpoint -----------------------------------------------------------------------------------------

RUN = "{case}/out/run"      # the copy of a run that a case damages; {case}/out/new is for what is written
TINY = ["num_steps=1", "batch_size=2"]
USES = {      # name: (program, settings, which run is copied)
    "resume": ("train", [*SMALL, f"run_dir={RUN}", "steps=5"], "run"),
    "resume_adapter": ("train", [*SMALL, f"run_dir={RUN}", "steps=5", f"init_from={GIVEN}/run", "lora.rank=2"],
                       "adapter"),
    "init_from": ("train", [*SMALL, "run_dir={case}/out/new", f"init_from={RUN}", "steps=1"], "run"),
    "sample": ("sample", [f"checkpoint={RUN}", "seeds=0-1", *TINY, "out={case}/out/new/x.png"], "run"),
    "sample_adapter": ("sample", [f"checkpoint={RUN}", "seeds=0-1", *TINY, "out={case}/out/new/x.npz"], "adapter"),
    "sample_folder": ("sample", [f"checkpoint={RUN}/{STEP}", "seeds=0-1", *TINY, "out={case}/out/new/x.npz"], "run"),
    "weak": ("sample", [f"checkpoint={GIVEN}/run", "seeds=0-1", *TINY, "out={case}/out/new/x.npz", "scale=1.5",
                        f"weak={RUN}"], "run"),
    "rf": ("rf", [f"checkpoint={RUN}", "seeds=0-1", *TINY, "out={case}/out/new/x.png"], "flow"),
    "fid": ("fid", [f"checkpoint={RUN}", f"reference={GIVEN}/reference.npz", "features=pixels", "num_samples=4",
                    "num_steps=1", "metrics=[fd_pixels]"], "run"),
    "sweep": ("scripts.sweep_guidance", [f"checkpoint={RUN}", f"reference={GIVEN}/reference.npz", "features=pixels",
                                         "num_samples=4", "num_steps=1", "metrics=[fd_pixels]", "grid.scale=[1.5]",
                                         "grid.gamma1=[0]", "grid.gamma2=[0.5]", "picture={case}/out/new/x.png"],
                                         "run"),
    "diffusers": ("scripts.export", [f"checkpoint={RUN}", "to=diffusers", "out={case}/out/new"], "run"),
    "hub": ("scripts.export", [f"checkpoint={RUN}", "to=hub", "out={case}/out/new"], "run"),
    "dit": ("scripts.export", [f"checkpoint={RUN}", "to=dit", "out={case}/out/new.pt"], "run"),
    "overwrite": ("scripts.export", [f"checkpoint={GIVEN}/run", "to=hub", f"out={RUN}/{STEP}", "overwrite=true"],
                  "run"),
    "merge": ("scripts.merge_lora", [f"checkpoint={RUN}", "out={case}/out/new"], "adapter"),
    "report": ("scripts.report", [f"runs=[{RUN}]", "out={case}/out/new"], "run"),
    "study": ("scripts.study", [*STUDY, "out={case}/out/study"], "run"),
}


def use(name: str, folder: Path, must_refuse: str | None = None) -> None:
    """Runs a command on the copy of a run that a case has damaged, to its end."""
    program, wanted, _ = USES[name]
    quoted = tuple(f"{key}='{value}'" if "{case}" in value and "[" not in value else
                   f"{key}=['{value[1:-1]}']" if "{case}" in value else text
                   for text in wanted for key, _, value in [text.partition("=")])
    run_command(program, folder, [], at_home(composed(program, quoted), folder), through=program != "scripts.study",
                must_refuse=must_refuse)


def copy_run(name: str, folder: Path) -> Path:
    """Copies the run that a use of it reads; returns the checkpoint in it that counts."""
    run = folder / "out" / ("study/runs/dit-seed0" if name == "study" else "run")
    shutil.copytree(given() / USES[name][2], run)
    return run / STEP


def rehash(saved: Path) -> None:
    """Makes meta.json say of the files beside it what they are, as whoever means harm would."""
    file = saved / "meta.json"
    meta = json.loads(file.read_text())
    meta["files"] = {path.name: {"bytes": path.stat().st_size, "sha256": files.sha256(path)}
                     for path in sorted(saved.glob("*.safetensors"))}
    file.write_text(json.dumps(meta))


# ---- JSON -----------------------------------------------------------------------------------------------------------

ODD_JSON = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.text(max_size=5), st.floats(),
    st.sampled_from([2**31, 2**62, 2**63, 2**64, 10**30, -1, 1e308, "\ud800", "a\0b", "../../x", "/etc/passwd", "/",
                     "x" * 5000, [], {}, [None], [[]], {"": {}}, [1, "x"], [0] * 10000, 10**3000,
                     ["../x"], {"a": 1}, {"bytes": 1, "sha256": ""}, {"../../x.safetensors": {"bytes": 0,
                                                                                              "sha256": ""}}]),
    st.recursive(st.integers(0, 9), lambda part: st.lists(part, max_size=2) | st.dictionaries(st.text(max_size=2), part,
                                                                                             max_size=2), max_leaves=4))
EDIT = st.tuples(st.integers(0, 10**6), st.sampled_from(("set", "set", "set", "drop", "again", "wrap")), ODD_JSON)
WHOLE = {      # instead of a JSON file
    "empty": b"", "brace": b"{", "null": b"null", "list": b"[]", "number": b"3", "text": b'"x"', "object": b"{}",
    "deep": b"[" * 100_000, "deep objects": b'{"a":' * 100_000, "long number": b"1" * 100_000,
    "exponent": b"1e999999", "latin": b'{"a": "\xe9"}', "utf-16": '{"a": 1}'.encode("utf-16"), "bom": b"\xef\xbb\xbf{}",
    "zeros": bytes(1000), "lone half": b'{"\\ud800": "\\udfff"}', "nan": b"NaN",
    "comment": b"// x\n{}", "many": b"[" + b"{}," * 200_000 + b"{}]",
}
JSON_DAMAGE = st.one_of(
    st.fixed_dictionaries({"edits": st.lists(EDIT, min_size=1, max_size=2)}),
    st.fixed_dictionaries({"whole": st.sampled_from(sorted(WHOLE))}),
    st.fixed_dictionaries({"cut": st.integers(0, 10**6)}), st.fixed_dictionaries({"flip": st.integers(0, 10**6)}))


def damaged_json(content: bytes, damage: dict) -> bytes:
    if "whole" in damage:
        return WHOLE[damage["whole"]]
    if "cut" in damage:
        return content[: damage["cut"] % len(content)]
    if "flip" in damage:
        place = damage["flip"] % (8 * len(content))
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        return bytes(flipped)
    plain = json.loads(content)
    text = None
    for number, how, value in damage["edits"]:
        places = list(places_in(plain))
        if not places:
            break
        first = list(plain)[number % len(plain)] if isinstance(plain, dict) else None      # else config has most
        below = [place for place in places if first is None or place[0] == first]
        path = below[number // 97 % len(below)]
        if how == "set":
            put(plain, path, value)
        elif how == "wrap":
            put(plain, path, [at(plain, path)])
        elif how == "drop":
            del at(plain, path[:-1])[path[-1]]
        elif isinstance(path[0], str):
            text = json.dumps(plain)[:-1] + f", {json.dumps(path[0])}: {json.dumps(value)}" + "}"
    return (text or json.dumps(plain)).encode()


META_USES = sorted(USES)
META = st.fixed_dictionaries({"use": st.sampled_from(META_USES), "damage": JSON_DAMAGE})


def build_meta(case: dict, folder: Path) -> None:
    file = copy_run(case["use"], folder) / "meta.json"
    file.write_bytes(damaged_json(file.read_bytes(), case["damage"]))


def run_meta(case: dict, folder: Path) -> None:
    use(case["use"], folder)


# ---- safetensors ----------------------------------------------------------------------------------------------------


def with_header(content: bytes, header: bytes, length: int | None = None) -> bytes:
    size = struct.unpack("<Q", content[:8])[0]
    return struct.pack("<Q", len(header) if length is None else length) + header + content[8 + size :]


def header_of(content: bytes) -> dict:
    return json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])


def tampered(content: bytes, how: str, number: int, value: Any) -> bytes:
    """Damages the bytes of a safetensors file."""
    header = header_of(content)
    names = sorted(name for name in header if name != "__metadata__")
    name, other = names[number % len(names)], names[(number + 1) % len(names)]
    match how:
        case "length":
            return with_header(content, json.dumps(header).encode(),
                               [0, 1, 2**20, 2**31, 2**63, 2**64 - 1, 7][number % 7])
        case "overlap":
            header[name]["data_offsets"] = header[other]["data_offsets"]
        case "offsets":
            header[name]["data_offsets"] = [[0, 0], [0, 2**40], [2**63, 2**64], [-1, 4], [8, 4], [0], ["a",
                                                                                                       "b"]][number % 7]
        case "dtype":
            header[name]["dtype"] = ["F64", "F16", "I32", "U8", "BOOL", "X", "F8_E4M3", 7, None][number % 9]
        case "shape":
            header[name]["shape"] = [[], [0], [2**40], [2**32, 2**32], [-1], [1.5], "x", [[1]]][number % 8]
        case "again":
            text = json.dumps(header)
            return with_header(content,
                               (text[:-1] + f", {json.dumps(name)}: {json.dumps(header[other])}" + "}").encode())
        case "json":
            return with_header(content, damaged_json(json.dumps(header).encode(), value))
        case "cut":
            return content[: number % len(content)]
        case "more":
            return content + bytes(number % 100 + 1)
        case "flip":
            flipped = bytearray(content)
            flipped[number % len(content)] ^= 255
            return bytes(flipped)
        case "empty":
            return b""
        case "garbage":
            return b"\x80\x04" + os.urandom(0) + bytes(range(256)) * (number % 5)
    return with_header(content, json.dumps(header).encode())


BYTES = ("length", "overlap", "offsets", "dtype", "shape", "again", "json", "cut", "more", "flip", "empty", "garbage")
TENSORS = ("drop", "add", "rename", "reshape", "shrink", "nan", "inf", "huge", "integers", "half", "double", "none",
           "scalar", "odd name")
TENSOR_DAMAGE = st.fixed_dictionaries({
    "how": st.sampled_from((*BYTES, *TENSORS)), "number": st.integers(0, 10**6), "value": JSON_DAMAGE,
    "rehashed": st.sampled_from((True, True, True, False))})


def changed_tensors(file: Path, how: str, number: int) -> None:
    """Writes a whole safetensors file of other tensors."""
    state = load_file(file)
    name = sorted(state)[number % len(state)]
    tensor = state[name]
    match how:
        case "drop":
            del state[name]
        case "add":
            state["blocks.99.odd"] = torch.zeros(2)
        case "rename":
            state[["", "x", name + ".exp_avg", "é", "a.b", "../x"][number % 6]] = state.pop(name)
        case "reshape":
            state[name] = tensor.flatten().unsqueeze(0).clone()
        case "shrink":
            state[name] = tensor.flatten()[: tensor.numel() // 2].clone()
        case "nan" | "inf" | "huge":
            value = {"nan": torch.nan, "inf": torch.inf, "huge": 3e38}[how] if tensor.is_floating_point() else -1
            state[name] = torch.full_like(tensor, value)
        case "integers":
            state[name] = torch.ones(tensor.shape, dtype=[torch.int64, torch.uint8, torch.bool][number % 3])
        case "half":
            state[name] = tensor.to([torch.float16, torch.bfloat16][number % 2])
        case "double":
            state[name] = tensor.double()
        case "none":
            state = {}
        case "scalar":
            state[name] = torch.tensor(1.0)
        case "odd name":
            state = {f"{name}.": value for name, value in state.items()}
    save_file(state, file)


SAFETENSORS = st.fixed_dictionaries({
    "use": st.sampled_from([use for use in META_USES if use not in ("report", "overwrite", "study")]),
    "file": st.sampled_from(("ema", "ema", "model", "training")), "damage": TENSOR_DAMAGE})
READS = {"resume": ("ema", "model", "training"), "resume_adapter": ("ema", "model", "training"), "merge": ("ema",
                                                                                                           "model")}


def build_safetensors(case: dict, folder: Path) -> None:
    saved, damage = copy_run(case["use"], folder), case["damage"]
    file = saved / f"{case['file']}.safetensors"
    if damage["how"] in BYTES:
        file.write_bytes(tampered(file.read_bytes(), damage["how"], damage["number"], damage["value"]))
    else:
        changed_tensors(file, damage["how"], damage["number"])
    if damage["rehashed"]:
        rehash(saved)
    else:
        shutil.rmtree(saved.with_name("step-00000002"), ignore_errors=True)      # no older one to fall back to


def run_safetensors(case: dict, folder: Path) -> None:
    how, why = case["damage"]["how"], None
    is_read = case["file"] in READS.get(case["use"], ("ema",))
    original = given() / USES[case["use"]][2] / STEP / f"{case['file']}.safetensors"
    now = folder / "out" / "run" / STEP / original.name
    if is_read and original.read_bytes() != now.read_bytes():
        if not case["damage"]["rehashed"]:
            why = f"{now.name} is not what its record says"
        elif how in ("drop", "add", "rename", "none", "nan", "inf", "odd name", "length", "cut", "empty", "garbage"):
            why = f"{now.name} was changed by {how}"
    use(case["use"], folder, why)


# ---- a run's folder with something odd in it ------------------------------------------------------------------------

PLACES = (".lock", "metrics.jsonl", "results.jsonl", "config.yaml", "checkpoints", "samples", STEP, f"{STEP}/meta.json",
          f"{STEP}/ema.safetensors", f"{STEP}/training.safetensors", f"{STEP}/model.safetensors",
          "checkpoints/step-00000005", "checkpoints/step-99999999999999999999", "checkpoints/damaged-step-00000005",
          "checkpoints/step-0000000x", "samples/step-00000004.png", "checkpoints/.step-00000001.1.tmp", ".")
ODD_THINGS = ("folder", "full folder", "fifo", "loop", "dangling", "link out", "link to itself's run", "empty",
              "garbage",
              "gone", "zero", "full", "long line", "unreadable name", "sparse")
LAYOUT = st.fixed_dictionaries({"use": st.sampled_from(META_USES), "place": st.sampled_from(PLACES),
                                "thing": st.sampled_from(ODD_THINGS)})


def make_thing(path: Path, thing: str, folder: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if thing == "link out" and path.exists():
        aside = folder / "elsewhere"
        shutil.move(path, aside)
        path.symlink_to(aside)
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    match thing:
        case "folder":
            path.mkdir()
        case "full folder":
            (path / "x").mkdir(parents=True)
            (path / "x" / "y").write_text("y")
        case "fifo":
            os.mkfifo(path)
        case "loop":
            path.symlink_to(path.name)
        case "dangling" | "link out":
            path.symlink_to(folder / "nothing")
        case "link to itself's run":
            path.symlink_to(path.parent)
        case "empty":
            path.touch()
        case "garbage":
            path.write_bytes(bytes(range(256)) * 8)
        case "zero" | "full":
            os.mknod(path, 0o020666, os.makedev(1, {"zero": 5, "full": 7}[thing]))
        case "long line":
            path.write_text("{" + " " * 10**7)
        case "unreadable name":
            path.mkdir()
            os.mkdir(os.fsencode(path) + b"/\xff\xfe")
        case "sparse":
            with open(path, "wb") as file:
                file.truncate(2**33)


def build_layout(case: dict, folder: Path) -> None:
    run = copy_run(case["use"], folder)
    make_thing(run.parents[1] / case["place"], case["thing"], folder)


def run_layout(case: dict, folder: Path) -> None:
    use(case["use"], folder)


# ---- rows of metrics.jsonl and results.jsonl ------------------------------------------------------------------------

ROW_USES = ("resume", "fid", "sweep", "hub", "report", "study")
ROWS = st.fixed_dictionaries({"use": st.sampled_from(ROW_USES), "file": st.sampled_from(("metrics", "results")),
                              "damage": st.lists(JSON_DAMAGE, min_size=1, max_size=3), "guided": st.booleans()})


def build_rows(case: dict, folder: Path) -> None:
    run = copy_run(case["use"], folder).parents[1]
    file = run / f"{case['file']}.jsonl"
    lines = file.read_bytes().splitlines()
    row = json.loads(lines[-1])
    if case["guided"] and isinstance(row.get("source"), dict):
        row["source"]["guidance"] = {"scale": 1.5, "gamma1": 0, "gamma2": 0.5, "drop_label": False, "interval": None,
                                     "routes": None, "channels": None, "weak": None}
        row["source"]["in_training"] = True
    file.write_bytes(b"\n".join([*lines, *(damaged_json(json.dumps(row).encode(),
                                                        damage) for damage in case["damage"])]))


def run_rows(case: dict, folder: Path) -> None:
    use(case["use"], folder)


# ---- a study's files, a run's config ---------------------------------------------------------------------------------

TOLD = st.fixed_dictionaries({"file": st.sampled_from(("study.json", "study.json", "timing.json", "rows")),
                              "program": st.sampled_from(("scripts.study", "scripts.report")), "damage": JSON_DAMAGE})


def build_told(case: dict, folder: Path) -> None:
    study = folder / "out" / "study"
    shutil.copytree(given() / "study", study)
    name = "study.json" if case["file"] == "rows" else case["file"]
    (study / name).write_bytes(damaged_json((study / name).read_bytes(), case["damage"]))
    if case["file"] == "rows":
        shutil.move(study / name, study / "rows.json")


def run_told(case: dict, folder: Path) -> None:
    if case["program"] == "scripts.report":
        file = "{case}/out/study/" + ("rows.json" if case["file"] == "rows" else "study.json")
        wanted = (f"study_dir='{file}'", "out='{case}/out/page'")
    else:
        rows = ("rows=['{case}/out/study/rows.json']",) if case["file"] == "rows" else ()
        wanted = (*STUDY, "out='{case}/out/study'", *rows)
    run_command(case["program"], folder, [], at_home(composed(case["program"], wanted), folder))


YAMLS = {
    "laughs": "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
    "python": f"a: !!python/object/apply:os.system ['touch {CANARY}']\n", "deep": "[" * 5000,
    "deep lines": "".join(" " * i + "a:\n" for i in range(800)), "self": "&a [*a]", "anchor": "a: *b",
    "tab": "a:\n\t- b",
    "list": "- 1\n- 2", "text": "x", "empty": "", "number keys": "1: 2\ntrue: 3\nnull: 4\n1.5: x",
    "interpolation": "a: ${b}\nb: ${a}", "environment": "a: ${oc.env:HOME}", "resolver": "a: ${x:y}",
    "missing": "a: ???",
    "binary": "a: !!binary AAAA", "date": "a: 2001-01-01\nb: 12:30:45", "set": "a: !!set {x, y}", "merge": "<<: {a: 1}",
    "two": "---\na: 1\n---\nb: 2", "nul": "a: \"\\0\"", "half": "a: \"\\ud800\"", "long": "a: " + "x" * 10**6,
    "list key": "? [a, b]\n: c", "nan": "steps: .nan\nseed: .inf\nmodel: 3\nsamples: [1]", "again": "a: 1\na: 2",
}
CONFIG = st.fixed_dictionaries({"yaml": st.sampled_from(sorted(YAMLS)) | st.text(max_size=20).map("text:".__add__)})


def build_config(case: dict, folder: Path) -> None:
    run = copy_run("report", folder).parents[1]
    text = YAMLS.get(case["yaml"], case["yaml"].removeprefix("text:"))
    (run / "config.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))


def run_config(case: dict, folder: Path) -> None:
    use("report", folder)


# ---- .pt ------------------------------------------------------------------------------------------------------------


class Harm:
    """A pickle of it makes a file when it is loaded by a reader that trusts it."""

    def __init__(self, path: Path, how: int):
        self.path, self.how = str(path), how

    def __reduce__(self) -> tuple:
        return [(os.system, (f"touch '{self.path}'",)), (eval, (f"open({self.path!r}, 'w')",)), (open, (self.path,
                                                                                                        "w")),
                (exec, (f"open({self.path!r}, 'w')",))][self.how % 4]


ODD_KEYS = [0, None, b"x", (1, 2), "", "é\ud800", "x" * 5000, "blocks.x.y", "blocks.-1.attn.qkv.weight", "blocks.", ".",
            "blocks.99999999999.attn.qkv.weight", "transformer_blocks.0.x", "transformer_blocks.x.y",
            "decoder_blocks.0.a",
            "decoder_blocks.x", "projectors.0", "feat_rope.x", "module.", "model.x", "_orig_mod.module.model.x",
            "ema", 1.5]
PT_DAMAGE = ("key", "value", "drop", "nan", "shape", "wrap", "harm", "plain pickle", "legacy", "cut", "flip", "bomb",
             "claims", "script", "args", "list", "zip of nothing", "safetensors", "gzip", "tar", "type", "many keys")
WEIGHT_NAMES = ("x.pt", "x.pt", "x.pt", "x.safetensors", "x", "x.ckpt", "latents_stats.pt", "vae.pt")
WEIGHTS = st.fixed_dictionaries({
    "how": st.sampled_from(PT_DAMAGE), "number": st.integers(0, 10**6), "second": st.integers(0, 50),
    "name": st.sampled_from(WEIGHT_NAMES),
    "use": st.sampled_from(("sample", "sample", "sample heads", "init_from", "export", "weak", "autoencoder",
                            "inception",
                            "script features"))})


def odd_values(number: int) -> Any:
    eye = torch.eye(4)
    return [None, 1, 1.5, "x", [1], [], {}, {"a": eye}, eye.to_sparse(), eye.to_sparse_csr(), eye.bool(), eye.long(),
            eye.to(torch.complex64), torch.empty(4, 4, device="meta"), eye.half(), torch.empty(0), torch.tensor(1.0),
            torch.quantize_per_tensor(eye, 0.1, 0, torch.quint8), eye.to(torch.float8_e4m3fn), eye.expand(2**10, 4, 4),
            torch.zeros(1).expand(2**40), torch.nn.Parameter(eye), eye.numpy(), np.float64(1), argparse.Namespace(a=1),
            torch.zeros(1, 1, 1, 1, 1), eye.T, torch.Size([1]), torch.float32, torch.device("cpu")][number % 30]


def damaged_weights(state: dict[str, torch.Tensor], how: str, number: int, second: int, canary: Path) -> bytes:
    """Makes the bytes of a file of weights in which something is wrong; code in it would make the file `canary`."""
    name, buffer = sorted(state)[number % len(state)], io.BytesIO()
    content: Any
    content = state = dict(state)
    match how:
        case "key":
            state[ODD_KEYS[second % len(ODD_KEYS)]] = state[name]
        case "value":
            state[name] = odd_values(second)
        case "drop":
            del state[name]
        case "nan":
            state[name] = torch.full_like(state[name], [torch.nan, torch.inf, -torch.inf, 1e38][second % 4])
        case "shape":
            state[name] = [state[name][:0], state[name].flatten(), state[name][None], torch.zeros(1), torch.zeros(()),
                           torch.zeros(2, 3, 5, 7), torch.zeros(0, 4)][second % 7]
        case "wrap":
            content = [{"ema": state}, {"ema": {}}, {"ema": None, "model": state}, {"ema": [1]}, {"model": {"x": 1}},
                       {"state_dict": {"state_dict": state}}, {"ema": {f"module.{k}": v for k, v in state.items()}},
                       {f"model.{k}": v for k, v in state.items()}, {"ema_state_dict": state, "model_state_dict": 7},
                       {"ema": state, "config": {"transport": 3}}, {"ema": state,
                                                                    "config": {"transport": {"path_type": []}}},
                       {"ema": {1: 2}, "model": state}, {"ema": {"ema": state}}][second % 13]
        case "args":
            odd = [argparse.Namespace(), argparse.Namespace(model=7, image_size=None),
                   argparse.Namespace(model="SiT-XL/2", path_type="VP", prediction="noise"), {"model": "DiT-XL/2"}, 7,
                   argparse.Namespace(model="DiT-XL/2", image_size=[]), argparse.Namespace(path_type=None,
                                                                                           prediction=None)]
            content = {"ema": state, "args": odd[second % 7]}
        case "list":
            content = [[], {}, 7, None, "x", [state], (state,), state[name], {name: state}, b"x"][second % 10]
        case "many keys":
            content = {f"blocks.{i}.x": torch.zeros(1) for i in range(3000)}
        case "type":
            content = [torch.nn.Linear(2, 2), torch.Generator(), Path("x"), {1, 2}, range(3), type, print][second % 7]
        case "harm":
            content = [{"ema": state, "opt": Harm(canary, number)}, Harm(canary, number), {Harm(canary, number): 1}
                       if False else [Harm(canary, number)], {name: Harm(canary, number)}][second % 4]
        case "plain pickle":
            return pickle.dumps([Harm(canary, number), {"ema": Harm(canary, number)}, {"x": 1}][second % 3],
                                protocol=number % 6)
        case "legacy":
            torch.save([state, {"ema": Harm(canary, number)}, {"x": None}][second % 3], buffer,
                       _use_new_zipfile_serialization=False)
            return buffer.getvalue() if second % 2 else buffer.getvalue()[: number % len(buffer.getvalue())]
        case "safetensors":
            return save(state)
        case "gzip":
            return b"\x1f\x8b" + bytes(number % 100)
        case "tar":
            return bytes(257) + b"ustar\x0000" + bytes(1024)
        case "zip of nothing":
            with zipfile.ZipFile(buffer, "w") as archive:
                for member in [(), ("data.pkl",), ("x/data.pkl", "x/version"), ("../../x/data.pkl",),
                               ("/etc/x",)][second % 5]:
                    archive.writestr(member, b"\x80\x02}q\x00.")
            return buffer.getvalue()
        case "script":
            with torch.jit.optimized_execution(False):
                torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), buffer)
            return buffer.getvalue()
    if how == "type" and second % 7 > 3:
        return pickle.dumps(content)
    try:
        torch.save(content, buffer)
    except Exception:      # what torch itself does not write
        return pickle.dumps(repr(content))
    whole = buffer.getvalue()
    if how == "cut":
        return whole[: number % len(whole)]
    if how == "flip":
        flipped = bytearray(whole)
        flipped[number % len(whole)] ^= 1 << second % 8
        return bytes(flipped)
    if how in ("bomb", "claims"):
        return repacked(whole, how, number)
    return whole


def repacked(whole: bytes, how: str, number: int) -> bytes:
    """Rewrites the zip of a .pt: a member of 2 GiB unpacked, or a storage that claims terabytes."""
    buffer, packer, end = io.BytesIO(), zlib.compressobj(9, wbits=-15), zlib.compressobj(9, wbits=-15).flush()
    zeros = packer.compress(bytes(2**22)) + packer.flush(zlib.Z_FULL_FLUSH)      # packed once: after it all begins anew
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(buffer, "w") as new:
        for member in old.namelist():
            content = old.read(member)
            if how == "claims" and member.endswith("data.pkl"):
                content = content.replace(b"M\x00\x01", b"\x8a\x06\x00\x00\x00\x00\x00\x01")
            bomb = how == "bomb" and member.endswith(["data.pkl", "data/0", "version"][number % 3])
            if not bomb:
                new.writestr(member, content)
                continue
            with new.open(zipfile.ZipInfo(member), "w", force_zip64=True) as file:
                file._zinfo.compress_type = zipfile.ZIP_DEFLATED
                file._compressor = SimpleNamespace(compress=lambda _: b"", flush=lambda: 512 * zeros + end)
                for _ in range(512):
                    file.write(bytes(2**22))
    return buffer.getvalue()


def build_weights(case: dict, folder: Path) -> None:
    state = torch.load(given() / "weights.pt", weights_only=True)
    whole = damaged_weights(state, case["how"], case["number"], case["second"], folder / CANARY)
    (folder / case["name"]).write_bytes(whole)
    if case["name"] == "latents_stats.pt":
        shutil.copy(given() / "weights.pt", folder / "beside.pt")


def run_weights(case: dict, folder: Path) -> None:
    file = f"{{case}}/{'beside.pt' if case['name'] == 'latents_stats.pt' else case['name']}"
    drawn = ["seeds=0-1", *TINY, "out='{case}/out/x.npz'"]
    why = "there are values that are not finite" if case["how"] == "nan" and case["second"] % 4 < 3 else None
    if case["how"] in ("drop", "plain pickle", "list"):
        why = f"it holds no whole network: {case['how']}"
    match case["use"]:
        case "sample":
            wanted = "sample", [f"checkpoint='{file}'", "diffusion_name=edm", *drawn]
        case "sample heads":
            wanted = "sample", [f"checkpoint='{file}'", "diffusion_name=sit", "num_heads=2", *drawn]
        case "init_from":
            wanted = "train", [*SMALL, f"init_from='{file}'", "diffusion_name=edm", "run_dir='{case}/out/run'",
                               "steps=1"]
        case "export":
            wanted = "scripts.export", [f"checkpoint='{file}'", "diffusion_name=edm", "num_heads=2", "to=hub",
                                        "out='{case}/out/x'"]
        case "weak":
            wanted = "sample", [f"checkpoint={GIVEN}/run", f"weak='{file}'", "scale=1.5", *drawn]
        case "autoencoder":
            wanted, why = ("sample", [f"checkpoint={GIVEN}/run", f"autoencoder='{file}'", *drawn]), None
        case "inception" | "script features":
            features = "inception" if case["use"] == "inception" else "torchscript"
            wanted, why = ("fid", [f"images={GIVEN}/images.npz", f"reference={GIVEN}/reference.npz",
                                   f"features={features}", f"features_weights='{file}'",
                                   "results='{case}/out/results.jsonl'"]), None
    if case["name"] == "latents_stats.pt":
        why = None
    run_command(wanted[0], folder, [], at_home(composed(wanted[0], tuple(wanted[1])), folder), through=True,
                must_refuse=why)


# ---- npz ------------------------------------------------------------------------------------------------------------

NPZ_DAMAGE = ("drop", "nan", "asymmetric", "negative", "shape", "type", "objects", "terabytes", "compressed", "flip",
              "cut", "encrypted", "lying size", "method", "garbage", "again", "odd member", "header", "fortran", "huge",
              "space", "digest", "version", "bomb", "zero variance", "truncated member", "text")
NPZ = st.fixed_dictionaries({
    "how": st.sampled_from(NPZ_DAMAGE), "key": st.sampled_from(("mu", "sigma", "arr_0", "space", "weights_sha256",
                                                                "count")),
    "number": st.integers(0, 10**6), "use": st.sampled_from(("reference", "reference", "reference", "evaluate",
                                                             "images",
                                                            "reference_from", "precision"))})


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def npy_claiming(header: str, content: bytes = bytes(64), version: bytes = b"\x01\x00") -> bytes:
    return b"\x93NUMPY" + version + struct.pack("<H", len(header)) + header.encode() + content


class Executed:
    """An object array's member; unpickling it makes a file."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self) -> tuple:
        return (open, (self.path, "w"))


def damaged_npz(arrays: dict[str, np.ndarray], case: dict, canary: Path) -> tuple[bytes, str | None]:
    """Returns an npz in which something is wrong, and why it must be refused where that can be told here."""
    how, key, number = case["how"], case["key"], case["number"]
    arrays = dict(arrays)
    members, compression, why = {}, zipfile.ZIP_STORED, None
    array = arrays[key]
    is_statistic = key in ("mu", "sigma")
    match how:
        case "drop":
            del arrays[key]
        case "nan":
            if array.dtype.kind == "f":
                arrays[key] = array.copy()
                arrays[key].flat[number % array.size] = [np.nan, np.inf, -np.inf][number % 3]
                why = f"{key} is not finite"
        case "asymmetric":
            arrays["sigma"] = arrays["sigma"].copy()
            arrays["sigma"][0, 1] += [1, 0.1, 100][number % 3]
            why = "the covariance is not symmetric"
        case "negative":
            size = len(arrays["mu"])
            arrays["sigma"] = [-np.eye(size), np.diag([-1.0] + [1.0] * (size - 1)), arrays["sigma"] - np.eye(size),
                               np.ones((size, size)) - np.eye(size)][number % 4]
            why = "the covariance has negative eigenvalues"
        case "zero variance":
            arrays["sigma"] = np.zeros_like(arrays["sigma"])
        case "huge":
            arrays[key] = array * [1e300, 1e160, -1e300][number % 3] if array.dtype.kind == "f" else array
        case "shape":
            arrays[key] = [array[:0], array[None], array.ravel()[:3], np.zeros(()), array[..., None],
                           np.zeros((0, 0, 0, 3), np.uint8), np.zeros((4, 0, 0, 3), np.uint8), np.zeros((1, 2, 2, 3),
                                                                                                        np.uint8),
                           np.zeros((4, 2**15, 0, 3), np.uint8)][number % 9] if array.ndim else np.zeros((3, 3))
        case "type":
            odd = [np.complex128, "U8", "S3", bool, "M8[s]", np.float16, ">f8", "V8", np.int8, object, np.float128]
            kind = odd[number % len(odd)]
            arrays[key] = np.zeros(array.shape, kind)
            no_numbers = (np.complex128, "U8", "S3", bool, "M8[s]", "V8", object)
            why = f"{key} holds {kind}" if is_statistic and kind in no_numbers else None
        case "objects":
            arrays[key] = np.array([Executed(canary), None], object)
            why = "an object array is there" if is_statistic else None
        case "terabytes":
            shape = [(2**40,), (2**20, 2**20), (4, 2**20, 2**20, 3), (2**62, 2**62), (-1,), (2**63, 2),
                     (10**30,)][number % 7]
            kind = "|u1" if key == "arr_0" else "<f8"
            members[key] = npy_claiming(f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n")
        case "header":
            odd = ["{'descr': '<f8', 'fortran_order': False, 'shape': (192,)", "[" * 5000, "", "{}", "1",
                   "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n", "{'descr': 'x', 'shape': 1}",
                   f"__import__('os').system('touch {canary}')",
                   "{'descr': [('a','<f8')], 'fortran_order': False, 'shape': (1,), }\n",
                   "{'descr': '<f8', 'fortran_order': 7, 'shape': (1.5,), }\n",
                   "{'descr': '<f8', 'fortran_order': False, 'shape': ((1,),), }\n",
                   "{" + "'a':{" * 3000, "9" * 5000]
            members[key] = npy_claiming(odd[number % len(odd)], version=[b"\x01\x00", b"\x02\x00", b"\x03\x00",
                                                                         b"\x09\x09"][number % 4])
        case "fortran":
            arrays[key] = np.asfortranarray(array)
        case "compressed":
            compression = [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA][number % 3]
        case "truncated member":
            members[key] = npy(array)[: number % len(npy(array))]
        case "garbage":
            members[key] = bytes(range(256)) * (number % 3)
        case "text":
            members[key] = b"words"
        case "space":
            arrays["space"] = [np.array("inception-2015"), np.array(["a", "b"]), np.array(7), np.array("x" * 10**6),
                               np.array("é\ud800")][number % 5]
            why = "it is of another space" if number % 5 == 0 else None
        case "digest":
            arrays["weights_sha256"] = [np.array("pixels:0"), np.array(b"pixels:None"), np.array(["pixels:", "x"]),
                                        np.array(1.5)][number % 4]
        case "odd member":
            members[["../../executed", "/executed", "mu", "mu.npy/x", "x" * 300, "mu.npy "][number % 6]] = b"words"
    if how == "bomb":
        members[key] = None
    return packed(arrays, members, compression, case), why


def packed(arrays: dict[str, np.ndarray], members: dict[str, bytes | None], compression: int, case: dict) -> bytes:
    how, number, buffer = case["how"], case["number"], io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, array in arrays.items():
            if name not in members:
                archive.writestr(f"{name}.npy", npy(array))
        for name, content in members.items():
            own = name if how == "odd member" else f"{name}.npy"
            if content is not None:
                archive.writestr(own, content)
                continue
            with archive.open(zipfile.ZipInfo(own), "w", force_zip64=True) as file:      # 3 GiB, deflated to 3 MiB
                file._compressor, file._zinfo.compress_type = zipfile._get_compressor(zipfile.ZIP_DEFLATED, 9), 8
                count = 3 * 2**30 // 8
                file.write(npy_claiming(f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({count},), }}\n", b""))
                for _ in range(768):
                    file.write(bytes(2**22))
        if how == "again":
            archive.writestr(f"{case['key']}.npy", npy(np.zeros(number % 5)))
    whole = bytearray(buffer.getvalue())
    names = [found for found in range(len(whole) - 4) if whole[found : found + 4] in (b"PK\x01\x02", b"PK\x03\x04")]
    place = names[number % len(names)]
    is_central = whole[place : place + 4] == b"PK\x01\x02"
    match how:
        case "cut":
            return bytes(whole[: number % len(whole)])
        case "flip":
            whole[number % len(whole)] ^= 1 << number % 8
        case "encrypted":
            whole[place + (8 if is_central else 6)] |= 1
        case "method":
            whole[place + (10 if is_central else 8)] = [8, 12, 14, 93, 99, 1][number % 6]
        case "lying size":
            offset = place + (20 if is_central else 18) + 4 * (number % 2)
            whole[offset : offset + 4] = struct.pack("<I", [0, 1, 2**31, 2**32 - 2, 10][number % 5])
        case "version":
            whole[place + 4] = 255
    return bytes(whole)


def sound_reference() -> dict[str, np.ndarray]:
    with np.load(given() / "reference.npz") as kept:
        return {name: kept[name] for name in kept.files}


def build_npz(case: dict, folder: Path) -> None:
    (folder / "x.npz").write_bytes(damaged_npz(sound_reference(), case, folder / CANARY)[0])


def run_npz(case: dict, folder: Path) -> None:
    why = damaged_npz(sound_reference(), case, folder / CANARY)[1]
    file, results = "'{case}/x.npz'", "results='{case}/out/results.jsonl'"
    match case["use"]:
        case "reference":
            wanted = "fid", [f"images={GIVEN}/images.npz", f"reference={file}", results, "metrics=[fd_pixels]"]
        case "precision":
            wanted = "fid", [f"images={GIVEN}/images.npz", f"reference={file}", results]
        case "images":
            wanted, why = ("fid", [f"images={file}", f"reference={GIVEN}/reference.npz", results]), None
        case "reference_from":
            wanted, why = ("fid", [f"reference_from={file}", "out='{case}/out/y.npz'"]), None
        case "evaluate":
            wanted = "train", [*SMALL, "run_dir='{case}/out/run'", "evaluate.every=1", "evaluate.features=pixels",
                               "steps=1",
                               f"evaluate.reference={file}", "evaluate.metrics=[fd_pixels]"]
    program, overrides = wanted
    overrides = tuple(overrides) if program == "train" else (*overrides, "features=pixels")
    run_command(program, folder, [], at_home(composed(program, overrides), folder), through=True, must_refuse=why)


# ---- hashes beside weights, features that were kept -----------------------------------------------------------------

SIDECARS = (b"", b" ", b"\n", b"0" * 64, b"\xff\xfe", "é".encode(), b"x  y z", b"\0", b"0" * 10**7)
SIDECAR = st.fixed_dictionaries({"content": st.sampled_from(SIDECARS).map(lambda some: base64.b64encode(some).decode()),
                                 "thing": st.sampled_from((None, None, "folder", "fifo", "loop", "dangling", "zero")),
                                 "features": st.sampled_from(("adm", "inception", "dinov2"))})


def build_sidecar(case: dict, folder: Path) -> None:
    shutil.copy(given() / "features" / "inception.pth", folder / "x.pth")
    record = folder / "x.pth.sha256"
    if case["thing"] is None:
        record.write_bytes(base64.b64decode(case["content"]))
    else:
        make_thing(record, case["thing"], folder)


def run_sidecar(case: dict, folder: Path) -> None:
    wanted = (f"images={GIVEN}/images.npz", f"reference={GIVEN}/reference.npz", f"features={case['features']}",
              "features_weights='{case}/x.pth'", "results='{case}/out/results.jsonl'")
    if case["features"] == "adm":      # TensorFlow is not started in a child
        from scoring import features

        run_command("fid", folder, [], at_home(composed("fid", wanted), folder), through=True,
                    must_refuse="these are no weights of ADM's", prepare=lambda: setattr(features, "adm",
                                                                                         adm_hash_alone))
        return
    run_command("fid", folder, [], at_home(composed("fid", wanted), folder), through=True,
                must_refuse="these are no weights of these features")


def adm_hash_alone(weights: Path, sha256: str | None, device: object) -> None:
    from scoring import features

    features.verified(weights, sha256)
    raise ValueError("TensorFlow is left out.")


KEPT = st.fixed_dictionaries({"damage": TENSOR_DAMAGE, "thing": st.sampled_from((None, None, None, *ODD_THINGS)),
                              "place": st.sampled_from(("file", "file", "record.json", "other"))})


def build_kept(case: dict, folder: Path) -> None:
    scored = folder / "out" / "scored"
    shutil.copytree(given() / "scored" / "features", scored / "features")
    file = sorted(scored.rglob("*.safetensors"))[0]
    place = {"file": file, "record.json": file.with_name("record.json"),
             "other": file.with_name("x.safetensors")}[case["place"]]
    damage = case["damage"]
    if case["thing"] is not None:
        make_thing(place, case["thing"], folder)
    elif damage["how"] in BYTES:
        file.write_bytes(tampered(file.read_bytes(), damage["how"], damage["number"], damage["value"]))
    else:
        changed_tensors(file, damage["how"], damage["number"])


def run_kept(case: dict, folder: Path) -> None:
    wanted = (f"images={GIVEN}/images.npz", f"reference={GIVEN}/reference.npz", "features=pixels", "keep_features=true",
              "batch_size=4", "results='{case}/out/scored/results.jsonl'")
    run_command("fid", folder, [], at_home(composed("fid", wanted), folder), through=True)


# Features record the hash of their weights beside them at the first use.
HASHES = tuple(f"{name}.sha256" for name in {*WEIGHT_NAMES, "beside.pt"})
READERS = [Reader(name, cases, build, run, may_write=("out", *HASHES) if name == "weights" else ("out",), prepare=given)
           for name, cases, build, run in (
    ("meta_json", META, build_meta, run_meta), ("safetensors", SAFETENSORS, build_safetensors, run_safetensors),
    ("run_folder", LAYOUT, build_layout, run_layout), ("rows", ROWS, build_rows, run_rows),
    ("study_json", TOLD, build_told, run_told), ("config_yaml", CONFIG, build_config, run_config),
    ("weights", WEIGHTS, build_weights, run_weights), ("reference_npz", NPZ, build_npz, run_npz),
    ("sidecar", SIDECAR, build_sidecar, run_sidecar), ("kept_features", KEPT, build_kept, run_kept),
)]
