"""Notices that the loop does not turn any more, says where it stands, and ends the process.

A thread looks. It counts its own wake-ups and reads no clock, so a process that was stopped, or a
machine that slept, has lost no time. What keeps the interpreter to itself keeps the thread from
looking, too: that is not noticed.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable

import trio

log = logging.getLogger(__name__)

TICK_S = 1.0
TICKS_MAX = 30
SAYING_S = 5.0  # the log may be what the loop hangs in


class Pulse:
    """Counts looks in vain. `look` returns True once for each time that the loop stands still."""

    def __init__(self, ticks_max: int) -> None:
        self.beats = 0  # by the loop
        self._ticks_max = ticks_max
        self._seen = -1
        self._vain = 0

    def look(self) -> bool:
        """One tick has passed."""
        if self.beats != self._seen:
            self._seen, self._vain = self.beats, 0
            return False
        self._vain += 1
        return self._vain == self._ticks_max


async def watched(
    stalled: Callable[[], None], *, tick_s: float = TICK_S, ticks_max: int = TICKS_MAX
) -> None:
    """Until cancelled, call `stalled` from a thread whenever the loop stands still for long."""
    pulse, over = Pulse(ticks_max), threading.Event()

    def look() -> None:
        while not over.wait(tick_s):
            if pulse.look():
                stalled()

    threading.Thread(target=look, name="watchdog", daemon=True).start()
    try:
        while True:
            pulse.beats += 1
            await trio.sleep(tick_s)
    finally:
        over.set()


def stalled_main(*, has_heir: bool) -> None:
    """Say where the main thread stands; with `has_heir`, end the process, so that another starts.

    Nothing is asked of this process for that: who waits is answered by the next one.
    """
    saying = threading.Thread(target=_say, args=(has_heir,), name="watchdog log", daemon=True)
    saying.start()
    saying.join(SAYING_S)
    if has_heir:
        os.kill(os.getpid(), signal.SIGKILL)


def _say(has_heir: bool) -> None:
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident) if ident is not None else None
    stack = "".join(traceback.format_stack(frame)) if frame is not None else "(none)"
    what = "another process takes over" if has_heir else "nobody can take over"
    log.critical("the loop stands still, and %s; the main thread is at\n%s", what, stack)
