#!/usr/bin/env bash
# Dynamo's KV indexer hears from a vLLM engine which prompts the node's cache holds.
#
#   examples/dynamo/run.sh MODEL [flags of vllm serve ...]
#
# environment variables: DATA_BYTES (8G), SERVER_NAME (one of this run), PORT (8001), EVENTS_PORT (5557; the next one
# replays), INDEXER_PORT (8090), BLOCK_SIZE (32), INDEXER_PYTHON (python3): an interpreter with ai-dynamo-runtime.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
model=${1:?usage: run.sh MODEL [flags of vllm serve ...]}
shift
port=${PORT:-8001} events_port=${EVENTS_PORT:-5557} indexer_port=${INDEXER_PORT:-8090} block_size=${BLOCK_SIZE:-32}
export FLEXKV_RADIXSHMEM_SERVER_NAME=${SERVER_NAME:-/dynamo-example-$$}

trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
radix-server --name "$FLEXKV_RADIXSHMEM_SERVER_NAME" --data-bytes "${DATA_BYTES:-8G}" --metrics-address '' &
"${INDEXER_PYTHON:-python3}" -m dynamo.indexer --port "$indexer_port" &
vllm serve "$model" --port "$port" --block-size "$block_size" \
    --kv-transfer-config '{"kv_connector": "RadixShmemConnector", "kv_role": "kv_both"}' \
    --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:'"$events_port"'",
        "replay_endpoint": "tcp://*:'"$((events_port + 1))"'"}' \
    "$@" &
python3 "$here/route.py" "http://127.0.0.1:$port" "http://127.0.0.1:$indexer_port" \
    "$block_size" "tcp://127.0.0.1:$events_port" "tcp://127.0.0.1:$((events_port + 1))"
