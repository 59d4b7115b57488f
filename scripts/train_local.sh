#!/usr/bin/env bash
# Train on all GPUs of this host, or on one CPU process where there is none.
#
#   scripts/train_local.sh [-n PROCESSES] [overrides for train.py …]
#   scripts/train_local.sh -n 2 model=dense_tiny train.steps=50
#
# SIGTERM, SIGUSR1, SIGHUP and Ctrl-C save a checkpoint and end it; the exit code is then 75, for Ctrl-C 130.

set -euo pipefail

processes=""
case "${1:-}" in
  -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit 0 ;;
  -n) processes=${2:?-n needs a number of processes}; shift 2 ;;
esac
cd "$(dirname "$0")/.."

python=.venv/bin/python
[ -x "$python" ] || { echo "Run 'make train' once first: it creates .venv." >&2; exit 1; }
if [ -z "$processes" ]; then
  processes=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
  [ "$processes" -gt 0 ] || processes=1
fi
exec "$python" -m app.cli.torchrun --standalone --nproc-per-node="$processes" train.py "$@"
