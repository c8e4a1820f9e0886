#!/usr/bin/env bash
# Train on the freest GPU, picked and reserved: ./train_auto_gpu.sh [OPTIONS ...]
[ -n "${BASH_VERSION-}" ] || exec bash "$0" "$@" # started as `sh train_auto_gpu.sh`
set -euo pipefail

self=$(readlink -f -- "${BASH_SOURCE[0]}")
export MODEL_CHECK_MEANT="${self##*/} means run.sh --gpus auto" # where a message names the option
exec bash "${self%/*}/run.sh" --gpus auto "$@"
