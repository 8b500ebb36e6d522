#!/usr/bin/env bash
# Sets up what quickstart.sh does plus the development packages, checks the style, and runs the whole test suite.
#   bash scripts/test.sh [arguments of pytest]
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh requirements-dev.txt

ruff check .
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} python -m pytest -n 2 --dist loadfile "$@"
