"""Asks scripts for their help, each in a process of its own, with what all of them import loaded.

    python asking.py FOLDER SCRIPT...

Leaves what each has printed, and its exit status in the last line, in the folder under its name.
"""

import contextlib
import os
import runpy
import sys
import traceback
from pathlib import Path

import transformers
from transformers import BertForSequenceClassification, LlamaForCausalLM

import l2l

LOADED = (
    l2l.Engine,
    l2l.plan,
    transformers.Trainer,
    BertForSequenceClassification,
    LlamaForCausalLM,
)


def ask(script: Path, to: Path) -> None:
    """What `python SCRIPT --help` does."""
    sys.argv, sys.path[0] = [str(script), "--help"], str(script.parent)
    status: object = 0
    with to.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as left:
            status = left.code
        except BaseException:
            traceback.print_exc()
            status = 1
        print(f"\n{status or 0}")


def main() -> None:
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        script = Path(name)
        if (child := os.fork()) == 0:
            ask(script, folder / script.stem)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
