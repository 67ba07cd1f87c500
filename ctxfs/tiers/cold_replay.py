"""What the records of a cold device add up to: pure, in whatever order they were found."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ctxfs.core.meta import (
    BlockMeta,
    DirectoryMeta,
    Drop,
    Entry,
    MakeDirectory,
    Put,
    RemoveDirectory,
)
from ctxfs.ondisk import ledger
from ctxfs.ondisk.record import RecordHeader, RecordKind
from ctxfs.tiers.cold_index import ColdIndex, Grave
from ctxfs.tiers.cold_parts import pack_part, part_segment
from ctxfs.tiers.cold_space import Segment

_IN_DATA: Final = -1  # the newest attributes are in a data record, not in a note's segment


@dataclass(frozen=True, slots=True)
class FoundPart:
    """One data record. `stamp` is the record's, `meta_stamp` that of the attributes in it.

    `encoded_bytes`: how long the block is as a codec made it, if this is a part of that.
    """

    offset: int
    length: int
    stamp: int
    meta_stamp: int
    part: int  # as ColdIndex keeps it
    encoded_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Contents:
    """What is live on one device, and the generations of which only pieces are left."""

    blocks: dict[int, BlockMeta]
    directories: dict[int, DirectoryMeta]
    incomplete: list[int]


def tile(parts: Sequence[FoundPart], size: int) -> tuple[FoundPart, ...] | None:
    """Parts that together are the `size` bytes of a block, without gap or overlap; newest first.

    None where there are none. A part may be there several times, also cut differently: each time
    it was carried over.
    """
    starting: dict[int, list[FoundPart]] = {}
    for part in sorted(parts, key=lambda part: part.stamp):
        starting.setdefault(part.offset, []).append(part)  # the newest is tried first: popped
    chosen: list[FoundPart] = []
    at = 0
    while True:
        choices = starting.get(at)
        if choices:
            chosen.append(choices.pop())
            at += chosen[-1].length
            if at == size:
                return tuple(chosen)
        elif chosen:  # nothing more goes on from here, whatever led here
            at = chosen.pop().offset
        else:
            return None


def _newest_whole(parts: Sequence[FoundPart], size: int) -> tuple[FoundPart, ...] | None:
    """Parts that together are a block of `size` bytes, or what a codec made of it.

    What was put, failed, and was put again may have been stored in another way then.
    """
    ways: dict[int, list[FoundPart]] = {}
    for part in sorted(parts, key=lambda part: part.stamp, reverse=True):
        ways.setdefault(part.encoded_bytes, []).append(part)
    for encoded_bytes, found in ways.items():
        tiling = tile(found, encoded_bytes or size)
        if tiling is not None:
            return tiling
    return None


class Replay:
    """Takes every good record of one device, then fills the index of it."""

    def __init__(self) -> None:
        self._parts: dict[int, list[FoundPart]] = {}
        self._metas: dict[int, tuple[BlockMeta, int]] = {}  # and the segment of the note
        self._drops: dict[int, tuple[int, int]] = {}  # stamp, segment
        self._directories: dict[int, tuple[DirectoryMeta, int]] = {}
        self._directory_holders: dict[int, set[int]] = {}
        self._removed: dict[int, tuple[int, int]] = {}  # stamp, segment
        self.highest_stamp = 0
        self.highest_number = 0  # generation or inode

    def add(
        self, segment: Segment, position: int, header: RecordHeader, entries: Sequence[Entry]
    ) -> None:
        """A good record, found at `position` of `segment`."""
        self.highest_stamp = max(self.highest_stamp, header.stamp)
        if header.kind is RecordKind.NOTE:
            for entry in entries:
                self._add_note(segment.index, entry)
            return
        generation = header.generation
        meta = next((e.meta for e in entries if isinstance(e, Put)), None)
        if meta is None or meta.generation != generation:
            return  # of a kind this version does not write
        segment.generations.append(generation)
        self._add_meta(meta, _IN_DATA)
        part = pack_part(
            segment.index,
            position,
            header.header_bytes,
            header.data_bytes,
            method=header.method,
        )
        self._parts.setdefault(generation, []).append(
            FoundPart(
                header.part_offset,
                header.part_length,
                header.stamp,
                meta.stamp,
                part,
                header.encoded_bytes,
            )
        )

    def _add_meta(self, meta: BlockMeta, segment: int) -> None:
        self._see(meta.generation, meta.stamp)
        known = self._metas.get(meta.generation)
        newer = known is None or meta.stamp > known[0].stamp
        if newer or (known and meta.stamp == known[0].stamp and segment == _IN_DATA):
            self._metas[meta.generation] = meta, segment

    def _add_note(self, segment: int, entry: Entry) -> None:
        match entry:
            case Put(meta):
                self._add_meta(meta, segment)
            case Drop(generation, stamp):
                self._see(generation, stamp)
                self._drops[generation] = max(
                    self._drops.get(generation, (stamp, segment)), (stamp, segment)
                )
            case MakeDirectory(directory):
                self._see(directory.inode, directory.stamp)
                self._directory_holders.setdefault(directory.inode, set()).add(segment)
                known = self._directories.get(directory.inode)
                if known is None or directory.stamp >= known[0].stamp:
                    self._directories[directory.inode] = directory, segment
            case RemoveDirectory(inode, stamp):
                self._see(inode, stamp)
                self._removed[inode] = stamp, segment

    def _see(self, number: int, stamp: int) -> None:
        self.highest_number = max(self.highest_number, number)
        self.highest_stamp = max(self.highest_stamp, stamp)

    def settle(self, index: ColdIndex) -> Contents:
        """Fill `index`, which is empty, and say what is live."""
        contents = Contents({}, {}, [])
        for generation, parts in self._parts.items():
            self._settle_block(generation, parts, index, contents)
        for inode, (directory, segment) in self._directories.items():
            self._settle_directory(inode, directory, segment, index, contents)
        return contents

    def _settle_block(
        self, generation: int, parts: list[FoundPart], index: ColdIndex, contents: Contents
    ) -> None:
        meta, noted_in = self._metas[generation]
        dropped_at, drop_segment = self._drops.get(generation, (-1, 0))
        later = [part for part in parts if part.stamp > dropped_at]
        holders = {part_segment(part.part) for part in parts}
        tiling = _newest_whole(later, meta.size)
        if tiling is not None:
            index.add_block(generation, tuple(part.part for part in tiling))
            index.add_holders(generation, holders)
            if noted_in != _IN_DATA:
                _add_note(index, Put(meta), noted_in)
            elif all(part.meta_stamp < meta.stamp for part in tiling):
                index.queue(Put(meta))  # they are in a record that nothing else is needed of
            contents.blocks[generation] = meta
        elif not later:
            index.graves[generation] = Grave(dropped_at, tuple(holders))
            _add_note(index, Drop(generation, dropped_at), drop_segment)
        else:
            if dropped_at >= 0:  # that Drop is not needed only when the new one is written
                index.space.segments[drop_segment].remember_note(Drop, generation)
            index.bury_remains(generation, max(part.stamp for part in parts), holders)
            contents.incomplete.append(generation)

    def _settle_directory(
        self,
        inode: int,
        directory: DirectoryMeta,
        segment: int,
        index: ColdIndex,
        contents: Contents,
    ) -> None:
        for holder in self._directory_holders[inode]:
            index.add_holder(MakeDirectory(directory), index.space.segments[holder])
        _add_note(index, MakeDirectory(directory), segment)
        removed = self._removed.get(inode)
        if removed is None:
            contents.directories[inode] = directory
        else:
            _add_note(index, RemoveDirectory(inode, removed[0]), removed[1])


def _add_note(index: ColdIndex, entry: Entry, segment: int) -> None:
    index.add_note(entry, index.space.segments[segment], len(ledger.encode(entry)))
