"""A rank as a process: rank_main.py <endpoint> <fd,fd,...> [fork], a Register message on stdin.

It ends with stdin, and so does its child, of which the interpreter does not know.
"""

import ctypes
import sys

from flexkv_radix.transfer.protocol import Register, decode
from flexkv_radix.transfer.registration import register_rank


def main() -> None:
    num_bytes = int.from_bytes(sys.stdin.buffer.read(4), "little")
    message = decode(sys.stdin.buffer.read(num_bytes))
    assert isinstance(message, Register)
    fds = [int(fd) for fd in sys.argv[2].split(",")]
    registration = register_rank(sys.argv[1], message.rank, fds, timeout_s=30.0)
    if sys.argv[3:] == ["fork"]:
        ctypes.PyDLL(None).fork()
    sys.stdin.buffer.read()
    registration.close()


if __name__ == "__main__":
    main()
