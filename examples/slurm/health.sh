#!/bin/bash
# HealthCheckProgram in slurm.conf: within ten seconds, beside jobs, on no GPU. Slurm ignores its exit
# code, so it drains the node itself; once, so that the reason and its time stay.
set -uo pipefail
[[ -r /etc/slurm/model-check.sh ]] || exit 0
source /etc/slurm/model-check.sh
said=$(bash "$MODEL_CHECK/run.sh" doctor --quick \
    ${MODEL_CHECK_GPUS:+launch.expect_gpus="$MODEL_CHECK_GPUS"} 2>&1)
case $? in
    22 | 69) ;;
    *) exit 0 ;;
esac
[[ $(sinfo --noheader --nodes "$SLURMD_NODENAME" --format %T) == drain* ]] && exit 0
scontrol update "NodeName=$SLURMD_NODENAME" State=DRAIN "Reason=model_check: ${said%%$'\n'*}"
