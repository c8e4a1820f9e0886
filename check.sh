#!/usr/bin/env bash
# The checks, in the environment that they are pinned to (made once): format, lint, tests with types.
# With other arguments only pytest runs, with them: bash check.sh tests/test_layers.py
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@" # started as `sh check.sh`
set -euo pipefail

if [[ ${1-} == --help || ${1-} == -h ]]; then
    printf '%s\n' 'usage: bash check.sh [--fast | --all | PYTEST ARGUMENTS]' \
        'Without: ruff format --check, ruff check, then pytest in several processes, where mypy is' \
        'a test among the others; ends with the first that fails.' \
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
    # Bytecode, whatever the environment says, for the hundreds of processes that tests start.
    "$python" -m compileall -q -j 0 launcher model_check > /dev/null 2>&1 &
    "$python" -m ruff format --check .
    "$python" -m ruff check .
    wait
    # Many tests wait for processes of their own: two processes of tests a core keep the cores busy;
    # where no test computes, four. A file's tests stay together, for the fixtures that they share,
    # and in the order of tests/conftest.py. (nproc obeys OMP_NUM_THREADS, too.)
    cores=$(env -u OMP_NUM_THREADS nproc)
    how=(--dist loadfile --no-loadscope-reorder)
    without_torch=(tests/test_*.py tests/{config,launcher,utils})
    case ${1-} in
    --all) set -- -n $((2 * cores)) "${how[@]}" ;;
    --fast) set -- -n $((4 * cores)) "${how[@]}" -m "not slow" "${without_torch[@]}" ;;
    *) set -- -n $((2 * cores)) "${how[@]}" -m "not slow" ;;
    esac
fi
# A thread of torch's a core, in each process of tests, would only spin.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" -m pytest "$@"
