"""Every event in every state of a task."""

from __future__ import annotations

import pytest

from flexkv_radix.lifecycle import Settle, Task, TaskKind, TaskState

S = TaskState


def task(state: TaskState = S.UNREADY, *, transfers: int = 2) -> Task:
    """A task brought into state by its events."""
    one = Task(1, TaskKind.PUT, (), (), 0.0)
    if state is S.UNREADY:
        return one
    if state is S.CANCELLED:
        one.cancel(1.0)
        return one
    one.launched(transfers)
    if state is S.READY:
        return one
    if state is S.FAILED:
        one.fail("broken", 1.0)
        return one
    one.submitted()
    if state is S.COMPLETED:
        for _ in range(transfers):
            one.transfer_done("", 1.0)
        one.settled("", 1.0)
    return one


@pytest.mark.parametrize("state", list(S))
def test_the_helper_reaches_every_state(state: TaskState) -> None:
    assert task(state).state is state


def test_success_commits_after_the_last_transfer() -> None:
    one = task(S.RUNNING)
    assert one.transfer_done("", 1.0) is Settle.NOTHING
    assert one.transfer_done("", 2.0) is Settle.COMMIT
    assert one.state is S.RUNNING
    one.settled("", 3.0)
    assert (one.state, one.finished_s) == (S.COMPLETED, 3.0)


def test_results_may_come_before_submitted() -> None:
    one = task(S.READY, transfers=1)
    assert one.transfer_done("", 1.0) is Settle.COMMIT
    one.settled("", 2.0)
    one.submitted()
    assert one.state is S.COMPLETED


def test_a_failed_transfer_fails_the_task_when_the_others_are_over() -> None:
    one = task(S.RUNNING)
    assert one.transfer_done("disk on fire", 1.0) is Settle.NOTHING
    assert one.transfer_done("", 2.0) is Settle.GIVE_BACK
    assert (one.state, one.error) == (S.FAILED, "disk on fire")


def test_a_failed_commit_fails_the_task() -> None:
    one = task(S.RUNNING, transfers=1)
    one.transfer_done("", 1.0)
    one.settled("reset meanwhile", 2.0)
    assert (one.state, one.error) == (S.FAILED, "reset meanwhile")


def test_cancel_waits_for_running_transfers() -> None:
    one = task(S.RUNNING)
    assert one.cancel(1.0) is Settle.NOTHING
    assert one.transfer_done("", 2.0) is Settle.NOTHING
    assert one.state is S.RUNNING
    assert one.transfer_done("", 3.0) is Settle.GIVE_BACK
    assert one.state is S.CANCELLED


def test_cancel_during_the_commit_comes_too_late() -> None:
    one = task(S.RUNNING, transfers=1)
    one.transfer_done("", 1.0)
    assert one.cancel(2.0) is Settle.NOTHING
    one.settled("", 3.0)
    assert one.state is S.COMPLETED


def test_cancel_before_launch_is_at_once() -> None:
    one = task()
    assert one.cancel(1.0) is Settle.GIVE_BACK
    assert one.state is S.CANCELLED


@pytest.mark.parametrize("state", [S.UNREADY, S.READY, S.RUNNING])
def test_a_lost_worker_ends_whatever_is_not_over(state: TaskState) -> None:
    one = task(state)
    assert one.fail("lost", 1.0) is Settle.GIVE_BACK
    assert (one.state, one.error) == (S.FAILED, "lost")
    assert one.transfer_done("", 2.0) is Settle.NOTHING


def test_a_lost_worker_does_not_interrupt_the_commit() -> None:
    one = task(S.RUNNING, transfers=1)
    one.transfer_done("", 1.0)
    assert one.fail("lost", 2.0) is Settle.NOTHING
    one.settled("", 3.0)
    assert one.state is S.COMPLETED


@pytest.mark.parametrize("state", [S.COMPLETED, S.FAILED, S.CANCELLED])
def test_terminal_states_are_left_by_nothing(state: TaskState) -> None:
    one = task(state)
    assert one.fail("x", 9.0) is Settle.NOTHING
    assert one.transfer_done("x", 9.0) is Settle.NOTHING
    one.submitted()
    assert one.state is state


@pytest.mark.parametrize("state", [S.READY, S.RUNNING, S.COMPLETED, S.FAILED, S.CANCELLED])
def test_a_task_is_launched_once(state: TaskState) -> None:
    with pytest.raises(ValueError, match="task 1"):
        task(state).launched(1)
    with pytest.raises(ValueError, match="task 1"):
        task(state).finish("", 1.0)


def test_finish_without_transfers() -> None:
    good, bad = task(), task()
    assert good.finish("", 1.0) is Settle.GIVE_BACK
    assert bad.finish("no space", 1.0) is Settle.GIVE_BACK
    assert (good.state, bad.state, bad.error) == (S.COMPLETED, S.FAILED, "no space")
