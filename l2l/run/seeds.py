"""Seeds of passes and updates: from the run's seed, the step, the part and the microbatch."""

from typing import Final

PROLOGUE_SEED: Final = -1  # in the place of a layer's number
TABLE_SEED: Final = -16  # the same, of the first table
DEVICE_UPDATE_SEED: Final = -2  # in the place of a microbatch's number


def mix_seed(*numbers: int) -> int:
    """A 63-bit seed that depends on all the numbers (splitmix64, folded)."""
    state = 0
    for number in numbers:
        state = (state ^ (number & (2**64 - 1))) + 0x9E3779B97F4A7C15 & (2**64 - 1)
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & (2**64 - 1)
        state ^= state >> 31
    return state >> 1


def position(unit: str) -> int:
    """A number for a unit, in the place of a layer's."""
    if unit.startswith("L"):
        return int(unit[1:])
    return TABLE_SEED - int(unit[1:]) if unit.startswith("T") else PROLOGUE_SEED
