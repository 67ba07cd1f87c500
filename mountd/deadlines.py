"""Requests that wait: how many, for how long, and an end to those that wait too long.

Only who has been put to sleep comes here, so all others cost nothing. One task looks at them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import trio

from ctxfs.core.block import Block
from ctxfs.errors import BlockNotFound, CtxfsError, DeadlineExceeded
from ctxfs.store.catalog import Catalog

log = logging.getLogger(__name__)

# How often is looked, as a part of the deadline; and what that is at least and at most.
LOOKS_PER_DEADLINE = 8
PERIOD_MIN_S, PERIOD_MAX_S = 0.02, 5.0
# What moves whole blocks may take longer while devices answer, up to so many deadlines: a device
# that hangs beside others that do not is not told apart.
PATIENCE = 10


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that was put to sleep."""

    operation: str
    inode: int
    name: bytes  # below the inode, of an operation that makes one
    end: Callable[[CtxfsError], None]  # called once, if it waits too long: answer, and cancel
    is_patient: bool  # may take as long as bytes move
    is_reader: bool  # an open for reading: to be told of trouble as a miss
    since_s: float = 0.0


class Deadlines:
    """Who waits now. Its clock stands still while the process or the machine is stopped."""

    def __init__(self, catalog: Catalog, *, deadline_s: float, trouble_is_error: bool) -> None:
        self.deadline_s = deadline_s
        self.trouble_is_error = trouble_is_error
        self._catalog = catalog
        self._waiters: set[Waiter] = set()
        self._looked_s: float | None = None  # by trio's clock
        self._counted_s = 0.0
        self._moved_bytes = 0
        self._moved_s = 0.0  # when a device last answered, by our clock

    def begin(
        self,
        operation: str,
        inode: int,
        end: Callable[[CtxfsError], None],
        *,
        name: bytes = b"",
        is_patient: bool = False,
        is_reader: bool = False,
    ) -> Waiter:
        """A request is put to sleep. Call `over` when it goes on, or ends."""
        waiter = Waiter(operation, inode, name, end, is_patient, is_reader, self._now_s())
        self._waiters.add(waiter)
        return waiter

    def over(self, waiter: Waiter) -> None:
        """It waits no longer; harmless if it was ended."""
        self._waiters.discard(waiter)

    def statistics(self) -> dict[str, Any]:
        """Return how many wait now, and how long the longest has."""
        now_s = self._now_s()
        longest_s = max((now_s - waiter.since_s for waiter in self._waiters), default=0.0)
        return {"waiting": len(self._waiters), "longest_s": round(longest_s, 3)}

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look after them, until cancelled."""
        task_status.started()
        while True:
            self._look()
            await trio.sleep(self._period_s())

    def _period_s(self) -> float:
        return min(PERIOD_MAX_S, max(PERIOD_MIN_S, self.deadline_s / LOOKS_PER_DEADLINE))

    def _now_s(self) -> float:
        """Our clock: what came late counts as twice the time between looks, not as what it took."""
        if self._looked_s is None:
            return self._counted_s
        return self._counted_s + min(trio.current_time() - self._looked_s, 2 * self._period_s())

    def _look(self) -> None:
        self._counted_s = now_s = self._now_s()
        self._looked_s = trio.current_time()
        if not self._waiters:
            return
        moved_bytes = self._device_bytes()
        if moved_bytes != self._moved_bytes:
            self._moved_bytes, self._moved_s = moved_bytes, now_s
        for waiter in [each for each in self._waiters if self._is_overdue(each, now_s)]:
            self._end(waiter, now_s - waiter.since_s)

    def _device_bytes(self) -> int:
        cold = self._catalog.cold
        devices = cold.statistics() if cold is not None else ()
        return sum(device.written_bytes + device.read_bytes for device in devices)

    def _is_overdue(self, waiter: Waiter, now_s: float) -> bool:
        if now_s - waiter.since_s < self.deadline_s:
            return False
        if not waiter.is_patient or now_s - waiter.since_s >= PATIENCE * self.deadline_s:
            return True
        return now_s - self._moved_s >= self.deadline_s

    def _end(self, waiter: Waiter, waited_s: float) -> None:
        self._waiters.discard(waiter)
        self._catalog.counters.overdue += 1
        error: CtxfsError = DeadlineExceeded("it waited longer than limits.operation_deadline")
        if waiter.is_reader and not self.trouble_is_error:
            self._catalog.counters.trouble += 1
            error = BlockNotFound(str(error))
        self._tell(waiter, waited_s, error)
        waiter.end(error)

    def _tell(self, waiter: Waiter, waited_s: float, error: CtxfsError) -> None:
        node = self._catalog.names.by_inode.get(waiter.inode)
        key = self._catalog.names.key_of(node) if node is not None else b""
        if waiter.name:
            key = b"/".join(filter(None, (key, waiter.name)))
        log.error("%s of %r waited %.1f s and is answered with: %s",
                  waiter.operation, key, waited_s, os.strerror(error.code))  # fmt: skip
        self._catalog.events.emit(
            "overdue",
            self._catalog.clock().wall_ns,
            key=os.fsdecode(key),
            generation=waiter.inode,
            size_bytes=node.size if isinstance(node, Block) and not waiter.name else 0,
            operation=waiter.operation,
            waited_s=round(waited_s, 3),
        )
