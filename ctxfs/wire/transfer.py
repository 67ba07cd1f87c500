"""Bytes of one request in stripes: which are sent next, which may arrive, and how much credit.

A stripe begins at a multiple of the unit and holds one unit or several; only the last one of all
may end within a unit. Stripes go over any of the data connections, and arrive in any order.
"""

from ctxfs.errors import PeerProtocolError


class Dispatch:
    """What is still to be sent of `length` bytes."""

    __slots__ = ("_credit", "_length", "_next", "_unit")

    def __init__(self, length: int, unit: int, credit: int) -> None:
        self._length = length
        self._unit = unit
        self._credit = credit
        self._next = 0

    def give(self, amount: int) -> None:
        """Take note of more credit. What is beyond the length is of no use and not kept."""
        self._credit = min(self._credit + amount, self._length)

    @property
    def is_done(self) -> bool:
        """Whether all stripes were taken."""
        return self._next >= self._length

    @property
    def is_ready(self) -> bool:
        """Whether there is a stripe that the credit covers."""
        return not self.is_done and self._credit >= self._size()

    def take(self, size_max: int = 0) -> tuple[int, int]:
        """Return offset and length of the next stripe, where `is_ready`.

        It is one unit, or as many as go into `size_max` and the credit.
        """
        offset, size = self._next, self._size()
        if size_max > self._unit:
            units = min(size_max, self._credit, self._length - offset) // self._unit
            size = max(size, units * self._unit)
        self._next += size
        self._credit -= size
        return offset, size

    def _size(self) -> int:
        return min(self._unit, self._length - self._next)


class Reception:
    """What has arrived of `length` bytes. Each stripe is accepted once, and counted in bytes."""

    __slots__ = ("_given", "_length", "_seen", "_taken", "_unit", "_window", "arrived")

    def __init__(self, length: int, unit: int, window: int) -> None:
        """`window`: bytes that may be under way, at least two stripes."""
        self._length = length
        self._unit = unit
        self._window = window
        self._given = min(length, window)
        self._seen = bytearray(-(-length // unit))  # of each stripe, whether it began
        self._taken = 0  # bytes of stripes that began
        self.arrived = 0

    @property
    def first_credit(self) -> int:
        """What the request is sent with."""
        return min(self._length, self._window)

    @property
    def is_complete(self) -> bool:
        """Whether every byte is there."""
        return self.arrived == self._length

    def accept(self, offset: int, length: int) -> None:
        """A stripe begins. Raises PeerProtocolError where it cannot be one that is awaited."""
        first, rest = divmod(offset, self._unit)
        end = offset + length
        if rest or not offset < end <= self._length or (end % self._unit and end != self._length):
            raise PeerProtocolError(f"a stripe of {length} bytes at {offset} that nobody awaits")
        last = -(-end // self._unit)
        if any(self._seen[first:last]):
            raise PeerProtocolError(f"a stripe at {offset} that was here before")
        self._taken += length
        if self._taken > self._given:
            raise PeerProtocolError("more bytes than there was credit for")
        self._seen[first:last] = bytes([1]) * (last - first)

    def add(self, length: int) -> int:
        """`length` bytes of accepted stripes arrived; return the credit to give now, or 0."""
        self.arrived += length
        under_way = self._given - self.arrived
        rest = self._length - self._given
        if not rest or under_way > self._window // 2:
            return 0
        amount = min(rest, self._window - under_way)
        self._given += amount
        return amount
