"""Questions for keys to one member: one request at a time, for all that were asked meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol, TypeVar

import trio

from ctxfs.device.peer import Peer
from ctxfs.errors import CtxfsError, PeerUnreachable
from ctxfs.wire.limits import BATCH_MAX, BODY_BYTES_MAX
from ctxfs.wire.messages import Answer

T = TypeVar("T")
BATCH_BYTES_MAX: Final = BODY_BYTES_MAX // 2  # of keys, beside which a frame holds what else it has
KEY_OVERHEAD_BYTES: Final = 32


class Question(Protocol):
    """Somebody wants to know of a key."""

    @property
    def key(self) -> bytes: ...

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for the answer any more."""

    def hear(self, name: str, answer: Answer | CtxfsError) -> None:
        """What the member of this name says, or why it says nothing. Called once, and at once."""


class Asker:
    """Asks one member. `run` while it is one; `ask` at any time."""

    def __init__(self, name: str, peer: Peer, deadline_s: float) -> None:
        self._name = name
        self._peer = peer
        self.deadline_s = deadline_s
        self._waiting: deque[Question] = deque()
        self._asked: list[Question] = []
        self._came = trio.Event()
        self._is_over = False

    def ask(self, question: Question) -> None:
        """Have the question answered: with the next request, or now where the member has left."""
        if self._is_over:
            question.hear(self._name, self._departed())
            return
        self._waiting.append(question)
        self._came.set()

    async def run(self) -> None:
        """Ask until cancelled; what is not answered then is answered with PeerUnreachable."""
        try:
            while True:
                # All who ask in this turn of the loop have done so before this task wakes up.
                await self._came.wait()
                self._came = trio.Event()
                while self._waiting:
                    await self._ask_some()
        finally:
            self.end()

    def end(self) -> None:
        """Nobody is asked any more."""
        self._is_over = True
        self._hear_all(self._departed())
        waiting, self._waiting = self._waiting, deque()
        for question in waiting:
            question.hear(self._name, self._departed())

    async def _ask_some(self) -> None:
        self._asked = list(self._next_batch())
        if not self._asked:
            return
        keys = [each.key for each in self._asked]
        try:
            answers = await self._peer.lookup(keys, self.deadline_s)
        except CtxfsError as error:
            self._hear_all(error)
            return
        asked, self._asked = self._asked, []
        for question, answer in zip(asked, answers, strict=True):
            question.hear(self._name, answer)

    def _next_batch(self) -> Iterator[Question]:
        room, count = BATCH_BYTES_MAX, 0
        while self._waiting and count < BATCH_MAX:
            question = self._waiting[0]
            room -= len(question.key) + KEY_OVERHEAD_BYTES
            if room < 0:
                return
            self._waiting.popleft()
            if not question.is_over:
                count += 1
                yield question

    def _hear_all(self, error: CtxfsError) -> None:
        asked, self._asked = self._asked, []
        for question in asked:
            question.hear(self._name, error)

    def _departed(self) -> PeerUnreachable:
        return PeerUnreachable(f"{self._name} is not a member any more")


def batches(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Cut into lists that fit a request each: BATCH_MAX items, BATCH_BYTES_MAX bytes."""
    batch: list[T] = []
    room = BATCH_BYTES_MAX
    for item in items:
        size = size_of(item) + KEY_OVERHEAD_BYTES
        if batch and (size > room or len(batch) >= BATCH_MAX):
            yield batch
            batch, room = [], BATCH_BYTES_MAX
        batch.append(item)
        room -= size
    if batch:
        yield batch
