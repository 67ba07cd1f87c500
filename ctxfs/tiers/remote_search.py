"""One key is looked for among the members that may have it: one after the other, hedged."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

import trio

from ctxfs.errors import CtxfsError
from ctxfs.tiers.remote_facts import Found, RemoteCounters, RemoteSettings
from ctxfs.tiers.remote_neighbour import Neighbour
from ctxfs.wire.messages import Answer, Gone, Have, Miss


class Search:
    """Satisfies `Question`. Of use once.

    The first candidate is asked alone. One that takes its time or has trouble costs a question to
    the next one; one that does not have the key makes it likely that nobody has, so that all others
    are asked at once: a miss takes two round trips, however many homes there are.
    """

    def __init__(self, key: bytes, settings: RemoteSettings, counters: RemoteCounters) -> None:
        self.key = key
        self.is_over = False
        self.gone: Gone | None = None  # the highest deletion that was told of
        self.is_sure = True  # everybody answered, so that a miss is one
        self._settings = settings
        self._counters = counters
        self._haves: dict[str, Have] = {}
        self._open = 0  # questions that are not answered
        self._mail: list[tuple[str, Answer | CtxfsError]] = []
        self._came = trio.Event()

    def hear(self, name: str, answer: Answer | CtxfsError) -> None:
        """An answer, at which the search goes on."""
        self._mail.append((name, answer))
        self._came.set()

    async def run(self, candidates: Iterable[Neighbour]) -> Found | None:
        """Ask until it is found, or all have answered, or the deadline is over."""
        with trio.move_on_after(self._settings.deadline_s) as patience:
            await self._ask_around(deque(candidates))
        self.is_over = True
        self.is_sure = self.is_sure and not patience.cancelled_caught
        return self._found()

    async def _ask_around(self, rest: deque[Neighbour]) -> None:
        hedge_at = self._ask(rest, 1)
        while self._open or rest:
            if not await self._hear_until(hedge_at if rest or self._haves else math.inf):
                if self._haves:  # a loaded holder: nobody better spoke in time
                    return
                self._counters.hedged += 1
                hedge_at = self._ask(rest, 1)
                continue
            mail, self._mail = self._mail, []
            more = [self._weigh(name, answer, len(rest)) for name, answer in mail]
            if self._is_settled():
                return
            if any(more):
                hedge_at = self._ask(rest, max(more))

    def _ask(self, rest: deque[Neighbour], count: int) -> float:
        """Ask so many of the rest; returns when patience with them is over."""
        for _ in range(min(count, len(rest))):
            self._open += 1
            rest.popleft().asker.ask(self)
        return trio.current_time() + self._settings.hedge_s

    async def _hear_until(self, time_s: float) -> bool:
        """Wait for an answer; False where there was none by then."""
        if not self._mail:
            with trio.move_on_at(time_s):
                await self._came.wait()
        self._came = trio.Event()
        return bool(self._mail)

    def _weigh(self, name: str, answer: Answer | CtxfsError, left: int) -> int:
        """Note an answer; returns how many more are to be asked for it, of those left."""
        self._open -= 1
        match answer:
            case Have() if not self._is_deleted(answer.version):
                self._haves[name] = answer
                return 1  # which matters only if this one is loaded
            case Gone():
                if self.gone is None or answer.version > self.gone.version:
                    self.gone = answer
                self._haves = {
                    holder: have
                    for holder, have in self._haves.items()
                    if not self._is_deleted(have.version)
                }
                return left
            case Miss() | Have():
                return left
        self._counters.trouble += 1
        self.is_sure = False
        return 1

    def _is_deleted(self, version: int) -> bool:
        return self.gone is not None and version <= self.gone.version

    def _is_settled(self) -> bool:
        """Whether somebody who has it is at leisure."""
        return any(have.load < self._settings.loaded for have in self._haves.values())

    def _found(self) -> Found | None:
        if not self._haves:
            return None
        newest = max(self._haves.values(), key=lambda have: have.version)
        return Found(
            version=newest.version,
            size=newest.size,
            digest=newest.digest,
            attributes=newest.attributes,
            holders=self._holders(newest.version),
        )

    def _holders(self, version: int) -> tuple[str, ...]:
        holders: Sequence[str] = [
            name for name, have in self._haves.items() if have.version == version
        ]
        return tuple(sorted(holders, key=lambda name: self._haves[name].load))
