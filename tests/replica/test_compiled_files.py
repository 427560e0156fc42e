"""What a crash or a full disk leaves in a cache of compiled files."""

from __future__ import annotations

import json
from ctypes import CDLL
from pathlib import Path

import pytest

from replica.compiled_files import is_sound, is_whole


@pytest.fixture
def library(kernels: CDLL) -> bytes:
    return Path(kernels._name).read_bytes()


def test_a_file_cut_anywhere_is_not_whole(library, tmp_path):
    path = tmp_path / "kernels.so"
    path.write_bytes(library)
    assert is_whole(path)
    for size in (0, 3, 20, 63, 64, 4096, len(library) // 2, len(library) - 64):
        path.write_bytes(library[:size])
        assert not is_whole(path), size
    path.write_bytes(b"not a library" * 100)
    assert not is_whole(path)
    assert not is_whole(tmp_path / "absent.so")


def kernel(folder: Path, library: bytes) -> dict[str, Path]:
    """The files of a kernel as Triton keeps them."""
    folder.mkdir()
    names = {"binary": "k.cubin", "about": "k.json", "text": "k.ptx", "group": "__grp__k.json"}
    files = {kind: folder / name for kind, name in names.items()}
    files["binary"].write_bytes(library)
    files["about"].write_text('{"name": "k"}')
    files["text"].write_text("// é")
    children = {file.name: str(file) for kind, file in files.items() if kind != "group"}
    files["group"].write_text(json.dumps({"child_paths": children}))
    return files


@pytest.mark.parametrize("kind", ["binary", "about", "text", "group"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe{", b"[]", None], ids=str)
def test_a_kernel_with_a_spoiled_or_absent_file_is_not_loaded(library, tmp_path, kind, content):
    files = kernel(tmp_path / "k", library)
    assert is_sound(tmp_path / "k")
    if content is None:
        files[kind].unlink()
    else:
        files[kind].write_bytes(content)
    harmless = kind == "text" and content in (b"", b"[]")  # read by nobody
    unlisted = kind == "group" and content is None  # Triton takes such a kernel for absent
    assert is_sound(tmp_path / "k") == (harmless or unlisted)


def test_what_is_no_folder_is_not_sound(tmp_path):
    (tmp_path / "file").write_text("")
    assert not is_sound(tmp_path / "file")
