"""Contents by digest and size: which one of those that are there may be the same as a new one."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ctxfs.core.columns import U8, U64
from ctxfs.core.rowindex import NO_ROW, RowIndex

_TAG_MASK = 0xFFFF_FFFF
_NUMBER_MASK = 0xFFFF_FFFF_FFFF_FFFF
_SWEPT_MIN = 64
_KEPT_SHARE = 4  # one in so many rows may be of what is gone before all are looked through

# Which of these generations are gone.
Gone = Callable[[U64], npt.NDArray[np.bool]]


class ContentIndex:
    """Generations by a sum of digest and size, the newest of each: about 30 bytes for one.

    Sums are made with numbers that nobody else knows, so nobody can choose two contents that have
    one. Who asks must still compare, for a digest is no proof. What is gone is not taken out at
    once, and may be found; from time to time all rows are looked through.
    """

    def __init__(self, random: Callable[[int], bytes], gone: Gone) -> None:
        self._factors = np.frombuffer(random(24), np.uint64) | np.uint64(1)
        self._gone = gone
        self._rows = RowIndex()
        self._sums = array("Q", [0])  # by row; there is no row 0
        self._generations = array("Q", [0])
        self._swept = 0  # rows that were there after the last look

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, digest: bytes, size: int) -> int | None:
        """Return the generation that may have this content."""
        row = self._row(self._sum(digest, size))
        return self._generations[row] if row else None

    def put(self, digest: bytes, size: int, generation: int) -> None:
        """It has this content, and is the one to be found from now on."""
        number = self._sum(digest, size)
        row = self._row(number)
        if row:
            self._generations[row] = generation
            return
        if len(self._sums) > _SWEPT_MIN + self._swept + self._swept // _KEPT_SHARE:
            self._sweep()
        self._rows.add(number & _TAG_MASK, len(self._sums))
        self._sums.append(number)
        self._generations.append(generation)

    def load(self, digests: U8, sizes: U64, generations: U64) -> None:
        """Put in many; `digests` is (n, 16). Of several with one content one is taken."""
        words = np.ascontiguousarray(digests).view("<u8").reshape(-1, 2)
        factors = self._factors
        sums = words[:, 0] * factors[0] + words[:, 1] * factors[1] + sizes * factors[2]
        _, firsts = np.unique(sums, return_index=True)
        self._lay_out(sums[firsts], generations[firsts])

    def _sum(self, digest: bytes, size: int) -> int:
        low, high = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
        first, second, third = self._factors.tolist()
        return int(low * first + high * second + size * third) & _NUMBER_MASK

    def _row(self, number: int) -> int:
        row = self._rows.first(number & _TAG_MASK)
        while row != NO_ROW and self._sums[row] != number:
            row = self._rows.next(row)
        return row

    def _sweep(self) -> None:
        sums = np.frombuffer(self._sums, np.uint64)[1:]
        generations = np.frombuffer(self._generations, np.uint64)[1:]
        kept = ~self._gone(generations)
        self._lay_out(sums[kept], generations[kept])

    def _lay_out(self, sums: U64, generations: U64) -> None:
        self._rows = RowIndex()
        self._rows.fill((sums & np.uint64(_TAG_MASK)).astype(np.uint32), 1)
        self._sums, self._generations = array("Q", [0]), array("Q", [0])
        self._sums.frombytes(sums.astype(np.uint64).tobytes())
        self._generations.frombytes(generations.astype(np.uint64).tobytes())
        self._swept = len(sums)
