"""The Dockerfile, as far as it can be judged without Docker."""

from __future__ import annotations

import re
from importlib.metadata import requires, version

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.k8s.manifests import PROJECT, ROOT

LINES = (ROOT / "Dockerfile").read_text().replace("\\\n", "").splitlines()


def copied() -> list[str]:
    """What is copied from the repository."""
    words = [line.split()[1:-1] for line in LINES if line.startswith("COPY ")]
    return [one for line in words for one in line if not line[0].startswith("--from=")]


@pytest.mark.parametrize("path", copied())
def test_what_is_copied_is_there_and_is_not_kept_outside(path: str) -> None:
    assert (ROOT / path).exists()
    assert f"!{path}" in (ROOT / ".dockerignore").read_text().splitlines()


def test_nothing_else_gets_in() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == set(copied())


def test_every_package_that_the_server_imports_is_copied() -> None:
    """The build asks for the licence and the readme, too."""
    assert {"router", "replica", "serve_app", "pyproject.toml"} <= set(copied())
    assert {"README.md", "LICENSE"} <= set(copied())


def test_the_extras_that_it_installs_exist() -> None:
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', "\n".join(LINES))
    for extra in extras.split(","):
        assert f"\n{extra} = [" in PROJECT


def test_its_ray_is_the_one_that_these_tests_run_on_and_that_the_project_allows() -> None:
    """KubeRay wants one version in all pods, so the image names it."""
    (pinned,) = (line.partition("=")[2] for line in LINES if line.startswith("ARG RAY_VERSION="))
    assert pinned == version("ray")
    (ours,) = re.findall(r'"ray\[serve\](.+)"', PROJECT)
    assert pinned in SpecifierSet(ours)


def needed(name: str, extras: frozenset[str], found: set[str]) -> set[str]:
    """Packages that come along with one, itself included, as they are installed here."""
    key = canonicalize_name(name)
    if key in found and not extras:
        return found
    found.add(key)
    for line in requires(name) or ():
        one = Requirement(line)
        wanted = [{"extra": extra} for extra in (*extras, "")]
        if one.marker is None or any(map(one.marker.evaluate, wanted)):
            needed(one.name, frozenset(one.extras), found)
    return found


def test_everything_that_it_installs_is_pinned() -> None:
    """To a version that the project allows."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    listed = [re.search(rf"^{name} = \[(.+?)\]$", PROJECT, re.MULTILINE | re.DOTALL)
              for name in ("dependencies", "local", "redis")]  # fmt: skip
    ours = [one for found in listed for one in re.findall('"(.+?)"', found[1])]
    found: set[str] = set()
    for one in map(Requirement, ours):
        needed(one.name, frozenset(one.extras), found)
        assert pins[one.name] in one.specifier
    assert not found - pins.keys()
    installs = [line for line in LINES if "pip install" in line and "MODEL_PACKAGES" not in line]
    assert all("constraints.txt" in line or "PIP_CONSTRAINT" in line for line in installs)
    assert all(re.search(r":.*\d+\.\d+\.\d+", base) for base in bases())


def bases() -> list[str]:
    """Images that it begins with, arguments put in."""
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", "\n".join(LINES), re.MULTILINE))
    found = [line.split()[1] for line in LINES if line.startswith("FROM python:")]
    return [re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], one) for one in found]


def test_stages_and_arguments_are_declared_before_they_are_used() -> None:
    stages, arguments = set(), set()
    for line in LINES:
        words = line.split()
        if line.startswith("ARG "):
            arguments.add(words[1].partition("=")[0])
        for used in re.findall(r"\$\{(\w+)", line):
            assert used in arguments, line
        if line.startswith("FROM "):
            base = words[1]
            assert base.startswith("python:") or base in stages or base == "runtime-${DEVICE}"
            stages.add(words[3])
        for source in re.findall(r"--from=(\w+)", line):
            assert source in stages
    assert {"runtime-cpu", "runtime-cuda"} <= stages


def test_it_does_not_run_as_root() -> None:
    """With the user that the manifests name."""
    assert [line for line in LINES if line.startswith("USER ")] == ["USER 1000:1000"]
