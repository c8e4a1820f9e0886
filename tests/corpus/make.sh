#!/usr/bin/env bash
# Makes the corpus anew: real runs of real trainers, one of each kind, and what is said of them.
#   bash tests/corpus/make.sh [NAME ...]        (all: about 5 minutes on 2 cores)
# It runs in /tmp/model_check_corpus, which stands in the files. `tests.corpus.keep` then takes what a
# report is made of. Read the diff: it shows which sentence has changed. Needs root, for a host name.
set -euo pipefail

if [[ -z ${IS_NODE-} ]]; then
    IS_NODE=1 exec unshare --uts sh -c 'hostname node1; exec bash "$@"' sh "$0" "$@"
fi

root=$(readlink -f -- "$(dirname -- "${BASH_SOURCE[0]}")/../..")
work=/tmp/model_check_corpus
python=${MODEL_CHECK_VENV:-$root/.venv}/bin/python
NORM=layers.0.attention_norm.weight
wanted=" $* "

export PYTHONPATH=$root MODEL_CHECK_HISTORY_FILE='' DATASET_CACHE_DIR=$work/cache
mkdir -p "$work" && cd "$work"
"$python" - >tiny.json <<'PYTHON'
import json
from tests.e2e.conftest import TINY
print(json.dumps(TINY))
PYTHON
rm -rf cache
"$python" -m launcher --config tiny.json --max-steps 1 >cache.txt # one cache for all, found by each

wants() { [[ $wanted == '  ' || $wanted == *" $1 "* ]]; }

# NAME ARGUMENT ...: one run. A fault's exit code is no failure of this script.
run() {
    wants "$1" || return 0
    rm -rf "$1"
    "$python" -m launcher --config tiny.json --run-dir "$@" >"$1.txt" 2>&1 || true
    "$python" -m tests.corpus.keep "$1"
}

# NAME SIGNAL PATTERN ARGUMENT ...: one that gets a signal when PATTERN is printed.
ended() {
    wants "$1" || return 0
    local name=$1 signal=$2 pattern=$3
    shift 3
    rm -rf "$name"
    "$python" -m launcher --config tiny.json --run-dir "$name" "$@" >"$name.txt" 2>&1 &
    until grep -q "$pattern" "$name.txt"; do sleep 0.05; done
    kill -"$signal" $!
    wait $! || true
    "$python" -m tests.corpus.keep "$name"
}

# Faults that no one drill can make: tests/e2e/in_workers.
each() { PYTHONPATH=$root:$root/tests/e2e/in_workers "$@"; }

run pass --workers 3
run odd_transient --workers 3 launch.replay_s=100 debug.drill=flip_gradient@2:CPU1:$NORM:3
run odd_persistent --workers 3 launch.replay_s=100 debug.drill=flip_gradient@2:CPU1:$NORM:3:always
run odd_unnamed --workers 2 debug.drill=flip_gradient@2:CPU1:$NORM:3
run changed --workers 3 launch.replay_s=100 debug.drill=flip@2:CPU0:$NORM:3
run nan_one --workers 2 debug.drill=nan@2:CPU1
run nan_all --workers 2 debug.drill=nan@2
run died --workers 2 debug.drill=kill@2:CPU1
run raised --workers 2 debug.drill=raise@2:CPU0
run hang --workers 2 --hang-timeout 3 debug.drill=hang@2:CPU1
run slow --workers 3 --max-steps 60 debug.drill=slow@12:CPU1:4x
DRILLS='{}' SETTINGS='{"CPU1": "training.learning_rate=0.5"}' each run mismatch --workers 2
export RESTS=0.2
each ended stopped TERM 'Step \[1/' --workers 2 --max-steps 1000
each ended killed KILL 'Step \[1/' --workers 2 --max-steps 1000
unset RESTS
run ddp --workers 2 --mode ddp
run ddp_odd --workers 3 --mode ddp debug.drill=flip_gradient@2:CPU1:$NORM:3
run arms --mode compare --arm slow training.learning_rate=1e-3 --arm fast training.learning_rate=2e-3
IN_ROUND='{"round_002": {"CPU1": "flip_gradient@2:CPU1:layers.0.attention_norm.weight:3"}}' \
    each run rounds --workers 3 --repeat 3

# GPUs that NVML has something to say of.
if wants gpus; then
    rm -rf gpus
    "$python" -m tests.corpus.box --run-dir gpus launch.telemetry_interval_s=0.02 >gpus.txt 2>&1 || true
    "$python" -m tests.corpus.keep gpus
fi
"$python" -m tests.corpus.keep --fleet
