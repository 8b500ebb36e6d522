"""The extensions of CONTRIBUTING.md, as files that the packages find beside their own."""

import contextlib
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from conftest import ROOT

PAGE = {"objectives/probe": "A linear probe", "objectives/huber": "Huber's loss",
        "blocks/parallel": "Attention and MLP in parallel", "solvers/midpoint": "The midpoint rule",
        "metrics/mean_distance": "def mean_distance",
        "guidances/rescaled": "Guidance whose estimate", "diffusions/log_uniform": "EDM, trained on noise levels"}


def code_of(file: str) -> str:
    """The code that the page shows for a file, which is short."""
    codes = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    [code] = [code for code in codes if PAGE[file] in code]
    assert len([line for line in code.splitlines() if line]) <= 20
    return code


@contextlib.contextmanager
def installed(folder: Path) -> Iterator[None]:
    """Writes the page's files where packages search, and removes them afterwards."""
    rooms = {file.partition("/")[0] for file in PAGE}
    for file in PAGE:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / f"{file}.py").write_text(code_of(file))
    for room in rooms:
        importlib.import_module(room).__path__.append(str(folder / room))
    yield
    for room in rooms:
        importlib.import_module(room).__path__.pop()
    for file in PAGE:
        sys.modules.pop(file.replace("/", "."), None)
