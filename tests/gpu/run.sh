#!/bin/sh
# Tests, tunes and measures the CUDA path on this machine's GPUs.  Needs torch with CUDA and pytest.
#   tests/gpu/run.sh [directory for results]
set -u
cd "$(dirname "$0")/../.."
results=${1:-bench-results}
python=${PYTHON:-python3}
mkdir -p "$results"
PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH

status=0
"$python" -m pytest tests/gpu -m gpu -q -p no:cacheprovider || status=$?
"$python" -m benchmarks.gpu_transfer --json "$results/gpu_transfer.json" || status=$?
exit $status
