"""Two clocks. Deadlines run on the one that never steps; records keep the one that outlives boots.

In memory a deadline is nanoseconds of CLOCK_BOOTTIME, so that setting the wall clock neither
expires nor revives a block. On a medium it is wall-clock time, since boot time starts over.
"""

from typing import NamedTuple

NEVER = 0


class Now(NamedTuple):
    """One moment on both clocks, nanoseconds."""

    boot_ns: int
    wall_ns: int

    def to_wall(self, deadline_boot_ns: int) -> int:
        """Return the wall-clock time of a deadline; NEVER stays NEVER."""
        if deadline_boot_ns == NEVER:
            return NEVER
        return max(1, self.wall_ns + deadline_boot_ns - self.boot_ns)

    def to_boot(self, deadline_wall_ns: int) -> int:
        """Return the boot-clock deadline of a wall-clock time; NEVER stays NEVER."""
        if deadline_wall_ns == NEVER:
            return NEVER
        return max(1, self.boot_ns + deadline_wall_ns - self.wall_ns)
