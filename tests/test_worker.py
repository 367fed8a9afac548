"""The host thread of the update lane: work in order, and whoever waits is told what broke."""

import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from l2l.device.cuda import _finish_before_compiling as finish_before_compiling
from l2l.device.cuda import _forget_callback as forget_callback
from l2l.device.cuda_streams import MAX_LAUNCHES, HostWork
from l2l.device.worker import UpdateFailedError, Worker
from l2l.schedule import Lane

LONG = 30.0  # seconds: what takes longer will never come


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.dismiss()  # without waiting: it may hang in a test that fails


def fail() -> None:
    raise OSError("planted")


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_finishing_waits_for_all_that_was_submitted(worker: Worker) -> None:
    gate, done = threading.Event(), list[int]()
    worker.submit("", lambda: gate.wait(LONG) and None)
    for number in range(5):
        worker.submit("", lambda number=number: done.append(number))
    finishing = in_thread(worker.finish)
    finishing.join(0.1)
    assert finishing.is_alive()
    assert not done
    gate.set()
    finishing.join(LONG)
    assert not finishing.is_alive()
    assert done == [0, 1, 2, 3, 4]


def test_finishing_waits_after_a_failure_too_and_leaves_it_to_others(worker: Worker) -> None:
    gate, done = threading.Event(), list[str]()
    worker.submit("", lambda: gate.wait(LONG) and fail())
    worker.submit("", lambda: done.append("dropped"))
    finishing = in_thread(worker.finish)
    finishing.join(0.1)
    assert finishing.is_alive()
    gate.set()
    finishing.join(LONG)
    assert not finishing.is_alive()
    worker.finish()
    assert not done
    for wait in (worker.raise_failure, worker.record().synchronize):
        with pytest.raises(UpdateFailedError, match="planted"):
            wait()


def test_an_event_is_awaited_with_or_without_its_failure(worker: Worker) -> None:
    before = worker.record()
    worker.submit("", fail)
    after = worker.record()
    after.wait()
    before.wait()
    with pytest.raises(UpdateFailedError, match="planted"):
        after.synchronize()


def test_the_thread_itself_does_not_wait_for_what_comes_after(worker: Worker) -> None:
    done: list[str] = []

    def finish_first() -> None:
        worker.finish()
        done.append("first")

    worker.submit("", finish_first)
    worker.submit("", lambda: done.append("second"))
    finishing = in_thread(worker.finish)
    finishing.join(LONG)
    assert not finishing.is_alive()
    worker.raise_failure()
    assert done == ["first", "second"]


def test_a_thread_that_has_ended_has_nothing_to_finish() -> None:
    worker, numbers = Worker(), list[int]()
    worker.submit("", lambda: numbers.append(1))
    worker.close()
    finishing = in_thread(worker.finish)
    finishing.join(LONG)
    assert not finishing.is_alive()
    assert numbers == [1]


def test_finishing_counts_as_an_event() -> None:
    """A stream that waits for a later number must not wait for ever."""
    numbers: list[int] = []
    worker = Worker(on_event=numbers.append)
    first = worker.record()
    worker.finish()
    last = worker.record()
    worker.close()
    assert [first.number, last.number] == [1, 3]
    assert numbers == [1, 2, 3]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch warns of itself
def test_the_thread_finishes_before_anything_is_compiled(worker: Worker) -> None:
    from torch._dynamo.callback import callback_handler

    done, at_compilation = list[str](), list[list[str]]()

    def note(graph: Any, _: object) -> Callable[..., Any]:
        at_compilation.append(list(done))
        return graph.forward

    def update() -> None:
        time.sleep(0.2)
        done.append("update")

    callback = partial(finish_before_compiling, [weakref.ref(worker)])
    callback_handler.register_start_callback(callback)
    try:
        worker.submit("", update)
        torch.compile(lambda x: 2 * x, backend=note)(torch.ones(3))
    finally:
        forget_callback(callback)
    assert at_compilation == [["update"]]
    assert callback not in callback_handler.start_callbacks
    forget_callback(callback)  # torch was reset


def test_a_device_that_is_gone_does_not_hold_up_compilation() -> None:
    worker = Worker()
    gone = weakref.ref(worker)
    worker.close()
    finish_before_compiling([gone], None)
    del worker
    assert gone() is None
    finish_before_compiling([gone], None)


def test_a_process_that_ends_waits_for_the_work_under_way_and_drops_the_rest() -> None:
    """A thread that is in torch's code when the interpreter goes may abort the process."""
    program = """
import os, time, torch
from l2l.device.worker import Worker

def work():
    os.write(1, b"begun ")
    end = time.perf_counter() + 0.3
    while time.perf_counter() < end:
        torch.ones(64, 64).mm(torch.ones(64, 64))
    os.write(1, b"done ")

worker = Worker()
for _ in range(1000):
    worker.submit("update", work)
time.sleep(0.1)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    words = done.stdout.split()
    assert words == ["begun", "done"] * (len(words) // 2)
    assert 2 <= len(words) < 200


def test_launches_wait_for_host_work_of_any_thread_once_too_many_are_queued() -> None:
    """And only then: what queues behind a thread that is done is free."""
    threads = [Worker("one"), Worker("other")]
    gates = [threading.Event() for _ in threads]
    try:
        work, lane = HostWork(), Lane.COMPUTE
        work.launch(lane, 10 * MAX_LAUNCHES)
        for thread, gate in zip(threads, gates, strict=True):
            thread.submit("held", gate.wait)
        first, second = (thread.record() for thread in threads)
        work.follow(lane, (first,))
        assert work.of(lane) == (first,)
        work.launch(lane, MAX_LAUNCHES)
        work.follow(lane, (second,))
        assert set(work.of(lane)) == {first, second}
        assert not work.of(Lane.FETCH)
        waiter = threading.Thread(target=work.launch, args=(lane, 1))
        waiter.start()
        gates[0].set()
        waiter.join(0.2)
        assert waiter.is_alive(), "the other thread is not done"
        gates[1].set()
        waiter.join(5)
        assert not waiter.is_alive()
        work.launch(lane, 10 * MAX_LAUNCHES)
        assert not work.of(lane)
        later = threads[0].record()
        later.wait()
        work.follow(lane, (later,))
        assert not work.of(lane), "it was done already"
    finally:
        for gate in gates:
            gate.set()
        for thread in threads:
            thread.close()
