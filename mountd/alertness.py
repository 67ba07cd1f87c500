"""Processors stay awake while requests keep coming.

A request wakes the daemon up, and its answer the program. Where that finds a processor asleep, it
takes longer than all the rest of the request (docs/direct.md has figures).
"""

import logging

import trio

from ctxfs.device import idling
from ctxfs.device.idling import Idling

log = logging.getLogger(__name__)

LOOK_S = 0.01
BUSY = 3  # requests between two looks: three hundred a second
QUIET_S = 0.5  # without so many, processors may sleep again


class Alertness:
    """Counts requests, and asks the kernel accordingly. `wanted`: what is configured."""

    def __init__(self, *, wanted: bool) -> None:
        self.wanted = wanted
        self.requests = 0  # counted by the channel
        self.idling = Idling()
        self._stirred = trio.Event()

    def stir(self) -> None:
        """A request came after a while without any."""
        self._stirred.set()

    async def watch(self) -> None:
        """Look on until cancelled. Ends by itself where the kernel cannot be told."""
        if idling.driver() == idling.NONE:
            return
        try:
            await self._watch()
        except OSError as error:
            log.info("idle processors sleep as they like: %s: %s", idling.DEVICE, error.strerror)
        finally:
            self.idling.free()

    async def _watch(self) -> None:
        busy_at = 0.0
        while True:
            if not self.idling.is_limited:
                await self._stirred.wait()
                self._stirred = trio.Event()
            before = self.requests
            await trio.sleep(LOOK_S)
            now = trio.current_time()
            if self.wanted and self.requests - before >= BUSY:
                busy_at = now
                self.idling.limit()
            elif not self.wanted or now - busy_at >= QUIET_S:
                self.idling.free()
