#!/usr/bin/env bash
# Train and evaluate: scripts/train.sh [--config configs/X.gin] [--bind 'name=value'] ... (default: generated data, CPU).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

config=("--config" "$REPO/configs/synthetic.gin")
for argument in "$@"; do
  case "$argument" in --config | --config=* | -h | --help) config=() ;; esac
done
exec "$PYTHON" -m generative_recommenders.train ${config[@]+"${config[@]}"} "$@"
