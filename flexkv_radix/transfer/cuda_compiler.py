"""Compiles CUDA C at run time with NVRTC, which comes with torch's CUDA wheels or a CUDA toolkit."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p, create_string_buffer
from pathlib import Path
from typing import Any

from flexkv_radix.transfer.cuda_driver import Device, driver_cuda_version


def compile_program(source: str, device: Device, defines: dict[str, str]) -> bytes:
    """Machine code of source for device, or PTX when the compiler does not know the device yet.

    RuntimeError with the compiler's log, or saying where NVRTC was looked for.
    """
    library = _library()
    known = _known_architectures(library)
    wanted = device.compute_capability
    is_known = wanted in known
    target = f"sm_{wanted}" if is_known else f"compute_{max(arch for arch in known if arch <= wanted)}"
    options = [f"--gpu-architecture={target}", *(f"-D{name}={value}" for name, value in defines.items())]
    program = c_void_p()
    _call(library, "nvrtcCreateProgram", byref(program), source.encode(), b"transfer.cu", 0, None, None)
    try:
        encoded = (c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), encoded) != 0:
            raise RuntimeError(f"nvrtc: {_output(library, 'ProgramLog', program).decode()}")
        return _output(library, "CUBIN" if is_known else "PTX", program)
    finally:
        library.nvrtcDestroyProgram(byref(program))


def _known_architectures(library: ctypes.CDLL) -> list[int]:
    count = c_int()
    _call(library, "nvrtcGetNumSupportedArchs", byref(count))
    architectures = (c_int * count.value)()
    _call(library, "nvrtcGetSupportedArchs", architectures)
    return list(architectures)


def _output(library: ctypes.CDLL, what: str, program: c_void_p) -> bytes:
    size = c_size_t()
    _call(library, f"nvrtcGet{what}Size", program, byref(size))
    buffer = create_string_buffer(size.value)
    _call(library, f"nvrtcGet{what}", program, buffer)
    return buffer.raw


def _call(library: ctypes.CDLL, name: str, *arguments: Any) -> None:
    code = getattr(library, name)(*arguments)
    if code != 0:
        raise RuntimeError(f"{name}: nvrtc error {code}")


@functools.cache
def _library() -> ctypes.CDLL:
    major = driver_cuda_version() // 1000
    candidates = [*_packaged(), f"libnvrtc.so.{major}", "libnvrtc.so"]
    candidates.sort(key=lambda name: not name.endswith(f".{major}"))  # what fits the driver comes first
    for name in candidates:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError(
        f"CUDA tensors need NVRTC, none of {candidates} loads: install nvidia-cuda-nvrtc or CUDA's torch"
    )


def _packaged() -> list[str]:
    """NVRTC libraries of NVIDIA's wheels and of a toolkit in its usual place."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec is not None else []
    paths = [path for root in roots for path in root.glob("*/lib/libnvrtc.so.*")]
    paths += Path("/usr/local/cuda/lib64").glob("libnvrtc.so.*")
    return [str(path) for path in sorted(paths) if "builtins" not in path.name]
