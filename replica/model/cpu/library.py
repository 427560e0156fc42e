"""Compiles the C++ kernels for the CPU they run on, once, and loads them.

It needs a C++ compiler with OpenMP, as Triton needs one for C; without one there is no library,
and products are oneDNN's.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, cast

import torch

from replica.compiled_files import is_whole

FOLDER = Path(__file__).parent
SOURCES = ("products.cpp", "attention.cpp")
HEADER = "lanes.h"
COMPILE = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-c")
LINK = ("-shared",)
"""Linked without libgomp, so that OpenMP's functions are those of the copy that torch has loaded: a
second copy would start a second team of threads on the same cores."""

_POINTER, _LONG, _FLOAT, _BOOL = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_bool
Kernel: TypeAlias = Callable[..., None]


class NoLibrary(Exception):
    """The kernels cannot be had here; says why."""


def load(cache_dir: str) -> ctypes.CDLL:
    """The kernels, compiled unless `cache_dir` holds them, whole. Raises NoLibrary."""
    path = _path(Path(cache_dir).expanduser())
    try:
        if not is_whole(path):
            _compile(path)
        return _declare(ctypes.CDLL(str(path)))
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit status {error.returncode}"]
        raise NoLibrary(f"{error.cmd[0]} failed: {lines[0]}") from error
    except OSError as error:
        raise NoLibrary(str(error)) from error


def _path(folder: Path) -> Path:
    """A file for these sources and this CPU: a folder may be shared by several machines."""
    digest = hashlib.sha256()
    for name in (HEADER, *SOURCES):
        digest.update((FOLDER / name).read_bytes())
    digest.update(repr((COMPILE, LINK, torch.__version__, _cpu())).encode())
    return folder / f"kernels-{digest.hexdigest()[:16]}.so"


def _cpu() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(path: Path) -> None:
    """Put the library in its place whole: other processes may be about to load it."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise NoLibrary("there is no C++ compiler")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects = [str(Path(name).with_suffix(".o")) for name in SOURCES]
        # Nothing but this folder need be writable.
        environment = os.environ | {"TMPDIR": folder}
        for command in (
            [compiler, *COMPILE, *(str(FOLDER / name) for name in SOURCES)],
            [compiler, *LINK, *objects, "-o", path.name],
        ):
            subprocess.run(
                command, check=True, capture_output=True, text=True, cwd=folder, env=environment
            )
        Path(folder, path.name).replace(path)


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    for name in ("float32", "bfloat16"):
        for function, arguments in (
            (f"linear_{name}", [_POINTER] * 4 + [_LONG] * 3),
            (f"logits_{name}", [_POINTER] * 3 + [_LONG] * 3),
            (f"gated_{name}", [*[_POINTER] * 3, *[_LONG] * 3, _BOOL]),
            (f"add_norm_{name}", [*[_POINTER] * 3, _FLOAT, _POINTER, *[_LONG] * 2, _FLOAT]),
        ):
            found = getattr(library, function)
            found.argtypes, found.restype = arguments, None
        store = getattr(library, f"rotate_and_store_{name}")
        attend = getattr(library, f"attend_{name}")
        store.argtypes = [*[_POINTER] * 4, _FLOAT, _FLOAT, _POINTER, _POINTER, *[_LONG] * 5]
        attend.argtypes = [_POINTER, _LONG, _POINTER, _POINTER, *[_LONG] * 3]
        attend.argtypes += [_POINTER, _POINTER, *[_LONG] * 5, _FLOAT, _FLOAT]
        for found in (store, attend):
            found.restype, found.errcheck = _BOOL, _check
    library.lanes.restype = _LONG
    library.attends_over.argtypes, library.attends_over.restype = [_LONG], _BOOL
    return library


def _check(valid: bool, *_: object) -> None:
    if not valid:
        raise IndexError("the KV pool has no such slot")


def kernel(library: ctypes.CDLL, name: str, dtype: torch.dtype) -> Kernel:
    """The kernel for weights and activations of that type."""
    return cast("Kernel", getattr(library, f"{name}_{str(dtype).removeprefix('torch.')}"))
