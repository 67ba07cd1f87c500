"""What the store counts, from start on. Names are those of `.ctx/stats`."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Numbers that only grow."""

    opens: int = 0
    opens_lent: int = 0  # of these: served by the kernel from the hot file itself
    writers_lent: int = 0  # of these: open for writing
    hits_hot: int = 0
    hits_warm: int = 0
    hits_cold: int = 0
    misses: int = 0
    creates: int = 0
    published: int = 0
    sealed: int = 0
    sealed_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    promoted: int = 0
    promoted_bytes: int = 0
    recycled: int = 0  # of the promoted: read into the memory of a block that left
    warmed: int = 0  # compressed into the warm tier
    warmed_bytes: int = 0  # of content
    demoted: int = 0
    demoted_bytes: int = 0
    not_admitted: int = 0  # to the cold tier, whose writes of the day were used up
    evicted: int = 0
    evicted_bytes: int = 0
    expired: int = 0
    expired_bytes: int = 0
    corrupt: int = 0  # copies whose bytes did not match their digest
    trouble: int = 0  # requests answered as a miss because a tier failed
    overdue: int = 0  # requests that waited too long and were ended
    no_space: int = 0
    room_waits: int = 0
    discarded: int = 0  # generations whose writer died before they were published
