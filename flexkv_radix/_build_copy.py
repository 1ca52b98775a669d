"""Builds flexkv_radix._copy from csrc/copy.c; the declarations are those of csrc/copy.h."""

from pathlib import Path

from cffi import FFI

_ROOT = Path(__file__).resolve().parent.parent
_HEADER = (_ROOT / "csrc" / "copy.h").read_text()

ffi = FFI()
ffi.cdef(_HEADER.split("/* CDEF-BEGIN */")[1].split("/* CDEF-END */")[0])
ffi.set_source(
    "flexkv_radix._copy",
    '#include "copy.h"',
    sources=["csrc/copy.c"],
    include_dirs=["csrc"],
    depends=["csrc/copy.h"],
    extra_compile_args=["-std=c11", "-O3", "-Wall", "-Wextra", "-pthread", "-fvisibility=hidden"],
    extra_link_args=["-pthread"],
)

if __name__ == "__main__":
    ffi.compile(verbose=True)
