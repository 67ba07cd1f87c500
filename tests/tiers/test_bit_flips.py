"""Bits change anywhere on a cold device: it starts, serves no wrong byte, and counts what it lost.

CTXFS_POWER_FLIPS says how many devices to damage. A test that fails names its seeds:
CTXFS_FLIP_SEED=LOAD:FLIP does that again.
"""

import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import pytest
import xxhash

from ctxfs.errors import ConfigError
from ctxfs.ondisk.facts import Facts
from ctxfs.ondisk.superblock import SUPERBLOCK_OFFSETS
from ctxfs.tiers import cold_facts
from tests.tiers.power_checks import MOVES_AFTERWARDS, by_inode, start_after
from tests.tiers.power_life import Life, blank, content, run_seeded
from tests.tiers.power_load import Load
from tests.tiers.recording import SECTOR, Cut, Way, random_cut

FLIPS = int(os.environ.get("CTXFS_POWER_FLIPS", "100"))
FLIPS_PER_LOAD = 50
ASKED_LOAD, _, ASKED_FLIP = os.environ.get("CTXFS_FLIP_SEED", "").partition(":")
LOADS = [int(ASKED_LOAD)] if ASKED_LOAD else range(-(-FLIPS // FLIPS_PER_LOAD))


async def _synced_life(seed: int, *, clean: bool) -> Life:
    dice = random.Random(seed)
    life = Life([blank(dice.randrange(8, 13))], dice)
    await life.begin()
    await Load(life, dice).run(60)
    await life.sync()
    if clean:
        await life.tier.close()
    return life


def _flip(image: bytearray, life: Life, dice: random.Random) -> None:
    """Some bits of one place: rather where a write began, for there the headers are."""
    written = [write.offset for write in life.trace.writes]
    start = dice.choice(
        (
            dice.choice(written),
            dice.choice(written) + SECTOR * dice.randrange(8),
            dice.choice(SUPERBLOCK_OFFSETS),
            dice.randrange(0, len(image), SECTOR),
        )
    )
    length = dice.choice((128, SECTOR))
    for _ in range(dice.choice((1, 1, 2, 20))):
        at = min(start + dice.randrange(length), len(image) - 1)
        image[at] ^= 1 << dice.randrange(8)


async def _begin(damaged: Life) -> bool:
    """False: it is refused, by the error that the documentation names, and left as it was."""
    before = bytes(damaged.engines[0].image)
    try:
        await damaged.begin()
    except ConfigError as error:
        refusal = str(error)
    else:
        return True
    assert "both superblocks are damaged" in refusal
    assert damaged.engines[0].image == before
    return False


async def _drop_wrong(damaged: Life, life: Life) -> int:
    """As the store does with what does not match its digest; returns how many."""
    wrong = 0
    for generation, meta in damaged.recovered.blocks.items():
        assert meta in life.blocks.ever(generation), "these attributes were made up"
        found = await damaged.read(meta)
        if xxhash.xxh3_128_digest(found) != meta.digest:
            wrong += 1
            damaged.drop(generation)
        else:
            assert found == content(meta)
    return wrong


async def _check_flipped(life: Life, seed: int) -> None:
    """What is found is as it once was; what is not, is counted; and the tier goes on working."""
    dice = random.Random(seed)
    damaged = life.after(Cut(life.trace.now, Way.SUBMITTED), dice)
    for _ in range(dice.choice((1, 1, 3))):
        _flip(damaged.trace.bases[0], life, dice)
    damaged.engines[0].image[:] = damaged.trace.bases[0]
    if not await _begin(damaged):
        return
    recovered = damaged.recovered
    wrong = await _drop_wrong(damaged, life)
    for inode, directory in by_inode(recovered.directories).items():
        assert directory in life.directories.ever(inode)
    if not life.blocks.kept(life.trace.now) <= set(damaged.live):
        assert recovered.corrupt + recovered.torn + wrong > 0, "what is lost is not counted"
    await damaged.sync()
    synced_at = damaged.trace.now
    await Load(damaged, dice).run(MOVES_AFTERWARDS)
    cut = random_cut(dice, damaged.trace.now, synced_at)
    await start_after(damaged, cut, dice, damaged=True)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("seed", LOADS)
def test_flipped_bits_never_give_a_wrong_byte_and_are_counted(seed: int, clean: bool) -> None:
    life = run_seeded(seed, partial(_synced_life, seed, clean=clean))
    for number in [int(ASKED_FLIP)] if ASKED_FLIP else range(FLIPS_PER_LOAD):
        call: Callable[[], Awaitable[None]] = partial(_check_flipped, life, number)
        try:
            run_seeded(number, call)
        except BaseException as error:
            error.add_note(f"CTXFS_FLIP_SEED={seed}:{number} does that again")
            raise


def test_seed_leads_to_the_same_writes_however_long_threads_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def writes() -> list[tuple[int, int]]:
        life = run_seeded(0, partial(_synced_life, 0, clean=False))
        return [(write.submitted, write.offset) for write in life.trace.writes]

    merge = cold_facts.merge

    def slow_merge(several: Sequence[Facts]) -> Facts:
        time.sleep(0.002)  # meanwhile a clock that jumps would, were this in a thread
        return merge(several)

    expected = writes()
    monkeypatch.setattr(cold_facts, "merge", slow_merge)
    assert writes() == expected
