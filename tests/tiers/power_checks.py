"""The power fails, comes back, and the tier is compared with what it had promised."""

import random
from collections.abc import Iterable

import xxhash

from ctxfs.core.meta import BlockMeta, DirectoryMeta
from ctxfs.tiers.cold import Recovered
from tests.tiers.power_life import Life, content
from tests.tiers.power_load import Load
from tests.tiers.recording import SECTOR, Cut, Way, random_cut

MOVES_AFTERWARDS = 6


async def start_after(life: Life, cut: Cut, dice: random.Random, *, damaged: bool = False) -> Life:
    """Recover from a cut, and check what is found against what `life` promised.

    `damaged`: it began on a device with changed bits, which may still be counted.
    """
    following = life.after(cut, dice)
    recovered = await following.begin()
    await check_found(following, recovered, life, cut)
    assert damaged or recovered.corrupt == 0, "a power cut alone damages nothing"
    return following


async def check_found(following: Life, recovered: Recovered, life: Life, cut: Cut) -> None:
    """Every block that was to be kept, nothing that was to be gone, and no wrong byte."""
    life.blocks.check(recovered.blocks, cut.at)
    life.directories.check(by_inode(recovered.directories), cut.at)
    for meta in recovered.blocks.values():
        assert following.tier.holds(meta.generation)
        assert recovered.highest_number >= meta.generation
        assert recovered.highest_stamp >= meta.stamp
        await check_content(following, meta)


async def check_content(life: Life, meta: BlockMeta) -> None:
    found = await life.read(meta)
    assert xxhash.xxh3_128_digest(found) == meta.digest, f"{meta} has other bytes"
    assert found == content(meta)


def by_inode(directories: Iterable[DirectoryMeta]) -> dict[int, DirectoryMeta]:
    return {directory.inode: directory for directory in directories}


async def check_cut(life: Life, cut: Cut) -> None:
    """All that must hold after this cut, however it goes on from there."""
    dice = random.Random(cut.seed)
    first = await start_after(life, cut, dice)
    await check_second_recovery(life, cut, first, dice)
    await check_interrupted_recovery(life, cut, first, dice)
    await check_work_goes_on(first, dice)


async def check_second_recovery(life: Life, cut: Cut, first: Life, dice: random.Random) -> None:
    """The power fails once more as soon as all is found: then all of it is found again."""
    again = Cut(first.recovered_at, dice.choice(list(Way)), SECTOR, cut.seed)
    second = first.after(again, dice)
    recovered = await second.begin()
    assert recovered.corrupt == 0, "a power cut alone damages nothing"
    assert recovered.blocks == first.recovered.blocks
    assert by_inode(recovered.directories) == by_inode(first.recovered.directories)
    await check_found(second, recovered, life, cut)


async def check_interrupted_recovery(
    life: Life, cut: Cut, first: Life, dice: random.Random
) -> None:
    """The power fails while it is being recovered: what was promised holds as before."""
    between = random_cut(dice, first.recovered_at)
    second = first.after(between, dice)
    await check_found(second, await second.begin(), life, cut)


async def check_work_goes_on(first: Life, dice: random.Random) -> None:
    """What is put and promised from now on survives the next cut."""
    await Load(first, dice).run(MOVES_AFTERWARDS)
    cut = random_cut(dice, first.trace.now, first.recovered_at)
    await start_after(first, cut, dice)
