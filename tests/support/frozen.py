"""A lock holder that makes no progress, as a stopped process would be, but without luck in the timing."""

from __future__ import annotations

import functools
import mmap
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from regions import attach

from radixshmem.region import object_path

_CSRC = Path(__file__).parents[2] / "csrc"


@functools.cache
def lock_word_offset() -> int:
    """Where the lock word lies in an index file, as the compiler lays it out."""
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory, "offset")
        source = (
            '#include "layout.h"\n#include <stdio.h>\n'
            'int main(void) { printf("%zu", offsetof(rs_header_shm, lock_word)); }'
        )
        subprocess.run(
            ["cc", "-std=c11", "-D_GNU_SOURCE", f"-I{_CSRC}", "-xc", "-", "-o", program],
            input=source.encode(),
            check=True,
        )
        return int(subprocess.run([program], capture_output=True, check=True).stdout)


@contextmanager
def frozen_index(name: str) -> Iterator[None]:
    """Within, the lock of the index ``name`` is held by a live client that never lets go."""
    owner = attach(name, "frozen")
    with open(object_path(name), "r+b") as file, mmap.mmap(file.fileno(), 0) as region:
        word = lock_word_offset()
        assert region[word : word + 4] == bytes(4), "somebody holds the lock"
        region[word : word + 4] = struct.pack("<I", owner.slot + 1)
        try:
            yield
        finally:
            region[word : word + 4] = bytes(4)
    owner.close()
