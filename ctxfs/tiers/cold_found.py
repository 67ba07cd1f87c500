"""Records that were found on a cold device, and which of them together are a block. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ctxfs.ondisk.columnar import Array


@dataclass(frozen=True, slots=True)
class FoundPart:
    """One data record. `stamp` is the record's, `meta_stamp` that of the attributes in it.

    `encoded_bytes`: how long the block is as a codec made it, if this is a part of that.
    """

    offset: int
    length: int
    stamp: int
    meta_stamp: int
    part: int  # as ColdIndex keeps it
    encoded_bytes: int = 0


def tile(parts: Sequence[FoundPart], size: int) -> tuple[FoundPart, ...] | None:
    """Parts that together are the `size` bytes of a block, without gap or overlap; newest first.

    None where there are none. A part may be there several times, also cut differently: each time
    it was carried over.
    """
    starting: dict[int, list[FoundPart]] = {}
    for part in sorted(parts, key=lambda part: part.stamp):
        starting.setdefault(part.offset, []).append(part)  # the newest is tried first: popped
    chosen: list[FoundPart] = []
    at = 0
    while True:
        choices = starting.get(at)
        if choices:
            chosen.append(choices.pop())
            at += chosen[-1].length
            if at == size:
                return tuple(chosen)
        elif chosen:  # nothing more goes on from here, whatever led here
            at = chosen.pop().offset
        else:
            return None


def newest_whole(parts: Sequence[FoundPart], size: int) -> tuple[FoundPart, ...] | None:
    """Parts that together are a block of `size` bytes, or what a codec made of it.

    What was put, failed, and was put again may have been stored in another way then.
    """
    ways: dict[int, list[FoundPart]] = {}
    for part in sorted(parts, key=lambda part: part.stamp, reverse=True):
        ways.setdefault(part.encoded_bytes, []).append(part)
    for encoded_bytes, found in ways.items():
        tiling = tile(found, encoded_bytes or size)
        if tiling is not None:
            return tiling
    return None


class Lookup:
    """Rows of a table by number, of which each has one at most."""

    def __init__(self, numbers: Array) -> None:
        self._order = np.argsort(numbers, kind="stable")
        self._sorted = numbers[self._order]

    def rows(self, wanted: Array) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool]]:
        """The row of each, and whether there is one; 0 where there is none."""
        if not len(self._sorted):
            return np.zeros(len(wanted), np.intp), np.zeros(len(wanted), bool)
        at = np.minimum(np.searchsorted(self._sorted, wanted), len(self._sorted) - 1)
        known = self._sorted[at] == wanted
        return np.where(known, self._order[at], 0), known
