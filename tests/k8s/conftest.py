from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def crds(request: pytest.FixtureRequest) -> Path | None:
    """Where the schemas of custom resources are, or None."""
    named = request.config.getoption("--crd-schemas") or os.environ.get("FAIRSTREAM_CRD_SCHEMAS")
    return Path(named) if named else None


@pytest.fixture
def known_crds(crds: Path | None) -> Path:
    if crds is None:
        pytest.skip("neither --crd-schemas nor FAIRSTREAM_CRD_SCHEMAS names a folder of schemas")
    return crds
