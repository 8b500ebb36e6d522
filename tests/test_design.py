"""Imports point down between packages, without a cycle, and docs/design.md names every file and package."""

import ast
import re
from graphlib import TopologicalSorter

from conftest import ROOT

# From the lowest to the highest; files of one group may import each other, without a cycle.
CORE = ("extensions", "routing_module", "blocks", "dit", "guidance", "edm", "rf", "autoencoder", "objectives",
        "solvers", "guidances", "diffusions", "routed")
ORDER = [*CORE, "runtime", "weights", "latents", "sampling", "scoring", "metrics", "training", "commands", "scripts"]
COMMANDS = ("train", "sample", "fid")


def files() -> dict[str, ast.Module]:
    """Parses our code outside of tests, by module name."""
    found = [*ROOT.glob("*.py"), *(path for name in ORDER for path in (ROOT / name).glob("**/*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"):
            ast.parse(path.read_text()) for path in found}


def package(module: str) -> str:
    first = module.partition(".")[0]
    return "commands" if first in COMMANDS else first


def imported(name: str, tree: ast.Module, modules: dict) -> set[str]:
    """Names our modules that a file imports at its top; what a function imports when it is called does not count."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in modules else node.module
                      for alias in node.names}
    return {module for module in found if module in modules and module != name}


def test_imports_point_down_and_the_core_imports_no_supporting_code():
    modules = files()
    for name, tree in modules.items():
        for other in imported(name, tree, modules):
            assert ORDER.index(package(other)) <= ORDER.index(package(name)), f"{name} imports {other}"
            if package(name) == "commands":  # sample.py and fid.py are commands that no other imports
                assert package(other) != "commands", f"{name} imports {other}"


def test_imports_have_no_cycle():
    modules = files()
    TopologicalSorter({name: imported(name, tree, modules) for name, tree in modules.items()}).prepare()


def test_a_reader_of_latents_imports_no_network():
    modules, reached, found = files(), {"latents.loader", "latents.folder"}, set()
    while reached:
        found |= reached
        reached = {other for name in reached for other in imported(name, modules[name], modules)} - found
    assert {package(name) for name in found} <= {"latents", "runtime", "autoencoder", "routing_module"}


def test_at_most_ten_files_at_the_top_level_and_the_page_names_each_file_and_package():
    top = sorted(path.name for path in ROOT.glob("*.py"))
    tree = re.search(r"```\n(.*?)```", (ROOT / "docs/design.md").read_text(), re.DOTALL)[1]
    assert len(top) <= 10
    assert {line.split()[0] for line in tree.splitlines() if line.split()[0].endswith(".py")} == set(top)
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages <= set(re.findall(r"^(\w+)/", tree, re.MULTILINE)), packages


def test_a_folders_file_is_found_by_its_name_alone():
    names = [path.stem for folder in (ROOT, *map(ROOT.joinpath, ORDER)) for path in folder.glob("*.py")
             if path.stem != "__init__"]
    assert sorted(names) == sorted(set(names)), sorted(name for name in set(names) if names.count(name) > 1)


def test_private_parts_of_libraries_are_reached_from_one_file():
    for name, tree in files().items():
        private = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
                   and node.attr in ("_dynamo", "_inductor", "_reset_state", "filterwarnings", "setLevel")}
        assert not private or name == "runtime.libraries" or package(name) in ("routed", "scripts"), (name, private)
