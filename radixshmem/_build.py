"""cffi builder of ``radixshmem._radixshm``: the C core, with the header's CDEF part as interface."""

import re
from pathlib import Path

from cffi import FFI

CSRC = Path("csrc")  # relative to the repository root, from where setuptools builds


def read_interface(header: str) -> str:
    """Declarations between the CDEF markers, plus the error codes of the RS_ERRORS list."""
    cdef = header.split("/* CDEF-BEGIN */")[1].split("/* CDEF-END */")[0]
    errors = re.findall(r"^\s*X\((RS_\w+), (-?\d+),", header, re.MULTILINE)
    return cdef + "enum {" + ", ".join(f"{name} = {value}" for name, value in errors) + "};"


def sources() -> list[str]:
    """C files of the core; copy.c belongs to flexkv_radix."""
    return sorted(str(path) for path in CSRC.glob("*.c") if path.name != "copy.c")


ffi = FFI()
ffi.cdef(read_interface((CSRC / "radixshm.h").read_text()))
ffi.set_source(
    "radixshmem._radixshm",
    '#include "radixshm.h"',
    sources=sources(),
    depends=sorted(str(path) for path in CSRC.glob("*.h")),
    include_dirs=[str(CSRC)],
    extra_compile_args=["-std=c11", "-O2", "-Wall", "-Wextra", "-D_GNU_SOURCE", "-pthread"],
    extra_link_args=["-pthread"],
)
