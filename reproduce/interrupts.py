"""Interrupt `engine.step` at random instants and see that the engine is whole or says it is not.

    python reproduce/interrupts.py --tries 1000

A small model is trained in several settings. A step is interrupted at an instant drawn evenly from
the time that one takes: by Ctrl-C (SIGINT), by two of them in a row, of which the engine does not
hold back the second, or by an exception that another thread injects between any two instructions,
which cannot be held back at all. Then an engine that says it is open must be, bit by bit, as before
the step or as after it, and go on as the undisturbed one; one that says it is torn must refuse, and
go on exactly once a checkpoint was loaded. There is no hook in the code that is interrupted. Prints
a table, and ends with status 1 if anything was half updated and open, or unusable.
"""

import argparse
import contextlib
import ctypes
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import l2l

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import inside

LAYERS, WIDTH, WORDS, ROWS, LENGTH = 4, 16, 40, 4, 6
SETTINGS: dict[str, dict[str, Any]] = {
    "eager": {},
    "clipped": {"clip_norm": 0.1},
    "halves": {"clip_norm": 0.1, "overrides": {"halves": True}},
    "tables on the host": {"embedding": "host"},
    "tables, clipped": {"embedding": "host", "clip_norm": 0.1, "overrides": {"halves": True}},
    "some late": {"overrides": {"num_late": 2}},
    "tail": {"overrides": {"num_tail": 2}},
    "device state": {"overrides": {"num_tail": 2, "num_device_states": 2}},
    "shared": {"overrides": {"num_shared": 2, "num_pieces": 3}},
    "shared, clipped": {"overrides": {"num_shared": 2, "num_pieces": 3}, "clip_norm": 0.1},
    "Adafactor": {"optimizer": l2l.Adafactor(lr=1e-2)},
    "float16": {"precision": "float16"},
    "microbatches": {"microbatch_size": 1},
    "background save": {"clip_norm": 0.1},
}
KINDS = ("signal", "two signals", "injected")


class Layer(nn.Module):
    """A layer with random numbers and with buffers that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        """The hidden state after the layer."""
        centred = hidden - 0.1 * self.seen.to(hidden.dtype)
        if self.training:
            self.seen.mul_(0.9).add_(hidden.detach().float().mean((0, 1)), alpha=0.1)
        return hidden + self.dropout(self.down(torch.tanh(self.up(centred))))


class Model(nn.Module):
    """Embedding, layers, head, loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss of every word."""
        hidden = self.table(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def batch(number: int) -> dict[str, Tensor]:
    """The rows of a step."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids.flip(1)}


@dataclass(slots=True)
class Row:
    """What interrupts of one kind have done in one setting."""

    setting: str
    kind: str
    tries: int = 0
    before: int = 0
    after: int = 0
    torn: int = 0
    half: int = 0
    unusable: int = 0
    others: int = 0


def state_of(engine: l2l.Engine) -> dict[str, Tensor]:
    """Everything that the next steps depend on, once all updates are done."""
    server = inside.server(engine)
    inside.clean_up(engine)
    server.settle_all()
    found = {"step": torch.tensor(engine.step_number)}
    for name, unit in server.units.items():
        found |= {f"{name} {key}": t.clone() for key, t in server.image(name).tensors.items()}
        found[f"{name} steps"] = torch.tensor(list(unit.steps.values()))
    for name, buffer in inside.present_buffers(engine).items():
        found[f"buffer {name}"] = buffer.clone()
    return found


def differences(
    found: dict[str, Tensor], expected: dict[str, Tensor], *, rounds: bool
) -> list[str]:
    """What differs in two states, bit by bit.

    `rounds`: but for last bits, where the host may do an update that the device else does.
    """
    keys = {*found, *expected}
    missing = [key for key in keys if key not in found or key not in expected]
    return missing + [
        key
        for key in keys.difference(missing)
        if not torch.equal(found[key], expected[key])
        and not (rounds and torch.allclose(found[key], expected[key], rtol=1e-4, atol=1e-6))
    ]


def interrupt(kind: str, delays: tuple[float, float], done: threading.Event) -> threading.Thread:
    """A thread that interrupts the one that asks, after a while, and says when that is done."""
    target = threading.get_ident()

    def send() -> None:
        for delay in delays if kind == "two signals" else delays[:1]:
            end = time.perf_counter() + delay
            while time.perf_counter() < end:
                time.sleep(0)
            if kind == "injected":
                error = ctypes.py_object(KeyboardInterrupt)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(target), error)
            else:
                signal.pthread_kill(target, signal.SIGINT)
        done.set()

    return threading.Thread(target=send, daemon=True)


def is_interrupt(error: BaseException | None) -> bool:
    """Whether an error is an interrupt, or what became of one on its way."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__context__
    return False


class Campaign:
    """Interrupts of one engine."""

    def __init__(self, setting: str, folder: Path, chance: random.Random, device: str) -> None:
        """Make the engine, and learn what undisturbed steps give."""
        torch.manual_seed(0)
        settings = {"precision": "float32", "device": device, "microbatch_size": 2}
        self.name, self.chance = setting, chance
        self.engine = inside.engine(Model(), layers="layers", **{**settings, **SETTINGS[setting]})
        self.checkpoint, self.beside = folder / f"{setting}-0", folder / f"{setting}-1"
        if setting == "float16":
            inside.scaler(self.engine).scale.value = 1024.0
        for number in range(2):
            self.engine.step(batch(number))
        self.engine.save(self.checkpoint)
        self.states: dict[int, dict[str, Tensor]] = {}
        for number in (2, 3, 4):
            self.go(number)
            self.states[number + 1] = state_of(self.engine)
        began = time.perf_counter()
        for _ in range(3):
            self.go(3)
        self.seconds = (time.perf_counter() - began) / 3 / 2  # of a step; `go` makes two

    def go(self, last: int) -> None:
        """From the checkpoint to a step's end."""
        self.engine.load(self.checkpoint)
        for number in range(2, last + 1):
            self.engine.step(batch(number))

    def try_once(self, row: Row) -> None:
        """Interrupt a step and look."""
        row.tries += 1
        self.go(2)  # so that updates wait
        if self.name == "background save":
            self.engine.save(self.beside, background=True)
        delays = self.chance.uniform(0, 1.1 * self.seconds), self.chance.uniform(0, 0.002)
        done, raised = threading.Event(), list[BaseException]()
        thread = interrupt(row.kind, delays, done)
        try:  # what comes second must be met everywhere
            try:
                thread.start()
                self.engine.step(batch(3))
                self._wait(done)
            except BaseException as error:
                raised.append(error)
                self._wait(done)
        except KeyboardInterrupt:
            self._wait(done)
        if raised and not is_interrupt(raised[0]):
            row.others += 1
            traceback.print_exception(raised[0])
        try:
            self._look(row)
        except BaseException:
            row.unusable += 1
            traceback.print_exc()

    @staticmethod
    def _wait(done: threading.Event) -> None:
        # Not `join`: after an interrupt that takes a thread for ended which is not.
        while not done.is_set():
            time.sleep(0.0002)
        time.sleep(0.001)

    def _look(self, row: Row) -> None:
        if self.engine.state == "torn":
            row.torn += 1
            with contextlib.suppress(RuntimeError):
                self.engine.step(batch(3))
                row.half += 1  # it did not refuse
            self.go(3)
            row.unusable += not self._is_after(4)
            return
        number = self.engine.step_number
        if number not in (3, 4) or not self._is_after(number):
            row.half += 1
            return
        row.before += number == 3
        row.after += number == 4
        self.engine.step(batch(number))
        row.unusable += not self._is_after(number + 1)

    def _is_after(self, number: int) -> bool:
        """Whether the engine is as undisturbed ones are after a step."""
        rounds = self.name == "shared, clipped"
        found = differences(state_of(self.engine), self.states[number], rounds=rounds)
        if found:
            print(f"{self.name}: differs after {number} steps: {found}", file=sys.stderr)
        return not found


def run(
    *,
    tries: int,
    folder: Path,
    seed: int = 0,
    device: str = "cpu",
    say: Callable[[Row], None] = lambda _: None,
) -> list[Row]:
    """Interrupt so many times, in all settings alike; one row for each of these and each kind."""
    chance, rows = random.Random(seed), list[Row]()
    number = -(-tries // (len(SETTINGS) * len(KINDS)))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that any instant may be hit
    try:
        for setting in SETTINGS:
            campaign = Campaign(setting, folder, chance, device)
            for kind in KINDS:
                row = Row(setting, kind)
                for _ in range(number):
                    campaign.try_once(row)
                rows.append(row)
                say(row)
            campaign.engine.close()
    finally:
        sys.setswitchinterval(before)
    return rows


def main() -> int:
    """Run the campaign and print its table."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=1000, help="interrupts in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    names = [field.name for field in fields(Row)]
    line = "{:<20}{:<13}" + "{:>9}" * (len(names) - 2)

    def say(row: Row) -> None:
        print(line.format(*(getattr(row, name) for name in names)), flush=True)

    print(line.format(*names))
    with tempfile.TemporaryDirectory() as folder:
        rows = run(
            tries=given.tries, folder=Path(folder), seed=given.seed, device=given.device, say=say
        )
    total = Row("all", f"pid {os.getpid()}")
    for name in names[2:]:
        setattr(total, name, sum(getattr(row, name) for row in rows))
    say(total)
    return 1 if total.half or total.unusable or total.others else 0


if __name__ == "__main__":
    sys.exit(main())
