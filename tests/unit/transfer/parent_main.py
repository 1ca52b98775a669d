"""An engine that copies until it is killed: parent_main.py <lease file>, a Start message on stdin.

Holds the lease, prints the worker's pid once ops are completing.
"""

import fcntl
import os
import struct
import sys

import numpy as np

from flexkv_radix.transfer.handle import TransferHandle
from flexkv_radix.transfer.protocol import OpKind, Start, TransferOp, decode
from radixshmem.geometry import ComponentType


def main() -> None:
    start = decode(sys.stdin.buffer.read())
    assert isinstance(start, Start)
    lease_fd = os.open(sys.argv[1], os.O_RDWR)
    fcntl.fcntl(lease_fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
    handle = TransferHandle(start.config, lease_fd=lease_fd)
    handle.start()
    while not handle.is_ready():
        handle.poll(0.01)
    ids = np.arange(start.config.store.pools[0].num_slots)
    op_id = 0
    while True:
        op = TransferOp(op_id, OpKind.D2H, ComponentType.FULL, ids.astype(np.int64), ids.astype(np.int32))
        handle.submit([op])
        while not handle.poll(1.0):
            pass
        if op_id == 3:
            print(handle.pid, flush=True)
        op_id += 1


if __name__ == "__main__":
    main()
