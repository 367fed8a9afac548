"""What may be used of a device: by one engine, or by several that take turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from l2l.device import parse_bytes


@final
@dataclass(eq=False)
class Budget:
    """Bytes of a device, as the driver counts them."""

    given: int | None
    """By the user; None: what is free, once that is known."""

    def __post_init__(self) -> None:
        self.nbytes = self.given

    @classmethod
    def of(cls, device_memory: int | str | None) -> Budget:
        """As the user says it.

        Raises:
            ValueError: the text is not a size.
        """
        if device_memory is None:
            return cls(None)
        found = parse_bytes(device_memory, name="device_memory")
        if found < 1:
            raise ValueError(f"device_memory={device_memory!r}; expected a size above 0, or None.")
        return cls(found)
