"""Processes of benchmarks: what they say is kept, and none outlives the one that started it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from l2l.bench import child_process

SLEEP = "import time; time.sleep(60)"
STARTS_ANOTHER = f"""
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", {SLEEP!r}]).pid, flush=True)
{SLEEP}
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_ends(pid: int) -> None:
    until = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < until, "it still runs"
        time.sleep(0.01)


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_what_a_process_says_and_how_it_ends_is_returned():
    text = "import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)"
    assert child_process.run(python(text), 60) == ("one\n", "two\n", "exit status 3")


def test_a_process_that_takes_too_long_ends_with_all_that_it_started():
    output, _, note = child_process.run(python(STARTS_ANOTHER), 2)
    assert note == "not done after 2 s (--time-limit)"
    assert_ends(int(output))


def test_lines_can_be_read_as_they_come():
    with child_process.started(python("for i in range(3): print(i)")) as process:
        assert process.stdout is not None
        assert [int(line) for line in process.stdout] == [0, 1, 2]
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_whoever_ends_takes_along_what_it_started(number: signal.Signals):
    text = f"""
import sys
from l2l.bench import child_process
with child_process.started([sys.executable, "-c", {STARTS_ANOTHER!r}]) as process:
    print(process.pid, process.stdout.readline(), flush=True)
    process.wait()
"""
    with subprocess.Popen(python(text), stdout=subprocess.PIPE, text=True) as ours:
        assert ours.stdout is not None
        started = [int(pid) for pid in ours.stdout.readline().split()]
        assert all(map(is_running, started))
        os.kill(ours.pid, number)
    for pid in started:
        assert_ends(pid)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
