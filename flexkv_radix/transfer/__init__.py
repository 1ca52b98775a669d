"""Moves KV blocks between engine memory and slots, in a subprocess of its own.

The engine's side:

    handle        spawn the worker, submit ops, poll results
    tensors       turn KV tensors into handles that the worker can map
    registration  hand them over, from every rank

Between them:

    segments      pure: where the bytes of a block are, in an engine's tensors and in its slot
    protocol      the messages
    wire          framing and file descriptors over Unix sockets

The worker's side:

    worker        the process: answers the engine and its ranks
    roster        the ranks, and what is made of them once all are there
    lane          a thread for each direction
    signals       eventfds of layerwise loads
    mover         what CPU and CUDA have in common, and the checks before any byte moves
    mapping, cpu  CPU tensors (csrc/copy.c)
    cuda*         CUDA tensors: cuda_plans chooses between cuda_rows, cuda_batch and cuda_kernel
    pinning       the SlotStore, pinned in chunks
"""
