"""File names by number, in a few large pieces of memory."""

from __future__ import annotations

import binascii
from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np

from ctxfs.core.columns import I64, U8, U32
from ctxfs.core.key import NAME_BYTES_MAX

_STEP: Final = 16  # what is kept of a name takes its length, rounded up to this
# Most clients name blocks by digests in hexadecimal: of those, the bytes are kept.
_DIGITS_MIN: Final = 32
_PACKED: Final = 1 << 31  # in the number of a cell
_NO_DIGIT: Final = 255
_DIGITS: Final = np.full(256, _NO_DIGIT, np.uint8)
_DIGITS[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)


class NameStore:
    """Names of 1 to 255 bytes. Each length class has cells of one size, and reuses free ones.

    A name is known by its cell and its length, which the owner keeps.
    """

    def __init__(self) -> None:
        classes = range(-(-NAME_BYTES_MAX // _STEP) + 1)
        self._cells = [bytearray() for _ in classes]
        self._free = [array("I") for _ in classes]

    def put(self, name: bytes) -> int:
        """Keep a name; returns its cell."""
        packed = _packed(name)
        kept = name if packed is None else packed
        kind = -(-len(kept) // _STEP)
        width = kind * _STEP
        cells, free = self._cells[kind], self._free[kind]
        if free:
            cell = free.pop()
            cells[cell * width : cell * width + len(kept)] = kept
        else:
            cell = len(cells) // width
            cells += kept.ljust(width, b"\0")
        return cell if packed is None else cell | _PACKED

    def get(self, cell: int, length: int) -> bytes:
        """Return a name."""
        if cell & _PACKED:
            return binascii.hexlify(self._kept(cell ^ _PACKED, length // 2))
        return bytes(self._kept(cell, length))

    def _kept(self, cell: int, length: int) -> bytearray:
        kind = -(-length // _STEP)
        start = cell * kind * _STEP
        return self._cells[kind][start : start + length]

    def is_at(self, cell: int, name: bytes) -> bool:
        """Whether a cell begins with this name. Of a name of the same length: whether it is it."""
        if cell & _PACKED:
            return self.get(cell, len(name)) == name
        kind = -(-len(name) // _STEP)
        return self._cells[kind].startswith(name, cell * kind * _STEP)

    def drop(self, cell: int, length: int) -> None:
        """Let go of a name."""
        if cell & _PACKED:
            cell, length = cell ^ _PACKED, length // 2
        self._free[-(-length // _STEP)].append(cell)

    def put_all(self, names: Sequence[bytes], lengths: U8) -> U32:
        """Keep many names, of these lengths, behind all others; returns their cells."""
        cells = np.empty(len(names), np.uint32)
        for length in np.unique(lengths).tolist():
            rows = np.flatnonzero(lengths == length)
            data = b"".join([names[row] for row in rows.tolist()])
            letters = np.frombuffer(data, np.uint8).reshape(-1, length)
            if length < _DIGITS_MIN or length % 2:
                cells[rows] = self._put_alike(letters)
                continue
            digits = _DIGITS[letters]
            fits = (digits != _NO_DIGIT).all(axis=1)
            packed: U8 = digits[fits, 0::2] << np.uint8(4) | digits[fits, 1::2]
            cells[rows[fits]] = self._put_alike(packed) | _PACKED
            cells[rows[~fits]] = self._put_alike(letters[~fits])
        return cells

    def _put_alike(self, kept: U8) -> I64:
        """Keep what is to be kept of names, one in a row, all of one length."""
        count, length = kept.shape
        kind = -(-length // _STEP)
        first = len(self._cells[kind]) // (kind * _STEP)
        padded = np.zeros((count, kind * _STEP), np.uint8)
        padded[:, :length] = kept
        self._cells[kind] += padded.tobytes()
        return np.arange(first, first + count)


def _packed(name: bytes) -> bytes | None:
    """Return the bytes of which a name is the hexadecimal text; None where it is not."""
    if len(name) < _DIGITS_MIN or len(name) % 2:
        return None
    try:
        packed = binascii.unhexlify(name)
    except binascii.Error:
        return None
    return packed if binascii.hexlify(packed) == name else None  # capitals come back as small
