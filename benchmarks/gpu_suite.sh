#!/usr/bin/env bash
# Everything that needs a real GPU, in one go, most telling first: within ten minutes the trial of the
# attention kernels and the runs that settle bits, speed, memory and the alarm; then tests, the trainer
# variant by variant, further runs. Each row has what is expected beside it (computed, never measured).
#   bash benchmarks/gpu_suite.sh [OUTPUT_DIR [--self-test] [--only WORD]]
# --self-test takes the same way on a CPU with tiny models. Never run on a GPU yet.
# Takes the Python that is there (PYTHON=python3), with torch 2.11 or newer: nothing is installed, what
# it lacks is told, and the last lines say which paths were left out. Never changes a GPU setting.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
# -P: benchmarks/launcher.py, beside the script, is not the package.
exec "${PYTHON:-python3}" -P "$root/benchmarks/gpu_suite.py" "${1:-gpu_suite_out}" "${@:2}"
