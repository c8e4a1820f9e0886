#!/bin/bash
# Prolog in slurm.conf: a short run on the job's GPUs, over within MODEL_CHECK_DEADLINE seconds. Where
# it finds something against this node, it drains the node, says why, and ends with 1: Slurm requeues
# the job. It ends with 0 in every other case, also where the check itself could not be made.
set -uo pipefail
[[ -r /etc/slurm/model-check.sh ]] || exit 0
source /etc/slurm/model-check.sh
run=$MODEL_CHECK_SPOOL/$SLURM_JOB_ID.${SLURM_JOB_RESTART_COUNT:-0}

condemn() { # WORDS
    local words=$1
    scontrol update "NodeName=$SLURMD_NODENAME" State=DRAIN "Reason=model_check: ${words:0:200}"
    exit 1
}

let_it_start() { # WORDS
    logger -t model_check -- "job $SLURM_JOB_ID: $1"
    exit 0
}

# The whole node, in a second: a GPU that is gone, errors that NVML counted, the history.
said=$(env -u CUDA_VISIBLE_DEVICES bash "$MODEL_CHECK/run.sh" doctor --quick \
    ${MODEL_CHECK_GPUS:+launch.expect_gpus="$MODEL_CHECK_GPUS"} 2>&1)
case $? in
    0) ;;
    22 | 69) condemn "${said%%$'\n'*}" ;;
    *) let_it_start "not checked: ${said##*$'\n'}" ;;
esac

# The GPUs of the job: CUDA_VISIBLE_DEVICES holds them.
mkdir -p "$MODEL_CHECK_SPOOL"
said=$(bash "$MODEL_CHECK/run.sh" --deadline $((MODEL_CHECK_DEADLINE - SECONDS)) --run-dir "$run" \
    "${MODEL_CHECK_OPTIONS[@]}" 2>&1)
code=$? said=${said##*$'\n'} # the last line is the verdict
case $code in
    0) ;;
    21 | 22 | 23 | 69) condemn "${said#\[launcher\] }" ;;
    20) # a NaN: this node's fault only where another GPU of it was finite
        if bash "$MODEL_CHECK/run.sh" report "$run" --drain 2>&1 | grep -q '^scontrol '; then
            condemn "${said#\[launcher\] }"
        fi
        let_it_start "$said"
        ;;
    *) let_it_start "$said" ;;
esac
