#!/usr/bin/env bash
# Makes the environment of Dynamo's KV indexer, to which the event tests talk, once; prints its directory.
#   setup_dynamo.sh [VERSION]      environment variables: RADIX_ENGINES_DIR, PYTHON
set -euo pipefail
version=${1:-1.6.1}
env_dir=${RADIX_ENGINES_DIR:-$HOME/.cache/radixshmem-engines}/dynamo-$version
if [ ! -e "$env_dir/.complete" ]; then
    rm -rf "$env_dir"
    mkdir -p "$(dirname "$env_dir")"
    "${PYTHON:-python3}" -m venv "$env_dir"
    "$env_dir/bin/python" -m pip install --quiet --no-cache-dir "ai-dynamo-runtime==$version" >&2
    touch "$env_dir/.complete"
fi
echo "$env_dir"
