"""Threads that are started inside ``on_any_core`` run where the parent process may."""

import os
import threading

import pytest

from kvferry.vllm.affinity import on_any_core

pytestmark = pytest.mark.skipif(
    len(os.sched_getaffinity(os.getppid())) < 2, reason="the machine gives this process one core only"
)


def cores_of_a_new_thread() -> set[int]:
    found: set[int] = set()
    thread = threading.Thread(target=lambda: found.update(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    return found


def test_a_pinned_thread_starts_free_ones_and_stays_pinned() -> None:
    before = os.sched_getaffinity(0)
    one = {min(before)}
    os.sched_setaffinity(0, one)
    try:
        assert cores_of_a_new_thread() == one
        with on_any_core():
            assert cores_of_a_new_thread() == os.sched_getaffinity(os.getppid())
        assert os.sched_getaffinity(0) == one
    finally:
        os.sched_setaffinity(0, before)


def test_a_thread_with_several_cores_is_left_alone() -> None:
    before = os.sched_getaffinity(0)
    with on_any_core():
        assert cores_of_a_new_thread() == before
