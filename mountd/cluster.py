"""This daemon as one of a cluster: everything that docs/cluster.md names, put together."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from ctxfs.addresses import split_address
from ctxfs.core.block import Block, State
from ctxfs.core.key import is_lock
from ctxfs.core.members import Member
from ctxfs.core.tombstones import Listing, Tombstone, Tombstones
from ctxfs.core.versions import VersionClock
from ctxfs.device.peer import Peer
from ctxfs.device.peerserver import serve
from ctxfs.device.tcp import Listener
from ctxfs.device.tls import Certificates, Insecure, Security
from ctxfs.errors import ConfigError, CtxfsError
from ctxfs.settings import ClusterConfig
from ctxfs.store.amending import Amending
from ctxfs.store.assuring import Assuring, Unassured
from ctxfs.store.deletions import Deletions
from ctxfs.store.elsewhere import Elsewhere
from ctxfs.store.receiving import Receiver
from ctxfs.store.replicating import Replicator
from ctxfs.store.serving import Serving
from ctxfs.store.store import Store
from ctxfs.tiers.remote import RemoteTier
from ctxfs.tiers.remote_facts import PeerStatistics, RemoteSettings
from ctxfs.wire.breaker import Health
from ctxfs.wire.greeting import MINOR, NEWEST, Identity
from ctxfs.wire.messages import GoneKey
from mountd.clusterparts import Parts
from mountd.membership import MembershipService
from mountd.peerdoor import PeerDoor
from mountd.repairing import Repairer
from mountd.tombstonefile import TombstoneFile

log = logging.getLogger(__name__)

SECOND_NS: Final = 1_000_000_000
EXCHANGE_S: Final = 10.0  # between two exchanges with one member that goes on to be there
LOOK_S: Final = 0.25  # how often it is looked who came, or does not answer
DOUBT_S: Final = 3.0  # a listed member that is ill for so long is no home of new blocks


class Cluster:
    """Runs as long as the daemon does; joins as soon as it has a slot."""

    def __init__(
        self, config: ClusterConfig, state: Path, store: Store, members: MembershipService
    ) -> None:
        """Raises ConfigError where certificates cannot be had, or nobody can listen there."""
        self._config = config
        self._store = store
        self._catalog = store.catalog
        self._members = members
        self._security = _security(config)
        self._listener = Listener(split_address(config.listen))
        self._file = TombstoneFile(state / "tombstones")
        self._file_in_use = trio.Lock()  # by a thread
        self._exchanged: dict[str, tuple[int, float]] = {}  # by member: which session, and when
        self.remote = RemoteTier(
            members.me.name,
            self._peer,
            remote_settings(config),
        )
        self._parts: Parts | None = None  # while this daemon shares
        store.sealing.assurance = Unassured(is_wanted=config.fsync == "replicas")

    def _identity(self) -> Identity:
        me = self._members.me
        assert self._config.id is not None
        return Identity(
            cluster=self._config.id.encode(),
            name=me.name.encode(),
            slot=me.slot,
            zone=me.zone.encode(),
        )

    def _peer(self, member: Member) -> Peer:
        return Peer(
            self._identity(),
            member.name.encode(),
            split_address(member.address),
            self._security,
            lanes=self._config.connections,
        )

    # -- life

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Has started when deletions that others know were learned, as far as they answer."""
        if not self._members.view.slot_claimed:
            log.warning("no slot in the cluster yet: nothing is shared until there is one")
            task_status.started()
            task_status = trio.TASK_STATUS_IGNORED
            while not self._members.view.slot_claimed:
                await self._members.view.wait_changed()
        try:
            await self._share(task_status)
        finally:
            self._file.close()

    async def _share(self, task_status: trio.TaskStatus[None]) -> None:
        slot = self._members.me.slot
        self._catalog.versions = VersionClock(slot, self._catalog.next_generation)
        saved, since = await trio.to_thread.run_sync(self._file.load)
        table = Tombstones.restored(slot, saved, since)
        self._catalog.versions.highest = max(self._catalog.versions.highest, table.highest)
        deletions = Deletions(
            self._catalog,
            table,
            self._config.tombstone_keep_ns,
            note=lambda tombstone: self._file.write([tombstone]),
            keep=self._keep,
            tell=self._tell,
        )
        serving = Serving(self._store, table)
        receiver = Receiver(self._store, deletions)
        deletions.settle()
        me = self._members.me.name
        replicator = Replicator(self._store, deletions, self.remote, me)
        amending = Amending(self._catalog, deletions, self.remote)
        repairer = Repairer(
            self._catalog, replicator, me, self._config.replicas, self._config.repair_bytes_per_s
        )
        assuring = Assuring(self._store, replicator)
        elsewhere = Elsewhere(self._catalog, self.remote, deletions.may_accept)
        parts = Parts(
            deletions, serving, receiver, replicator, amending, repairer, assuring, elsewhere
        )
        parts.connect(self._store, self._is_first_home)
        parts.apply(self._config, self._members.membership)
        self._parts = parts
        door = PeerDoor(self._store, serving, receiver, deletions)
        async with trio.open_nursery() as nursery:
            await nursery.start(self.remote.run)
            self.remote.set_members(self._members.membership)
            await nursery.start(door.run)
            await nursery.start(
                partial(serve, self._listener, door, self._identity(), self._security)
            )
            with trio.move_on_after(self._config.peer_deadline_ns / SECOND_NS):
                await self._exchange(deletions, self._others())
            nursery.start_soon(self._follow, parts)
            nursery.start_soon(self._look, parts)
            nursery.start_soon(self._keep_short, table)
            await nursery.start(replicator.run)
            await nursery.start(amending.run)
            await nursery.start(deletions.run)
            await nursery.start(repairer.run)
            task_status.started()

    def _is_first_home(self, block: Block) -> bool:
        homes = self.remote.homes(self._catalog.names.key_of(block))
        return homes[:1] == (self._members.me.name,)

    def apply(self, config: ClusterConfig) -> None:
        """Go by what may be changed while running."""
        self._config = config
        self.remote.apply(remote_settings(config))
        if self._parts is not None:
            self._parts.apply(config, self._members.membership)
        else:
            self._store.sealing.assurance = Unassured(is_wanted=config.fsync == "replicas")

    async def _follow(self, parts: Parts) -> None:
        """Have the tier know the members, and what they lack be sent to them."""
        known, repairer = self._members.membership, parts.repairer
        repairer.doubt(known)  # what an earlier life had not sent yet
        while True:
            fresh = await self._members.wait_newer(known.epoch)
            self.remote.set_members(fresh)
            repairer.changed(known, fresh)
            if fresh.fingerprint != known.fingerprint:
                parts.retry()
            known = fresh

    async def _look(self, parts: Parts) -> None:
        """Exchange deletions with who came, and now and then; tell who does not answer."""
        while True:
            await trio.sleep(LOOK_S)
            now = trio.current_time()
            due = []
            for peer in self.remote.statistics():
                if peer.health != Health.HEALTHY.value:
                    if peer.ill_for_s > DOUBT_S:
                        self._members.doubt(peer.name)
                    continue
                self._members.vouch(peer.name)
                session, at = self._exchanged.get(peer.name, (0, 0.0))
                if peer.connected != session:
                    parts.retry()
                if peer.connected != session or now - at > EXCHANGE_S:
                    due.append(peer)
            await self._exchange(parts.deletions, due)

    # -- deletions

    def _others(self) -> list[PeerStatistics]:
        return list(self.remote.statistics())

    async def _exchange(self, deletions: Deletions, peers: Sequence[PeerStatistics]) -> None:
        """Learn what these know of deletions; who does not answer is asked again later."""

        async def ask(peer: PeerStatistics) -> None:
            try:
                page = await self.remote.tombstones(peer.name, deletions.table.known)
            except CtxfsError as error:
                log.debug("%s was not asked for deletions: %s", peer.name, error)
                return
            told = tuple(Tombstone(each.key, each.version, each.until_ns) for each in page.entries)
            deletions.learn(peer.name, Listing(told, dict(page.known), dict(page.forgotten)))
            self._exchanged[peer.name] = (peer.connected, trio.current_time())

        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(ask, peer)

    async def _keep(self, tombstones: Sequence[Tombstone]) -> None:
        self._file.write(tombstones)
        async with self._file_in_use:
            await trio.to_thread.run_sync(self._file.sync)

    async def _tell(self, tombstones: Sequence[Tombstone]) -> None:
        await self.remote.tell_gone([GoneKey(*each) for each in tombstones])

    async def _keep_short(self, table: Tombstones) -> None:
        while True:
            await trio.sleep(EXCHANGE_S)
            async with self._file_in_use:
                if self._file.wants_rewrite:
                    self._file.begin_anew()
                    await trio.to_thread.run_sync(self._file.rewrite, table.snapshot())

    # -- for people

    def replicas(self, block: Block) -> str | None:
        """How many of a block's homes have it, as far as is known here: `1/2`."""
        if self._parts is None or is_lock(block.name):
            return None
        wanted = self.remote.wanted(block.replicas)
        if block.state is not State.SEALED:
            return f"0/{wanted}"
        _, reached = self._parts.replicator.reached(block)
        here = self.remote.is_home(self._catalog.names.key_of(block), block.replicas)
        return f"{reached + here}/{wanted}"

    def statistics(self) -> dict[str, Any]:
        """For `.ctx/stats`, by the names of ctxfs(7)."""
        seen = self.remote.statistics()
        told: dict[str, Any] = {
            "members": len(seen) + 1,
            "members_healthy": 1 + sum(each.health == Health.HEALTHY.value for each in seen),
            "source": self._members.kind,
            "source_reachable": self._members.view.is_reachable,
            "shares": self._parts is not None,
            "counters": dataclasses.asdict(self.remote.counters),
        }
        if self._parts is not None:
            told["counters"] |= self._parts.counters()
            told |= self._parts.state()
        return told

    def as_json(self) -> bytes:
        """`.ctx/peers`: the members, and what the transport knows of the others."""
        told = self._members.as_dict()
        told["protocol"] = f"{NEWEST}.{MINOR}"
        told["certificates"] = self._certificates()
        seen = self._peers_as_dict()
        for member in told["members"]:
            member["peer"] = seen.get(member["name"])
        return json.dumps(told, indent=2).encode() + b"\n"

    def _certificates(self) -> dict[str, Any] | None:
        """When the files are no good any more, and why they are not used as they are, if so."""
        if isinstance(self._security, Insecure):
            return None
        return {"ends": self._security.ends(), "trouble": self._security.trouble}

    def _peers_as_dict(self) -> dict[str, dict[str, Any]]:
        """Health and traffic of the other members, by the names of ctxfs(7)."""
        return {
            each.name: {
                "health": each.health,
                "ill_for_s": round(each.ill_for_s, 3),
                "trouble": each.trouble,
                "round_trip_s": each.round_trip_s,
                "load": each.load,
                "capacity_bytes": each.capacity_bytes,
                "free_bytes": each.free_bytes,
                "blocks": each.blocks,
                "requests": each.requests,
                "missed": each.missed,
                "received_bytes": each.received_bytes,
                "sent_bytes": each.sent_bytes,
                "corrupt": each.corrupt,
                "protocol": each.protocol,
                "clock_ahead_s": _rounded(each.clock_ahead_s),
            }
            for each in self.remote.statistics()
        }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def remote_settings(config: ClusterConfig) -> RemoteSettings:
    """How other members are asked."""
    return RemoteSettings(
        replicas=config.replicas,
        hedge_s=config.hedge_ns / SECOND_NS,
        deadline_s=config.peer_deadline_ns / SECOND_NS,
        pace_bytes_per_s=config.peer_bytes_per_s,
        negative_s=config.missing_keep_ns / SECOND_NS,
    )


def _security(config: ClusterConfig) -> Security:
    if config.insecure:
        return Insecure()
    if config.ca is None or config.cert is None or config.key is None:
        raise ConfigError(
            "cluster: ca, cert and key are needed to talk to other members, or insecure = true"
        )
    return Certificates(config.ca, config.cert, config.key)
