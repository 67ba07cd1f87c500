"""Elements to byte planes and back: all lowest bytes together, …, all highest bytes together.

Halving by shift and narrowing is what numpy does in vector registers; on two-byte elements it is
four times as fast as copying every second byte. Measured in docs/codec.md.
"""

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ctxfs.codec.pool import Pool

ELEMENT_BYTES: Final = (1, 2, 4, 8)

Bytes = NDArray[np.uint8]
Words = NDArray[Any]  # of one of the types below

_TYPES: Final = {size: np.dtype(f"<u{size}") for size in ELEMENT_BYTES}


@dataclass(frozen=True, slots=True)
class Layout:
    """What a source is taken for.

    `rotated`: elements are turned left by one bit, which puts the exponent of a floating-point
    number in its top bytes and the sign at the bottom.
    """

    element_bytes: int
    rotated: bool

    @property
    def planes(self) -> int:
        return self.element_bytes


PLAIN: Final = Layout(1, False)


@dataclass(slots=True)
class Scratch:
    """Buffers by name that are used again: fresh memory costs a page fault for each 4 KiB."""

    _buffers: dict[str, Bytes] = field(default_factory=dict)

    def words(self, name: str, count: int, element_bytes: int) -> Words:
        """`count` elements whose content is left over from the last use of this name."""
        length = count * element_bytes
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < length:
            buffer = self._buffers[name] = np.empty(length, np.uint8)
        return buffer[:length].view(_TYPES[element_bytes])

    def memory(self, name: str, length: int) -> memoryview:
        """The same as plain bytes."""
        return self.words(name, length, 1).data


SCRATCHES: Final = Pool(Scratch)


def split(body: memoryview, layout: Layout, scratch: Scratch) -> list[Bytes]:
    """The planes of `body`, which is whole elements; lowest byte first, each `len / size` bytes.

    They lie in `scratch`, or with one plane and nothing rotated are `body` itself.
    """
    words = _aligned(np.frombuffer(body, np.uint8), layout, scratch)
    if layout.rotated:
        words = _rotated(words, 1, scratch.words("rotated", len(words), words.itemsize), scratch)
    return _halved(words, scratch, "plane")


def join(planes: list[Bytes], layout: Layout, body: memoryview, scratch: Scratch) -> None:
    """The reverse of `split`: write the elements to `body`."""
    target = np.frombuffer(body, np.uint8)
    direct = _is_aligned(target, layout)
    count = len(target) // layout.element_bytes
    words = (
        target.view(_TYPES[layout.element_bytes])
        if direct
        else scratch.words("aligned", count, layout.element_bytes)
    )
    if layout.rotated:
        turned = scratch.words("rotated", count, layout.element_bytes)
        _combined(planes, turned, scratch, "half")
        _rotated(turned, layout.element_bytes * 8 - 1, words, scratch)
    else:
        _combined(planes, words, scratch, "half")
    if not direct:
        np.copyto(target, words.view(np.uint8))


def _is_aligned(values: Bytes, layout: Layout) -> bool:
    return values.view(_TYPES[layout.element_bytes]).flags.aligned


def _aligned(values: Bytes, layout: Layout, scratch: Scratch) -> Words:
    """The elements in `values`, copied if need be: numpy is slow on elements at odd addresses."""
    if not _is_aligned(values, layout):
        copy = scratch.words("aligned", len(values), 1)
        np.copyto(copy, values)
        values = copy
    return values.view(_TYPES[layout.element_bytes])


def _rotated(words: Words, bits: int, into: Words, scratch: Scratch) -> Words:
    """Turn every element left by `bits`. `into` is written last, in one pass."""
    down = scratch.words("down", len(words), words.itemsize)
    up = scratch.words("up", len(words), words.itemsize)
    np.right_shift(words, words.itemsize * 8 - bits, out=down)
    np.left_shift(words, bits, out=up)
    np.bitwise_or(down, up, out=into)
    return into


def _halved(words: Words, scratch: Scratch, name: str) -> list[Bytes]:
    """Split in a low and a high half, and these again, down to bytes."""
    if words.itemsize == 1:
        return [words]
    half = words.itemsize // 2
    low = scratch.words(f"{name}0", len(words), half)
    high = scratch.words(f"{name}1", len(words), half)
    shifted = scratch.words("down", len(words), words.itemsize)
    np.copyto(low, words, casting="unsafe")  # keeps the low bits
    np.right_shift(words, half * 8, out=shifted)
    np.copyto(high, shifted, casting="unsafe")
    return [*_halved(low, scratch, f"{name}0"), *_halved(high, scratch, f"{name}1")]


def _combined(planes: list[Bytes], into: Words, scratch: Scratch, name: str) -> None:
    """Put planes together to elements, which are written to `into` in one last pass."""
    if len(planes) == 1:
        np.copyto(into, planes[0])
        return
    middle, half = len(planes) // 2, into.itemsize // 2
    halves = []
    for part, which in ((planes[:middle], "0"), (planes[middle:], "1")):
        if half == 1:
            halves.append(part[0])
            continue
        words = scratch.words(f"{name}{which}", len(into), half)
        _combined(part, words, scratch, f"{name}{which}")
        halves.append(words)
    low = scratch.words("down", len(into), into.itemsize)
    high = scratch.words("up", len(into), into.itemsize)
    np.copyto(low, halves[0])
    np.copyto(high, halves[1])
    np.left_shift(high, half * 8, out=high)
    np.bitwise_or(low, high, out=into)
