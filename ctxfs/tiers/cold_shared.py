"""What the records of a cold device add up to where blocks share their content: pure."""

from dataclasses import dataclass, field

import numpy as np

from ctxfs.core.columns import I64, U64
from ctxfs.core.meta import Alias, Drop
from ctxfs.ondisk.columnar import Array
from ctxfs.ondisk.facts import HOME_SHIFT, IN_DATA, NOWHERE, Facts, block_columns
from ctxfs.ondisk.record import UNNAMED
from ctxfs.tiers.cold_facts import is_in, runs
from ctxfs.tiers.cold_found import FoundPart, Lookup, newest_whole
from ctxfs.tiers.cold_index import ColdIndex, Grave
from ctxfs.tiers.cold_parts import part_segment

_PART: tuple[str, ...] = ("offset", "length", "stamp", "meta_stamp", "part", "encoded_bytes")


@dataclass(frozen=True, slots=True, order=True)
class _FoundAlias:
    """One alias in a note record, which has this stamp."""

    stamp: int
    meta_stamp: int
    holder: int
    home: int


@dataclass(slots=True)
class _Found:
    """All that is there of a generation that is an alias, or that an alias refers to.

    `own`: records that are the block itself. `content`: records with its content, be they only
    others' by now. `alias`: what it is an alias by.
    """

    row: int | None = None  # of its attributes
    dropped_at: int | None = None
    drop_home: int = NOWHERE
    parts: list[FoundPart] = field(default_factory=list)
    aliases: list[_FoundAlias] = field(default_factory=list)
    own: tuple[FoundPart, ...] | None = None
    content: tuple[FoundPart, ...] | None = None
    alias: _FoundAlias | None = None

    @property
    def holders(self) -> set[int]:
        """Segments that hold any of it."""
        segments = {part_segment(part.part) for part in self.parts}
        return segments | {alias.home >> HOME_SHIFT for alias in self.aliases}

    @property
    def later(self) -> list[int]:
        """Stamps of records that no Drop has killed, and that name the block."""
        stamps = [*(part.stamp for part in self.parts), *(each.stamp for each in self.aliases)]
        return [stamp for stamp in stamps if stamp > (self.dropped_at or UNNAMED)]


@dataclass(frozen=True, slots=True)
class WholeRecords:
    """Blocks, in order, of which one record is there that is all of it; be they dropped."""

    generations: U64
    parts: U64
    meta_rows: I64


class PlainAliases:
    """Those of which there is one note and nothing else, and one record of the content. They are
    settled all at once, for they may be many.

    `live` and `dead` are rows of facts.aliases; `contents`: what is referred to, in order.
    """

    def __init__(self, facts: Facts, index: ColdIndex, whole: WholeRecords) -> None:
        self._facts = facts
        self._index = index
        numbers, holders = (facts.aliases.array(name) for name in ("generation", "holder"))
        self._meta_rows, known = Lookup(facts.metas.array("generation")).rows(numbers)
        self._drop_rows, dropped = Lookup(facts.drops.array("number")).rows(numbers)
        at, is_whole = Lookup(whole.generations).rows(holders)
        self._parts = _taken(whole.parts, at)
        _, inverse, counts = np.unique(numbers, return_inverse=True, return_counts=True)
        known &= ~is_in(numbers, np.unique(facts.parts.array("generation")))
        known &= counts[inverse] == 1
        known &= ~is_in(numbers, np.unique(holders))
        drop_stamps = _taken(facts.drops.array("stamp"), self._drop_rows)
        dead = dropped & (facts.aliases.array("stamp") <= drop_stamps)
        live = known & ~dead & is_whole & ~is_in(holders, np.unique(numbers))
        live &= self._is_same(_taken(whole.meta_rows, at))
        live &= ~is_in(holders, np.unique(holders[~live & ~(known & dead)]))
        self.live, self.dead = np.flatnonzero(live), np.flatnonzero(known & dead)
        self.others = np.flatnonzero(~live & ~(known & dead))
        self.contents: U64 = np.unique(holders[live])

    def _is_same(self, holder_rows: Array) -> Array:
        """Which have size and digest of their content, by rows of metas."""
        metas, rows = self._facts.metas, self._meta_rows
        if not len(metas):
            return np.zeros(len(rows), bool)
        digests, sizes = metas.array("digest"), metas.array("size")
        same = (digests[rows] == digests[holder_rows]).all(axis=1)
        return np.asarray(same & (sizes[rows] == sizes[holder_rows]))

    def settle(self) -> I64:
        """Put them into the index, which has their contents. Returns rows of attributes."""
        aliases = self._facts.aliases
        for row in self.dead.tolist():
            number, segment = int(aliases.array("generation")[row]), self._segment(row)
            self._index.space.segments[segment].remember_note(Alias, number)
            names = ("stamp", "home")
            drop = self._drop_rows[row]
            stamp, home = (int(self._facts.drops.array(name)[drop]) for name in names)
            self._index.load_grave(number, Grave(stamp, (segment,)), home)
        numbers, contents, homes = (
            aliases.array(name)[self.live] for name in ("generation", "holder", "home")
        )
        in_segment = (homes >> np.uint64(HOME_SHIFT)).astype(np.intp)
        order = np.argsort(in_segment, kind="stable")
        for start, end in zip(*runs(in_segment[order]), strict=True):
            at = int(in_segment[order[start]])
            self._index.space.segments[at].remember_notes(Alias, numbers[order[start:end]])
        self._index.load_aliases(numbers, contents, homes, self._parts[self.live])
        self._settle_attributes(numbers)
        return self._meta_rows[self.live]

    def _segment(self, row: int) -> int:
        return int(self._facts.aliases.array("home")[row]) >> HOME_SHIFT

    def _settle_attributes(self, numbers: U64) -> None:
        metas, rows = self._facts.metas, self._meta_rows[self.live]
        if not len(rows):
            return
        home = metas.array("home")[rows]
        noted = (home != np.uint64(IN_DATA)) & (home != np.uint64(NOWHERE))
        for number, where in zip(numbers[noted].tolist(), home[noted].tolist(), strict=True):
            self._index.load_noted(number, where)
        # The newest attributes are in a record that nothing else is needed of.
        said = self._facts.aliases.array("meta_stamp")[self.live]
        lost = ~noted & (said < metas.array("stamp")[rows])
        columns = block_columns(metas.take(rows[lost]))
        for row in range(len(columns)):
            self._index.load_loose(columns.meta(row))


def _taken(column: Array, rows: Array) -> Array:
    """Values of these rows; of an empty column zeros."""
    return column[rows] if len(column) else np.zeros(len(rows), column.dtype)


class SharedBlocks:
    """`generations`: those that this is about, in order: of the given aliases, and what they refer
    to. No other has to do with them."""

    def __init__(self, facts: Facts, index: ColdIndex, rows: I64) -> None:
        self._facts = facts
        self._index = index
        self._aliases = facts.aliases.take(rows)
        numbers = [self._aliases.array("generation"), self._aliases.array("holder")]
        self.generations: U64 = np.unique(np.concatenate(numbers))
        self._found: dict[int, _Found] = {}

    def settle(self, incomplete: list[int]) -> I64:
        """Put them into the index. Returns rows of attributes of what is live; what is not, though
        nobody dropped it, is added to `incomplete`."""
        if not len(self.generations):
            return np.zeros(0, np.int64)
        self._find()
        for found in self._found.values():
            self._tile(found)
        live = [number for number, found in self._found.items() if self._choose(found)]
        for number in live:
            self._add_content(self._found[number], number)
        for number in live:
            self._add_alias(self._found[number], number)
        for number in live:
            self._index.add_holders(number, self._found[number].holders)
            self._settle_attributes(self._found[number], number)
        for number in self._found.keys() - set(live):
            self._settle_dead(self._found[number], number, incomplete)
        rows = [self._found[number].row for number in live]
        return np.array([row for row in rows if row is not None], np.int64)

    # -- what there is

    def _find(self) -> None:
        self._found = {number: _Found() for number in self.generations.tolist()}
        metas, drops = self._facts.metas, self._facts.drops
        rows, known = Lookup(metas.array("generation")).rows(self.generations)
        self._fill("row", rows, known)
        rows, known = Lookup(drops.array("number")).rows(self.generations)
        for name, column in (("dropped_at", "stamp"), ("drop_home", "home")):
            if known.any():
                self._fill(name, drops.array(column)[rows], known)
        self._find_records()
        self._find_aliases()

    def _fill(self, name: str, values: Array, known: Array) -> None:
        numbers = self.generations[known].tolist()
        for number, value in zip(numbers, values[known].tolist(), strict=True):
            setattr(self._found[number], name, value)

    def _find_records(self) -> None:
        parts = self._facts.parts
        numbers = parts.array("generation")
        rows = np.flatnonzero(is_in(numbers, self.generations))
        columns = [parts.array(name)[rows].tolist() for name in _PART]
        for number, *values in zip(numbers[rows].tolist(), *columns, strict=True):
            self._found[number].parts.append(FoundPart(*values))

    def _find_aliases(self) -> None:
        aliases = self._aliases
        names = ("generation", "stamp", "meta_stamp", "holder", "home")
        columns = [aliases.array(name).tolist() for name in names]
        for number, *values in zip(*columns, strict=True):
            alias = _FoundAlias(*values)
            self._found[number].aliases.append(alias)
            segment = self._index.space.segments[alias.home >> HOME_SHIFT]
            segment.remember_note(Alias, number)

    # -- what counts

    def _tile(self, found: _Found) -> None:
        dropped_at = found.dropped_at or UNNAMED
        if found.row is not None and found.parts:
            size = int(self._facts.metas.array("size")[found.row])
            own = [part for part in found.parts if part.stamp > dropped_at]
            found.own = newest_whole(own, size)
            found.content = found.own or newest_whole(found.parts, size)
        later = [each for each in found.aliases if each.stamp > dropped_at]
        found.alias = max(later, default=None)

    def _choose(self, found: _Found) -> bool:
        """Whether the block is live; then it has either `own` or `alias`, whichever is newer."""
        if found.alias is not None and not self._is_good(found, found.alias.holder):
            found.alias = None
        if found.alias is None or found.own is None:
            return found.alias is not None or found.own is not None
        if found.alias.stamp > max(part.stamp for part in found.own):
            found.own = None
        else:
            found.alias = None
        return True

    def _is_good(self, found: _Found, holder: int) -> bool:
        """Whether the content that it refers to is there, and is its own by size and digest."""
        other = self._found[holder]
        if other.content is None or other.row is None or found.row is None:
            return False
        size, digest = (self._facts.metas.array(name) for name in ("size", "digest"))
        same_size = size[found.row] == size[other.row]
        return bool(same_size and (digest[found.row] == digest[other.row]).all())

    # -- into the index

    def _add_content(self, found: _Found, number: int) -> None:
        if found.own is not None:
            self._index.add_block(number, tuple(part.part for part in found.own))

    def _add_alias(self, found: _Found, number: int) -> None:
        if found.alias is None:
            return
        holder = found.alias.holder
        content = self._found[holder].content
        assert content is not None
        if not self._index.own_parts(holder):
            self._index.add_content(holder, tuple(part.part for part in content))
        self._index.add_alias(number, holder, found.alias.home)

    def _settle_attributes(self, found: _Found, number: int) -> None:
        assert found.row is not None
        metas = self._facts.metas
        home, stamp = (int(metas.array(name)[found.row]) for name in ("home", "stamp"))
        written = [found.alias.meta_stamp] if found.alias is not None else []
        written += [part.meta_stamp for part in found.own or ()]
        if home not in (IN_DATA, NOWHERE):
            self._index.load_noted(number, home)
        elif all(each < stamp for each in written):
            # They are in a record that nothing else is needed of.
            rows = np.array([found.row], np.intp)
            self._index.load_loose(block_columns(metas.take(rows)).meta(0))

    def _settle_dead(self, found: _Found, number: int, incomplete: list[int]) -> None:
        later, holders = found.later, found.holders
        if later:
            if found.dropped_at is not None and found.drop_home != NOWHERE:
                # That Drop is not needed only when the new one is written.
                segment = self._index.space.segments[found.drop_home >> HOME_SHIFT]
                segment.remember_note(Drop, number)
            self._index.bury_remains(number, max(later), holders)
            incomplete.append(number)
        elif found.dropped_at is not None and holders:
            grave = Grave(found.dropped_at, tuple(holders))
            self._index.load_grave(number, grave, found.drop_home)
