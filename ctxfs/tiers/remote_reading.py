"""The bytes of one block, from whoever of its holders gives them."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from ctxfs.errors import (
    BlockGone,
    BlockNotFound,
    CtxfsError,
    DeadlineExceeded,
    PeerBusy,
    PeerError,
    PeerUnreachable,
)
from ctxfs.tiers.remote_facts import RemoteCounters, RemoteSettings
from ctxfs.tiers.remote_neighbour import Neighbour, Neighbours


class Reading:
    """One fetch. Holders that give nothing are left out from then on; busy ones are asked again."""

    def __init__(
        self,
        neighbours: Neighbours,
        settings: RemoteSettings,
        counters: RemoteCounters,
        key: bytes,
        version: int,
    ) -> None:
        self._neighbours = neighbours
        self._settings = settings
        self._counters = counters
        self._key = key
        self._version = version
        self._tried = 0
        self._busy: list[str] = []
        self._trouble: CtxfsError | None = None  # what to say if nobody gives it

    async def run(self, holders: Sequence[str], others: Sequence[str], into: memoryview) -> str:
        """Fill `into`; returns who gave it. `others` may have it, and are tried last.

        Raises BlockNotFound, DeadlineExceeded, PeerUnreachable. Nothing is written to `into` after
        the return, whatever becomes of it.
        """
        pause_s = self._settings.busy_pause_s
        give_up_s = trio.current_time() + self._settings.within_s(len(into))
        while True:
            for group in (list(holders), list(others)):
                while group:
                    name = self._easiest(group)
                    group.remove(name)
                    if await self._read(name, into):
                        return name
            if not self._busy:
                raise self._trouble or BlockNotFound("no member has the block any more")
            if trio.current_time() + pause_s > give_up_s:
                raise DeadlineExceeded("all who have the block are busy")
            await trio.sleep(pause_s)
            pause_s *= 2
            holders, others, self._busy, self._tried = self._busy, (), [], 0

    def _easiest(self, names: Sequence[str]) -> str:
        def ease(name: str) -> tuple[bool, int, bool, int]:
            neighbour = self._neighbours.get(name)
            if neighbour is None:
                return (True, 0, True, 0)
            return neighbour.ease(self._neighbours.zone)

        return min(names, key=ease)

    async def _read(self, name: str, into: memoryview) -> bool:
        """Whether this one gave it. Raises BlockGone where the block was deleted."""
        self._counters.failed_over += self._tried > 0
        self._tried += 1
        neighbour = self._neighbours.get(name)
        try:
            if neighbour is None:
                raise PeerUnreachable(f"{name} is not a member any more")
            await self._read_from(neighbour, into)
        except PeerBusy:
            assert neighbour is not None
            neighbour.sends_away()
            self._counters.busy += 1
            self._busy.append(name)
        except BlockGone as error:
            if error.version >= self._version:
                raise
        except BlockNotFound:
            pass  # it had it, or might have had it, and does not any more
        except DeadlineExceeded as error:
            self._note(error)
        except PeerError as error:
            self._note(PeerUnreachable(str(error)))
        else:
            self._counters.fetched += 1
            self._counters.fetched_bytes += len(into)
            return True
        return False

    async def _read_from(self, neighbour: Neighbour, into: memoryview) -> None:
        with neighbour.calling(len(into)) as peer:
            within_s = self._settings.within_s(neighbour.in_flight_bytes)
            await peer.read(self._key, self._version, into, within_s)

    def _note(self, error: CtxfsError) -> None:
        self._counters.trouble += 1
        if not isinstance(self._trouble, DeadlineExceeded):
            self._trouble = error
