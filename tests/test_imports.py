"""Each module can be imported by itself, and no imports form a circle."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import grimp
import networkx as nx

PACKAGES = ("serve_app", "replica", "router", "benchmarks")
OPTIONAL = {"triton", "matplotlib"}
"""Not installed everywhere: modules that need one of these are left out where it is missing."""
TOGETHER = """
import os, sys
import fastapi, openai, ray.serve, torch, transformers  # not of ours, and slow
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            __import__(name)
        except BaseException as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            os._exit(1)
        os._exit(0)
    os.waitpid(child, 0)
"""


def modules() -> list[str]:
    files = (file for package in PACKAGES for file in Path(package).rglob("*.py"))
    return sorted(".".join(f.with_suffix("").parts).removesuffix(".__init__") for f in files)


def test_no_imports_form_a_circle() -> None:
    """To import a module is to import the packages that it is in."""
    graph = grimp.build_graph(*PACKAGES)
    imports = nx.DiGraph()
    for name in graph.modules:
        parents = (name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1))
        imports.add_edges_from((name, parent) for parent in parents)
        found = graph.find_modules_directly_imported_by(name)
        imports.add_edges_from((name, other) for other in found)
    circles = [sorted(each) for each in nx.strongly_connected_components(imports) if len(each) > 1]
    assert circles == []


def test_every_module_imports_alone() -> None:
    names = modules()
    assert len(names) > 200
    command = [sys.executable, "-W", "ignore", "-c", TOGETHER, *names]
    failed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    missing = {name for name in OPTIONAL if find_spec(name) is None}
    excused = tuple(f"ModuleNotFoundError: No module named '{name}'" for name in missing)
    assert [line for line in failed.splitlines() if not line.endswith(excused)] == []
