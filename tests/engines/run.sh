#!/usr/bin/env bash
# End-to-end tests with real engines: `make test-engines`, or with pytest's arguments to choose among them.
#   environment variables: RADIX_ENGINES_DIR (~/.cache/radixshmem-engines): about 8 GB for all environments
#   ENGINES ("vllm sglang-0.5.23 sglang-0.5.20 dynamo"): which to set up; tests that need another are deselected
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
here=$root/tests/engines
export RADIX_ENGINES_DIR=${RADIX_ENGINES_DIR:-$HOME/.cache/radixshmem-engines}
export ENGINES=${ENGINES:-vllm sglang-0.5.23 sglang-0.5.20 dynamo}
make -C "$root" --no-print-directory .venv/.test

# The engines get what a user would install: a wheel built from this tree.
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
"$root/.venv/bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$wheels" "$root"

for engine in $ENGINES; do
    case $engine in
        vllm) env_dir=$("$here/setup_vllm.sh") ;;
        sglang-*) env_dir=$("$here/setup_sglang.sh" "${engine#sglang-}") ;;
        dynamo) "$here/setup_dynamo.sh" > /dev/null; continue ;;
        *) echo "run.sh: ENGINES: $engine is none of vllm, sglang-<version>, dynamo" >&2; exit 2 ;;
    esac
    # A second install replaces the package alone; the first also brings what it needs, torch is there.
    pip=("$env_dir/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir)
    "${pip[@]}" "$(ls "$wheels"/radixshmem-*.whl)[flexkv]"
    "${pip[@]}" --force-reinstall --no-deps "$wheels"/radixshmem-*.whl
done

cd "$root"
paths=(tests/engines)
for argument; do
    case $argument in tests/*) paths=() ;; esac
done
"$root/.venv/bin/python" -m pytest -m engines "${paths[@]}" "$@"
