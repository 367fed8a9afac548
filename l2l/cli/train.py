"""`l2l train`: a run from a TOML file, from flags, or from flags over a file."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, final

from typing_extensions import override

from l2l.cli import signals
from l2l.distributed import World, started_by_torchrun
from l2l.train import (
    SECTIONS,
    Display,
    Flag,
    RunFolder,
    Settings,
    SettingsError,
    Training,
    help_text,
    open_display,
)

HELP = """Train a model that does not fit the device. Settings come from a TOML file, from flags, or
from both: flags override the file. Everything is checked before anything is loaded. A run whose
folder has a checkpoint goes on from it; it may be stopped at any time, with Ctrl-C, SIGTERM or by
pulling the plug."""

EXAMPLES = """examples:
  l2l train run.toml
  l2l train --model models/SmolLM2-135M --data alpaca.jsonl.gz --task instruct --steps 300
  l2l train --model models/bert --data train.jsonl --evaluation-data dev.jsonl \\
      --task classification --epochs 3 --length 128 --learning-rate 3e-5 --device-memory 4GiB
  l2l train runs/SmolLM2-135M-alpaca          go on with a run
  torchrun --nproc-per-node 4 -m l2l train run.toml
                                              four devices, which hold the model together
  l2l train --help-settings > run.toml        all that a TOML file may say

Ends with status 0 if the run is at its end or SIGTERM has stopped it between steps, 130 if Ctrl-C
has, 130 or 143 if one of them came before the first step, 1 if something went wrong, 2 if a setting
cannot be."""

FLAGS = {  # flag -> section, key, what it takes
    "--model": ("model", "folder", "FOLDER"),
    "--data": ("data", "source", "FILE"),
    "--evaluation-data": ("data", "evaluation_source", "FILE"),
    "--task": ("data", "task", "TASK"),
    "--output": ("output", "folder", "FOLDER"),
    "--steps": ("training", "steps", "N"),
    "--epochs": ("training", "epochs", "N"),
    "--rows": ("training", "rows", "N"),
    "--length": ("training", "length", "TOKENS"),
    "--learning-rate": ("optimizer", "learning_rate", "RATE"),
    "--optimizer": ("optimizer", "name", "NAME"),
    "--device-memory": ("memory", "device_memory", "SIZE"),
    "--host-memory": ("memory", "host_memory", "SIZE"),
    "--precision": ("training", "precision", "NAME"),
    "--seed": ("training", "seed", "N"),
    "--random-init": ("model", "random_init", ""),
    "--allow-missing-weights": ("model", "allow_missing_weights", ""),
}
SEVERAL = ("--data", "--evaluation-data")  # may be given more than once


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `l2l train` takes."""
    parser.description, parser.epilog = HELP, EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "settings",
        nargs="?",
        type=Path,
        metavar="RUN",
        help="a TOML file, or the folder of a run to go on with",
    )
    group = parser.add_argument_group("settings, which override those of the file")
    for flag, (section, name, value) in FLAGS.items():
        key = SECTIONS[section][name]
        words = key["help"].replace("%", "%%")
        if key["type"] == "boolean":
            group.add_argument(flag, action="store_const", const=True, help=words)
        elif flag in SEVERAL:
            group.add_argument(flag, metavar=value, help=words, action="append")
        else:
            group.add_argument(flag, metavar=value, help=words)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="show data, a batch and the plan, and stop; nothing is written",
    )
    parser.add_argument(
        "--no-resume",
        action="store_true",
        help="begin anew; a run that is in the folder is kept beside it",
    )
    parser.add_argument(
        "--help-settings", action="store_true", help="print all settings of a TOML file, and stop"
    )
    parser.add_argument("--debug", action="store_true", help="show where an error came from")


def run(parsed: argparse.Namespace) -> int:
    """`l2l train`; returns the exit status."""
    if parsed.help_settings:
        print(help_text())
        return 0
    stopping = _Stopping()
    signals.handle(stopping.handle)
    try:
        settings = Settings.read(_settings_file(parsed.settings), flags=_flags(parsed))
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    with started_by_torchrun(settings.training.device) as world:
        status = _run(settings, parsed, world, stopping)
        signals.let_end()
    return status


def _run(settings: Settings, parsed: argparse.Namespace, world: World, stopping: _Stopping) -> int:
    with open(os.devnull, "w") as nowhere:  # the first rank speaks for all
        stream = nowhere if world.rank else sys.stdout
        display = open_display(stream, every_steps=settings.output.every_steps)
        return _run_shown(settings, parsed, world, display, stopping)


def _run_shown(
    settings: Settings,
    parsed: argparse.Namespace,
    world: World,
    display: Display,
    stopping: _Stopping,
) -> int:
    try:
        with _said_by(display):
            return _train(settings, parsed, display, world, stopping)
    except Exception as error:  # whatever it is, the user reads what it says
        display.close()
        if parsed.debug:
            traceback.print_exc()
        who = f"rank {world.rank} of {world.size}: " if world.size > 1 else ""
        print(who + _words(error, settings, is_shown=parsed.debug), file=sys.stderr, flush=True)
        if world.size > 1:
            os._exit(1)  # now, so that torchrun ends the others: some may wait for this one
        return 1
    finally:
        display.close()


def _train(
    settings: Settings,
    parsed: argparse.Namespace,
    display: Display,
    world: World,
    stopping: _Stopping,
) -> int:
    training = Training(settings, display=display, resume=not parsed.no_resume, world=world)
    if parsed.dry_run:
        training.dry_run()
        return 0
    stopping.training = training
    if training.run() or stopping.number is None:
        return 0
    if not training.has_stepped:
        display.close()
        print("interrupted before the first step; there was nothing to save", file=sys.stderr)
        return signals.status_of(stopping.number)
    return signals.status_of(signal.SIGINT) if stopping.number == signal.SIGINT else 0


def _settings_file(path: Path | None) -> Path | None:
    return RunFolder(path).settings_file if path is not None and path.is_dir() else path


def _flags(parsed: argparse.Namespace) -> list[Flag]:
    found = []
    for word, (section, key, _) in FLAGS.items():
        value = getattr(parsed, word.removeprefix("--").replace("-", "_"))
        if value is not None:
            found.append(Flag(word=word, section=section, key=key, value=value))
    return found


def _words(error: Exception, settings: Settings, *, is_shown: bool) -> str:
    """An error for people, and how to go on."""
    text = str(error)
    if not isinstance(error, ValueError | OSError):
        text = f"{type(error).__name__}: {text}"
        text += "" if is_shown else "\nWith --debug it is shown where this came from."
    folder = RunFolder(settings.output.folder)
    if isinstance(error, ValueError):  # the same command would end alike
        return text
    if folder.checkpoints.is_dir() and any(folder.checkpoints.iterdir()):
        text += f"\nWhat was saved is in {folder.checkpoints}; go on with: l2l train {folder.root}"
    return text


# --------------------------------------------------------------------------------------------------
# What comes from outside


@final
class _Stopping:
    """What SIGTERM and Ctrl-C do: end the process while there is nothing to save, else the run.

    A run finishes its step and saves; a second signal ends the process at once.
    """

    def __init__(self) -> None:
        self.training: Training | None = None
        self.number: int | None = None  # of the signal that has stopped the run

    def handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.number is not None:  # nothing here may wait: only the terminal is put in order
            os.write(sys.stdout.fileno(), b"\x1b[?25h\n" if sys.stdout.isatty() else b"")
            os._exit(signals.status_of(number))
        end = partial(signals.end, number, "interrupted before the first step; nothing was written")
        if self.training is None:
            end()
        elif self.training.interrupt(end):
            self.number = number


@contextmanager
def _said_by(display: Display) -> Iterator[None]:
    """Let a display show what the package logs and warns of, so that neither spoils the other."""
    handler = _Handler(display.say)
    logger = logging.getLogger("l2l")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    shows = warnings.showwarning

    def show(message: Any, *_: Any, **__: Any) -> None:
        display.say(f"note: {message}")

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shows
        logger.removeHandler(handler)
        logger.setLevel(level)


class _Handler(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self._say(record.getMessage())
