"""Tombstones: kept in bounds, told to who missed them, and a deleted block never comes back."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxfs.core.tombstones import Listing, Tombstone, Tombstones
from ctxfs.core.versions import VersionClock, slot_of


def version(time: int, slot: int) -> int:
    return time << 10 | slot


def test_a_tombstone_beats_every_version_up_to_its_own() -> None:
    table = Tombstones(1)
    table.bury(b"k", version(5, 1), 100)
    assert table.beats(b"k", version(5, 1))
    assert table.beats(b"k", version(4, 1023))
    assert not table.beats(b"k", version(5, 2))
    assert not table.beats(b"other", version(1, 0))


def test_only_new_versions_of_the_own_slot_are_buried() -> None:
    table = Tombstones(1)
    table.bury(b"k", version(5, 1), 100)
    for wrong in (version(6, 2), version(5, 1), version(4, 1)):
        with pytest.raises(ValueError, match="no new version of slot 1"):
            table.bury(b"k", wrong, 100)


def test_who_asks_is_told_what_it_missed_and_nothing_twice() -> None:
    one, two = Tombstones(1), Tombstones(2)
    tombstones = [one.bury(b"%d" % number, version(number, 1), 100) for number in range(1, 6)]
    assert two.merge(one.since(two.known)).dead == tuple(tombstones)
    assert one.since(two.known).tombstones == ()
    sixth = one.bury(b"6", version(6, 1), 100)
    assert one.since(two.known).tombstones == (sixth,)


def test_what_was_heard_is_told_on_to_a_third() -> None:
    one, two, three = Tombstones(1), Tombstones(2), Tombstones(3)
    tombstone = one.bury(b"k", version(5, 1), 100)
    assert two.hear(tombstone)
    assert not two.hear(tombstone)
    assert three.merge(two.since(three.known)).dead == (tombstone,)
    # Hearing of one does not say that there were no others.
    assert three.known.get(1, 0) == 0


def test_who_was_away_while_tombstones_were_dropped_doubts_what_is_older() -> None:
    one, two = Tombstones(1), Tombstones(2)
    one.bury(b"k", version(5, 1), 100)
    one.bury(b"l", version(9, 1), 200)
    assert one.expire(100) == 1
    merged = two.merge(one.since(two.known))
    assert merged.doubt_version == version(5, 1)
    assert [each.key for each in merged.dead] == [b"l"]
    # Once is enough.
    assert two.merge(one.since(two.known)).doubt_version == 0


def test_who_was_away_while_nothing_was_deleted_doubts_nothing() -> None:
    one, two = Tombstones(1), Tombstones(2)
    one.bury(b"k", version(5, 1), 100)
    two.merge(one.since(two.known))
    assert one.expire(10**18) == 1
    assert two.merge(one.since(two.known)).doubt_version == 0


def test_a_copy_is_taken_only_from_who_knew_what_was_forgotten_here() -> None:
    table = Tombstones(1)
    table.bury(b"k", version(5, 1), 100)
    assert not table.may_accept(b"k", version(4, 2), {1: version(5, 1)})
    assert table.may_accept(b"k", version(6, 2), {})
    table.expire(100)
    assert not table.may_accept(b"k", version(4, 2), {})
    assert not table.may_accept(b"other", version(4, 2), {})
    assert table.may_accept(b"k", version(4, 2), {1: version(5, 1)})
    assert table.may_accept(b"k", version(6, 2), {})


def test_a_full_table_drops_what_would_go_first() -> None:
    table = Tombstones(1, entries_max=3)
    for number in range(1, 11):
        table.bury(b"%d" % number, version(number, 1), 100 - number)
    assert {each.key for each in table} == {b"1", b"2", b"3"}
    assert table.forgotten == {1: version(10, 1)}


def test_a_table_that_is_used_for_long_does_not_grow() -> None:
    table = Tombstones(1, entries_max=50)
    for number in range(1, 20_000):
        table.bury(b"%d" % (number % 70), version(number, 1), number)
    assert len(table) == 50
    assert table._indexed <= 2 * 50 + 1025
    assert len(table._ends) <= table._indexed


def test_what_was_written_down_reads_back_with_the_own_made_since() -> None:
    table = Tombstones(1)
    first = table.bury(b"k", version(5, 1), 100)
    table.hear(Tombstone(b"l", version(7, 2), 100))
    saved = table.snapshot()
    later = table.bury(b"m", version(9, 1), 100)
    again = Tombstones.restored(1, saved, [first, later])
    assert set(again) == set(table)
    assert (again.known, again.forgotten) == (table.known, table.forgotten)


def test_what_others_told_since_the_snapshot_reads_back_too() -> None:
    table = Tombstones(1)
    saved = table.snapshot()
    since = [Tombstone(b"l", version(7, 2), 100), Tombstone(b"m", version(3, 1), 100)]
    again = Tombstones.restored(1, saved, since)
    assert set(again) == set(since)
    assert again.known == {1: version(3, 1)}  # of others' we may have missed some


# ---- the simulation ------------------------------------------------------------------------

KEEP = 6  # ticks; so short that most tombstones are dropped while messages are still under way
ENTRIES_MAX = 2
KEYS = (b"a", b"b", b"c")
HOUR_US = 3_600_000_000


@dataclass
class Node:
    """A member: what it holds, and what it was told. Its medium is `copies`, `saved`, `own`."""

    name: int
    slot: int
    incarnation: int = 0
    copies: dict[bytes, int] = field(default_factory=dict)
    doubtful: dict[bytes, int] = field(default_factory=dict)
    saved: Listing = field(default_factory=lambda: Listing((), {}, {}))
    own: list[Tombstone] = field(default_factory=list)
    # By peer: under which token it told what it knows; which one it gave us.
    heard: dict[int, tuple[Any, dict[int, int]]] = field(default_factory=dict)
    token: dict[int, Any] = field(default_factory=dict)
    tokens_given: int = 0

    def __post_init__(self) -> None:
        self.clock = VersionClock(self.slot, HOUR_US << 10)
        self.table = Tombstones(self.slot, ENTRIES_MAX)

    def bury_copies(self) -> None:
        for held in (self.copies, self.doubtful):
            for key in [key for key, each in held.items() if self.table.beats(key, each)]:
                del held[key]

    def doubt(self, up_to: int) -> None:
        for key in [key for key, each in self.copies.items() if each <= up_to]:
            self.doubtful[key] = self.copies.pop(key)

    def restart(self) -> None:
        """From its medium. What was in doubt is dropped, as are messages to its earlier life."""
        self.incarnation += 1
        self.table = Tombstones.restored(self.slot, self.saved, self.own, ENTRIES_MAX)
        self.doubtful.clear()
        self.heard.clear()
        self.token.clear()
        self.bury_copies()


class World:
    """Members, messages that arrive in any order or never, and what must hold after each step."""

    def __init__(self, count: int) -> None:
        self.nodes = [Node(name, name) for name in range(count)]
        self.messages: list[tuple[int, int, str, tuple[Any, ...]]] = []
        self.cut: set[tuple[int, int]] = set()
        self.now = 0
        self.slots = count
        self.made: list[Tombstone] = []
        # By member: the newest tombstone of each key that it ever applied in this life.
        self.applied: list[dict[bytes, int]] = [defaultdict(int) for _ in self.nodes]

    def send(self, sender: int, to: int, kind: str, *what: Any) -> None:
        if sender != to and (sender, to) not in self.cut:
            self.messages.append((sender, to, kind, what))

    def check(self) -> None:
        for node in self.nodes:
            for tombstone in self.made:
                key, beaten, _ = tombstone
                if tombstone in node.table:
                    self.applied[node.name][key] = max(self.applied[node.name][key], beaten)
                if beaten <= node.table.known.get(slot_of(beaten), 0):
                    assert node.copies.get(key, beaten + 1) > beaten, "held although it is known"
            for key, held in node.copies.items():
                assert held > self.applied[node.name][key], "a deleted block came back"
            assert len(node.table) <= ENTRIES_MAX

    # -- what programs and operators do

    def put(self, node: Node, key: bytes) -> None:
        if key in node.copies or key in node.doubtful:
            self.delete(node, key)
        node.copies[key] = node.clock.next(HOUR_US + self.now)
        for other in range(len(self.nodes)):
            self.push(node, key, other)

    def delete(self, node: Node, key: bytes) -> None:
        new = node.clock.next(HOUR_US + self.now)
        tombstone = node.table.bury(key, new, self.now + KEEP)
        node.own.append(tombstone)
        self.made.append(tombstone)
        self.applied[node.name][key] = new
        node.copies.pop(key, None)
        node.doubtful.pop(key, None)
        for other in range(len(self.nodes)):
            self.send(node.name, other, "gone", tombstone)

    def push(self, node: Node, key: bytes, to: int) -> None:
        if key in node.copies and to in node.token:
            self.send(node.name, to, "push", key, node.copies[key], node.token[to])

    def replace(self, node: Node) -> None:
        """The host is lost, and comes back with nothing: another slot, as a new instance gets."""
        self.nodes[node.name] = Node(node.name, self.slots)
        self.nodes[node.name].incarnation = node.incarnation + 1
        self.slots += 1
        self.applied[node.name] = defaultdict(int)

    def restart(self, node: Node) -> None:
        node.restart()
        self.applied[node.name] = defaultdict(int)

    # -- what members do when they are told something

    def deliver(self, number: int) -> None:
        sender, to, kind, what = self.messages.pop(number % len(self.messages))
        node = self.nodes[to]
        getattr(self, f"on_{kind}")(node, sender, *what)
        node.bury_copies()

    def on_gone(self, node: Node, sender: int, tombstone: Tombstone) -> None:
        node.clock.see(tombstone.version, HOUR_US + self.now)
        node.table.hear(tombstone)
        self.note(node, (tombstone,))

    def ask(self, node: Node, to: int) -> None:
        self.send(node.name, to, "ask", dict(node.table.known), node.incarnation)

    def on_ask(self, node: Node, sender: int, known: dict[int, int], life: int) -> None:
        node.tokens_given += 1
        token = (node.incarnation, node.tokens_given)
        self.send(node.name, sender, "answer", node.table.since(known), life, token)

    def on_answer(self, node: Node, sender: int, listing: Listing, life: int, token: Any) -> None:
        if life != node.incarnation:
            return  # it knew more then, and so was told less
        node.clock.see(listing.highest, HOUR_US + self.now)
        merged = node.table.merge(listing)
        self.note(node, merged.dead)
        node.doubt(merged.doubt_version)
        for other in range(len(self.nodes)):
            for key, held in node.doubtful.items():
                self.send(node.name, other, "doubt", key, held)
        node.token[sender] = token
        self.send(node.name, sender, "done", token, dict(node.table.known))

    def on_done(self, node: Node, sender: int, token: Any, known: dict[int, int]) -> None:
        if token[0] == node.incarnation:
            node.heard[sender] = (token, known)

    def on_push(self, node: Node, sender: int, key: bytes, held: int, token: Any) -> None:
        last, known = node.heard.get(sender, (None, {}))
        if token == last:
            self.take(node, key, held, known)

    def on_doubt(self, node: Node, sender: int, key: bytes, held: int) -> None:
        if node.copies.get(key) == held:
            self.send(node.name, sender, "vouch", key, held, dict(node.table.known))

    def on_vouch(
        self, node: Node, sender: int, key: bytes, held: int, known: dict[int, int]
    ) -> None:
        if node.doubtful.get(key) == held:
            self.take(node, key, held, known)

    def take(self, node: Node, key: bytes, held: int, known: dict[int, int]) -> None:
        if node.table.may_accept(key, held, known) and held > node.copies.get(key, 0):
            node.clock.see(held, HOUR_US + self.now)
            node.copies[key] = held
            if node.doubtful.get(key, 0) <= held:
                node.doubtful.pop(key, None)

    def note(self, node: Node, tombstones: tuple[Tombstone, ...]) -> None:
        """A tombstone counts as applied even where the table was too small to keep it."""
        for key, beaten, _ in tombstones:
            self.applied[node.name][key] = max(self.applied[node.name][key], beaten)
            for held in (node.copies, node.doubtful):
                if held.get(key, beaten + 1) <= beaten:
                    del held[key]

    # -- steps, as they are drawn

    def step(self, action: str, first: int, second: int, key: bytes) -> None:
        node = self.nodes[first % len(self.nodes)]
        other = second % len(self.nodes)
        if action in ("put", "delete"):
            getattr(self, action)(node, key)
        elif action == "push":
            self.push(node, key, other)
        elif action == "meet":
            self.ask(node, other)
        elif action == "deliver" and self.messages:
            self.deliver(second)
        elif action == "quiet":
            for _ in range(len(self.messages)):
                self.deliver(second)
                self.check()
        elif action == "lose" and self.messages:
            self.messages.pop(second % len(self.messages))
        elif action == "cut":
            self.cut ^= {(node.name, other)}
        elif action == "evict":
            node.copies.pop(key, None)
        elif action == "save" and not node.doubtful:
            node.saved, node.own = node.table.snapshot(), []
        elif action in ("restart", "replace"):
            getattr(self, action)(node)
        elif action == "tick":
            self.now += second % (KEEP + 2)
            node.table.expire(self.now)
        self.check()

    def settle(self) -> None:
        """All links work again, nothing is lost, and everybody meets everybody, twice."""
        self.cut.clear()
        self.messages.clear()
        for _ in range(2):
            for node in self.nodes:
                for other in self.nodes:
                    self.ask(node, other.name)
                    while self.messages:
                        self.deliver(0)
                        self.check()


ACTIONS = ["put", "delete", "push", "push", "meet", "meet", *["deliver"] * 6, "lose", "cut"]
ACTIONS += ["evict", "save", "restart", "replace", "quiet", "tick", "tick"]
STEPS = st.tuples(
    st.sampled_from(ACTIONS), st.integers(0, 3), st.integers(0, 30), st.sampled_from(KEYS)
)


@given(st.integers(2, 4), st.lists(STEPS, min_size=20, max_size=150))
@settings(max_examples=150, deadline=None)
def test_a_deleted_block_never_comes_back(
    count: int, steps: list[tuple[str, int, int, bytes]]
) -> None:
    world = World(count)
    world.settle()  # they have met: without that, nobody takes anything from anybody
    for step in steps:
        world.step(*step)
    world.settle()
    deleted = {key: max(t.version for t in world.made if t.key == key) for key in KEYS
               if any(t.key == key for t in world.made)}  # fmt: skip
    lost = {node.name for node in world.nodes if node.slot != node.name or node.incarnation}
    for node in world.nodes:
        for key, held in node.copies.items():
            # A tombstone that only a host knew that was lost since is known to nobody.
            assert held > deleted.get(key, 0) or lost
