"""Whether a peer is worth asking now: one missed deadline of a silent peer is enough to stop.

Times are nanoseconds of any clock that only grows.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

SLOW_MISSES_MAX: Final = 3  # deadlines missed in a row while the peer answers heartbeats
PAUSE_MIN_NS: Final = 500_000_000
PAUSE_MAX_NS: Final = 30_000_000_000


class Health(Enum):
    """What a peer is to those who want to ask it."""

    HEALTHY = "healthy"
    SLOW = "slow"  # it lives, and does not answer in time: asked again after a pause
    BROKEN = "broken"  # silent: asked again when it was heard of


@dataclass(slots=True)
class Breaker:
    """Opens and closes by what became of requests. Begins closed.

    A peer that was not heard of at all since a request was sent, and misses its deadline, is
    BROKEN until it is heard of. One that was heard of is alive, but if it misses several deadlines
    in a row it is SLOW: for a pause, which doubles each time, nobody asks; then one request tries.
    """

    health: Health = Health.HEALTHY
    since_ns: int = 0  # it is no more HEALTHY; meaningless while it is
    opened: int = 0  # how often
    _misses: int = 0
    _pause_ns: int = PAUSE_MIN_NS
    _retry_ns: int = 0

    def admits(self, now_ns: int) -> bool:
        """Whether a request may be sent. True to one caller only where it is to try a slow peer."""
        if self.health is Health.SLOW and now_ns >= self._retry_ns:
            self._retry_ns = now_ns + self._pause_ns
            return True
        return self.health is Health.HEALTHY

    def heard(self, now_ns: int) -> None:
        """Bytes of the peer came."""
        if self.health is Health.BROKEN:
            self.health = Health.HEALTHY
            self._judge(now_ns)

    def answered(self) -> None:
        """A request that needs the peer's store was answered in time."""
        self._misses = 0
        self._pause_ns = PAUSE_MIN_NS
        self.health = Health.HEALTHY

    def missed(self, sent_ns: int, now_ns: int, *, heard_ns: int) -> None:
        """A request that was sent at `sent_ns` was not answered by its deadline.

        `heard_ns`: when anything last came from the peer.
        """
        self._misses += 1
        if heard_ns <= sent_ns:
            self.broke(now_ns)
        elif self.health is Health.SLOW:
            self._pause_ns = min(2 * self._pause_ns, PAUSE_MAX_NS)
            self._retry_ns = now_ns + self._pause_ns
        else:
            self._judge(now_ns)

    def broke(self, now_ns: int) -> None:
        """The peer cannot be reached: the connection broke, or heartbeats stay away."""
        if self.health is Health.HEALTHY:
            self._open(now_ns)
        self.health = Health.BROKEN

    def _judge(self, now_ns: int) -> None:
        """It lives. Is it of use?"""
        if self.health is Health.HEALTHY and self._misses >= SLOW_MISSES_MAX:
            self._open(now_ns)
            self.health = Health.SLOW
            self._retry_ns = now_ns + self._pause_ns

    def _open(self, now_ns: int) -> None:
        self.since_ns = now_ns
        self.opened += 1
