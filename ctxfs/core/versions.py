"""Versions: numbers that are unique in the cluster and order what was written. Pure.

A version is microseconds since 1970 and the slot of the member that issued it; docs/cluster.md.
The clock is a hybrid logical one: Kulkarni, Demirbas and others, "Logical Physical Clocks" (2014).
"""

from __future__ import annotations

from typing import Final

from ctxfs.addresses import SLOTS
from ctxfs.errors import CtxfsError

SLOT_BITS: Final = 10
VERSION_MAX: Final = (1 << 63) - 1  # an inode number, and a signed 64-bit one to many programs
AHEAD_US_MAX: Final = 3600 * 1_000_000


class VersionAhead(CtxfsError):
    """A version is from the future, further than clocks may differ. Its sender is at fault."""


def slot_of(version: int) -> int:
    """The slot of the member that issued it."""
    return version & (SLOTS - 1)


def time_us_of(version: int) -> int:
    """When it was issued, in microseconds since 1970, as far as clocks are right."""
    return version >> SLOT_BITS


class VersionClock:
    """Issues the versions of one member.

    Invariant: each version that is issued is higher than all that were issued or seen before.
    """

    def __init__(self, slot: int, highest: int = 0) -> None:
        """`highest`: the highest version that is on our media, whoever issued it."""
        if not 0 <= slot < SLOTS:
            raise ValueError(f"there is no slot {slot}")
        self.slot = slot
        self.highest = highest

    def next(self, wall_us: int) -> int:
        """A new version. `wall_us`: microseconds since 1970; they may step back."""
        time_us = max(wall_us, time_us_of(self.highest) + 1)
        self.highest = time_us << SLOT_BITS | self.slot
        return self.highest

    def see(self, version: int, wall_us: int) -> None:
        """Whatever is issued from now on is higher than this one, which came from elsewhere.

        Raises VersionAhead, with nothing changed, where it would drag our clock along too far.
        """
        if version <= self.highest:
            return
        ahead_us = time_us_of(version) - wall_us
        # Our own highest is accepted whatever the clock says: it may have been set back.
        if version > VERSION_MAX or ahead_us > AHEAD_US_MAX:
            raise VersionAhead(
                f"version {version} is {ahead_us / 1e6:.0f} s ahead of this host's clock"
            )
        self.highest = version
