#!/usr/bin/env bash
# Two SGLang servers on one node's cache, and a prompt that the first computes and the second only loads.
#
#   examples/sglang/run.sh MODEL [flags of sglang.launch_server ...]
#
# environment variables: DATA_BYTES (8G): size of the cache; SERVER_NAME: of the radix-server (one of this run);
# BACKEND ("--radix-cache-backend radixshmem"): or "--enable-flexkv", SGLang's own; PAGE_SIZE (32): tokens of a block,
# the same in all engines; PORT (30001): the second engine gets the tenth next one;
# FLEXKV_ENABLE_LAYERWISE_TRANSFER=1: the forward waits for a load layer by layer.
# Needs `pip install radixshmem[flexkv]` beside SGLang.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
model=${1:?usage: run.sh MODEL [flags of sglang.launch_server ...]}
shift
port=${PORT:-30001}
export FLEXKV_RADIXSHMEM_SERVER_NAME=${SERVER_NAME:-/sglang-engines-$$}
read -ra backend <<< "${BACKEND:---radix-cache-backend radixshmem}"

trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
radix-server --name "$FLEXKV_RADIXSHMEM_SERVER_NAME" --data-bytes "${DATA_BYTES:-8G}" --metrics-address '' &
for number in 0 1; do
    python3 -m sglang.launch_server --model-path "$model" --port $((port + 10 * number)) \
        --page-size "${PAGE_SIZE:-32}" --enable-cache-report "${backend[@]}" "$@" &
done
python3 "$here/../vllm_two_engines/ask.py" "http://127.0.0.1:$port" "http://127.0.0.1:$((port + 10))" &
wait -n  # for the answers, or for a server that could not start
radixctl --name "$FLEXKV_RADIXSHMEM_SERVER_NAME" status
