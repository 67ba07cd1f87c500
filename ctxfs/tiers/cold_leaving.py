"""How it goes with a cold device that is being emptied: plain data for its log and its user."""

import enum
from dataclasses import dataclass, field


class LeavingState(enum.StrEnum):
    """DRAINING → DRAINED, or one of those between, where it stops and what is left stays."""

    DRAINING = "draining"
    NEEDS_ROOM = "needs room"  # on the other devices, and nothing there may go
    UNREADABLE = "unreadable"  # all that could be read is elsewhere
    FAILED = "drain failed"  # a device failed
    DRAINED = "drained"  # nothing is on it, and it is closed


@dataclass(slots=True)
class Leaving:
    """No new blocks go to a device that has this."""

    state: LeavingState = LeavingState.DRAINING
    why: str | None = None  # it stopped, for people
    moved_blocks: int = 0
    moved_bytes: int = 0
    unreadable: set[int] = field(default_factory=set)  # generations

    def stop(self, state: LeavingState, why: str) -> None:
        self.state = state
        self.why = why
