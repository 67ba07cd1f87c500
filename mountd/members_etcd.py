"""Members by etcd: this one registers itself under a lease, and follows the others.

docs/cluster.md has the keys, and what is claimed how.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio

from ctxfs.addresses import SLOTS
from ctxfs.core.members import Member, from_record
from ctxfs.device.etcd import Etcd, EtcdSettings
from ctxfs.device.etcd_values import Found, KeyValue
from ctxfs.device.etcd_watch import Watch
from ctxfs.errors import BadValue, CtxfsError, EtcdError, HistoryGone, LeaseGone, NameTaken
from mountd.members_view import MembersView

log = logging.getLogger(__name__)
logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log each request

RETRY_MIN_S, RETRY_MAX_S = 0.1, 2.0
END_S = 1.0  # for telling the others that we end; else they learn it from the lease
REGISTERING, FOLLOWING = "registering", "following"


class EtcdMembers:
    """Keeps `view` as etcd says, and etcd as this member is."""

    def __init__(
        self, view: MembersView, settings: EtcdSettings, cluster_id: str, lease_s: float
    ) -> None:
        root = f"/ctxfs/{cluster_id}/"
        self._members = f"{root}members/".encode()
        self._slots = f"{root}slots/".encode()
        self._own_key = self._members + view.me.name.encode()
        self._view = view
        self._settings = settings
        self._lease_s = lease_s
        self._lease = 0
        self._retry_s = {REGISTERING: RETRY_MIN_S, FOLLOWING: RETRY_MIN_S}
        self._registered = trio.Event()
        self._listed = trio.Event()
        self._lost = trio.Event()  # our key is gone, though our lease may live

    async def wait_known(self) -> None:
        """Until we are registered and know the others."""
        await self._registered.wait()
        await self._listed.wait()

    async def run(self) -> None:
        """Go on for ever; at the end, tell the others."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._repeat, REGISTERING, self._stay_registered)
                nursery.start_soon(self._repeat, FOLLOWING, self._follow)
        finally:
            if self._lease:
                end = trio.CancelScope(shield=True, deadline=trio.current_time() + END_S)
                with end, suppress(CtxfsError):
                    async with Etcd(self._settings) as etcd:
                        await etcd.revoke(self._lease)

    async def _repeat(self, doing: str, body: Callable[[Etcd], Awaitable[None]]) -> None:
        """Do it again whenever it fails. Each try reads certificates and passwords anew."""
        while True:
            try:
                async with Etcd(self._settings) as etcd:
                    await body(etcd)
            except CtxfsError as error:
                self._view.failed(doing, str(error))
            wait_s = self._retry_s[doing]
            self._retry_s[doing] = min(2 * wait_s, RETRY_MAX_S)
            await trio.sleep(wait_s)

    def _reached(self, doing: str) -> None:
        self._retry_s[doing] = RETRY_MIN_S
        self._view.reached(doing)

    # ---- this member

    async def _stay_registered(self, etcd: Etcd) -> None:
        while True:
            try:
                if not self._lease:
                    self._lease = await self._register(etcd)
                ttl_s = await etcd.keep_alive(self._lease)
            except LeaseGone:
                self._lease = 0
                log.warning("etcd has given up our lease: registering anew")
                continue
            self._reached(REGISTERING)
            self._registered.set()
            with trio.move_on_after(min(ttl_s, self._lease_s) / 3):
                await self._lost.wait()
                self._lost = trio.Event()
                self._lease = 0

    async def _register(self, etcd: Etcd) -> int:
        """Claim a slot and our name; returns the lease. Raises NameTaken."""
        self._view.claim_slot(await self._claim_slot(etcd))
        lease, _ = await etcd.grant(self._lease_s)
        record = self._view.me.to_record()
        there = await etcd.put_if(self._own_key, record, lease=lease)
        while there is not None:
            revision = 0
            if there.value is not None:
                revision = there.revision
                self._must_be_ours(there.value)
            there = await etcd.put_if(self._own_key, record, revision=revision, lease=lease)
        return lease

    def _must_be_ours(self, record: bytes) -> None:
        with suppress(BadValue):
            other = from_record(record)
            if other.instance != self._view.me.instance:
                raise NameTaken(
                    f"another member is called {other.name}, at {other.address}: "
                    "give one of them another [cluster] name"
                )

    async def _claim_slot(self, etcd: Etcd) -> int:
        """The slot of this instance; a free one where it has none.

        Raises EtcdError where all are taken by members that are there.
        """
        me = self._view.me
        mine = json.dumps({"name": me.name, "instance": me.instance}).encode()
        while True:
            taken = {_number(each.key): each for each in (await etcd.list(self._slots)).pairs}
            for number, pair in taken.items():
                if number is not None and _instance(pair.value) == me.instance:
                    return number
            order = [(me.slot + count) % SLOTS for count in range(SLOTS)]
            free = next((number for number in order if number not in taken), None)
            if free is None:
                free = await self._abandoned(etcd, taken)
            revision = taken[free].revision if free in taken else 0
            if await etcd.put_if(self._slot_key(free), mine, revision=revision) is None:
                return free

    async def _abandoned(self, etcd: Etcd, taken: dict[int | None, KeyValue]) -> int:
        """A slot whose owner is not registered."""
        there = {each.instance for each in _records(await etcd.list(self._members))}
        for number, pair in taken.items():
            if number is not None and _instance(pair.value) not in there:
                return number
        raise EtcdError(f"all {SLOTS} slots of the cluster are taken")

    def _slot_key(self, number: int) -> bytes:
        return self._slots + b"%04d" % number

    # ---- the others

    async def _follow(self, etcd: Etcd) -> None:
        while True:
            found = await etcd.list(self._members)
            self._view.put_all(_records(found))
            self._reached(FOLLOWING)
            self._listed.set()
            with suppress(HistoryGone):
                async with Watch(etcd, self._members, found.revision + 1) as watch:
                    while True:
                        for change in await watch.next():
                            self._hear(change)

    def _hear(self, change: KeyValue) -> None:
        if change.value is None:
            if change.key == self._own_key:
                self._lost.set()
            self._view.miss(change.key.removeprefix(self._members).decode("utf-8", "replace"))
            return
        self._view.put(*_records(Found(change.revision, (change,))))


def _records(found: Found) -> list[Member]:
    """The members among what was found; of what is none, and lies under their keys, we warn."""
    members = []
    for each in found.pairs:
        try:
            member = from_record(each.value or b"")
            if each.key.rpartition(b"/")[2] != member.name.encode():
                raise BadValue("has another name than its key")
        except BadValue as error:
            log.warning("etcd: %r %s", each.key, error)
        else:
            members.append(member)
    return members


def _number(key: bytes) -> int | None:
    digits = key.rpartition(b"/")[2]
    return int(digits) if digits.isdigit() and int(digits) < SLOTS else None


def _instance(value: bytes | None) -> str | None:
    """Whose slot it is, or None where that cannot be read."""
    try:
        told = json.loads(value or b"")
        return str(told["instance"])
    except (ValueError, TypeError, KeyError):
        return None
