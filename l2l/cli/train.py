"""`l2l train`: a run from a TOML file, from flags, or from flags over a file."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, final

from typing_extensions import override

from l2l.cli import signals
from l2l.distributed import World, started_by_torchrun
from l2l.train import (
    SECTIONS,
    Display,
    Flag,
    Level,
    RunFolder,
    Settings,
    Training,
    answer,
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
  l2l train --model models/Qwen2.5-14B --data chats.jsonl --task instruct --lora \\
      --learning-rate 2e-4 --device-memory 8GiB          an adapter beside frozen weights
  l2l train --model models/Qwen2.5-0.5B-sft --data pairs.jsonl --task dpo --learning-rate 5e-7
  l2l train --model models/Qwen2.5-0.5B --data questions.jsonl --task grpo \\
      --reward my_rewards.py:is_right --learning-rate 1e-6
  l2l train runs/SmolLM2-135M-alpaca          go on with a run
  torchrun --nproc-per-node 4 -m l2l train run.toml
                                              four devices, which hold the model together
  l2l train --help-settings > run.toml        all that a TOML file may say

Ends with status 0 if the run is at its end or SIGTERM has stopped it between steps, 130 if Ctrl-C
has, 130 or 143 if one of them came before the first step, 1 if something went wrong, 2 if a setting
cannot be."""

FLAGS = {  # flag -> section, key, what it takes; nothing: it switches something on
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
    "--disk": ("memory", "disk", "FOLDER"),
    "--precision": ("training", "precision", "NAME"),
    "--seed": ("training", "seed", "N"),
    "--reward": ("grpo", "rewards", "FILE.py:FUNCTION"),
    "--lora": ("lora", "enabled", ""),
    "--lora-rank": ("lora", "rank", "N"),
    "--lora-alpha": ("lora", "alpha", "NUMBER"),
    "--lora-dropout": ("lora", "dropout", "SHARE"),
    "--lora-target": ("lora", "targets", "MODULE"),
    "--lora-save": ("lora", "modules_to_save", "MODULE"),
    "--base": ("lora", "base", "FORMAT"),
    "--rslora": ("lora", "rslora", ""),
    "--dora": ("lora", "dora", ""),
    "--random-init": ("model", "random_init", ""),
    "--allow-missing-weights": ("model", "allow_missing_weights", ""),
}
SEVERAL = ("--data", "--evaluation-data", "--lora-target", "--lora-save", "--reward")


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `l2l train` takes."""
    words = "a TOML file, or a run folder to resume"
    parser.add_argument("settings", nargs="?", type=Path, metavar="RUN", help=words)
    group = parser.add_argument_group("settings, which override those of the file")
    for flag, (section, name, value) in FLAGS.items():
        how: dict[str, Any] = {"action": "store_const", "const": True}
        if value:
            how = {"metavar": value}
            how |= {"action": "extend", "nargs": "+"} if flag in SEVERAL else {}
        group.add_argument(flag, help=SECTIONS[section][name]["help"].replace("%", "%%"), **how)
    words = "any other setting of a TOML file, such as schedule.warm_up_steps=100"
    group.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=words
    )
    levels = parser.add_mutually_exclusive_group()
    words = "also show the whole plan, and all about the data"
    levels.add_argument("--verbose", action="store_true", help=words)
    levels.add_argument("--quiet", action="store_true", help="show only what has to be known")
    switches = {
        "--dry-run": "show data, a batch and the plan, and stop; nothing is written",
        "--no-resume": "start over; an existing run in the folder is moved aside and kept",
        "--help-settings": "print all settings of a TOML file, and stop",
        "--debug": "show where an error came from",
    }
    for flag, words in switches.items():
        parser.add_argument(flag, action="store_true", help=words)


def run(parsed: argparse.Namespace) -> int:
    """`l2l train`; returns the exit status."""
    if parsed.help_settings:
        print(help_text())
        return 0
    stopping = _Stopping()
    signals.handle(stopping.handle)
    path = parsed.settings or _taken_for_data(parsed.data)
    if path is not None and path.is_dir():
        path = RunFolder(path).settings_file
    try:
        settings = Settings.read(path, flags=_flags(parsed))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    with started_by_torchrun(settings.training.device) as world:
        status = _run(settings, parsed, world, stopping)
        signals.let_end()
    return status


def answer_to(key: str) -> str:
    """What an unknown flag is called here, as a sentence; empty if that is not known."""
    homes = [name for name, keys in SECTIONS.items() if key in keys]
    if len(homes) == 1:
        return f" Here it is {_how_to_set(homes[0], key)}."
    return answer(key, _how_to_set)


def _how_to_set(section: str, key: str) -> str:
    flags = [flag for flag, (*place, _) in FLAGS.items() if place == [section, key]]
    return flags[0] if flags else f"--set {section}.{key}=VALUE"


def _taken_for_data(sources: list[str] | None) -> Path | None:
    """A TOML file or run folder that stands behind a flag that takes several values."""
    if not sources or len(sources) < 2:
        return None
    last = Path(sources[-1])
    if last.suffix != ".toml" and not RunFolder(last).settings_file.is_file():
        return None
    return Path(sources.pop())


def _flags(parsed: argparse.Namespace) -> list[Flag]:
    """What was set on the command line.

    Raises:
        SettingsError: what follows --set is no setting.
    """
    given = {flag: getattr(parsed, flag.removeprefix("--").replace("-", "_")) for flag in FLAGS}
    flags = [
        Flag(word=flag, section=section, key=key, value=given[flag])
        for flag, (section, key, _) in FLAGS.items()
        if given[flag] is not None
    ]
    return flags + [Flag.of_text(text) for text in parsed.set]


def _run(settings: Settings, parsed: argparse.Namespace, world: World, stopping: _Stopping) -> int:
    with open(os.devnull, "w") as nowhere:  # the first rank speaks for all
        stream = nowhere if world.rank else sys.stdout
        level = Level.DETAIL if parsed.verbose else Level.NEEDED if parsed.quiet else Level.USUAL
        display = open_display(stream, every_steps=settings.output.every_steps, level=level)
        try:
            with _said_by(display):
                training = Training(
                    settings, display=display, resume=not parsed.no_resume, world=world
                )
                if parsed.dry_run:
                    training.dry_run()
                    return 0
                return stopping.run(training, display)
        except Exception as error:  # whatever it is, the user reads what it says
            display.close()
            if parsed.debug:
                traceback.print_exc()
            who = f"rank {world.rank} of {world.size}: " if world.size > 1 else ""
            words = _words(error, RunFolder(settings.output.folder), is_shown=parsed.debug)
            print(who + words, file=sys.stderr, flush=True)
            if world.size > 1:
                os._exit(1)  # now, so that torchrun ends the others: some may wait for this one
            return 1
        finally:
            display.close()


def _words(error: Exception, folder: RunFolder, *, is_shown: bool) -> str:
    """An error for people, and how to go on."""
    text = str(error)
    if isinstance(error, ValueError):  # the same command would end alike
        return text
    if not isinstance(error, OSError):
        text = f"{type(error).__name__}: {text}"
        text += "" if is_shown else "\nWith --debug it is shown where this came from."
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
        self._training: Training | None = None
        self._number: int | None = None  # of the signal that has stopped the run

    def handle(self, number: int, *_: object) -> None:
        """The handler of both."""
        if self._number is not None:  # nothing here may wait: only the terminal is put in order
            os.write(sys.stdout.fileno(), b"\x1b[?25h\n" if sys.stdout.isatty() else b"")
            os._exit(signals.status_of(number))
        end = partial(signals.end, number, "interrupted before the first step; nothing was written")
        if self._training is None:
            end()
        elif self._training.interrupt(end):
            self._number = number

    def run(self, training: Training, display: Display) -> int:
        """Train until the end or a signal; returns the exit status."""
        self._training = training
        if training.run() or self._number is None:
            return 0
        if not training.has_stepped:
            display.close()
            print("interrupted before the first step; there was nothing to save", file=sys.stderr)
            return signals.status_of(self._number)
        return signals.status_of(signal.SIGINT) if self._number == signal.SIGINT else 0


@contextlib.contextmanager
def _said_by(display: Display) -> Iterator[None]:
    """Let a display show what the package logs and warns of, so that neither spoils the other."""

    class Handler(logging.Handler):
        @override
        def emit(self, record: logging.LogRecord) -> None:
            needed = record.levelno >= logging.WARNING
            display.say(record.getMessage(), Level.NEEDED if needed else Level.DETAIL)

    def show(message: Any, *_: Any, **__: Any) -> None:
        display.say(f"note: {message}", Level.NEEDED)

    logger, handler, shows = logging.getLogger("l2l"), Handler(), warnings.showwarning
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shows
        logger.removeHandler(handler)
        logger.setLevel(level)
