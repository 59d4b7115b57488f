#!/usr/bin/env bash
# Run the tests with other versions of Python and torch than those of constraints.txt.
#
#   scripts/versions.sh [PYTHON:TORCH …] [-- arguments of pytest]
#   scripts/versions.sh 3.12:2.13.0 3.13:2.15.0 -- tests/plan tests/tensors
#
# Each pair gets an environment in .cache/versions, kept for the next time. pythonX.Y is looked for on the PATH, then among
# the versions of pyenv and uv. PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu finds builds of torch without CUDA,
# a tenth of the download. Ends with a table, and with 1 if a pair failed.
set -uo pipefail
cd "$(dirname "$0")/.."

pairs=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  case "$1" in
    -h | --help) sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    [0-9].[0-9]*:[0-9]*) pairs+=("$1") ;;
    *) echo "versions.sh: $1: pairs are written as 3.12:2.13.0" >&2; exit 2 ;;
  esac
  shift
done
[ $# -eq 0 ] || shift
[ ${#pairs[@]} -gt 0 ] || pairs=(3.11:2.11.0 3.12:2.13.0 3.13:2.15.0)

python_of() {
  "python$1" -c '' 2>/dev/null && echo "python$1" && return # pyenv's programs may be there and fail
  find "${PYENV_ROOT:-$HOME/.pyenv}/versions/" -path "*/$1.*/bin/python$1" 2>/dev/null | sort -V | tail -n 1 | grep . && return
  command -v uv >/dev/null && uv python find "$1" 2>/dev/null
}

prepared() { # folder, python, torch
  local pip=("$1/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$1/constraints.txt")
  [ ! -f "$1/done" ] || return 0
  "$2" -m venv "$1" || return 1
  sed "s/^torch==.*/torch==$3/; /^triton==/d; /^nvidia-/d" constraints.txt >"$1/constraints.txt"
  "${pip[@]}" --editable '.[test]' && touch "$1/done"
}

failed=0
table=
for pair in "${pairs[@]}"; do
  version=${pair%:*} torch=${pair#*:} folder=.cache/versions/${pair/:/-}
  start=$SECONDS said=
  if ! python=$(python_of "$version"); then
    said="no python$version: uv python install $version, or pyenv install $version"
  else
    echo "Python $version, torch $torch …"
    if ! prepared "$folder" "$python" "$torch"; then
      said="not installed: pip's lines above"
    elif ! CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 "$folder/bin/python" -m pytest -n auto --maxprocesses 8 --dist worksteal "$@"; then
      said="tests failed"
    fi
  fi
  [ -z "$said" ] || failed=1
  table+=$(printf '%-8s %-9s %-10s %s' "$version" "$torch" "$((SECONDS - start)) s" "${said:-passed}")$'\n'
done
printf '%-8s %-9s\n%s' Python torch "$table"
exit "$failed"
