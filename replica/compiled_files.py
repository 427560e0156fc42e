"""Whether compiled files in a cache can be loaded.

A library or a GPU's kernel that a crash or a full disk has cut short is not refused where it is
loaded: it fails each start anew, or ends the process. So it is looked at first.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

_GROUP = "__grp__"
"""Prefix of the name of the file in which Triton lists the files of one kernel."""
MAGIC = b"\x7fELF"
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
"""Layout of the header of a 64-bit little-endian ELF file (`Elf64_Ehdr` in the System V ABI)."""


def is_whole(path: Path) -> bool:
    """A 64-bit ELF file that reaches to the end of its tables; False where there is none."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(_HEADER.size)
    except OSError:
        return False
    if len(head) < _HEADER.size or not head.startswith(MAGIC):
        return False
    fields: tuple[int, ...] = _HEADER.unpack(head)[1:]
    programs, sections = fields[4:6]
    program_size, num_programs, section_size, num_sections = fields[8:12]
    return size >= max(
        programs + program_size * num_programs, sections + section_size * num_sections
    )


def is_sound(kernel: Path) -> bool:
    """Whether a folder of Triton's cache, which holds one kernel, can be loaded as it is."""
    try:
        return all(_is_readable(file) for file in kernel.iterdir() if file.is_file())
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return False


def _is_readable(file: Path) -> bool:
    if file.suffix in (".cubin", ".so"):
        return is_whole(file)
    text = file.read_text()
    if file.name.startswith(_GROUP):
        return all(Path(path).is_file() for path in json.loads(text)["child_paths"].values())
    return file.suffix != ".json" or isinstance(json.loads(text), dict)
