"""Compiling the kernels, and doing without them."""

from __future__ import annotations

import os
import subprocess
import sys
from ctypes import CDLL
from pathlib import Path

import pytest
import torch

from replica.model.cpu import library, pack
from replica.model.cpu.library import NoLibrary, load
from replica.model.cpu.native import NativeOps
from replica.model.cpu.onednn import OneDnnOps


def compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_kernels_are_compiled_once(
    kernels: CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(str(tmp_path / "new")).lanes() == kernels.lanes()
    [made] = (tmp_path / "new").iterdir()
    monkeypatch.setenv("CXX", "there-is-no-such-compiler")
    assert load(str(tmp_path / "new")).lanes() == kernels.lanes()
    assert [made] == list((tmp_path / "new").iterdir())


def test_a_file_that_was_cut_short_is_compiled_again(kernels: CDLL, tmp_path: Path) -> None:
    load(str(tmp_path))
    [made] = tmp_path.iterdir()
    made.unlink()  # this process has it mapped
    made.write_bytes(Path(kernels._name).read_bytes()[:5000])
    assert load(str(tmp_path)).lanes() == kernels.lanes()


def test_another_cpu_gets_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder may be on a disk that several machines share."""
    files: set[Path] = set()
    monkeypatch.setattr(library, "_compile", files.add)
    for flags in ("flags: avx2", "flags: avx2 avx512f"):
        monkeypatch.setattr(library, "_cpu", lambda flags=flags: flags)
        with pytest.raises(NoLibrary):
            load(str(tmp_path))
    assert len(files) == 2


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'kernels: no such option' >&2; exit 1", "no such option"),
        ("exit 3", "exit status 3"),
        ("exit 0", "No such file"),
    ],
)
def test_a_compiler_that_fails_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    with pytest.raises(NoLibrary, match=message):
        load(str(tmp_path / "cache"))
    assert not list((tmp_path / "cache").iterdir())


def test_without_a_compiler_products_are_onednns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "there-is-no-such-compiler")
    assert isinstance(pack.choose(torch.float32, str(tmp_path)), OneDnnOps)
    assert "there is no C++ compiler" in caplog.text


def test_a_folder_that_cannot_be_written_costs_speed_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert not isinstance(pack.choose(torch.float32, str(tmp_path / "file")), NativeOps)
    assert "Slower products" in caplog.text


def test_matrix_units_are_left_to_onednn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert isinstance(pack.choose(torch.bfloat16, str(tmp_path)), OneDnnOps)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="lists what is loaded from there")
def test_there_is_one_team_of_threads(kernels: CDLL) -> None:
    """A second OpenMP would run its threads on the same cores."""
    code = (
        "from replica.config import EngineConfig\n"
        "from replica.model.cpu.library import load\n"
        "load(EngineConfig.cache_dir)\n"
        "files = {line.split()[-1] for line in open('/proc/self/maps') if 'omp' in line}\n"
        "print(*(file for file in files if '.so' in file), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert len(done.stdout.split()) == 1, done.stdout
