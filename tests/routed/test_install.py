"""What `pip install <checkout>` brings: one package and one module, which need torch alone."""

import ast
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from conftest import ROOT

USE = """
import sys
import torch
from routed import Route, Router, routed

net = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), num_layers=4)
with routed(net, [Route(1, -2, 0.5)], blocks="layers") as routing:
    net(torch.randn(2, 16, 8)).sum().backward()
assert routing.ids_keep[0].shape == (2, 8)
import routed, routing_module
print(routed.__file__, routing_module.__file__, *sys.modules, sep="\\n")
"""


def git(checkout: Path, *words: str) -> list[str]:
    return subprocess.run(["git", *words], cwd=checkout, check=True, capture_output=True, text=True).stdout.splitlines()


def needed_by(name: str, found: dict[str, metadata.Distribution]) -> dict[str, metadata.Distribution]:
    """The installed distributions that a distribution needs, itself included."""
    if name not in found:
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:           # of another system
            return found
        for line in found[name].requires or ():
            if "extra ==" not in line:
                needed_by(re.match(r"[\w.-]+", line)[0], found)
    return found


def test_pip_brings_one_package_and_one_module_that_need_torch_alone(tmp_path):
    checkout, installed, beside, empty = (tmp_path / name for name in ("checkout", "installed", "beside", "empty"))
    for folder in (checkout, beside, empty):
        folder.mkdir()
    for name in git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard"):
        if (ROOT / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, checkout / name)
    git(checkout, "init", "-q")
    git(checkout, "add", "-A")
    before = git(checkout, "status", "--porcelain")
    subprocess.run([sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index",
                    "--disable-pip-version-check", "--no-compile", "--target", installed, checkout], check=True,
                   capture_output=True)
    assert git(checkout, "status", "--porcelain") == before      # building leaves nothing that git would see
    brought = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert brought == {"routed", "routing_module.py"}

    for distribution in needed_by("torch", {}).values():
        for top in {file.parts[0] for file in distribution.files if file.parts[0] not in ("..", "__pycache__")}:
            if not (beside / top).exists():
                (beside / top).symlink_to(distribution.locate_file(top))
    result = subprocess.run([sys.executable, "-S", "-c", USE], cwd=empty, capture_output=True, text=True,
                            env=dict(PYTHONPATH=f"{installed}:{beside}", OMP_NUM_THREADS="1"))
    assert result.returncode == 0, result.stderr
    package, module, *imported = result.stdout.splitlines()
    assert package.startswith(str(installed)) and module.startswith(str(installed))
    assert not {"timm", "diffusers", "transformers"} & set(imported) and not list(empty.iterdir())


def test_what_pip_installs_runs_on_python_3_10():
    for path in [ROOT / "routing_module.py", *(ROOT / "routed").glob("*.py")]:
        ast.parse(path.read_text(), feature_version=(3, 10))
