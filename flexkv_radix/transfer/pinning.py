"""Pins the SlotStore for devices, in chunks, all or nothing."""

from __future__ import annotations

from collections.abc import Callable

# One registration of a terabyte takes minutes and fails as a whole; drivers have refused single ones
# of more than this.
CHUNK_BYTES = 64 << 30


class PinnedRange:
    """num_bytes from address on, registered chunk by chunk until close().

    register(address, num_bytes) and unregister(address) are the driver's.  If a chunk is refused,
    those before it are given back and the driver's error is passed on.
    """

    def __init__(
        self,
        address: int,
        num_bytes: int,
        register: Callable[[int, int], None],
        unregister: Callable[[int], None],
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._unregister = unregister
        self._chunks: list[int] = []
        try:
            for start in range(0, num_bytes, chunk_bytes):
                register(address + start, min(chunk_bytes, num_bytes - start))
                self._chunks.append(address + start)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        while self._chunks:
            self._unregister(self._chunks.pop())
