"""What the records of a cold device add up to: pure, in whatever order they were found."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ctxfs.core.columns import U64
from ctxfs.core.meta import BlockMeta, DirectoryMeta, Drop, MakeDirectory, RemoveDirectory
from ctxfs.ondisk.columnar import Array, Table
from ctxfs.ondisk.facts import (
    HOME_SHIFT,
    IN_DATA,
    NOWHERE,
    Facts,
    block_columns,
    directory_of,
)
from ctxfs.ondisk.record import UNNAMED
from ctxfs.tiers.cold_facts import is_in, runs
from ctxfs.tiers.cold_found import FoundPart, Lookup, newest_whole
from ctxfs.tiers.cold_index import ColdIndex, Grave
from ctxfs.tiers.cold_parts import part_segment, segments_of
from ctxfs.tiers.cold_shared import PlainAliases, SharedBlocks, WholeRecords


@dataclass(frozen=True, slots=True)
class Contents:
    """What is live on one device, and the generations of which only pieces are left."""

    metas: Table  # rows of facts.METAS
    directories: dict[int, DirectoryMeta]
    incomplete: list[int]


class _Blocks:
    """The data records of one device, by generation, with what is said of each."""

    def __init__(self, facts: Facts) -> None:
        parts, self.metas, self.drops = facts.parts, facts.metas, facts.drops
        generations = parts.array("generation")
        self.order = np.argsort(generations, kind="stable")
        in_order = generations[self.order]
        self.starts, self.ends = runs(in_order)
        self.generations: U64 = in_order[self.starts]
        self.columns = {name: parts.array(name) for name in parts.columns}
        self.meta_row, self.known = Lookup(self.metas.array("generation")).rows(self.generations)
        drop_row, self.dropped = Lookup(self.drops.array("number")).rows(self.generations)
        # Of nothing there are no rows to look at.
        stamps, homes = self.drops.array("stamp"), self.drops.array("home")
        empty = np.zeros(len(self.generations), np.uint64)
        self.drop_stamp = stamps[drop_row] if len(stamps) else empty
        self.drop_home = homes[drop_row] if len(homes) else empty

    def of_first(self, name: str) -> Array:
        """A column of each generation's first part."""
        return self.columns[name][self.order[self.starts]]

    def whole(self, mask: npt.NDArray[np.bool]) -> WholeRecords:
        """Those that have one record each, which is all of the block."""
        return WholeRecords(
            self.generations[mask], self.of_first("part")[mask], self.meta_row[mask]
        )

    def of_meta(self, name: str) -> Array:
        """A column of each generation's attributes."""
        column = self.metas.array(name)
        return column[self.meta_row] if len(column) else np.zeros(len(self.generations), np.uint64)

    def meta_value(self, name: str, at: int) -> int:
        """The same of one generation."""
        return int(self.metas.array(name)[self.meta_row[at]])

    def parts(self, at: int) -> list[FoundPart]:
        """All parts of the generation that is `at` this place."""
        rows = self.order[self.starts[at] : self.ends[at]]
        names = ("offset", "length", "stamp", "meta_stamp", "part", "encoded_bytes")
        columns = [self.columns[name][rows].tolist() for name in names]
        return [FoundPart(*row) for row in zip(*columns, strict=True)]


def settle(facts: Facts, index: ColdIndex) -> Contents:
    """Fill `index`, which is empty, and say what is live."""
    _name_generations(facts.parts, index)
    blocks = _Blocks(facts)
    single = blocks.ends - blocks.starts == 1
    # A record without a stamp names nothing: it is for aliases, if there are any.
    dropped_at = np.where(blocks.dropped, blocks.drop_stamp, np.uint64(UNNAMED))
    later = blocks.of_first("stamp") > dropped_at
    whole = blocks.of_first("offset") == 0
    encoded = blocks.of_first("encoded_bytes")
    whole &= blocks.of_first("length") == np.where(encoded, encoded, blocks.of_meta("size"))
    plain = PlainAliases(facts, index, blocks.whole(single & blocks.known & whole))
    shared = SharedBlocks(facts, index, plain.others)
    alone = ~is_in(blocks.generations, shared.generations)
    easy = alone & single & blocks.known & later & whole
    dead = alone & single & ~later
    needed = dead & is_in(blocks.generations, plain.contents)
    index.load_contents(blocks.generations[needed], blocks.of_first("part")[needed])
    _settle_whole(blocks, np.flatnonzero(easy), index)
    _settle_dead(blocks, np.flatnonzero(dead & blocks.dropped), index)
    incomplete: list[int] = []
    live = [blocks.meta_row[easy], plain.settle(), shared.settle(incomplete)]
    for at in np.flatnonzero(alone & blocks.known & ~easy & ~dead).tolist():
        row = int(blocks.meta_row[at])
        if _settle_block(blocks, at, index, incomplete):
            live.append(np.array([row], np.intp))
    rows = np.sort(np.concatenate(live))
    contents = Contents(blocks.metas.take(rows), {}, incomplete)
    _settle_directories(facts, index, contents.directories)
    return contents


def _name_generations(parts: Table, index: ColdIndex) -> None:
    """Tell each segment what was written to it, dead or alive."""
    segments = segments_of(parts.array("part"))
    order = np.argsort(segments, kind="stable")
    in_order = segments[order]
    generations = parts.array("generation")[order]
    for start, end in zip(*runs(in_order), strict=True):
        segment = index.space.segments[int(in_order[start])]
        segment.generations.frombytes(generations[start:end].tobytes())


def _settle_whole(blocks: _Blocks, at: npt.NDArray[np.intp], index: ColdIndex) -> None:
    """Blocks of one record, which is live."""
    index.load_blocks(blocks.generations[at], blocks.of_first("part")[at])
    home = blocks.of_meta("home")[at]
    noted = (home != np.uint64(IN_DATA)) & (home != np.uint64(NOWHERE))
    noted_at = at[noted]
    generations = blocks.generations[noted_at].tolist()
    for generation, where in zip(generations, home[noted].tolist(), strict=True):
        index.load_noted(generation, where)
    # The newest attributes are in a record that nothing else is needed of.
    lost = ~noted & (blocks.of_first("meta_stamp")[at] < blocks.of_meta("stamp")[at])
    for meta in _metas(blocks, at[lost]):
        index.load_loose(meta)


def _settle_dead(blocks: _Blocks, at: npt.NDArray[np.intp], index: ColdIndex) -> None:
    """Blocks of one record, which is dropped."""
    segments = segments_of(blocks.of_first("part")[at])
    columns = (blocks.generations[at], blocks.drop_stamp[at], blocks.drop_home[at], segments)
    for generation, stamp, home, segment in zip(*(c.tolist() for c in columns), strict=True):
        index.load_grave(generation, Grave(stamp, (segment,)), home)


def _metas(blocks: _Blocks, at: npt.NDArray[np.intp]) -> list[BlockMeta]:
    columns = block_columns(blocks.metas.take(blocks.meta_row[at]))
    return [columns.meta(row) for row in range(len(columns))]


def _settle_block(blocks: _Blocks, at: int, index: ColdIndex, incomplete: list[int]) -> bool:
    """A block of several records, or of which something is missing. Whether it is live."""
    generation = int(blocks.generations[at])
    parts = blocks.parts(at)
    dropped_at = int(blocks.drop_stamp[at]) if blocks.dropped[at] else UNNAMED
    drop_home = int(blocks.drop_home[at])
    later = [part for part in parts if part.stamp > dropped_at]
    holders = {part_segment(part.part) for part in parts}
    tiling = newest_whole(later, blocks.meta_value("size", at))
    if tiling is not None:
        index.add_block(generation, tuple(part.part for part in tiling))
        index.add_holders(generation, holders)
        home = blocks.meta_value("home", at)
        stamp = blocks.meta_value("stamp", at)
        if home not in (IN_DATA, NOWHERE):
            index.load_noted(generation, home)
        elif all(part.meta_stamp < stamp for part in tiling):
            # They are in a record that nothing else is needed of.
            index.load_loose(_metas(blocks, np.array([at]))[0])
        return True
    if not later:
        if blocks.dropped[at]:
            index.load_grave(generation, Grave(dropped_at, tuple(holders)), drop_home)
        return False
    if blocks.dropped[at] and drop_home != NOWHERE:
        # That Drop is not needed only when the new one is written.
        index.space.segments[drop_home >> HOME_SHIFT].remember_note(Drop, generation)
    index.bury_remains(generation, max(part.stamp for part in parts), holders)
    incomplete.append(generation)
    return False


def _settle_directories(
    facts: Facts, index: ColdIndex, directories: dict[int, DirectoryMeta]
) -> None:
    makes, holders, removes = facts.makes, facts.holders, facts.removes
    removed = dict(
        zip(
            removes.array("number").tolist(),
            zip(removes.array("stamp").tolist(), removes.array("home").tolist(), strict=True),
            strict=True,
        )
    )
    held: dict[int, list[int]] = {}
    pairs = (holders.array("number").tolist(), holders.array("segment").tolist())
    for inode, segment in zip(*pairs, strict=True):
        held.setdefault(inode, []).append(segment)
    homes = makes.array("home").tolist()
    for row, inode in enumerate(makes.array("number").tolist()):
        directory = directory_of(makes, row)
        if directory is None or inode not in held:
            continue
        note = MakeDirectory(directory)
        for segment in held[inode]:
            index.add_holder(note, index.space.segments[segment])
        if homes[row] != NOWHERE:
            index.add_note(note, *index.at_home(homes[row]))
        if inode not in removed:
            directories[inode] = directory
            if homes[row] == NOWHERE:
                index.queue(note)
            continue
        stamp, home = removed[inode]
        if home != NOWHERE:
            index.add_note(RemoveDirectory(inode, stamp), *index.at_home(home))
        else:
            index.queue(RemoveDirectory(inode, stamp))
