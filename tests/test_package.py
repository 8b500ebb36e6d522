"""What pip installs: its wheel builds from the checkout, has one version and the types, and runs the page's example."""

import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

import routed

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Builds the wheel from copies of what it consists of, as setuptools writes beside its sources."""
    checkout = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "LICENSE.txt", "routing_module.py"):
        shutil.copy(ROOT / name, checkout)
    shutil.copytree(ROOT / "routed", checkout / "routed", ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", "dist", "."]
    done = subprocess.run(build, cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Deprecat" not in done.stdout + done.stderr
    return next((checkout / "dist").glob("*.whl"))


def test_the_wheel_has_the_packages_their_types_the_licence_and_one_version(wheel):
    archive = zipfile.ZipFile(wheel)
    metadata = HeaderParser().parsestr(archive.read(f"routed-{routed.__version__}.dist-info/METADATA").decode())
    assert {"routed/__init__.py", "routed/py.typed", "routing_module.py"} <= {*archive.namelist()}
    assert {name.partition("/")[0] for name in archive.namelist()} - {"routed", "routing_module.py"} == {
        f"routed-{routed.__version__}.dist-info"}
    assert (metadata["Version"], metadata["License-Expression"]) == (routed.__version__, "MIT")
    assert metadata.get_all("Requires-Dist") == ["torch"]


def test_version_and_date_are_the_same_in_the_citation_and_the_changelog():
    date = re.search(rf"^## {re.escape(routed.__version__)}, (\d{{4}}-\d\d-\d\d)$",
                     (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {routed.__version__}\n" in citation and f"date-released: {date}\n" in citation


def test_the_example_runs_from_the_wheel_alone(wheel, tmp_path):
    example = re.search(r"```python\n(.+?)```", (ROOT / "routed/README.md").read_text(), re.S)[1]
    assert example in (ROOT / "README.md").read_text()
    code = f"import sys; sys.path.insert(0, {str(wheel)!r})\n{example}\nprint(routing.ids_keep[0].shape)\nimport routed"
    done = subprocess.run([sys.executable, "-I", "-c", code + "\nprint(routed.__file__, *sys.modules)"], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.stdout.split("\n")[0] == "torch.Size([8, 32])", done.stderr
    assert str(wheel) in done.stdout
    assert not {"timm", "diffusers", "transformers", "torchvision", "accelerate"} & {*done.stdout.split()}
