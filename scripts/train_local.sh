#!/usr/bin/env bash
# Train on all GPUs of this host, or on one CPU process where there is none.
#
#   scripts/train_local.sh [-n PROCESSES] [overrides for train.py …]
#   scripts/train_local.sh -n 2 model=dense_tiny train.steps=50
set -euo pipefail
cd "$(dirname "$0")/.."

processes=""
while getopts "n:h" option; do
  case $option in
    n) processes=$OPTARG ;;
    *) sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 0 ;;
  esac
done
shift $((OPTIND - 1))

python=.venv/bin/python
[ -x "$python" ] || { echo "Run 'make train' once first: it creates .venv." >&2; exit 1; }
if [ -z "$processes" ]; then
  processes=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
  [ "$processes" -gt 0 ] || processes=1
fi
exec "$python" -m torch.distributed.run --standalone --nproc-per-node="$processes" train.py "$@"
