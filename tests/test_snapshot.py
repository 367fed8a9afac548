"""A snapshot holds one step, whatever the order in which writers and changes come.

Threads meet at events, so that each order of things is one that was chosen; the last test leaves
the order to chance and looks at what every order must give.
"""

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from l2l.parameter_server import Image, Snapshot
from l2l.parameter_server.host_memory import SparePages
from l2l.parameter_server.snapshot import ImageState

SIZE = 100  # bytes of a unit
SOON = 10.0  # seconds after which a test is taken to hang


class Server:
    """Units of one tensor, all of whose bytes are the number of the last change."""

    def __init__(
        self, units: str, *, spare_units: int = 0, awaited: str = "", fixed: str = ""
    ) -> None:
        self.memory = {unit: torch.zeros(SIZE, dtype=torch.uint8) for unit in units}
        self.steps = {unit: {"weight": 0} for unit in units}
        self.copies: list[int] = []  # threads that have made a copy
        self.urgent: list[bool] = []
        self.while_copying: Callable[[], None] = lambda: None
        self.snapshot = Snapshot(
            list(units),
            image_of=self.image,
            copy_of=self.copy,
            awaited=frozenset(awaited),
            changing=frozenset(units) - frozenset(fixed),
            spare_bytes=spare_units * SIZE,
        )

    def image(self, unit: str) -> Image:
        return Image(unit=unit, tensors={"weight": self.memory[unit]}, steps=self.steps[unit])

    def copy(self, tensors: Mapping[str, Tensor], urgent: bool) -> dict[str, Tensor]:
        self.copies.append(threading.get_ident())
        self.urgent.append(urgent)
        self.while_copying()
        return {name: tensor.clone() for name, tensor in tensors.items()}

    def change(self, unit: str) -> None:
        self.snapshot.before(unit)
        self.memory[unit] += 1
        self.steps[unit]["weight"] += 1

    def take(self) -> Image:
        image = self.snapshot.take()
        assert image is not None
        return image

    def write(self) -> str:
        """What a writer does with the next unit; returns its name."""
        image = self.take()
        assert is_untouched(image)
        self.snapshot.written(image)
        return image.unit


def is_untouched(image: Image) -> bool:
    return not image.tensors["weight"].any() and image.steps == {"weight": 0}


class Other:
    """Something that runs on a thread of its own."""

    def __init__(self, act: Callable[..., Any], *args: Any) -> None:
        self.result: Any = None
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(act, *args), daemon=True)
        self._thread.start()

    def _run(self, act: Callable[..., Any], *args: Any) -> None:
        try:
            self.result = act(*args)
        except BaseException as failure:
            self.failure = failure

    @property
    def waits(self) -> bool:
        """Whether it is still there after a while in which it could have ended."""
        self._thread.join(0.03)
        return self._thread.is_alive()

    def end(self) -> Any:
        self._thread.join(SOON)
        assert not self._thread.is_alive(), "it waits for ever"
        return self.result


# --------------------------------------------------------------------------------------------------
# Writers alone


def test_units_are_written_in_their_order_each_once():
    server = Server("abc")
    assert [server.write() for _ in "abc"] == ["a", "b", "c"]
    assert server.snapshot.take() is None
    assert not server.copies
    assert server.snapshot.stall_seconds == 0


def test_units_that_change_last_are_written_first_while_the_others_could_be_copied():
    server = Server("abcd", spare_units=1)
    assert server.write() == "d"
    server.change("a")
    assert server.write() == "b"  # no memory is left: what changes next must be written
    assert server.write() == "c"
    assert server.write() == "a"


def test_several_writers_share_the_units():
    server = Server("abcd")
    taken = [server.take() for _ in range(3)]
    assert [image.unit for image in taken] == ["a", "b", "c"]
    for image in taken:
        server.snapshot.written(image)
    assert server.write() == "d"
    assert server.snapshot.take() is None


def test_a_writer_that_finds_nothing_left_ends_while_others_still_write():
    server = Server("a")
    server.take()
    assert server.snapshot.take() is None


def test_what_is_taken_without_a_change_is_no_copy():
    server = Server("a", spare_units=1)
    image = server.take()
    assert image.tensors["weight"] is server.memory["a"]
    assert not image.is_copy


# --------------------------------------------------------------------------------------------------
# Changes


def test_a_change_before_the_unit_is_written_copies_it():
    server = Server("ab", spare_units=1)
    server.change("a")
    assert server.copies == [threading.get_ident()]
    assert server.write() == "b"  # what nobody has copied is more urgent
    image = server.take()
    assert (image.unit, image.is_copy) == ("a", True)
    assert is_untouched(image)
    assert server.memory["a"].unique().tolist() == [1]
    assert server.snapshot.stall_seconds == 0


def test_a_change_after_the_unit_was_written_neither_copies_nor_waits():
    server = Server("a", spare_units=1)
    server.write()
    server.change("a")
    server.change("a")
    assert not server.copies
    assert server.snapshot.stall_seconds == 0


def test_a_second_change_of_a_copied_unit_goes_on_at_once():
    server = Server("a", spare_units=5)
    for _ in range(3):
        server.change("a")
    assert len(server.copies) == 1
    assert is_untouched(server.take())
    server.change("a")  # while the copy is being written


def test_a_change_without_spare_memory_waits_until_the_unit_is_written():
    server = Server("a")
    change = Other(server.change, "a")
    assert change.waits
    image = server.take()
    assert change.waits
    assert is_untouched(image)
    server.snapshot.written(image)
    change.end()
    assert server.memory["a"].unique().tolist() == [1]
    assert not server.copies
    assert server.snapshot.stall_seconds > 0.03


def test_a_change_of_a_unit_that_is_being_written_waits_though_there_is_memory():
    server = Server("a", spare_units=1)
    image = server.take()
    change = Other(server.change, "a")
    assert change.waits
    assert is_untouched(image)
    server.snapshot.written(image)
    change.end()
    assert not server.copies
    assert server.snapshot.stall_seconds > 0


def test_stalls_of_several_changes_add_up():
    server = Server("ab")
    changes = [Other(server.change, unit) for unit in "ab"]
    assert all(change.waits for change in changes)
    server.write()
    server.write()
    for change in changes:
        change.end()
    assert server.snapshot.stall_seconds > 0.06


def test_units_that_a_change_waits_for_are_written_first():
    server = Server("abcde", spare_units=1)
    server.change("a")
    for unit in "db":  # in the order in which they began to wait
        assert Other(server.change, unit).waits
    assert [server.write() for _ in "abcde"] == ["d", "b", "c", "e", "a"]


def test_spare_memory_is_there_again_once_a_copy_is_written():
    server = Server("ab", spare_units=1, awaited="b")
    server.change("a")
    assert server.write() == "a"
    server.snapshot.complete("b")
    server.change("b")
    assert len(server.copies) == 2
    assert server.write() == "b"
    assert server.snapshot.stall_seconds == 0


def test_memory_of_a_copy_that_is_being_written_is_not_spare():
    server = Server("ab", spare_units=1, awaited="b")
    server.change("a")
    copied = server.take()
    assert (copied.unit, copied.is_copy) == ("a", True)
    server.snapshot.complete("b")
    change = Other(server.change, "b")
    assert change.waits
    server.snapshot.written(copied)
    assert change.waits  # and does not begin to copy what a writer may have
    assert server.write() == "b"
    change.end()
    assert len(server.copies) == 1


def test_a_unit_larger_than_what_is_spare_waits_and_a_smaller_one_is_copied():
    server = Server("ab", spare_units=1)
    server.memory["a"] = torch.zeros(SIZE + 1, dtype=torch.uint8)
    change = Other(server.change, "a")
    assert change.waits
    server.change("b")
    assert server.write() == "a"
    change.end()
    assert len(server.copies) == 1


# --------------------------------------------------------------------------------------------------
# Units whose update of the step is still to come


def test_a_unit_is_taken_once_its_update_is_complete():
    server = Server("ab", awaited="a")
    assert server.snapshot.awaits
    assert server.write() == "b"
    writer = Other(server.write)
    assert writer.waits
    server.snapshot.complete("a")
    assert not server.snapshot.awaits
    assert writer.end() == "a"
    assert server.snapshot.take() is None


def test_the_awaited_update_itself_neither_copies_nor_waits():
    server = Server("a", awaited="a", spare_units=5)
    server.memory["a"] -= 2
    server.steps["a"]["weight"] -= 2
    server.change("a")  # an update may be done in parts
    server.change("a")
    server.snapshot.complete("a")
    assert not server.copies
    server.change("a")  # that of the next step
    assert len(server.copies) == 1
    assert is_untouched(server.take())


def test_an_awaited_unit_waits_for_the_writer_when_it_changes_again():
    server = Server("a", awaited="a")
    server.snapshot.complete("a")
    change = Other(server.change, "a")
    assert change.waits
    assert server.write() == "a"
    change.end()


def test_completing_a_unit_twice_or_one_that_was_not_awaited_changes_nothing():
    server = Server("ab", awaited="a")
    server.snapshot.complete("b")
    server.snapshot.complete("a")
    server.snapshot.complete("a")
    assert [server.write() for _ in "ab"] == ["a", "b"]
    server.snapshot.complete("a")
    assert server.snapshot.take() is None


# --------------------------------------------------------------------------------------------------
# Giving up


def test_giving_up_frees_changes_and_writers():
    server = Server("abcd", awaited="c")
    busy = server.take()
    waiting = [Other(server.change, unit) for unit in "ab"]
    assert all(one.waits for one in waiting)
    assert server.take().unit == "b"
    assert server.take().unit == "d"
    writer = Other(server.snapshot.take)
    assert writer.waits
    assert not server.snapshot.is_given_up
    server.snapshot.give_up()
    assert server.snapshot.is_given_up
    assert writer.end() is None
    for one in waiting:
        one.end()
    server.snapshot.written(busy)
    server.snapshot.complete("c")
    assert not server.snapshot.awaits
    assert server.snapshot.take() is None
    server.change("c")
    assert not server.copies


def test_a_copy_that_ends_after_giving_up_is_not_kept():
    server = Server("a", spare_units=1)
    begun, given_up = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        given_up.wait(SOON)

    server.while_copying = hold
    change = Other(server.change, "a")
    assert begun.wait(SOON)
    server.snapshot.give_up()
    given_up.set()
    change.end()
    assert server.snapshot.take() is None


def test_a_snapshot_that_was_written_is_not_given_up():
    server = Server("a")
    server.write()
    assert server.snapshot.take() is None
    assert not server.snapshot.is_given_up


def test_a_copy_that_fails_says_so_and_nobody_waits_for_it():
    server = Server("a", spare_units=1)

    def fail() -> None:
        raise OSError("planted")

    server.while_copying = fail
    with pytest.raises(OSError, match="planted"):
        server.change("a")
    assert Other(server.write).end() == "a"
    assert server.snapshot.take() is None
    assert server.snapshot._spare_bytes == SIZE


@pytest.mark.parametrize("failure", [MemoryError, RuntimeError])
def test_a_copy_that_memory_is_not_there_for_after_all_waits(failure: type[Exception]):
    server = Server("ab", spare_units=1)

    def fail() -> None:
        raise failure("planted")

    server.while_copying = fail
    change = Other(server.change, "a")
    assert change.waits
    assert server.write() == "a"
    change.end()
    assert change.failure is None
    assert server.write() == "b"


# --------------------------------------------------------------------------------------------------
# Two at once


def test_two_changes_of_a_unit_at_once_make_one_copy():
    server = Server("a", spare_units=2)
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go_on.wait(SOON)

    server.while_copying = hold
    first = Other(server.snapshot.before, "a")
    assert begun.wait(SOON)
    second = Other(server.snapshot.before, "a")
    writer = Other(server.take)
    assert second.waits  # it must not change what is being copied
    assert writer.waits
    go_on.set()
    first.end()
    second.end()
    assert len(server.copies) == 1
    assert writer.end().is_copy
    assert server.snapshot.take() is None


def test_two_changes_of_a_unit_at_once_without_spare_memory_wait_for_one_writing():
    server = Server("ab")
    changes = [Other(server.snapshot.before, "b") for _ in range(2)]
    assert all(change.waits for change in changes)
    assert server.write() == "b"
    for change in changes:
        change.end()
    assert server.write() == "a"
    assert server.snapshot.take() is None


def test_two_units_that_change_at_once_do_not_share_spare_memory_for_one():
    server = Server("ab", spare_units=1)
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go_on.wait(SOON)

    server.while_copying = hold
    first = Other(server.change, "a")
    assert begun.wait(SOON)
    second = Other(server.change, "b")
    assert second.waits
    assert server.write() == "b"
    second.end()
    go_on.set()
    first.end()
    assert server.write() == "a"
    assert len(server.copies) == 1


def test_a_unit_that_one_change_waits_for_may_be_copied_for_another():
    """Memory has become free in between. What the first has asked for is not written twice."""
    server = Server("abc", spare_units=1)
    server.change("a")
    first = Other(server.snapshot.before, "b")
    assert first.waits
    server.snapshot._spare_bytes += SIZE  # as if the copy had been written
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go_on.wait(SOON)

    server.while_copying = hold
    second = Other(server.change, "b")
    assert begun.wait(SOON)
    assert server.write() == "c"  # not what is being copied
    go_on.set()
    second.end()
    first.end()
    assert sorted([server.write(), server.write()]) == ["a", "b"]
    assert server.snapshot.take() is None


# --------------------------------------------------------------------------------------------------
# Copies that nobody waits for


def test_units_are_copied_ahead_in_the_order_in_which_they_change():
    server = Server("abc", spare_units=2)
    copied: list[str] = []
    server.while_copying = lambda: copied.append(
        next(u for u, s in server.snapshot._states.items() if s is ImageState.COPYING)
    )
    assert server.snapshot.copy_ahead()
    assert server.snapshot.copy_ahead()
    assert copied == ["a", "b"]
    assert server.urgent == [False, False]
    server.change("a")
    server.change("b")
    assert len(server.copies) == 2, "a change finds the copy"
    assert server.snapshot.stall_seconds == 0.0
    assert sorted(server.write() for _ in range(3)) == ["a", "b", "c"]


def test_writers_leave_units_that_change_to_whoever_copies_them():
    server = Server("abc", spare_units=3, fixed="c")
    server.snapshot.copies_ahead = True
    assert server.write() == "c", "which does not change"
    writer = Other(server.write)
    assert writer.waits
    assert server.snapshot.copy_ahead()
    assert writer.end() == "a"
    assert server.snapshot.copy_ahead()
    assert server.write() == "b"
    assert not server.snapshot.copy_ahead()
    assert server.snapshot.take() is None


def test_writers_take_copies_before_anything_else():
    server = Server("abcd", spare_units=2)
    server.snapshot.copies_ahead = True
    assert server.snapshot.copy_ahead()
    assert server.snapshot.copy_ahead()
    assert [server.write() for _ in range(2)] == ["a", "b"]


def test_writers_take_what_there_is_no_memory_to_copy():
    server = Server("ab", spare_units=0)
    server.snapshot.copies_ahead = True
    copying = Other(server.snapshot.copy_ahead)
    assert [server.write() for _ in range(2)] == ["a", "b"]
    copying.end()
    assert not server.copies


def test_writers_take_all_once_nobody_copies_any_more():
    server = Server("ab", spare_units=2)
    server.snapshot.copies_ahead = True

    def fail() -> None:
        raise MemoryError

    server.while_copying = fail
    writer = Other(server.write)
    assert writer.waits
    assert not server.snapshot.copy_ahead()
    assert {writer.end(), server.write()} == {"a", "b"}


def test_what_does_not_change_is_not_copied_ahead():
    server = Server("ab", spare_units=2, fixed="a")
    assert server.snapshot.copy_ahead()
    assert not server.snapshot.copy_ahead()
    assert len(server.copies) == 1
    assert sorted(server.write() for _ in range(2)) == ["a", "b"]


def test_copying_ahead_waits_for_an_update_that_is_not_complete():
    server = Server("a", spare_units=1, awaited="a")
    copying = Other(server.snapshot.copy_ahead)
    assert not server.copies
    server.change("a")
    server.snapshot.complete("a")
    copying.end()
    assert len(server.copies) == 1
    assert server.take().is_copy


def test_copying_ahead_waits_for_memory():
    server = Server("ab", spare_units=1)
    assert server.snapshot.copy_ahead()
    copying = Other(server.snapshot.copy_ahead)
    assert server.write() == "b", "there is no memory to copy it"
    copying.end()
    assert len(server.copies) == 1
    assert server.write() == "a"


def test_a_change_waits_for_the_copy_that_is_being_made():
    server = Server("a", spare_units=1)
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go_on.wait(SOON)

    server.while_copying = hold
    copying = Other(server.snapshot.copy_ahead)
    assert begun.wait(SOON)
    change = Other(server.change, "a")
    assert is_untouched(server.image("a"))
    go_on.set()
    copying.end()
    change.end()
    assert len(server.copies) == 1
    assert is_untouched(server.take())


def test_copying_ahead_ends_when_all_is_given_up():
    server = Server("a", awaited="a", spare_units=1)
    copying = Other(server.snapshot.copy_ahead)
    server.snapshot.give_up()
    copying.end()
    assert copying.failure is None
    assert not server.copies


@pytest.mark.parametrize("failure", [MemoryError, RuntimeError])
def test_copying_ahead_ends_where_memory_is_short_after_all(failure: type[Exception]):
    server = Server("a", spare_units=1)

    def fail() -> None:
        raise failure

    server.while_copying = fail
    assert not server.snapshot.copy_ahead()
    assert server.snapshot._spare_bytes == SIZE
    assert server.write() == "a"


# --------------------------------------------------------------------------------------------------
# By chance


@pytest.fixture
def quick_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_turns")
@pytest.mark.parametrize("seed", range(12))
def test_every_unit_is_written_once_as_it_was_whatever_happens_when(seed: int):
    source = random.Random(seed)
    units = "abcdefgh"
    awaited = "".join(unit for unit in units if source.random() < 0.3)
    server = Server(units, spare_units=source.choice([0, 1, 3, 8]), awaited=awaited)
    for unit in awaited:
        server.memory[unit] -= 1
        server.steps[unit]["weight"] -= 1
    pauses = [source.random() * 1e-3 for _ in range(64)]
    written: list[str] = []

    def train() -> None:
        for unit in awaited:
            server.change(unit)
            server.snapshot.complete(unit)
        for number in range(3):
            for unit in units:
                time.sleep(pauses[(ord(unit) * (number + 1)) % 64])
                server.change(unit)

    def write_all() -> None:
        while (image := server.snapshot.take()) is not None:
            time.sleep(pauses[ord(image.unit) % 64])
            assert is_untouched(image)
            written.append(image.unit)
            server.snapshot.written(image)

    server.snapshot.copies_ahead = source.random() < 0.5

    def copy_all() -> None:
        while server.snapshot.copy_ahead():
            pass

    others = [Other(train), Other(copy_all), *(Other(write_all) for _ in range(3))]
    for other in others:
        other.end()
        assert other.failure is None
    assert sorted(written) == list(units)
    assert all(server.steps[unit]["weight"] == 3 for unit in units)
    assert server.snapshot._spare_bytes % SIZE == 0


# -- Spare pages -----------------------------------------------------------------------------------


def test_blocks_are_used_again():
    spare = SparePages()
    first = spare.take(1000)
    assert spare.take(1000).data_ptr() != first.data_ptr()
    spare.give_back(first.data_ptr())
    assert spare.free_bytes == 1000
    assert spare.take(5000).data_ptr() != first.data_ptr(), "it is too small"
    assert spare.take(100).data_ptr() != first.data_ptr(), "it would be wasted"
    assert spare.take(900) is first
    assert spare.free_bytes == 0


def test_the_block_that_fits_best_is_taken():
    spare = SparePages()
    blocks = [spare.take(nbytes) for nbytes in (1200, 1000, 1100)]
    for block in blocks:
        spare.give_back(block.data_ptr())
    assert spare.take(990) is blocks[1]
    assert spare.take(990) is blocks[2]


def test_blocks_made_beforehand_are_taken_first():
    spare = SparePages()
    spare.fill([1000, 3000])
    spare.wait()
    assert spare.free_bytes == 4000
    taken = spare.take(3000)
    assert spare.free_bytes == 1000
    spare.reclaim()
    assert spare.free_bytes == 4000
    spare.close()
    assert spare.free_bytes == 0
    assert taken.numel() == 3000


def test_making_blocks_ends_when_there_is_no_memory_or_nobody_wants_them(
    monkeypatch: pytest.MonkeyPatch,
):
    spare = SparePages()
    spare.fill([1000, 1 << 62, 1000])
    spare.wait()
    assert spare.free_bytes == 1000
    touched = threading.Event()
    unwanted = SparePages()
    monkeypatch.setattr("l2l.parameter_server.host_memory.TOUCHED_AT_ONCE", 1)
    monkeypatch.setattr("ctypes.memset", lambda *_: (touched.set(), time.sleep(0.001)))
    unwanted.fill([1 << 20])
    assert touched.wait(10)
    unwanted.close()
    assert unwanted.free_bytes == 0
