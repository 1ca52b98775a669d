#!/bin/sh
# Tests, compares and measures the CUDA path on this machine.  Needs torch with CUDA, pytest and the built
# package; takes about five minutes.
#   tests/gpu/run.sh [directory for results]
# HUGEPAGE_PATH: a hugetlbfs mount with 3 GiB free; measures slots in huge pages too.
set -u
cd "$(dirname "$0")/../.."
results=${1:-bench-results}
python=${PYTHON:-python3}
mkdir -p "$results"
PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH

status=0
"$python" -m pytest tests/gpu -m gpu -q -p no:cacheprovider || status=$?
"$python" -m benchmarks.gpu_kernels | tee "$results/gpu_kernels.txt" || status=$?
if [ -n "${HUGEPAGE_PATH:-}" ]; then
    "$python" -m benchmarks.gpu_transfer --hugepage-path "$HUGEPAGE_PATH" \
        --json "$results/gpu_transfer_hugepages.json" || status=$?
fi
"$python" -m benchmarks.gpu_transfer --json "$results/gpu_transfer.json" || status=$?
exit $status
