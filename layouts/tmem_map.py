"""A plan of the columns of tensor memory. Nothing here imports the compiler."""

from collections.abc import Mapping
from dataclasses import dataclass

from .hardware import TMEM_COLUMNS


@dataclass(frozen=True)
class TmemMap:
    """First column and number of columns of each tensor.

    Raises ValueError where two overlap or one leaves the memory.
    """

    columns: Mapping[str, tuple[int, int]]

    def __post_init__(self) -> None:
        end, last = 0, "the start"
        for name, (first, count) in sorted(self.columns.items(), key=lambda item: item[1]):
            if count < 1 or first < end:
                raise ValueError(f"{name}: columns {first} to {first + count} overlap {last}")
            end, last = first + count, name
        if end > TMEM_COLUMNS:
            raise ValueError(f"{last} ends at column {end}: there are {TMEM_COLUMNS}")

    def first(self, name: str) -> int:
        """The first column of a tensor."""
        return self.columns[name][0]
