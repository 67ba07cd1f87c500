"""What lies where on one cold device, and what is still needed of it: pure, no I/O.

There may be millions of blocks, so a place on the medium is one integer: a part (a data record, see
`cold_parts`) or a home (the segment, and the length of the newest note about something).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from ctxfs.core.columns import U64
from ctxfs.core.meta import Alias, BlockMeta, Drop, Entry, MakeDirectory, Put, RemoveDirectory
from ctxfs.core.numbermap import NumberMap
from ctxfs.ondisk.facts import HOME_SHIFT, NOWHERE
from ctxfs.tiers.cold_errands import gone_stamp_of
from ctxfs.tiers.cold_parts import (
    count_by_segment,
    data_bytes_of,
    part_data_bytes,
    part_method,
    part_position,
    part_record_bytes,
    part_segment,
)
from ctxfs.tiers.cold_sharing import Sharing
from ctxfs.tiers.cold_space import Segment, Space

_NO_HOME: Final = -1
_HOME_SHIFT: Final = HOME_SHIFT
_MANY: Final = 2**64 - 1  # no part
_ELSEWHERE: Final = -1  # no segment: a device that is lost
_LENGTH_MASK: Final = 0xFFFF_FFFF  # of a home


@dataclass(slots=True)
class Grave:
    """Something dropped, while segments still hold records that would bring it back.

    Its Drop (or RemoveDirectory) note is needed until none does.
    """

    stamp: int
    holders: tuple[int, ...]  # segments
    home: int = _NO_HOME  # of the note; none while it waits to be written

    @property
    def is_noted(self) -> bool:
        return self.home != _NO_HOME


@dataclass(slots=True)
class DirectoryHome:
    """A directory: where its newest note is, and which segments hold any."""

    home: int
    holders: set[int]


@dataclass(slots=True)
class Errand:
    """A note about a block that lies on another device. `held`: that one is lost, or was."""

    meta: BlockMeta  # as `cold_errands` has it
    held: bool
    home: int = _NO_HOME


class ColdIndex:
    """Every change here is mirrored in the live bytes of the segments. No call awaits."""

    def __init__(self, space: Space) -> None:
        self.space = space
        # The part of each content, by the generation that it was written for; of those that have
        # several, _MANY, and them in their order.
        self._blocks = NumberMap()
        self._many: dict[int, tuple[int, ...]] = {}
        self.sharing = Sharing()
        self.saved_bytes = 0  # of data that would be on the medium, were nothing shared
        # Blocks whose newest attributes are in a note, not in a data record.
        self._noted: dict[int, int] = {}
        # Those whose newest attributes a recovery found where nothing else is needed: the note
        # that waits has to come before that place is erased.
        self.loose: set[int] = set()
        self.graves: dict[int, Grave] = {}
        # Segments that hold data of a live block beside those its parts are in: it was carried
        # over, or written anew after a failure.
        self._older: dict[int, tuple[int, ...]] = {}
        self.directories: dict[int, DirectoryHome] = {}
        # Notes that wait to be written, the newest about each thing.
        self.pending: dict[tuple[type[Entry], int], Entry] = {}
        self.directory_graves: dict[int, Grave] = {}
        # By generation: notes that are kept here until the block's own device has what they say.
        self.errands: dict[int, Errand] = {}

    def __contains__(self, generation: int) -> bool:
        if generation in self._blocks:
            return generation not in self.sharing.unnamed or generation in self.sharing
        return generation in self.sharing

    def __len__(self) -> int:
        return len(self._blocks) - len(self.sharing.unnamed) + len(self.sharing)

    def contents(self) -> U64:
        """All that is here, by the generations that it was written for."""
        return self._blocks.key_array()

    def content(self, generation: int) -> int:
        """The generation that its records were written for, mostly itself."""
        shared = self.sharing.content_of(generation)
        return generation if shared is None else shared

    def parts(self, generation: int) -> tuple[int, ...]:
        """What the block is read from, in its order; empty where nothing of it is here."""
        return self.own_parts(self.content(generation))

    def own_parts(self, generation: int) -> tuple[int, ...]:
        """The records written for it: its content, be it gone itself and only others' now."""
        found = self._blocks.get(generation)
        if found is None:
            return ()
        return (found,) if found != _MANY else self._many[generation]

    def physical_bytes(self, generation: int) -> int:
        """What the block takes: of records that several blocks share, its share."""
        if generation not in self:
            return 0
        content = self.content(generation)
        length = sum(map(part_record_bytes, self.own_parts(content)))
        home = self.sharing.home(generation)
        note_bytes = 0 if home is None else home & _LENGTH_MASK
        return note_bytes + length // self.sharing.names(content)

    def _set_parts(self, generation: int, parts: tuple[int, ...]) -> None:
        if len(parts) == 1:
            self._blocks[generation] = parts[0]
            self._many.pop(generation, None)
        else:
            self._blocks[generation] = _MANY
            self._many[generation] = parts

    def encoded_bytes(self, generation: int) -> int:
        """How long what a codec made of it is, padded; 0 where the content is stored itself."""
        if not self.method(generation):
            return 0
        return sum(part_data_bytes(part) for part in self.parts(generation))

    def method(self, generation: int) -> int:
        """How a codec made what is stored; 0: the content itself, or the block is not here."""
        parts = self.parts(generation)
        return part_method(parts[0]) if parts else 0

    def add_block(self, generation: int, parts: tuple[int, ...]) -> None:
        """The block is written. A grave it has is none any more: this came after it."""
        former = self.own_parts(generation)  # of others alone, until now
        self._count_saved(generation, -1)
        for part in former:
            self.space.remove_live(part_segment(part), part_record_bytes(part))
        self._add_parts(generation, parts)
        self.sharing.unnamed.discard(generation)
        self._count_saved(generation, 1)
        self._rise(generation)
        if former:
            self.add_holders(generation, map(part_segment, former))

    def add_content(self, generation: int, parts: tuple[int, ...]) -> None:
        """What others refer to is written; the block that it was once is gone."""
        self._add_parts(generation, parts)
        self.sharing.unnamed.add(generation)
        self._count_saved(generation, 1)

    def _add_parts(self, generation: int, parts: tuple[int, ...]) -> None:
        self._set_parts(generation, parts)
        for part in parts:
            self.space.add_live(part_segment(part), part_record_bytes(part))

    def is_alias_of(self, generation: int, content: int) -> bool:
        return self.sharing.content_of(generation) == content

    def add_alias(self, generation: int, content: int, home: int) -> None:
        """A block that is here from now on, and whose content was: its note is at `home`."""
        self._count_saved(content, -1)
        self.sharing.add(generation, content, self._arrive(home))
        self._count_saved(content, 1)
        self._rise(generation)

    def _rise(self, generation: int) -> None:
        """It is here, though it was dropped before."""
        self.pending.pop((Drop, generation), None)
        self._end_errand_of_new(generation)
        grave = self.graves.pop(generation, None)
        if grave is not None:
            self._leave(grave.home)
            self.add_holders(generation, grave.holders)

    def _end_errand_of_new(self, generation: int) -> None:
        """What was said here of this block, before it came, is a note of it now, or is over."""
        errand = self.errands.pop(generation, None)
        if errand is None:
            return
        if gone_stamp_of(errand.meta):
            self._leave(errand.home)
            self.pending.pop((Put, generation), None)
        elif errand.home != _NO_HOME:
            self._noted[generation] = errand.home

    def claim(self, content: int) -> bool:
        """Keep a content until `disclaim`, whoever drops it. False where it is not here."""
        if content not in self._blocks:
            return False
        self._count_saved(content, -1)
        self.sharing.claim(content)
        self._count_saved(content, 1)
        return True

    def disclaim(self, content: int) -> None:
        """It may go, unless a block needs it."""
        self._count_saved(content, -1)
        self.sharing.disclaim(content)
        self._count_saved(content, 1)
        self._free_unneeded(content)

    def _count_saved(self, content: int, sign: int) -> None:
        """Count what sharing a content saves; before it changes with -1, and after it with 1."""
        more = self.sharing.count(content) - (content in self.sharing.unnamed)
        if more:
            self.saved_bytes += sign * more * sum(map(part_data_bytes, self.own_parts(content)))

    def _free_unneeded(self, content: int) -> None:
        """The room of a content that was others' alone is free when the last of them is gone."""
        if content not in self.sharing.unnamed or self.sharing.count(content):
            return
        self._count_saved(content, -1)
        self.sharing.unnamed.remove(content)
        held = [part_segment(part) for part in self.own_parts(content)]
        self._free(content)
        if content in self:  # by another's content, since
            self.add_holders(content, held)

    def _free(self, generation: int) -> None:
        parts = self.own_parts(generation)
        self._blocks.remove(generation)
        self._many.pop(generation, None)
        for part in parts:
            self.space.remove_live(part_segment(part), part_record_bytes(part))

    def load_blocks(self, generations: U64, parts: U64) -> None:
        """Many blocks of one part each, into an index that does not have them yet."""
        self._blocks.load(generations, parts)
        in_segment, lengths = count_by_segment(parts)
        for index, length in zip(in_segment.tolist(), lengths.tolist(), strict=True):
            self.space.add_live(index, length)

    def load_contents(self, generations: U64, parts: U64) -> None:
        """Many contents of one part each, whose own blocks are gone."""
        self.load_blocks(generations, parts)
        self.sharing.unnamed.update(generations.tolist())
        self.saved_bytes -= data_bytes_of(parts)

    def load_aliases(self, aliases: U64, contents: U64, homes: U64, parts: U64) -> None:
        """Many blocks whose contents are here, of one part each: `parts`."""
        self.sharing.load(aliases, contents, homes)
        self.saved_bytes += data_bytes_of(parts)
        in_segment = (homes >> np.uint64(_HOME_SHIFT)).astype(np.intp)
        lengths = np.bincount(in_segment, homes & np.uint64(_LENGTH_MASK)).astype(np.int64)
        for index in np.flatnonzero(lengths).tolist():
            self.space.add_live(index, int(lengths[index]))

    def load_noted(self, generation: int, home: int) -> None:
        """The newest attributes of this block are in a note."""
        self.space.segments[home >> _HOME_SHIFT].remember_note(Put, generation)
        self._noted[generation] = self._arrive(home)

    def load_loose(self, meta: BlockMeta) -> None:
        """The newest attributes of this block are in a record that nothing else is needed of."""
        self.loose.add(meta.generation)
        self.queue(Put(meta))

    def load_grave(self, generation: int, grave: Grave, home: int) -> None:
        """A block that was dropped; its Drop is at `home`, or is to be written again."""
        self.graves[generation] = grave
        if home == NOWHERE:
            self.pending[Drop, generation] = Drop(generation, grave.stamp)
        else:
            self.space.segments[home >> _HOME_SHIFT].remember_note(Drop, generation)
            grave.home = self._arrive(home)

    def at_home(self, home: int) -> tuple[Segment, int]:
        """The segment of a note, and the note's length."""
        return self.space.segments[home >> _HOME_SHIFT], home & 0xFFFF_FFFF

    def add_holders(self, generation: int, segments: Iterable[int]) -> None:
        """These hold records too that a live block, or one that was dropped, could come from."""
        grave = self.graves.get(generation)
        if grave is not None:
            grave.holders = tuple({*grave.holders, *segments})
            return
        held = {part_segment(part) for part in self.own_parts(generation)}
        more = (set(segments) | set(self._older.pop(generation, ()))) - held
        if more:
            self._older[generation] = tuple(more)

    def replace_part(self, generation: int, old: int, new: tuple[int, ...]) -> bool:
        """A part was carried over; False where the content is not, or not there, any more."""
        parts = self.own_parts(generation)
        if old not in parts:
            return False
        at = parts.index(old)
        parts = parts[:at] + new + parts[at + 1 :]
        self._set_parts(generation, parts)
        self.space.remove_live(part_segment(old), part_record_bytes(old))
        for part in new:
            self.space.add_live(part_segment(part), part_record_bytes(part))
        if generation not in self.sharing.unnamed:
            # What was carried has the newest attributes in it: the note, if any, is not needed.
            self.loose.discard(generation)
            self._leave(self._noted.pop(generation, _NO_HOME))
        self.add_holders(generation, [part_segment(old)])
        return True

    def bury(self, generation: int, stamp: int) -> bool:
        """Drop a block: its room counts as free at once, unless others share its content. False
        where it is not here."""
        if generation not in self:
            return False
        self.loose.discard(generation)
        holders = {part_segment(part) for part in self.own_parts(generation)}
        holders.update(self._older.pop(generation, ()))
        if generation in self.sharing:
            holders.add(self._bury_alias(generation))
        elif self.sharing.count(generation):
            self._count_saved(generation, -1)
            self.sharing.unnamed.add(generation)
            self._count_saved(generation, 1)
        else:
            self._free(generation)
        self._leave(self._noted.pop(generation, _NO_HOME))
        self.graves[generation] = Grave(stamp, tuple(holders))
        self.pending.pop((Put, generation), None)
        self.pending[Drop, generation] = Drop(generation, stamp)
        return True

    def _bury_alias(self, generation: int) -> int:
        """The segment that its note is in."""
        content = self.content(generation)
        self._count_saved(content, -1)
        _, home = self.sharing.remove(generation)
        self._count_saved(content, 1)
        self._leave(home)
        self._free_unneeded(content)
        return home >> _HOME_SHIFT

    def bury_remains(self, generation: int, stamp: int, holders: Iterable[int]) -> None:
        """Records, up to `stamp`, of a block that is not here may lie in `holders`."""
        held = set(holders)
        grave = self.graves.get(generation)
        if grave is not None:
            held.update(grave.holders)
            grave.holders = tuple(held)
            if grave.stamp >= stamp:
                return
            self._leave(grave.home)
        if held:
            self.graves[generation] = Grave(stamp, tuple(held))
            self.pending[Drop, generation] = Drop(generation, stamp)

    # -- notes

    def queue(self, entry: Entry) -> None:
        """This is to be written with the next commit."""
        match entry:
            case Put(meta) | Alias(meta):
                self.pending[type(entry), meta.generation] = entry
            case Drop(generation):
                self.pending[Drop, generation] = entry
            case MakeDirectory(meta):
                self.pending[MakeDirectory, meta.inode] = entry
            case RemoveDirectory(inode):
                self.pending.pop((MakeDirectory, inode), None)
                self.pending[RemoveDirectory, inode] = entry

    def take_pending(self) -> list[Entry]:
        """What waits and still matters; nothing waits afterwards."""
        taken = [entry for entry in self.pending.values() if self.is_needed(entry)]
        self.pending.clear()
        return taken

    # -- errands

    def add_errand(self, meta: BlockMeta, *, held: bool = False) -> bool:
        """A note about a block that is not here is to be written here.

        False where it is here, or one is already. `held`: it stays until the next start.
        """
        generation = meta.generation
        if generation in self:
            return False
        errand = self.errands.get(generation)
        if errand is None:
            self.errands[generation] = Errand(meta, held)
            return True
        errand.held |= held
        if errand.meta.stamp < meta.stamp:
            errand.meta = meta
        return False

    def load_errand(self, meta: BlockMeta, home: int) -> None:
        """One that was found here, and is held."""
        self.space.segments[home >> _HOME_SHIFT].remember_note(Put, meta.generation)
        self.errands[meta.generation] = Errand(meta, True, self._arrive(home))

    def end_errand(self, generation: int) -> None:
        """Its block's own device has what it says; one that is held stays."""
        errand = self.errands.get(generation)
        if errand is not None and not errand.held:
            self._leave(errand.home)
            del self.errands[generation]

    def held_entries(self) -> list[Entry]:
        """All that is kept here for devices that are lost."""
        puts = [Put(errand.meta) for errand in self.errands.values() if errand.held]
        graves = self.directory_graves.items()
        removed = [inode for inode, grave in graves if _ELSEWHERE in grave.holders]
        return [*puts, *(RemoveDirectory(inode, 0) for inode in removed)]

    def hold_removal(self, inode: int) -> None:
        """The removal of this directory is to be kept here: a device that is lost may have it."""
        grave = self.directory_graves.get(inode)
        if grave is not None:
            grave.holders = (*grave.holders, _ELSEWHERE)
            return
        directory = self.directories.setdefault(inode, DirectoryHome(_NO_HOME, set()))
        directory.holders.add(_ELSEWHERE)

    def load_removal(self, inode: int, home: int) -> None:
        """One that was found here, and is held."""
        self.hold_removal(inode)
        if inode not in self.directory_graves:
            del self.directories[inode]
            self.space.segments[home >> _HOME_SHIFT].remember_note(RemoveDirectory, inode)
            self.directory_graves[inode] = Grave(0, (_ELSEWHERE,), self._arrive(home))

    def put_back(self, entries: Iterable[Entry]) -> None:
        """They could not be written, and wait again, but for what has a newer one waiting."""
        newer = self.pending
        self.pending = {}
        for entry in entries:
            if isinstance(entry, MakeDirectory) and (RemoveDirectory, entry.meta.inode) in newer:
                continue
            self.queue(entry)
        self.pending.update(newer)

    def is_needed(self, entry: Entry) -> bool:
        """Whether this, still to be written, says something about what is on the medium."""
        match entry:
            case Put(meta):
                return meta.generation in self or meta.generation in self.errands
            case Alias(meta):
                return meta.generation in self.sharing
            case Drop(generation):
                return generation in self.graves
            case MakeDirectory(meta):
                return meta.inode not in self.directory_graves
            case RemoveDirectory(inode):
                return inode in self.directories

    def add_note(self, entry: Entry, segment: Segment, length_bytes: int) -> None:
        """A note of this length was written to `segment`."""
        home = segment.index << _HOME_SHIFT | length_bytes
        match entry:
            case Put(meta):
                segment.remember_note(Put, meta.generation)
                self.loose.discard(meta.generation)
                if meta.generation in self:
                    self._leave(self._noted.get(meta.generation, _NO_HOME))
                    self._noted[meta.generation] = self._arrive(home)
                elif meta.generation in self.errands:
                    errand = self.errands[meta.generation]
                    self._leave(errand.home)
                    errand.home = self._arrive(home)
            case Alias(meta):
                self.loose.discard(meta.generation)
                segment.remember_note(Alias, meta.generation)
                self._move_alias(entry, home)
            case Drop(generation):
                segment.remember_note(Drop, generation)
                self._move_grave(self.graves.get(generation), home)
            case MakeDirectory(meta):
                segment.remember_note(MakeDirectory, meta.inode)
                self._move_directory(meta.inode, home, segment.index)
            case RemoveDirectory(inode):
                segment.remember_note(RemoveDirectory, inode)
                directory = self.directories.pop(inode, None)
                if directory is not None:
                    self._leave(directory.home)
                    self.directory_graves[inode] = Grave(0, tuple(directory.holders))
                self._move_grave(self.directory_graves.get(inode), home)

    def add_holder(self, entry: Entry, segment: Segment) -> None:
        """It is, or may be, on the medium, though it is not what counts."""
        if isinstance(entry, MakeDirectory):
            segment.remember_note(MakeDirectory, entry.meta.inode)
            directory = self.directories.setdefault(
                entry.meta.inode, DirectoryHome(_NO_HOME, set())
            )
            directory.holders.add(segment.index)
        elif isinstance(entry, Alias):
            segment.remember_note(Alias, entry.meta.generation)

    def _move_alias(self, entry: Alias, home: int) -> None:
        """Its note is at `home`, with the newest attributes in it; it may be new."""
        generation = entry.meta.generation
        former = self.sharing.home(generation)
        if generation not in self and self.sharing.coming.get(generation) == entry.holder:
            self.add_alias(generation, entry.holder, home)
        elif former is not None and self.is_alias_of(generation, entry.holder):
            self._leave(former)
            self._leave(self._noted.pop(generation, _NO_HOME))
            self.sharing.move(generation, self._arrive(home))
            self.add_holders(generation, [former >> _HOME_SHIFT])

    def _move_grave(self, grave: Grave | None, home: int) -> None:
        if grave is not None:
            self._leave(grave.home)
            grave.home = self._arrive(home)

    def _move_directory(self, inode: int, home: int, segment: int) -> None:
        directory = self.directories.get(inode)
        if directory is None:
            directory = self.directories[inode] = DirectoryHome(_NO_HOME, set())
        self._leave(directory.home)
        directory.home = self._arrive(home)
        directory.holders.add(segment)

    def _arrive(self, home: int) -> int:
        self.space.add_live(home >> _HOME_SHIFT, home & 0xFFFF_FFFF)
        return home

    def _leave(self, home: int) -> None:
        if home != _NO_HOME:
            self.space.remove_live(home >> _HOME_SHIFT, home & 0xFFFF_FFFF)

    # -- reclaiming

    def live_parts(self, segment: Segment) -> list[tuple[int, int]]:
        """Generation and part of every record in `segment` that is needed, in its order."""
        found = {
            (generation, part)
            for generation in set(segment.generations)
            for part in self.own_parts(generation)
            if part_segment(part) == segment.index
        }
        return sorted(found, key=lambda pair: part_position(pair[1]))

    def live_notes(self, segment: Segment) -> dict[type[Entry], list[int]]:
        """Kind, and generation or inode, of every note in `segment` that is needed elsewhere."""
        index = segment.index
        found: dict[type[Entry], list[int]] = {}
        for kind, numbers in segment.notes.items():
            found[kind] = [number for number in set(numbers) if self._is_home(kind, number, index)]
        return found

    def _is_home(self, kind: type[Entry], number: int, index: int) -> bool:
        if kind is Put:
            errand = self.errands.get(number)
            home = self._noted.get(number, _NO_HOME) if errand is None else errand.home
            return home >> _HOME_SHIFT == index
        if kind is Alias:
            noted = self.sharing.home(number)
            return noted is not None and noted >> _HOME_SHIFT == index
        if kind is MakeDirectory:
            directory = self.directories.get(number)
            return directory is not None and directory.home >> _HOME_SHIFT == index
        graves = self.graves if kind is Drop else self.directory_graves
        grave = graves.get(number)
        # With the segment itself goes the last record that the note speaks of.
        return (
            grave is not None and grave.home >> _HOME_SHIFT == index and grave.holders != (index,)
        )

    def forget_segment(self, segment: Segment) -> None:
        """Nothing that was in `segment` can come back: its header is zero on the medium."""
        index = segment.index
        for generation in {*segment.generations, *segment.notes.get(Alias, ())}:
            self._close_grave(self.graves, generation, index)
            older = self._older.get(generation)
            if older is not None and index in older:
                self._older[generation] = tuple(held for held in older if held != index)
                if not self._older[generation]:
                    del self._older[generation]
        for generation in set(segment.notes.get(Put, ())):
            if self._noted.get(generation, _NO_HOME) >> _HOME_SHIFT == index:
                self._leave(self._noted.pop(generation))
            errand = self.errands.get(generation)
            if errand is not None and errand.home >> _HOME_SHIFT == index:
                self._leave(self.errands.pop(generation).home)  # its block is gone
        for inode in set(segment.notes.get(MakeDirectory, ())):
            self._close_grave(self.directory_graves, inode, index)
            directory = self.directories.get(inode)
            if directory is not None:
                self._forget_directory(inode, directory, index)

    def _forget_directory(self, inode: int, directory: DirectoryHome, index: int) -> None:
        directory.holders.discard(index)
        if directory.home >> _HOME_SHIFT == index:
            self._leave(directory.home)
            directory.home = _NO_HOME
        if not directory.holders:
            del self.directories[inode]

    def _close_grave(self, graves: dict[int, Grave], number: int, index: int) -> None:
        grave = graves.get(number)
        if grave is None or index not in grave.holders:
            return
        grave.holders = tuple(held for held in grave.holders if held != index)
        if not grave.holders:
            self._leave(grave.home)
            del graves[number]
