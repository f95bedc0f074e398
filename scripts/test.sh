#!/usr/bin/env bash
# The test suite with linter, formatter and type checker in it: scripts/test.sh [--full] [pytest arguments]. Without
# --full the slow tier is skipped (under 10 minutes on 2 cores, no GPU needed). HSTU_TEST_WORKERS sets the number of
# parallel processes (default 2; 0 runs in one process).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

cd "$REPO"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$PYTHON" -m pytest -n "${HSTU_TEST_WORKERS:-2}" "$@"
