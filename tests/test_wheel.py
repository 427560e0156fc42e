"""What is installed: the server, its kernels and its commands, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

pytest.importorskip("setuptools", minversion="77", reason="the build needs a newer setuptools")


def test_the_wheel_holds_the_server_and_no_more(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-q", "-w", str(tmp_path)], check=True)
    [wheel] = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        [listed] = [name for name in names if name.endswith("entry_points.txt")]
        commands = archive.read(listed).decode()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"serve_app", "replica", "router"}
    code = {str(file) for top in tops for file in Path(top).rglob("*.py")}
    kernels = {
        str(file) for top in tops for end in ("cpp", "h") for file in Path(top).rglob(f"*.{end}")
    }
    page = {str(file) for file in Path("serve_app/http/dashboard").iterdir()}
    assert kernels
    assert page
    assert code | kernels | page == {name for name in names if ".dist-info" not in name}
    for name in ("check", "keys", "top"):
        assert f"fairstream-{name} = serve_app.{name}:main" in commands
