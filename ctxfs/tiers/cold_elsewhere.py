"""What the devices of a tier say, at a start, of blocks and directories of one another."""

from collections.abc import Callable

from ctxfs.core.meta import DirectoryMeta, Entry, Put, RemoveDirectory
from ctxfs.ondisk.columnar import Table
from ctxfs.ondisk.facts import NOWHERE, Facts
from ctxfs.tiers.cold_errands import Done, FoundErrand, find_errands, run_errands
from ctxfs.tiers.cold_index import ColdIndex


class Elsewhere:
    """`add` each device that was read, then `settle`."""

    def __init__(self) -> None:
        self._errands: list[tuple[ColdIndex, list[FoundErrand]]] = []
        self._removals: list[tuple[ColdIndex, dict[int, int]]] = []  # inode to home

    def add(self, index: ColdIndex, facts: Facts, live: Table) -> None:
        """All facts of a device, on which these blocks are live."""
        self._errands.append((index, find_errands(facts, live)))
        removes = facts.removes
        homes = zip(removes.array("number").tolist(), removes.array("home").tolist(), strict=True)
        self._removals.append((index, dict(homes)))

    def settle(
        self,
        metas: Table,
        directories: dict[int, DirectoryMeta],
        note: Callable[[Entry], None],
        drop: Callable[[int, int], None],
        *,
        hold: bool,
    ) -> Table:
        """The live blocks as all devices together have them; takes what is gone from `directories`.

        What that changes is noted on the device that did not know it. Until that is on the medium,
        and as long as a device is missing (`hold`), what is said elsewhere stays needed.
        """
        done = Done()
        metas = run_errands(metas, [each for _, found in self._errands for each in found], done)
        for generation, stamp in done.gone:
            drop(generation, stamp)
        for meta in done.changed:
            note(Put(meta))
        removed = {inode for _, homes in self._removals for inode in homes} & directories.keys()
        for inode in removed:
            del directories[inode]
            note(RemoveDirectory(inode, 0))
        told = {meta.generation for meta in done.changed} | {number for number, _ in done.gone}
        for index, found in self._errands:
            for each in found:
                if hold or each.meta.generation in told:
                    index.load_errand(each.meta, each.home)
        for index, homes in self._removals:
            for inode, home in homes.items():
                if home != NOWHERE and (hold or inode in removed):
                    index.load_removal(inode, home)
        return metas
