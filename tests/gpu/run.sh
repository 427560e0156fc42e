#!/usr/bin/env bash
# Every test that needs a GPU, on the machine that has one. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/../.."
python3 -m pytest -m gpu tests/gpu tests/replica/model/attention/test_triton_paged.py "$@"
