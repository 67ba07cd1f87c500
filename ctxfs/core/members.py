"""Who is in the cluster: members, immutable snapshots of them, and what differs between two. Pure.

docs/cluster.md has the states and what each means for placement.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from ctxfs.addresses import SLOTS, check_address, check_name, check_zone
from ctxfs.errors import BadValue

WEIGHT_MAX: Final = 1 << 60


class MemberState(enum.Enum):
    """Whether a member may be a home. One that has left is in no snapshot."""

    LIVE = "live"
    SUSPECT = "suspect"
    LEFT = "left"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One daemon of the cluster.

    `weight`: its capacity in bytes. `incarnation` is higher after each start. `instance` stays
    the same over starts, and tells one daemon from another that was given the same name.
    """

    name: str
    slot: int
    address: str  # host:port
    zone: str
    weight: int
    incarnation: int = 0
    instance: str = ""
    state: MemberState = MemberState.LIVE

    def with_state(self, state: MemberState) -> Member:
        """The same member in another state."""
        return self if state is self.state else dataclasses.replace(self, state=state)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self) | {"state": self.state.value}

    def to_record(self) -> bytes:
        """What others are told: all but the state, which is theirs to judge. JSON."""
        told = self.as_dict()
        del told["state"]
        return json.dumps(told, sort_keys=True).encode()


def from_record(record: bytes) -> Member:
    """Read what `to_record` wrote; names that a later version added are left out.

    Raises BadValue.
    """
    try:
        told = json.loads(record)
        fields = {each.name for each in dataclasses.fields(Member)} - {"state"}
        known = {name: told[name] for name in fields if name in told}
        member = Member(**known)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadValue(f"is no member: {error}") from None
    _check(member)
    return member


def _check(member: Member) -> None:
    """Raises BadValue for what no member can be."""
    texts = (member.name, member.address, member.zone, member.instance)
    numbers = (member.slot, member.weight, member.incarnation)
    if not all(isinstance(each, str) and len(each) <= 300 for each in texts):
        raise BadValue("is no member: a text is none, or too long")
    if not all(type(each) is int for each in numbers):
        raise BadValue("is no member: a number is none")
    check_name(member.name)
    check_address(member.address)
    check_zone(member.zone)
    if not 0 <= member.slot < SLOTS or not 1 <= member.weight <= WEIGHT_MAX:
        raise BadValue("is no member: its slot or weight is out of bounds")
    if not member.instance.isprintable():
        raise BadValue("is no member: a text cannot be printed")


class Membership:
    """A snapshot: members by name, in the order of names. Immutable; equal by what it holds.

    `epoch` counts the snapshots of one daemon; those of others count differently.
    """

    __slots__ = ("_by_name", "epoch", "fingerprint", "members")

    def __init__(self, epoch: int, members: Iterable[Member]) -> None:
        self.epoch = epoch
        self._by_name = {each.name: each for each in members}
        self.members = tuple(sorted(self._by_name.values(), key=lambda each: each.name))
        if any(each.state is MemberState.LEFT for each in self.members):
            raise ValueError("who has left is not in a snapshot")
        placing = "\n".join(f"{m.name}\t{m.zone}\t{m.weight}" for m in self.live())
        # Equal on two hosts that place all keys alike: they can compare it when they meet.
        self.fingerprint: int = xxhash.xxh3_64_intdigest(placing.encode())

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Membership) and self.members == other.members

    def __hash__(self) -> int:
        return hash(self.members)

    def __repr__(self) -> str:
        return f"Membership({self.epoch}, {list(self.members)})"

    def get(self, name: str) -> Member | None:
        """The member of this name, or None."""
        return self._by_name.get(name)

    def live(self) -> tuple[Member, ...]:
        """Those that may be homes."""
        return tuple(each for each in self.members if each.state is MemberState.LIVE)


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """What differs between two snapshots, each list in the order of names.

    `joined` and `left` are whole members; `changed` are pairs, before and after, of those that
    are in both and not the same.
    """

    joined: tuple[Member, ...]
    left: tuple[Member, ...]
    changed: tuple[tuple[Member, Member], ...]
    moves_homes: bool  # whether some keys have other homes now

    @property
    def restarted(self) -> tuple[Member, ...]:
        """Those that were started anew: what they were told before may be lost."""
        return tuple(new for old, new in self.changed if new.incarnation != old.incarnation)

    def __bool__(self) -> bool:
        return bool(self.joined or self.left or self.changed)


def difference(before: Membership, after: Membership) -> MembershipChange:
    """What happened between two snapshots."""
    pairs = [(old, after.get(old.name)) for old in before]
    return MembershipChange(
        joined=tuple(each for each in after if each.name not in before),
        left=tuple(old for old, new in pairs if new is None),
        changed=tuple((old, new) for old, new in pairs if new is not None and new != old),
        moves_homes=before.fingerprint != after.fingerprint,
    )
