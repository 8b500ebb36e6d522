"""Every part of the plan for a GPU runs on a CPU, with tiny networks, and writes its JSON."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = [pytest.mark.rig, pytest.mark.timeout(0)]
OFFICIAL = {  # what scripts/studies/official.py calls
    "dit.py": """
from torch import nn

class DiT(nn.Conv2d):
    def __init__(self, *, in_channels, routes, **_):
        super().__init__(in_channels, in_channels, 1)
""",
    "edm.py": """
class EDMDiffusion:
    wrap_model_with_precond = staticmethod(lambda net: net)
    get_training_loss = staticmethod(lambda net, x, y, class_drop_prob: (net(x) - x).square().mean((1, 2, 3)))
""",
    "routing_module.py": "",
    "utils/train_helper.py": "requires_grad = update_ema = lambda *_: None",
}


def write_official(folder: Path) -> Path:
    (folder / "utils").mkdir(parents=True)
    for name, source in OFFICIAL.items():
        (folder / name).write_text(source)
    return folder


def test_every_part_of_the_plan_for_a_gpu_runs_in_a_rehearsal(tmp_path):
    ended = subprocess.run(
        ["bash", ROOT / "scripts/studies/benchmark_gpu.sh"], capture_output=True, text=True, check=False,
        env=os.environ | {"REHEARSAL": "1", "PYTHON": sys.executable, "OUT": str(tmp_path / "out"),
                          "OFFICIAL": str(write_official(tmp_path / "official"))})
    assert ended.returncode == 0 and "All parts are in" in ended.stdout, ended.stdout[-3000:]
    records = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")}
    assert {*records} == {*re.findall(r"== (\w+) \(at most", ended.stdout)} and len(records) == 19
    assert [records[name]["DDP"] for name in ("s2_32", "s2_32_ddp")] == [False, True]
