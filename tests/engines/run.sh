#!/usr/bin/env bash
# End-to-end tests with real engines: `make test-engines`, or with pytest's arguments to choose among them.
#   environment variables: RADIX_ENGINES_DIR (~/.cache/radixshmem-engines): about 7 GB for all three environments
#   ENGINES ("vllm sglang-0.5.23 sglang-0.5.20"): which to set up; tests of the others are left out
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
here=$root/tests/engines
export RADIX_ENGINES_DIR=${RADIX_ENGINES_DIR:-$HOME/.cache/radixshmem-engines}
engines=${ENGINES:-vllm sglang-0.5.23 sglang-0.5.20}
make -C "$root" --no-print-directory .venv/.test

# The engines get what a user would install: a wheel built from this tree.
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
"$root/.venv/bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$wheels" "$root"

for engine in $engines; do
    case $engine in
        vllm) env_dir=$("$here/setup_vllm.sh") ;;
        sglang-*) env_dir=$("$here/setup_sglang.sh" "${engine#sglang-}") ;;
        *) echo "run.sh: ENGINES: $engine is neither vllm nor sglang-<version>" >&2; exit 2 ;;
    esac
    # A second install replaces the package alone; the first also brings what it needs, torch is there.
    pip=("$env_dir/bin/python" -m pip install --quiet)
    "${pip[@]}" "$(ls "$wheels"/radixshmem-*.whl)[flexkv]"
    "${pip[@]}" --force-reinstall --no-deps "$wheels"/radixshmem-*.whl
done
cd "$root"
exec "$root/.venv/bin/python" -m pytest -m engines tests/engines "$@"
