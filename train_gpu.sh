#!/usr/bin/env bash
# Train on one GPU: ./train_gpu.sh [GPU] [OPTIONS ...]; GPU 0 unless told. `./train_gpu.sh 3 --debug`
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@" # started as `sh train_gpu.sh`
case $OSTYPE:$BASH_VERSION in linux*:4.[4-9]* | linux*:[5-9].* | linux*:[1-9][0-9].*) ;; *)
    echo "[launcher] error: Model Check needs Linux and bash 4.4 or newer; this is bash $BASH_VERSION" \
        "on $OSTYPE: on Windows use WSL 2, on macOS a container or another machine" >&2; exit 2 ;; esac
set -euo pipefail

self=$(readlink -f -- "${BASH_SOURCE[0]}")
gpu=0
if (($#)) && [[ $1 != -* && $1 != *=* ]]; then # neither an option nor section.key=value
    gpu=${1:-0}
    shift
fi
export MODEL_CHECK_MEANT="${self##*/} means run.sh --gpu $gpu" # where a message names the option
exec bash "${self%/*}/run.sh" --gpu "$gpu" "$@"
