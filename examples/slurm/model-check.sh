# /etc/slurm/model-check.sh: what the scripts beside this file take from the site. bash reads it.

MODEL_CHECK=/opt/model-check           # the checkout; `bash run.sh doctor` ran there once
MODEL_CHECK_GPUS=8                     # how many GPUs a node must have; empty: any number
MODEL_CHECK_DEADLINE=60                # seconds that the prolog may take
MODEL_CHECK_SPOOL=/var/spool/model-check # on a node's own disk: runs of the prolog, until its epilog
MODEL_CHECK_REPORTS=/shared/model-check # what the epilogs keep, a directory a job
MODEL_CHECK_OPTIONS=(--device cuda data.dataset=embedded) # of the prolog's run

export DATASET_CACHE_DIR=/var/cache/model-check # made by the first run, a few MB
export MODEL_CHECK_HISTORY_FILE=/var/lib/model-check/history.jsonl # of this node's GPUs
