#!/usr/bin/env bash
# Everything that needs a real GPU, in one go; a short table comes last. About 8 minutes on one H100.
#   bash benchmarks/gpu_suite.sh [OUTPUT_DIR]
# Takes the Python that is there (PYTHON=python3): nothing is installed. Never changes a GPU setting.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" "$root/benchmarks/gpu_suite.py" "${1:-gpu_suite_out}"
