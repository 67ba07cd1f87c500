"""Bytes of one request in stripes: which are sent next, which may arrive, and how much credit.

Stripe k holds bytes k * unit up to the next one's, so that each is told by its offset. Stripes go
over any of the data connections, and arrive in any order.
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

    def take(self) -> tuple[int, int]:
        """Return offset and length of the next stripe, where `is_ready`."""
        offset, size = self._next, self._size()
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
        number, rest = divmod(offset, self._unit)
        legal = not rest and offset < self._length and length == self._expected(offset)
        if not legal or self._seen[number]:
            raise PeerProtocolError(f"a stripe of {length} bytes at {offset} that nobody awaits")
        self._taken += length
        if self._taken > self._given:
            raise PeerProtocolError("more bytes than there was credit for")
        self._seen[number] = 1

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

    def _expected(self, offset: int) -> int:
        return min(self._unit, self._length - offset)
