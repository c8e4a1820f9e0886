#!/usr/bin/env bash
# The one command: bash run.sh --help. Finds the environment, or makes it once, and becomes the
# launcher: no process of ours stays between it and its caller, so exit codes and signals are its own.
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@" # started as `sh run.sh`
case $OSTYPE:$BASH_VERSION in linux*:4.[4-9]* | linux*:[5-9].* | linux*:[1-9][0-9].*) ;; *)
    echo "[launcher] error: Model Check needs Linux and bash 4.4 or newer; this is bash $BASH_VERSION" \
        "on $OSTYPE: on Windows use WSL 2, on macOS a container or another machine" >&2; exit 2 ;; esac
set -euo pipefail
trap '' USR1 USR2 # meant for the workers: they must not kill us before the launcher handles them
become=()
if (($$ == 1)); then
    # The kernel drops a signal to the first process of a container that does not handle it yet.
    trap 'exit 143' TERM
    trap 'exit 130' INT
    env --block-signal=TERM,INT true 2>/dev/null && become=(env --block-signal=TERM,INT)
fi

export PATH # a prolog of Slurm's is given none: compilers then find no assembler
self=$(readlink -f -- "${BASH_SOURCE[0]}")
root=${self%/*}
# shellcheck source=launcher/install/environment.sh
source "$root/launcher/install/environment.sh"

# No cd: paths in the arguments are relative to the user's directory. -P, because a launcher/ or a
# types.py in that directory is not ours.
export MODEL_CHECK_PYTHONPATH_BEFORE=${PYTHONPATH-}
path=:${PYTHONPATH-}:
while [[ $path == *::* ]]; do path=${path//::/:}; done # an empty element is that directory, too
path=${path#:} path=${path%:}
export PYTHONPATH=$root${path:+:$path}
# --wheels is for the installation, whatever the verb; behind -- it belongs to another command.
arguments=()
while (($#)) && [[ $1 != -- ]]; do
    case $1 in
        --wheels=*) export MODEL_CHECK_WHEELS=${1#*=} ;;
        --wheels)
            export MODEL_CHECK_WHEELS=${2:-(no directory was given)}
            shift
            ;;
        *) arguments+=("$1") ;;
    esac
    shift || true
done
set -- "${arguments[@]}" "$@"
purpose=run
if [[ ${1-} == doctor && " $* " == *" --quick "* ]]; then
    # A health check: it installs nothing, and writes nothing, not even bytecode.
    purpose=found
    export PYTHONDONTWRITEBYTECODE=1
fi
if ! python_was_chosen && ready; then
    tell_owner
    exec "${become[@]}" "$venv/bin/python" -P -m launcher "$@"
fi
find_python
if [[ ${1-} == --help || ${1-} == -h ]]; then
    # Who asks what this is waits for no installation.
    "$python" -P -m launcher.install.environment found -P -m launcher "$@" 2> /dev/null ||
        printf '%s\n' 'usage: bash run.sh [OPTIONS] [section.key=value ...] [-- COMMAND ...]' '' \
            'Run the same short LLaMA training on every GPU and compare the workers.' '' \
            'bash run.sh            installs the environment first, once (.venv, or MODEL_CHECK_VENV)' \
            'bash run.sh --debug    the same, smaller, with more to see' \
            'bash run.sh doctor     the machine and its GPUs; with --quick it installs nothing' \
            'All options are listed here once it is installed; README.md has the most used ones.'
    exit
fi
exec "${become[@]}" "$python" -P -m launcher.install.environment "$purpose" -P -m launcher "$@"
