"""What a launch brings for a matched task, and whether it fits.

The blocks of the window may be given alone, or as the last of a list with one entry for each block that
moves: engines whose layers all have a slot mapping of one length need not cut it.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexkv_radix.lifecycle import Task, TaskKind, TaskState
from flexkv_radix.planner import BlockIds
from flexkv_radix.table import Entry
from flexkv_radix.tier import CacheEngineRadixShmem


@dataclass(frozen=True)
class Launch:
    """The engine's blocks for one matched task; swa_blocks: for the last blocks of its window."""

    task_id: int
    gpu_blocks: BlockIds
    swa_blocks: BlockIds | None = None


def check_launch(entry: Entry, launch: Launch, window_blocks: int) -> None:
    """Raise ValueError unless launch fits the task of entry."""
    task = entry.task
    if task.state in (TaskState.FAILED, TaskState.CANCELLED):
        return  # it ended meanwhile; its answer says why
    if task.state in (TaskState.READY, TaskState.RUNNING):
        raise ValueError(f"task_ids: task {task.task_id} was launched before")
    num_blocks = sum(len(member.blocks) for member in task.members)
    if len(launch.gpu_blocks) != num_blocks:
        raise ValueError(
            f"slot_mappings: {len(launch.gpu_blocks)} blocks given for task {task.task_id}, "
            f"{num_blocks} are to be moved"
        )
    if task.state is TaskState.COMPLETED:
        return  # there was nothing to move
    if task.kind is TaskKind.PUT:
        _check_put_window(entry, launch, window_blocks)
    else:
        _check_get_window(entry, launch)


def check_layerwise(task: Task) -> None:
    """Raise ValueError unless each layer of the load will be signalled, or who waits told of a failure."""
    if task.kind is not TaskKind.GET:
        raise ValueError(f"layerwise_transfer: task {task.task_id} is no GET; launch it apart")
    if task.state in (TaskState.FAILED, TaskState.CANCELLED):
        why = f"{task.state.name}: {task.error}" if task.error else task.state.name
        raise ValueError(
            f"layerwise_transfer: no layer of task {task.task_id} will be signalled, it is {why}"
        )


def _check_get_window(entry: Entry, launch: Launch) -> None:
    expected = len(entry.task.transfers[1].slots) if len(entry.task.transfers) > 1 else 0
    given = 0 if launch.swa_blocks is None else len(launch.swa_blocks)
    if given not in (expected, len(launch.gpu_blocks) if expected else 0):
        raise ValueError(
            f"swa_slot_mappings: {given} blocks given for task {launch.task_id}, the last {expected} "
            "are to be moved (match with swa_aware to move a window)"
        )


def _check_put_window(entry: Entry, launch: Launch, window_blocks: int) -> None:
    given = 0 if launch.swa_blocks is None else len(launch.swa_blocks)
    staged = entry.hold.staged
    most = min(window_blocks, staged[0].num_blocks) if staged else 0
    if given > most and given != len(launch.gpu_blocks):
        raise ValueError(
            f"swa_slot_mappings: {given} blocks given for task {launch.task_id}, its window has {most}"
        )


def num_window_blocks(launch: Launch, tier: CacheEngineRadixShmem) -> int:
    """Blocks of the window that a checked launch of a put brings."""
    return 0 if launch.swa_blocks is None else min(len(launch.swa_blocks), tier.swa_window_blocks)


def window_tail(launch: Launch, num_blocks: int) -> BlockIds:
    """The last num_blocks of the window's blocks of a checked launch."""
    given = launch.gpu_blocks[:0] if launch.swa_blocks is None else launch.swa_blocks
    return given[len(given) - num_blocks :]
