#!/usr/bin/env bash
# Runs every check and prints the minutes of each; `run_all.sh lint` stops before the tests, `run_all.sh coverage` runs
# only the unit tests and measures which lines they reach, which makes them half as slow again.
# A part that fails does not stop the next ones: one run tells everything that is wrong.
# BIN names the folder of the environment's programs.
set -uo pipefail
cd "$(dirname "$0")/.."
BIN=${BIN:-.venv/bin}

# One thread per process: the tests run several processes on few cores.
export OMP_NUM_THREADS=1
# Nothing here may reach for a network.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

table=""
failed=0

part() { # part NAME COMMAND...
  local name=$1 start=$EPOCHREALTIME outcome=ok
  shift
  printf '\n== %s\n' "$name"
  "$@" || { outcome=FAILED; failed=1; }
  table+=$(awk -v n="$name" -v o="$outcome" -v a="$start" -v b="$EPOCHREALTIME" \
    'BEGIN { printf "%-14s %6.2f min  %s", n, (b - a) / 60, o }')$'\n'
}

finish() {
  printf '\n%s' "$table"
  exit "$failed"
}

unit=(-n 2 --ignore=tests/procs --ignore=tests/jax --ignore=tests/procs_jax --ignore=tests/test_docs.py)
if [[ ${1:-} == coverage ]]; then
  # As many lines with few examples as with many.
  part "coverage" "$BIN/python" -m pytest -q "${unit[@]}" --cov --cov-report=term
  finish
fi

part "ruff check" "$BIN/ruff" check
part "ruff format" "$BIN/ruff" format --check
part "mypy" "$BIN/mypy"
part "import-linter" "$BIN/lint-imports" --no-logo
[[ ${1:-} == lint ]] && finish

pytest=("$BIN/python" -m pytest -q --hypothesis-profile=thorough)
part "unit tests" "${pytest[@]}" "${unit[@]}"
part "docs snippets" "${pytest[@]}" -n 2 tests/test_docs.py
# These start processes of their own, as many as there are cores and more: one test at a time.
part "process tests" "${pytest[@]}" tests/procs
part "jax tests" "${pytest[@]}" -n 2 --dist loadfile tests/jax tests/procs_jax
finish
