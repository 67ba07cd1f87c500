"""Following the changes of etcd's keys, over broken connections, from endpoint to endpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Final, Self

import httpx
import trio

from ctxfs.device.etcd import WATCH, Etcd
from ctxfs.device.etcd_values import (
    DENIED,
    Json,
    KeyValue,
    StaleToken,
    encoded,
    failure,
    pair,
    parsed,
    prefix_end,
    revision_of,
)
from ctxfs.errors import EtcdAway, HistoryGone

# So long nothing may come before the watch is taken up again: nobody tells of a host that is gone.
IDLE_S: Final = 60.0


class Watch:
    """The changes of keys that begin with `prefix`, from `revision` on. An async context manager.

    Invariant: all changes before `revision` were returned by `next`.
    """

    def __init__(self, etcd: Etcd, prefix: bytes, revision: int, idle_s: float = IDLE_S) -> None:
        self.revision = revision
        self._etcd = etcd
        self._prefix = prefix
        self._idle_s = idle_s
        self._open = AsyncExitStack()
        self._lines: AsyncIterator[str] | None = None

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def next(self) -> tuple[KeyValue, ...]:
        """The next changes, at least one, in their order.

        Raises HistoryGone, EtcdAway where the watch cannot be taken up again, and EtcdRefused.
        """
        while True:
            if self._lines is None:
                await self._start()
            told = await self._message()
            if told is None:
                await self._stop()
            elif changes := self._changes(told):
                return changes

    async def _start(self) -> None:
        """Ask for the changes. Returns when the answer has begun."""
        try:
            await self._try_start()
        except StaleToken:  # which a watch is told of later than other calls
            self._etcd.forget_login()
            await self._try_start()

    async def _try_start(self) -> None:
        await self._stop()
        asked = {
            "key": encoded(self._prefix),
            "range_end": encoded(prefix_end(self._prefix)),
            "start_revision": str(self.revision),
        }
        try:
            response = await self._open.enter_async_context(
                self._etcd.answered(WATCH, {"create_request": asked})
            )
            self._lines = response.aiter_lines()
            told: Json | None = None
            with trio.move_on_after(self._etcd.settings.deadline_s):
                told = await self._message()
            if told is None:
                raise EtcdAway(f"{self._etcd.endpoint}: does not begin a watch")
            self._changes(told)  # none are in the first
            # One that was set up anew, or from a backup, has another history, and would be silent.
            if revision_of(told.get("result", {})) < self.revision - 1:
                raise HistoryGone(f"etcd has no revision {self.revision - 1}")
        except BaseException:
            await self._stop()
            raise

    async def _stop(self) -> None:
        lines, self._lines = self._lines, None
        if lines is not None:
            # httpx reads by generators within generators: a read that is cancelled ends them all.
            with trio.CancelScope(shield=True) as scope:
                scope.cancel()
                async for _ in lines:
                    pass
        await self._open.aclose()

    async def _message(self) -> Json | None:
        """The next one, or None where there will be no other on this connection."""
        assert self._lines is not None
        with trio.move_on_after(self._idle_s):
            try:
                async for line in self._lines:
                    if line:
                        return parsed(line.encode())
            except (httpx.HTTPError, httpx.StreamError):
                return None
        return None

    def _changes(self, told: Json) -> tuple[KeyValue, ...]:
        """What a message says. Raises what it tells that went wrong."""
        if "error" in told:
            raise failure(told)
        result = told.get("result", {})
        if result.get("canceled"):
            if "compact_revision" in result:
                raise HistoryGone(f"etcd has compacted revision {self.revision}")
            raise failure({"error": result.get("cancel_reason", "cancelled"), "code": DENIED})
        changes = tuple(
            pair(each["kv"], deleted=each.get("type") == "DELETE")
            for each in result.get("events", ())
        )
        for change in changes:
            self.revision = max(self.revision, change.revision + 1)
        return changes
