"""What goes out on a control connection: whole frames, in order, at once where there is room."""

import trio

from ctxfs.device.links import Link
from ctxfs.errors import PeerUnreachable

FULL_BYTES = 4 << 20


class Outbox:
    """Frames on their way. A caller that is cancelled leaves no half of one behind."""

    def __init__(self, link: Link, stall_s: float) -> None:
        """A connection that takes nothing for `stall_s` is over."""
        self._stall_s = stall_s
        self._link = link
        self._waiting = bytearray()
        self._some = trio.Event()
        self._less = trio.Event()

    def put(self, frame: bytes) -> None:
        """Send it, or keep it for `run`. Raises PeerUnreachable. Who puts much waits for `room`."""
        sent = 0 if self._waiting else self._link.send_nowait(frame)
        if sent < len(frame):
            self._waiting += memoryview(frame)[sent:]
            self._some.set()

    async def room(self) -> None:
        """Wait until not much is kept here. No checkpoint where that is so."""
        while len(self._waiting) > FULL_BYTES:
            self._less = trio.Event()
            await self._less.wait()

    async def run(self) -> None:
        """Send what could not be sent at once, until cancelled. Raises PeerUnreachable."""
        while True:
            await self._some.wait()
            while self._waiting:
                sent = self._link.send_nowait(self._waiting)
                del self._waiting[:sent]
                if self._waiting:
                    await self._wait()
            self._some = trio.Event()
            self._less.set()

    async def _wait(self) -> None:
        with trio.move_on_after(self._stall_s):
            await self._link.wait_to_send()
            return
        raise PeerUnreachable("the peer takes nothing")
