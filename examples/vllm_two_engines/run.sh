#!/usr/bin/env bash
# Two vLLM servers on one node's cache, and a prompt that the first computes and the second only loads.
#
#   examples/vllm_two_engines/run.sh MODEL [flags of vllm serve ...]
#
# environment variables: DATA_BYTES (8G): size of the cache; SERVER_NAME: of the radix-server (one of this run);
# CONNECTOR (RadixShmemConnector): or FlexKVConnectorV1, vLLM's own; PORT (8001): the second engine gets the next one.
# Needs `pip install radixshmem[flexkv]` beside vLLM.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
model=${1:?usage: run.sh MODEL [flags of vllm serve ...]}
shift
port=${PORT:-8001}
export FLEXKV_RADIXSHMEM_SERVER_NAME=${SERVER_NAME:-/vllm-engines-$$}
transfer='{"kv_connector": "'${CONNECTOR:-RadixShmemConnector}'", "kv_role": "kv_both"}'

trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
radix-server --name "$FLEXKV_RADIXSHMEM_SERVER_NAME" --data-bytes "${DATA_BYTES:-8G}" --metrics-address '' &
for number in 0 1; do
    vllm serve "$model" --port $((port + number)) --enable-prompt-tokens-details \
        --kv-transfer-config "$transfer" "$@" &
done
python3 "$here/ask.py" "http://127.0.0.1:$port" "http://127.0.0.1:$((port + 1))"
radixctl --name "$FLEXKV_RADIXSHMEM_SERVER_NAME" status
