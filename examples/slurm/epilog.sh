#!/bin/bash
# Epilog in slurm.conf: keeps what the prolog's runs for this job left on the node, where all can read
# it. An epilog that fails drains its node, so this one ends with 0 whatever happens.
set -uo pipefail
[[ -r /etc/slurm/model-check.sh ]] || exit 0
source /etc/slurm/model-check.sh

keep() { # RUN: its reports where it passed; else all of it, with logs and evidence
    local run=$1 kept=$MODEL_CHECK_REPORTS/${1##*/}/$SLURMD_NODENAME
    local files=("$run"/{run.json,config.json,report.json,report.html,launcher.log})
    grep -q '^  "verdict": "PASS"' "$run/report.json" || files=("$run/.")
    mkdir -p "$kept" && cp -R -- "${files[@]}" "$kept" && rm -rf -- "$run" && return
    logger -t model_check -- "job $SLURM_JOB_ID: its report stays in $run"
}

for run in "$MODEL_CHECK_SPOOL/$SLURM_JOB_ID".*; do # one more each time that Slurm requeues the job
    [[ -d $run ]] && keep "$run"
done
exit 0
