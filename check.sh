#!/usr/bin/env bash
# The checks, in the environment that they are pinned to (made once): format, lint, types, tests.
# With other arguments only pytest runs, with them: bash check.sh tests/test_layers.py
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@" # started as `sh check.sh`
set -euo pipefail

if [[ ${1-} == --help || ${1-} == -h ]]; then
    printf '%s\n' 'usage: bash check.sh [--fast | --all | PYTEST ARGUMENTS]' \
        'Without: ruff format --check, ruff check, mypy, pytest in several processes;' \
        'ends with the first that fails.' \
        '--fast: the same, with the tests that need no torch alone.' \
        '--all: the same, with the tests that are marked slow, too.' \
        'PYTEST ARGUMENTS: only pytest, with them (bash check.sh tests/test_layers.py -k start).' \
        'Installs the pinned environment first, where it is missing (.venv, or MODEL_CHECK_VENV).'
    exit 0
fi

self=$(readlink -f -- "${BASH_SOURCE[0]}")
root=${self%/*}
# shellcheck source=launcher/install/environment.sh
source "$root/launcher/install/environment.sh"

find_python
PYTHONPATH=$root "$python" -P -m launcher.install.environment check
python=$(readlink -f -- "$venv/bin")/python
cd -- "$root"
if [[ $* == "" || $* == --fast || $* == --all ]]; then
    "$python" -m ruff format --check .
    "$python" -m ruff check .
    # Many tests wait for processes of their own: two processes of tests a core keep the cores busy.
    # A file's tests stay together, for the fixtures that they share. (nproc obeys OMP_NUM_THREADS,
    # too.)
    processes=(-n "$((2 * $(env -u OMP_NUM_THREADS nproc)))" --dist loadfile)
    case ${1-} in
    --all) set -- "${processes[@]}" ;;
    --fast) set -- "${processes[@]}" -m "not slow" tests/test_*.py tests/{config,launcher,utils} ;;
    *) set -- "${processes[@]}" -m "not slow" ;;
    esac
    # Beside mypy, which keeps one core busy, and whatever the environment says: bytecode for the
    # hundreds of processes that tests start, and of the tests for each process of pytest.
    {
        "$python" -m compileall -q launcher model_check
        env -u PYTHONDONTWRITEBYTECODE "$python" -m pytest --collect-only -q "$@"
    } > /dev/null 2>&1 &
    types=0
    "$python" -m mypy || types=$?
    wait # what is wrong with a test, pytest tells
    ((types == 0)) || exit "$types"
fi
# A thread of torch's a core, in each process of tests, would only spin.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" -m pytest "$@"
