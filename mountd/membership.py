"""The membership service: who is in the cluster, from a fixed list or from etcd."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import trio

from ctxfs.core.members import Member, Membership
from ctxfs.device.etcd import EtcdSettings
from ctxfs.errors import CtxfsError
from ctxfs.settings import ClusterConfig
from mountd import memberfile
from mountd.members_etcd import EtcdMembers
from mountd.members_view import SECOND_NS, MembersView

log = logging.getLogger(__name__)


class MembershipService:
    """Snapshots of the members for whoever asks or waits; docs/cluster.md has the rules.

    Made before the mount answers: it writes down this start, and knows the members last known.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        state: Path,
        *,
        weight_bytes: int,
        wall_ns: Callable[[], int],
    ) -> None:
        """`weight_bytes`: what the tiers here hold. Raises ConfigError, and NoRoom."""
        assert cluster.id is not None
        self._cluster_id = cluster.id
        self._cluster = cluster
        self._state = state
        saved = memberfile.read(state, cluster.id)
        me = memberfile.this_member(cluster, saved, weight_bytes, wall_ns() // 1000)
        self._saved = replace(saved, instance=me.instance, incarnation=me.incarnation)
        # A start must be written down before others hear of it: the next one counts from there.
        memberfile.write(state, cluster.id, self._saved)
        self.view = MembersView(me, cluster.absent_wait_ns, wall_ns)
        self._etcd: EtcdMembers | None = None
        if cluster.etcd:
            self.view.recall(saved.members)
            self.view.slot_claimed = saved.slot is not None
            lease_s = cluster.lease_ns / SECOND_NS
            self._etcd = EtcdMembers(self.view, etcd_settings(cluster), cluster.id, lease_s)
        else:
            self.view.claim_slot(me.slot)
            self.view.put(*memberfile.listed(cluster))

    @property
    def me(self) -> Member:
        """This member. Its slot may become another one when it is registered first."""
        return self.view.me

    @property
    def membership(self) -> Membership:
        """The snapshot of now."""
        return self.view.membership

    async def wait_newer(self, epoch: int) -> Membership:
        """The snapshot, once it is newer than the one with this epoch."""
        return await self.view.wait_newer(epoch)

    def doubt(self, name: str) -> None:
        """A member does not answer. With etcd its lease says that, and this does nothing."""
        if self._etcd is None and name != self.me.name:
            self.view.miss(name)

    def vouch(self, name: str) -> None:
        """A member that was doubted answers."""
        if self._etcd is None:
            self.view.vouch(name)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow the source.

        What an earlier life knew is enough to start with: a daemon that died is not missed for
        longer because etcd is away. A first start waits for its slot, but not for ever.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.view.run)
            nursery.start_soon(self._keep_saved)
            if self._etcd is not None:
                nursery.start_soon(self._etcd.run)
                wait_s = 0 if self.view.slot_claimed else 2
                with trio.move_on_after(wait_s * self._cluster.etcd_deadline_ns / SECOND_NS):
                    await self._etcd.wait_known()
            task_status.started()

    async def _keep_saved(self) -> None:
        """Write down the members, and our slot, whenever they change."""
        told = ""
        while True:
            slot = self.me.slot if self.view.slot_claimed else None
            others = memberfile.others(self.me.name, self.membership)
            fresh = replace(self._saved, slot=slot, members=others)
            if fresh == self._saved:
                await self.view.wait_changed()
                continue
            self._saved = fresh
            try:
                await trio.to_thread.run_sync(
                    memberfile.write, self._state, self._cluster_id, self._saved
                )
            except CtxfsError as error:
                if str(error) != told:
                    told = str(error)
                    log.warning("the members cannot be written down: %s", told)

    # ---- for people

    def as_json(self) -> bytes:
        """`.ctx/peers`."""
        return json.dumps(self.as_dict(), indent=2).encode() + b"\n"

    def as_dict(self) -> dict[str, Any]:
        """The same, by the names of ctxfs(7)."""
        return {
            "cluster": self._cluster_id,
            "self": self.me.name,
            "slot_claimed": self.view.slot_claimed,
            "epoch": self.membership.epoch,
            "fingerprint": f"{self.membership.fingerprint:016x}",
            "source": {
                "kind": self.kind,
                "endpoints": list(self._cluster.etcd),
                **self.view.source_as_dict(),
            },
            "members": self.view.members_as_list(),
        }

    @property
    def kind(self) -> Literal["none", "list", "etcd"]:
        """Where it has the members from."""
        if self._etcd is not None:
            return "etcd"
        return "list" if self._cluster.members else "none"


def etcd_settings(cluster: ClusterConfig) -> EtcdSettings:
    """How etcd is reached."""
    return EtcdSettings(
        endpoints=cluster.etcd,
        deadline_s=cluster.etcd_deadline_ns / SECOND_NS,
        user=cluster.etcd_user,
        password_file=cluster.etcd_password_file,
        ca=cluster.etcd_ca,
        cert=cluster.etcd_cert,
        key=cluster.etcd_key,
    )
