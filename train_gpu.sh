#!/usr/bin/env bash
# Train on one GPU: ./train_gpu.sh [GPU] [OPTIONS ...]; GPU 0 unless told. `./train_gpu.sh 3 --debug`
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@" # started as `sh train_gpu.sh`
set -euo pipefail

self=$(readlink -f -- "${BASH_SOURCE[0]}")
gpu=0
if (($#)) && [[ $1 != -* && $1 != *=* ]]; then # neither an option nor section.key=value
    gpu=${1:-0}
    shift
fi
export MODEL_CHECK_MEANT="${self##*/} means run.sh --gpu $gpu" # where a message names the option
exec bash "${self%/*}/run.sh" --gpu "$gpu" "$@"
