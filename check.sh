#!/usr/bin/env bash
# The checks, in the environment that they are pinned to (made once): format, lint, tests with types.
# Other arguments are for pytest: bash check.sh tests/test_layers.py
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@" # started as `sh check.sh`
case $OSTYPE:$BASH_VERSION in linux*:4.[4-9]* | linux*:[5-9].* | linux*:[1-9][0-9].*) ;; *)
    echo "[launcher] error: Model Check needs Linux and bash 4.4 or newer; this is bash $BASH_VERSION" \
        "on $OSTYPE: on Windows use WSL 2, on macOS a container or another machine" >&2; exit 2 ;; esac
set -euo pipefail

if [[ ${1-} == --help || ${1-} == -h ]]; then
    printf '%s\n' 'usage: bash check.sh [--fast | --all | PYTEST ARGUMENTS]' \
        'Always first: ruff format --check, ruff check; the first check that fails ends the script.' \
        'Without arguments: then pytest in several processes; mypy is one of the tests.' \
        '--fast: the same, with the tests that need no torch alone.' \
        '--all: the same, with the tests that are marked slow, too.' \
        'PYTEST ARGUMENTS: then pytest with them (bash check.sh tests/test_layers.py -k start).' \
        'bash check.sh tests/test_types.py: then mypy.' \
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
"$python" -m ruff format --check . || {
    printf >&2 '%s\n' '.venv/bin/ruff format .  makes it so'
    exit 1
}
"$python" -m ruff check .
if [[ $* == "" || $* == --fast || $* == --all ]]; then
    # Bytecode, whatever the environment says, for the hundreds of processes that tests start.
    "$python" -m compileall -q -j 0 launcher model_check > /dev/null 2>&1 &
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
    wait
fi
# A thread of torch's a core, in each process of tests, would only spin.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" -m pytest "$@"
