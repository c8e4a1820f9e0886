#!/usr/bin/env bash
# All checks, in the environment that they are pinned to (made once): format, lint, types, tests.
# Arguments go to pytest: bash check.sh tests/test_layers.py
set -euo pipefail

self=$(readlink -f -- "${BASH_SOURCE[0]}")
root=${self%/*}
# shellcheck source=launcher/environment.sh
source "$root/launcher/environment.sh"

find_python
PYTHONPATH=$root "$python" -P -m launcher.environment check
python=$(readlink -f -- "$venv/bin")/python
cd -- "$root"
"$python" -m ruff format --check .
"$python" -m ruff check .
"$python" -m mypy
exec "$python" -m pytest "$@"
