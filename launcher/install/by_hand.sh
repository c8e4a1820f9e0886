#!/usr/bin/env bash
# Become the Python that run.sh would take, with these arguments; make no environment: whoever started
# pretrain_main.py or prepare_dataset.py by hand did not ask for an installation. See by_hand.py.
set -euo pipefail

self=$(readlink -f -- "${BASH_SOURCE[0]}")
root=${self%/launcher/install/*}
# shellcheck source=launcher/install/environment.sh
source "$root/launcher/install/environment.sh"

if ! python_was_chosen && ready; then
    exec "$venv/bin/python" "$@"
fi
find_python
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -P -m launcher.install.environment found "$@"
