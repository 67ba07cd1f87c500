"""The power fails at any moment of a random load; recovery shows all that was promised.

CTXFS_POWER_CUTS says how many cuts to try. A test that fails names the seeds of its load and of the
cut: CTXFS_POWER_SEED=LOAD tries all cuts of that load again, LOAD:CUT that one.
"""

import os
import random
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from tests.tiers.power_checks import check_cut, start_after
from tests.tiers.power_life import Life, blank, run_seeded
from tests.tiers.power_load import Load
from tests.tiers.recording import Cut, Way, random_cut

CUTS = int(os.environ.get("CTXFS_POWER_CUTS", "200"))
CUTS_PER_LOAD = 50
ASKED_LOAD, _, ASKED_CUT = os.environ.get("CTXFS_POWER_SEED", "").partition(":")
LOADS = [int(ASKED_LOAD)] if ASKED_LOAD else range(-(-CUTS // CUTS_PER_LOAD))


async def _live(seed: int, steps: int, failures: int = 2) -> Life:
    """A life under load; a tier of one to three devices, blank or with some lives behind it."""
    dice = random.Random(seed)
    images = [blank(dice.randrange(8, 13)) for _ in range(dice.choice((1, 1, 1, 2, 3)))]
    life = Life(images, dice)
    await life.begin()
    for _ in range(dice.randrange(3)):
        await Load(life, dice, failures=failures).run(steps)
        cut = random_cut(dice, life.trace.now, life.recovered_at)
        if dice.random() < 0.4:
            await life.tier.close()
            cut = Cut(life.trace.now, Way.SUBMITTED)
        life = await start_after(life, cut, dice)
    await Load(life, dice, failures=failures).run(steps)
    return life


def _try_cuts(
    seed: int, steps: int, choose: Callable[[Life], list[Cut]], failures: int = 2
) -> None:
    """Each cut in a loop of its own, so that it goes the same way when it is tried alone."""
    life = run_seeded(seed, partial(_live, seed, steps, failures))
    for number, cut in enumerate(choose(life)):
        if not ASKED_CUT or number == int(ASKED_CUT):
            call: Callable[[], Awaitable[None]] = partial(check_cut, life, cut)
            try:
                run_seeded(cut.seed, call)
            except BaseException as error:
                error.add_note(f"CTXFS_POWER_SEED={seed}:{number} does that again: {cut}")
                raise


@pytest.mark.parametrize("seed", LOADS)
def test_what_was_promised_is_there_after_a_cut_that_kept_any_part_of_unflushed_writes(
    seed: int,
) -> None:
    def choose(life: Life) -> list[Cut]:
        dice = random.Random(seed)
        return [random_cut(dice, life.trace.now) for _ in range(CUTS_PER_LOAD)]

    _try_cuts(seed, steps=40, choose=choose)


@pytest.mark.parametrize("seed", LOADS[: max(1, len(LOADS) // 10)])
def test_what_was_promised_is_there_after_every_prefix_of_the_writes(seed: int) -> None:
    def choose(life: Life) -> list[Cut]:
        moments = range(life.recovered_at, life.trace.now + 1)
        return [Cut(at, Way.COMPLETED, seed=at) for at in moments]

    _try_cuts(seed, steps=8, choose=choose)


@pytest.mark.parametrize("seed", LOADS[: max(1, len(LOADS) // 10)])
def test_what_was_promised_is_there_though_requests_failed_until_no_segment_was_free(
    seed: int,
) -> None:
    def choose(life: Life) -> list[Cut]:
        dice = random.Random(seed)
        return [random_cut(dice, life.trace.now) for _ in range(CUTS_PER_LOAD // 2)]

    _try_cuts(seed, steps=40, choose=choose, failures=20)
