"""Moves KV blocks between engine memory and slots, in a subprocess of its own.

Modules:

    segments      pure: where the bytes of a block are in an engine's tensors and in its slot
    protocol      the messages between engine, ranks and transfer worker
    wire          framing and file descriptors over Unix sockets
    handle        the engine's side: spawn, submit, poll
    registration  a rank's side: hand KV tensors over
    worker        the subprocess
"""
