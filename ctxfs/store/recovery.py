"""What a starting daemon believes: the cold tier's records, overlaid with the hot journal.

Where two records disagree the higher stamp is right. A hot file that no journal entry claims, or
whose size is not the recorded one, was not sealed: it is removed. Where the mount outlived the
daemon, what was being written, or was gone and open, comes back too (docs/direct.md).
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from ctxfs.core.block import Block, Directory, State, Writing
from ctxfs.core.columnops import join, rows_of, select, superseded
from ctxfs.core.columns import BlockColumns
from ctxfs.core.key import split_key
from ctxfs.core.meta import (
    NOT_REFUSED,
    Alias,
    BlockMeta,
    DirectoryMeta,
    Drop,
    JournalEntry,
    MakeDirectory,
    Put,
    RemoveDirectory,
    Transient,
    TransientFlag,
)
from ctxfs.core.times import NEVER
from ctxfs.errors import CtxfsError
from ctxfs.store.catalog import Catalog
from ctxfs.store.loading import load
from ctxfs.tiers.cold import Recovered
from ctxfs.tiers.hot import FoundFile

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Journalled:
    """The hot journal, folded."""

    blocks: dict[int, BlockMeta] = field(default_factory=dict)
    transients: dict[int, Transient] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)  # generation → stamp
    directories: dict[int, DirectoryMeta] = field(default_factory=dict)
    removed: dict[int, int] = field(default_factory=dict)  # inode → stamp
    highest_number: int = 0
    highest_stamp: int = 0


def fold(entries: Iterable[JournalEntry]) -> Journalled:
    """Fold journal entries in their order; the last word on each number holds."""
    state = Journalled()
    for entry in entries:
        match entry:
            case Put(meta):
                number, stamp = meta.generation, meta.stamp
                state.blocks[number] = meta
                state.dropped.pop(number, None)
                state.transients.pop(number, None)
            case Drop(number, stamp):
                state.blocks.pop(number, None)
                state.transients.pop(number, None)
                state.dropped[number] = stamp
            case Transient(meta):
                number, stamp = meta.generation, meta.stamp
                state.blocks.pop(number, None)
                state.transients[number] = entry
                if entry.flags & TransientFlag.GONE:
                    state.dropped[number] = stamp
            case MakeDirectory(directory):
                number, stamp = directory.inode, directory.stamp
                state.directories[number] = directory
            case RemoveDirectory(number, stamp):
                state.directories.pop(number, None)
                state.removed[number] = stamp
            case Alias():  # only the cold tier has any
                continue
        state.highest_number = max(state.highest_number, number)
        state.highest_stamp = max(state.highest_stamp, stamp)
    return state


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What was found, for the log."""

    blocks: int
    hot: int
    warm: int
    cold: int
    directories: int
    unsealed: int


def recover(
    catalog: Catalog, cold: Recovered | None, still_open: Collection[int] | None = None
) -> RecoveryReport:
    """Fill an empty catalog. Removes what was unsealed, and tells the cold tier what is gone.

    `still_open`: the mount outlived the daemon, and these generations are open in it; so what was
    being written goes on, and what is gone and open stays until it is closed.
    """
    journal = fold(catalog.hot.journal.load())
    highest_number, highest_stamp = journal.highest_number, journal.highest_stamp
    catalog.memory_outlived = highest_stamp > 0
    directories = {d.inode: d for d in cold.directories} if cold is not None else {}
    if cold is not None:
        highest_number = max(highest_number, cold.highest_number)
        highest_stamp = max(highest_stamp, cold.highest_stamp)
    catalog.next_generation = max(catalog.next_generation, highest_number + 1)
    catalog.next_stamp = highest_stamp + 1

    _overlay_directories(directories, journal)
    _make_directories(catalog, directories.values())
    found_files = list(catalog.hot.scan())
    files = {found.generation: found for found in found_files if not found.is_gone}
    gone = {found.generation: found for found in found_files if found.is_gone}
    warm = (
        {generation for generation, _ in catalog.warm.scan()} if catalog.warm is not None else set()
    )
    columns = cold.columns if cold is not None else BlockColumns.from_metas(())
    believed = _Believed(columns, journal)
    _overlay_blocks(catalog, believed, journal, files.keys() | warm)
    shadows = _take_shadows(catalog, believed, journal) if still_open is not None else {}
    unsealed = _add_blocks(catalog, believed, files)
    _drop_unclaimed(catalog, warm)
    if still_open is not None:
        transients = sorted(journal.transients.values(), key=lambda each: each.meta.stamp)
        for each in transients:
            if not each.flags & TransientFlag.GONE:
                _add_writing(catalog, each, files, shadows.get(each.meta.generation))
            elif each.meta.generation in still_open:
                # It may have died before it gave the file its other name.
                _add_gone(catalog, each, gone if each.meta.generation in gone else files)
    for found in (*files.values(), *gone.values()):
        catalog.hot.discard(found)
    for directory in list(catalog.names.by_inode.directories.values()):
        if not directory.stamp and directory.parent is not None:
            catalog.record_directory(directory)  # its inode is not to change again
    return RecoveryReport(
        blocks=catalog.block_count,
        hot=len(catalog.hot_order),
        warm=len(catalog.warm_order),
        cold=len(catalog.cold_order),
        directories=catalog.names.directory_count,
        unsealed=unsealed + len(files),
    )


def _drop_unclaimed(catalog: Catalog, warm: Iterable[int]) -> None:
    """Remove warm copies of blocks that are gone."""
    for generation in warm:
        block = catalog.names.by_inode.peek(generation)
        if catalog.warm is not None and not (isinstance(block, Block) and not block.is_gone):
            catalog.warm.drop(generation)


class _Believed:
    """Blocks as the cold tier has them, and what the journal makes of some of them."""

    def __init__(self, cold: BlockColumns, journal: Journalled) -> None:
        """Only what `journal` speaks of may be asked for, or changed."""
        self._cold = cold
        asked = {*journal.dropped, *journal.blocks}
        for each in journal.transients.values():
            asked.update((each.shadow, each.coming))
        self._rows = rows_of(self._cold, list(asked))
        self._is_kept = np.ones(len(self._cold), np.bool_)
        self._newer: dict[int, BlockMeta] = {}

    def get(self, generation: int) -> BlockMeta | None:
        """Return what is believed of a block."""
        if generation in self._newer or generation not in self._rows:
            return self._newer.get(generation)
        return self._cold.meta(self._rows[generation])

    def pop(self, generation: int) -> BlockMeta | None:
        """Believe that there is no such block; returns what was believed before."""
        meta = self.get(generation)
        self._newer.pop(generation, None)
        row = self._rows.pop(generation, None)
        if row is not None:
            self._is_kept[row] = False
        return meta

    def set(self, meta: BlockMeta) -> None:
        """Believe this."""
        self.pop(meta.generation)
        self._newer[meta.generation] = meta

    def settle(self) -> tuple[BlockColumns, int, list[BlockMeta]]:
        """Return the blocks; how many of them, the first ones, are the cold tier's, unchanged; and
        those whose key another block has, rightly, the oldest first.
        """
        columns = select(self._cold, self._is_kept)
        unchanged = len(columns)
        if not self._newer:  # the cold tier has settled this
            return columns, unchanged, []
        columns = join(columns, BlockColumns.from_metas(self._newer.values()))
        losers = superseded(columns, unchanged)
        is_kept = np.ones(len(columns), np.bool_)
        is_kept[losers] = False
        unchanged = int(is_kept[:unchanged].sum())
        return select(columns, is_kept), unchanged, [columns.meta(row) for row in losers]


def _overlay_directories(directories: dict[int, DirectoryMeta], journal: Journalled) -> None:
    for inode, meta in journal.directories.items():
        known = directories.get(inode)
        if known is None or known.stamp < meta.stamp:
            directories[inode] = meta
    for inode, stamp in journal.removed.items():
        known = directories.get(inode)
        if known is not None and known.stamp < stamp:
            del directories[inode]


def _make_directories(catalog: Catalog, metas: Iterable[DirectoryMeta]) -> None:
    # Of two with one key the later one is right, so the earlier comes first and is replaced.
    for meta in sorted(metas, key=lambda m: (m.key.count(b"/") if m.key else -1, m.stamp)):
        if not meta.key:
            catalog.names.root.apply(meta)
            continue
        try:
            _directory(catalog, split_key(meta.key), meta)
        except CtxfsError as error:
            log.warning("directory %r cannot be made again: %s", meta.key, error)


def _directory(catalog: Catalog, names: list[bytes], meta: DirectoryMeta | None) -> Directory:
    """Return the directory with this path, made with its parents where it is missing."""
    directory = catalog.names.root
    for depth, name in enumerate(names, 1):
        child = directory.entries.get(name)
        if not isinstance(child, Directory):
            last = depth == len(names)
            inode = meta.inode if last and meta is not None else catalog.new_generation()
            child = catalog.names.make_directory(directory, name, inode)
            child.mode, child.uid, child.gid = directory.mode, directory.uid, directory.gid
        directory = child
    if meta is not None:
        directory.apply(meta)
    return directory


def _overlay_blocks(
    catalog: Catalog, believed: _Believed, journal: Journalled, in_memory: Collection[int]
) -> None:
    """Merge the journal into what the cold tier knows."""
    for generation, stamp in journal.dropped.items():
        if believed.pop(generation) is not None and catalog.cold is not None:
            catalog.cold.drop(generation, max(stamp, 1))
    for generation, meta in journal.blocks.items():
        known = believed.get(generation)
        if known is None and generation not in in_memory:
            continue  # its copy is gone with the machine's memory
        if known is None or known.stamp < meta.stamp:
            believed.set(meta)
            if known is not None and catalog.cold is not None:
                if known.key != meta.key:
                    catalog.cold.leaves_name(generation, known.key)
                catalog.cold.note(Put(meta))


def _take_shadows(
    catalog: Catalog, believed: _Believed, journal: Journalled
) -> dict[int, BlockMeta]:
    """Take away what fsync wrote of blocks that are still being written; by block.

    Of two, the later one counts.
    """
    taken = {}
    for generation, transient in journal.transients.items():
        found = [believed.pop(each) for each in (transient.shadow, transient.coming)]
        shadows = sorted((each for each in found if each), key=operator.attrgetter("stamp"))
        gone = bool(transient.flags & TransientFlag.GONE)
        if shadows and not gone:
            taken[generation] = shadows.pop()
        for each in shadows:
            if catalog.cold is not None:
                catalog.cold.drop(each.generation, catalog.new_stamp())
    return taken


def _add_blocks(catalog: Catalog, believed: _Believed, files: dict[int, FoundFile]) -> int:
    """Make the blocks; returns how many were lost. Takes from `files` what is claimed."""
    columns, unchanged, losers = believed.settle()
    cold = catalog.cold
    is_cold = np.arange(len(columns)) < unchanged
    if cold is not None:
        is_cold[unchanged:] = [cold.holds(g) for g in columns.generation[unchanged:].tolist()]

    def number_of(path: bytes) -> int:
        directory = _directory(catalog, split_key(path) if path else [], None)
        return catalog.names.number_for(directory)

    lost = load(catalog, columns, is_cold, files, number_of)
    for loser in losers:
        _replaced(catalog, loser)
    return lost


def _replaced(catalog: Catalog, loser: BlockMeta) -> None:
    """Drop a block whose name another has; but not before that one is on the medium, too.

    It may be what fsync wrote of the other, and the daemon died before it had written more.
    """
    cold = catalog.cold
    if cold is not None and cold.holds(loser.generation):
        with contextlib.suppress(CtxfsError):
            winner = catalog.names.resolve(loser.key)
            if isinstance(winner, Block) and not catalog.is_cold(winner):
                catalog.set_shadow(winner, loser)
                return
    stamp = catalog.new_stamp()
    catalog.hot.record(Drop(loser.generation, stamp))
    if cold is not None:
        cold.drop(loser.generation, stamp)


def _add_writing(
    catalog: Catalog,
    found: Transient,
    files: dict[int, FoundFile],
    shadow: BlockMeta | None,
) -> None:
    """Bring back a block that is being written. Takes its file from `files`."""
    meta = found.meta
    file = files.get(meta.generation)
    if file is None:
        return
    block = _transient_block(catalog, found)
    names, directory = catalog.names, block.directory
    published = bool(found.flags & TransientFlag.PUBLISHED)
    old = names.find(directory, block.name)
    if published and isinstance(old, Directory):
        return
    if published and isinstance(old, Block) and old.stamp > block.stamp:
        return  # it was replaced just before the daemon died
    del files[meta.generation]
    block.state = State.WRITING
    block.size, block.hot_bytes = file.size, file.physical_bytes
    catalog.block_count += 1
    catalog.writing_count += 1
    if published:
        catalog.put_in_place(block)
    else:
        names.add_private(block)
    catalog.set_expiry(block, block.expires_ns)
    if shadow is not None:
        catalog.set_shadow(block, shadow)


def _add_gone(catalog: Catalog, found: Transient, files: dict[int, FoundFile]) -> None:
    """Bring back a block without a name, for those who have it open. Takes from `files`."""
    file = files.pop(found.meta.generation, None)
    if file is not None:
        catalog.hot.retire(file)
        block = _transient_block(catalog, found)
        block.state = State.GONE
        block.size = file.size
        block.expires_ns = NEVER
        catalog.names.table.hold(block)


def _transient_block(catalog: Catalog, found: Transient) -> Block:
    now = catalog.clock()
    names = split_key(found.meta.key)
    block = Block(found.meta.generation, _directory_or_ghost(catalog, names[:-1]), names[-1])
    block.apply(found.meta, now)
    block.digest = b""
    if found.owner:
        base = catalog.names.by_inode.get(found.base)
        block.writing = Writing(
            found.owner,
            now.boot_ns,
            base=base if isinstance(base, Block) else None,
            time_given=bool(found.flags & TransientFlag.TIME_GIVEN),
            opener=found.opener,
            seen=bool(found.flags & TransientFlag.SEEN),
            refused_at=None if found.refused_at == NOT_REFUSED else found.refused_at,
        )
    return block


def _directory_or_ghost(catalog: Catalog, names: list[bytes]) -> Directory:
    """Return the directory with this path; if it was removed, one that stands for it."""
    directory = catalog.names.root
    for name in names:
        child = directory.entries.get(name)
        if not isinstance(child, Directory):
            child = catalog.names.new_directory(catalog.new_generation(), directory, name)
            child.removed = True
        directory = child
    return directory
