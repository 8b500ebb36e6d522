"""What the pages promise: links lead somewhere, commands parse, the Python lines run."""

import os
import pkgutil
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT, command_of

from runtime.command import by_key, compose, jobs_of, parse_options
from runtime.schema import read

PAGES = [*(ROOT / page for page in ("README.md", "CONTRIBUTING.md", "examples/emoji/README.md")),
         *sorted((ROOT / "docs").glob("*.md"))]
PLAIN_ARGUMENTS = ("scripts/compare.py", "scripts/studies/held_out.py", "examples/emoji/prepare_emoji.py",
                   "examples/route_diffusers.py", "examples/write_latents.py")
CODE = [*sorted(ROOT.glob("*.py")), *sorted((ROOT / "scripts").glob("[!_]*.py")),
        *sorted((ROOT / "scripts/studies").glob("[!_]*.py")), *sorted((ROOT / "examples").glob("*.py")),
        *sorted((ROOT / "configs").rglob("*.yaml"))]
LAUNCHED = re.compile(r"(\w+=\S+ )*(python|accelerate launch|torchrun|timeout|sbatch)( \S+)*? (\S+\.py)\b")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.S | re.M)


def command_lines(page):
    """The lines that call one of the commands, in a page's blocks and its prose or at the head of a file.

    Continued lines are joined. At the head of a file a command ends before two spaces or a remark.
    """
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".md":
        blocks = [block for language, block in FENCED.findall(text) if not language]
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        spans = re.findall(r"`([^`]+)`", FENCED.sub("", text))
        lines += [" ".join(span.split()) for span in spans]
    else:
        head = text.split('"""')[1] if page.suffix == ".py" else "\n".join(
            line.lstrip("# ") for line in text.splitlines() if line.lstrip().startswith("#"))
        lines = [re.split(r"  +| and torchrun", line.strip())[0]
                 for line in re.sub(r" *\\\n *", " ", head).splitlines()]
    for line in lines:
        if LAUNCHED.match(line) and " -m pytest" not in line:
            yield line


@cache  # many pages have the same line
def composed(line):
    """The settings of a command line, checked as the command checks them; None for a script with plain arguments."""
    for old, new in {"fid.py …": "fid.py checkpoint=x reference=x", "…": "x", "...": "x", "$m": "dit", "$p": "4",
                     "$b": "16"}.items():
        line = line.replace(old, new)
    words = shlex.split(re.sub(r"<[^>]*>", "x", line), comments=True)
    script = next(word for word in words if word.endswith(".py"))
    if script in PLAIN_ARGUMENTS:
        return None
    config = {"train.py": "config"}.get(script, Path(script).stem)
    main, declared = command_of(config)
    check = getattr(sys.modules[main.__module__], "check_settings", lambda cfg, _: cfg)
    given = words[words.index(script) + 1 :]
    given = [word for word in given[: given.index("|") if "|" in given else None] if word != "x"]
    options, given = parse_options(given)
    jobs = jobs_of(given) if options.multirun else [given]
    return [check(read(declared, compose(config, declared, job)), by_key(job)) for job in jobs]


@pytest.mark.parametrize("page", [*PAGES, *CODE], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_on_a_page_accepts_its_settings(page):
    for line in command_lines(page):
        try:
            composed(line)
        except Exception as error:
            pytest.fail(f"{page.name}: {line}\n{error}")


def test_commands_are_found_on_the_pages():
    assert sum(1 for page in PAGES for _ in command_lines(page)) > 30
    assert sum(1 for page in CODE for _ in command_lines(page)) > 30


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading.strip().lower())).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere_and_no_line_is_too_long(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\[[^\]]*\]\(([^)]+)\)", FENCED.sub("", text)):
        if target.startswith("http"):
            continue
        name, _, place = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{page.name} links to {target}, which is not there"
        if place:
            lines = file.read_text(encoding="utf-8").splitlines()
            headings = [anchor(line.lstrip("#")) for line in lines if line.startswith("#")]
            assert place in headings, f"{page.name} links to {target}, which has no such heading"
    assert not [line for line in text.splitlines() if len(line) > 120]


def test_each_function_and_test_that_carries_a_part_of_the_paper_exists():
    page = (ROOT / "docs/paper.md").read_text(encoding="utf-8")
    for file in re.findall(r"`(tests/\S+\.py)`", page):
        assert (ROOT / file).is_file()
    columns = [row.split(" | ")[1] for row in page.splitlines() if row.startswith("| ")]
    names = re.findall(r"`([\w.]+)`", " ".join(columns))
    assert len(names) > 20
    for name in names:
        assert pkgutil.resolve_name(name) is not None


def test_the_python_of_a_forward_pass_runs_in_another_folder(tmp_path):      # the readme's: test_package.py
    page = (ROOT / "docs/trainers.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(import torch.*?)```", page, re.S)
    (tmp_path / "notebook.py").write_text(code)
    result = subprocess.run([sys.executable, "notebook.py"], cwd=tmp_path, capture_output=True, text=True,
                            env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert result.returncode == 0, result.stderr
