#!/usr/bin/env bash
# Sets up what quickstart.sh does plus the development packages, lints, checks types, and runs the complete test suite.
#   bash scripts/test.sh [arguments of pytest]
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/environment.sh requirements-dev.txt

ruff check .
mypy
# One worker runs a file, so the longest two come first.
[ $# -gt 0 ] || set -- tests/test_resume.py tests/test_train.py \
    $(find tests -name 'test_*.py' ! -path '*/rigs/*' ! -name test_resume.py ! -name test_train.py | sort)
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
