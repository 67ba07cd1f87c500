"""How much room is set aside for a writer that does not ask for it."""

from ctxfs.tiers.hot import HUGE_PAGE_BYTES

GRANT_MIN_BYTES = 16 << 20  # what may be written at memory speed until somebody has looked
SHARE = 32  # a grant is at most this part of the tier, unless that is less than the least
SHARE_TOGETHER = 4  # all grants together
DECAY = 256  # by what part a block that is smaller lowers what is expected


class Grants:
    """What a grant is to be, from how large blocks were lately; bytes."""

    def __init__(self, capacity_bytes: int) -> None:
        """`capacity_bytes`: of the tier."""
        self._most = max(GRANT_MIN_BYTES, capacity_bytes // SHARE)
        self.together_bytes = capacity_bytes // SHARE_TOGETHER
        self._expected = self._most

    @property
    def are_safe(self) -> bool:
        """Whether the tier is so large that a single writer does not outrun any eviction."""
        return self.together_bytes >= 2 * GRANT_MIN_BYTES

    @property
    def are_enough(self) -> bool:
        """Whether a block as large as others lately fits into what is set aside for it at first."""
        return self._expected <= self._most

    def seen(self, size: int) -> None:
        """A block turned out to be that large."""
        self._expected = max(size, self._expected - self._expected // DECAY)

    def wanted(self, written_bytes: int = 0) -> int:
        """What to set aside. A file that is large already is taken to become twice as large."""
        first = max(GRANT_MIN_BYTES, min(self._most, self._expected + 2 * HUGE_PAGE_BYTES))
        return max(first, min(written_bytes, self.together_bytes // 2))
