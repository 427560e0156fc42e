"""A short run of schemathesis against our own OpenAPI document; README has the long one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.serve_app.conftest import KEY, Site

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)


def test_what_the_document_allows_and_forbids_is_answered_as_it_says(
    site: Site, tmp_path: Path
) -> None:
    """C22, C23, C28: none of the requests is a server error."""
    run = subprocess.run(
        [
            *(Path(sys.executable).with_name("schemathesis"), "run", f"{site.url}/openapi.json"),
            *("-H", f"Authorization: Bearer {KEY}", "--checks", ",".join(CHECKS), "--no-color"),
            *("--phases", "coverage,fuzzing", "--max-examples", "20", "--seed", "1"),
        ],
        cwd=tmp_path,  # it keeps notes
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert "9/9" in run.stdout
