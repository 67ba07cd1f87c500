"""What this daemon believes of the members, for those who wait for changes and those who ask."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import trio

from ctxfs.core.members import Member, Membership, difference
from ctxfs.core.roster import Roster
from ctxfs.store.events import utc_text

log = logging.getLogger(__name__)

SECOND_NS = 1_000_000_000


class MembersView:
    """A roster in trio's time, and how its source fares.

    `wall_ns`: the wall clock, for what people read.
    """

    def __init__(self, me: Member, absent_wait_ns: int, wall_ns: Callable[[], int]) -> None:
        self.slot_claimed = False
        self._roster = Roster(me, absent_wait_ns)
        self._wall_ns = wall_ns
        self._changed = trio.Event()
        # By what the source was doing: why it does not succeed now, and since when.
        self._troubles: dict[str, str] = {}
        self._since_wall_ns: int | None = None

    @property
    def me(self) -> Member:
        """This member."""
        return self._roster.me

    @property
    def membership(self) -> Membership:
        """The snapshot of now."""
        return self._roster.membership

    async def wait_newer(self, epoch: int) -> Membership:
        """The snapshot, once it is newer than the one with this epoch."""
        while self.membership.epoch <= epoch:
            await self.wait_changed()
        return self.membership

    async def wait_changed(self) -> None:
        """Until there is a new snapshot, or the source is reached or lost."""
        await self._changed.wait()

    # ---- what is heard of members

    def recall(self, members: Iterable[Member]) -> None:
        """These were known in an earlier life."""
        self._do(lambda: self._roster.recall(members, _now_ns()))

    def put(self, *members: Member) -> None:
        """They are there."""
        self._do(lambda: self._roster.put(*members))

    def put_all(self, members: Iterable[Member]) -> None:
        """They are there, and nobody else."""
        self._do(lambda: self._roster.put_all(members, _now_ns()))

    def miss(self, name: str) -> None:
        """It is not there now."""
        self._do(lambda: self._roster.miss(name, _now_ns()))

    def vouch(self, name: str) -> None:
        """It is there after all."""
        self._do(lambda: self._roster.vouch(name))

    def claim_slot(self, slot: int) -> None:
        """This slot is ours."""
        self.slot_claimed = True
        self._wake()
        if slot != self.me.slot:
            log.info("this member's slot is %d", slot)
            self._do(lambda: self._roster.rename_me(replace(self.me, slot=slot)))

    async def run(self) -> None:
        """Let go of members that are away for too long."""
        while True:
            first_ns = self._roster.next_ns()
            deadline = float("inf") if first_ns is None else first_ns / SECOND_NS
            with trio.move_on_at(deadline):
                await self.wait_newer(self.membership.epoch)
            self._do(lambda: self._roster.expire(_now_ns()))

    def _do(self, change: Callable[[], None]) -> None:
        before = self.membership
        change()
        if self.membership is before:
            return
        what = difference(before, self.membership)
        for member in what.joined:
            log.info("member %s has joined, at %s", member.name, member.address)
        for member in what.left:
            log.warning("member %s has left", member.name)
        for old, new in what.changed:
            if old.state is not new.state:
                log.warning("member %s is %s", new.name, new.state.value)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # ---- how the source fares

    def reached(self, doing: str) -> None:
        """The source answered."""
        if self._troubles.pop(doing, None) is None and self._since_wall_ns is not None:
            return
        if not self._troubles:
            if self._since_wall_ns is not None:
                log.warning("etcd answers")
            self._since_wall_ns = self._wall_ns()
            self._wake()

    def failed(self, doing: str, why: str) -> None:
        """It does not, or refuses us; members stay as they were last known."""
        if not self._troubles:
            self._since_wall_ns = self._wall_ns()
        if why not in self._troubles.values():
            log.warning("etcd: %s; the members are those last known", why)
        self._troubles[doing] = why
        self._wake()

    @property
    def is_reachable(self) -> bool | None:
        """Whether the source answers; None before it was asked."""
        return None if self._since_wall_ns is None else not self._troubles

    def source_as_dict(self) -> dict[str, Any]:
        """For `.ctx/peers`: whether it can be reached, since when that is so, and why not."""
        since = self._since_wall_ns
        return {
            "reachable": self.is_reachable,
            "since": None if since is None else utc_text(since),
            "why": "; ".join(dict.fromkeys(self._troubles.values())) or None,
        }

    def members_as_list(self) -> list[dict[str, Any]]:
        """For `.ctx/peers`: a dictionary for each member."""
        now_ns = _now_ns()
        rows = []
        for member in self.membership:
            row = member.as_dict()
            del row["instance"]
            row["weight_bytes"] = row.pop("weight")
            row["self"] = member.name == self.me.name
            since_ns = self._roster.absent_since_ns(member.name)
            row["away_s"] = None if since_ns is None else round((now_ns - since_ns) / SECOND_NS, 1)
            rows.append(row)
        return rows


def alone_as_json() -> bytes:
    """`.ctx/peers` of a daemon that is in no cluster."""
    source = {"kind": "none", "reachable": None, "since": None, "why": None}
    told: dict[str, Any] = {"cluster": None, "self": None, "source": source, "members": []}
    return json.dumps(told, indent=2).encode() + b"\n"


def _now_ns() -> int:
    return int(trio.current_time() * SECOND_NS)
