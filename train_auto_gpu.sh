#!/usr/bin/env bash
# Train on the freest GPU, picked and reserved: ./train_auto_gpu.sh [OPTIONS ...]
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@" # started as `sh train_auto_gpu.sh`
case $OSTYPE:$BASH_VERSION in linux*:4.[4-9]* | linux*:[5-9].* | linux*:[1-9][0-9].*) ;; *)
    echo "[launcher] error: Model Check needs Linux and bash 4.4 or newer; this is bash $BASH_VERSION" \
        "on $OSTYPE: on Windows use WSL 2, on macOS a container or another machine" >&2; exit 2 ;; esac
set -euo pipefail

self=$(readlink -f -- "${BASH_SOURCE[0]}")
export MODEL_CHECK_MEANT="${self##*/} means run.sh --gpus auto" # where a message names the option
exec bash "${self%/*}/run.sh" --gpus auto "$@"
