#!/usr/bin/env bash
# Makes the CPU environment of SGLang that the end-to-end tests use, once; prints its directory.
#   setup_sglang.sh [0.5.23|0.5.20]      environment variables: RADIX_ENGINES_DIR, PYTHON
# About 2 GB and two minutes.  SGLang's metadata asks for accelerators' packages; only what its CPU path imports is
# installed.  Needs g++, ninja and OpenSSL's headers, with which SGLang compiles small helpers when it starts.
set -euo pipefail
version=${1:-0.5.23}
here=$(cd "$(dirname "$0")" && pwd)
env_dir=${RADIX_ENGINES_DIR:-$HOME/.cache/radixshmem-engines}/sglang-$version
stamp=$env_dir/.complete
case $version in
    0.5.23) xgrammar=0.2.7 ;;
    0.5.20) xgrammar=0.2.1 ;;
    *) echo "setup_sglang.sh: version $version was not tried; known: 0.5.23, 0.5.20" >&2; exit 2 ;;
esac
needed=(aiohttp distro einops fastapi gguf ipython jsonschema msgspec ninja numpy openai orjson partial_json_parser pillow psutil
    pybase64 pydantic python-multipart pyzmq regex requests sentencepiece setproctitle soundfile tqdm transformers
    uvicorn uvloop)
if [ "$(cat "$stamp" 2>/dev/null)" != "${needed[*]}" ]; then
    rm -rf "$env_dir"
    mkdir -p "$(dirname "$env_dir")"
    "${PYTHON:-python3}" -m venv "$env_dir"
    pip() { "$env_dir/bin/python" -m pip install --quiet --no-cache-dir "$@" >&2; }
    pip torch==2.13.0 packaging
    pip --no-deps "sglang==$version" apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 "xgrammar==$xgrammar" \
        torchvision==0.28.0
    "$env_dir/bin/python" "$here/engine_requirements.py" sglang --only "${needed[@]}" > "$env_dir/requirements.txt"
    pip -r "$env_dir/requirements.txt" triton==3.9.0 dill loguru pyyaml pytest
    echo "${needed[*]}" > "$stamp"
fi
cp "$here/sglang_cpu/sitecustomize.py" "$("$env_dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
echo "$env_dir"
