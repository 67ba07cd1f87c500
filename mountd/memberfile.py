"""What a member of a cluster must remember of itself and of the others: `members.json`."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxfs.addresses import check_name, preferred_slot, slot_of, split_address
from ctxfs.core.members import Member, MemberState, from_record
from ctxfs.errors import BadValue, ConfigError, unusable
from ctxfs.settings import ClusterConfig

LIST_FILE = "members.json"  # in the state directory


@dataclass(frozen=True, slots=True)
class Saved:
    """What an earlier life wrote down; without one, what a new instance begins with.

    `slot` None: it has none yet. `members` are the others, in the states they had.
    """

    instance: str
    incarnation: int = 0
    slot: int | None = None
    members: tuple[Member, ...] = ()


def read(state: Path, cluster_id: str) -> Saved:
    """What is written down for this cluster. What cannot be read begins anew."""
    fresh = Saved(instance=secrets.token_hex(8))
    try:
        told = json.loads((state / LIST_FILE).read_bytes())
        if told["cluster"] != cluster_id:
            return fresh
        slot = told["slot"]
        return Saved(
            instance=str(told["instance"]),
            incarnation=int(told["incarnation"]),
            slot=None if slot is None else int(slot),
            members=tuple(_member(each) for each in told["members"]),
        )
    except (OSError, ValueError, TypeError, KeyError, BadValue):
        return fresh


def _member(told: dict[str, Any]) -> Member:
    return from_record(json.dumps(told).encode()).with_state(MemberState(told["state"]))


def write(state: Path, cluster_id: str, saved: Saved) -> None:
    """Write it down, whole or not at all. Raises ConfigError, and NoRoom."""
    told = {
        "cluster": cluster_id,
        "instance": saved.instance,
        "incarnation": saved.incarnation,
        "slot": saved.slot,
        "members": [member.as_dict() for member in saved.members],
    }
    path = state / LIST_FILE
    fresh = path.with_suffix(".new")
    try:
        fresh.touch(mode=0o600)
        with fresh.open("w") as file:
            file.write(json.dumps(told, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        raise unusable(str(path), error) from None


def own_name(cluster: ClusterConfig) -> str:
    """The name of this member. Raises ConfigError where it has none, or is not in the list."""
    try:
        name = cluster.name or check_name(socket.gethostname())
    except BadValue as error:
        raise ConfigError(f"[cluster] name: the host's will not do: {error}") from None
    if cluster.members and name not in [member.name for member in cluster.members]:
        raise ConfigError(f"[cluster] members: this host, {name}, is not among them; set name")
    return name


def this_member(cluster: ClusterConfig, saved: Saved, weight_bytes: int, wall_us: int) -> Member:
    """This daemon as others are to see it. Raises ConfigError.

    `weight_bytes`: what the tiers hold. With a fixed list, what is in it holds.
    """
    name = own_name(cluster)
    incarnation = max(saved.incarnation + 1, wall_us)
    for member in listed(cluster):
        if member.name == name:
            return _born(member, incarnation, saved.instance)
    _, port = split_address(cluster.listen)
    member = Member(
        name=name,
        slot=preferred_slot(name) if saved.slot is None else saved.slot,
        address=cluster.advertise or f"{name}:{port}",
        zone=cluster.zone,
        weight=max(1, cluster.weight_bytes or weight_bytes),
    )
    return _born(member, incarnation, saved.instance)


def _born(member: Member, incarnation: int, instance: str) -> Member:
    told = member.as_dict() | {"incarnation": incarnation, "instance": instance}
    return from_record(json.dumps(told).encode())


def listed(cluster: ClusterConfig) -> tuple[Member, ...]:
    """The members of the fixed list, all live."""
    return tuple(
        Member(
            name=each.name,
            slot=slot_of(each),
            address=each.address,
            zone=each.zone,
            weight=each.weight,
        )
        for each in cluster.members
    )


def others(name: str, members: Iterable[Member]) -> tuple[Member, ...]:
    """All but the one of this name."""
    return tuple(each for each in members if each.name != name)
