"""What one daemon makes of who comes and goes: live, suspect for a while, then gone. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ctxfs.core.members import Member, Membership, MemberState


class Roster:
    """Keeps the snapshot of members; time is given, and monotonic.

    Invariant: we are in it, live, as `me` says; what others tell of our name is not taken.
    """

    def __init__(self, me: Member, absent_wait_ns: int) -> None:
        self.me = me
        self.absent_wait_ns = absent_wait_ns
        self._members: dict[str, Member] = {}
        self._absent_since_ns: dict[str, int] = {}
        self.membership = Membership(0, ())
        self._publish()

    def rename_me(self, me: Member) -> None:
        """We are told another slot or address of ours."""
        self.me = me
        self._publish()

    def put(self, *members: Member) -> None:
        """They are there: registered, or heard of."""
        for member in members:
            if member.name != self.me.name:
                self._members[member.name] = member.with_state(MemberState.LIVE)
                self._absent_since_ns.pop(member.name, None)
        self._publish()

    def recall(self, members: Iterable[Member], now_ns: int) -> None:
        """These were known in an earlier life, in the states that they have."""
        for member in members:
            if member.name != self.me.name:
                self._members[member.name] = member
                if member.state is MemberState.SUSPECT:
                    self._absent_since_ns[member.name] = now_ns
        self._publish()

    def miss(self, name: str, now_ns: int) -> None:
        """It is not there, as of now; we know of it for a while."""
        self._miss(name, now_ns)
        self._publish()

    def put_all(self, members: Iterable[Member], now_ns: int) -> None:
        """These are there and no others."""
        there = {member.name: member for member in members}
        for name in self._members.keys() - there.keys():
            self._miss(name, now_ns)
        self.put(*there.values())

    def vouch(self, name: str) -> None:
        """It is there after all."""
        if member := self._members.get(name):
            self.put(member)

    def absent_since_ns(self, name: str) -> int | None:
        """Since when a member is suspect, or None."""
        return self._absent_since_ns.get(name)

    def next_ns(self) -> int | None:
        """When somebody will have been away for too long, if nothing happens; or None."""
        first = min(self._absent_since_ns.values(), default=None)
        return None if first is None else first + self.absent_wait_ns

    def expire(self, now_ns: int) -> None:
        """Who has been away for too long has left."""
        for name, since_ns in list(self._absent_since_ns.items()):
            if now_ns >= since_ns + self.absent_wait_ns:
                del self._absent_since_ns[name], self._members[name]
        self._publish()

    def _miss(self, name: str, now_ns: int) -> None:
        member = self._members.get(name)
        if member is not None and member.state is MemberState.LIVE:
            self._members[name] = member.with_state(MemberState.SUSPECT)
            self._absent_since_ns[name] = now_ns

    def _publish(self) -> None:
        """Make a new snapshot, if it differs."""
        fresh = Membership(self.membership.epoch + 1, (self.me, *self._members.values()))
        if fresh != self.membership:
            self.membership = fresh
