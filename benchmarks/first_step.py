"""The first step soon: cold and warm, compiled in the first step and beside the first steps.

    python benchmarks/first_step.py                        on an accelerator, the 3.2B shape
    python benchmarks/first_step.py --shape tiny --tokens 512 --length 64 --compile inductor

Every measurement is a process of its own (`l2l bench first`, which takes these options); the cold
ones have an empty home. The last line is JSON.
"""

import argparse
import json
import sys
from functools import partial

from l2l.bench import first

MODES = ("wait", "background")


def main() -> int:
    """Measure both modes."""
    parser = argparse.ArgumentParser(description=__doc__)
    first.add_options(parser)
    parsed = parser.parse_args()
    found, failed = {}, 0
    for mode in MODES:
        parsed.compile_ahead = mode
        table, found[mode], status = first.run(parsed, partial(print, flush=True))
        print(f"\ncompile_ahead={mode!r}\n{table}", flush=True)
        failed |= status
    print(json.dumps(found))
    return failed


if __name__ == "__main__":
    sys.exit(main())
