"""What is said of a block is kept on other devices, too: when its own is lost, or names pass on."""

import pytest

from ctxfs.errors import DeviceLost
from ctxfs.tiers.cold_faults import FaultKind
from ctxfs.tiers.cold_log import ColdLog
from tests.tiers.cold_devices import add, drain
from tests.tiers.cold_rig import OFTEN, SEGMENT, Rig, engine
from tests.tiers.test_cold_check import run_check


async def _rig() -> tuple[Rig, int, int]:
    """A tier of two devices, and a block on each, synced."""
    rig = Rig(engine(16), engine(16, seed=1))
    await rig.open()
    first = await rig.put(5000, b"a")
    second = await rig.put(5000, b"c")
    await rig.tier.sync()
    assert _log(rig, first) is not _log(rig, second)
    return rig, first, second


def _log(rig: Rig, generation: int) -> ColdLog:
    (log,) = (log for log in rig.tier._logs if generation in log.index)
    return log


def _rename(rig: Rig, generation: int, name: bytes) -> None:
    rig.tier.leaves_name(generation, rig.blocks[generation].key)
    rig.change(generation, key=name)


async def test_name_that_is_passed_on_costs_no_block_though_only_one_device_has_it() -> None:
    rig, first, second = await _rig()
    _rename(rig, first, b"b")
    _rename(rig, second, b"a")
    await _log(rig, second).sync()  # and the power fails before the other one gets to it
    rig.engines = [device.crash() for device in rig.engines]
    assert not (await run_check(*rig.engines)).of(FaultKind.KEY)
    recovered = await rig.open()
    assert {recovered.blocks[first].key, recovered.blocks[second].key} == {b"b", b"a"}
    assert (await rig.crash()).blocks == recovered.blocks


@pytest.mark.parametrize("flushed", [0, 1])
async def test_names_that_are_swapped_cost_no_block_though_only_one_device_has_it(
    flushed: int,
) -> None:
    rig, *blocks = await _rig()
    first, second = blocks
    _rename(rig, first, b"c")
    _rename(rig, second, b"a")
    await _log(rig, blocks[flushed]).sync()
    recovered = await rig.crash()
    assert (recovered.blocks[first].key, recovered.blocks[second].key) == (b"c", b"a")


async def test_new_block_under_a_name_that_was_left_does_not_cost_the_one_that_left_it() -> None:
    rig, first, _ = await _rig()
    _rename(rig, first, b"b")
    await rig.put(2 * SEGMENT)
    newer = await rig.put(5000, b"a")
    await _log(rig, newer)._flush()
    recovered = await rig.crash()
    assert (recovered.blocks[first].key, recovered.blocks[newer].key) == (b"b", b"a")


async def test_long_chain_of_names_costs_each_name_one_note() -> None:
    rig = Rig(engine(40))
    await rig.open()
    blocks = [await rig.put(100, b"%d" % number) for number in range(400)]
    await rig.tier.sync()
    before = rig.engines[0].statistics().written_bytes
    for number, block in reversed(list(enumerate(blocks))):
        _rename(rig, block, b"%d" % (number + 1))
    await rig.tier.sync()
    assert rig.engines[0].statistics().written_bytes - before < len(blocks) * 300
    recovered = await rig.crash()
    assert [recovered.blocks[block].key for block in blocks] == [b"%d" % n for n in range(1, 401)]


async def test_note_about_a_block_elsewhere_is_needed_until_its_own_device_has_it() -> None:
    rig, first, second = await _rig()
    other = _log(rig, second)
    _rename(rig, first, b"b")
    _rename(rig, second, b"a")
    await other.sync()
    assert other.index.errands
    home = other.index.errands[first].home >> 32
    other.space.close_open()
    await other._reclaimer.round([other.space.segments[home]])
    assert other.index.errands[first].home >> 32 != home
    await rig.tier.sync()
    assert not other.index.errands
    rig.check_accounts()
    recovered = await rig.crash()
    assert (recovered.blocks[first].key, recovered.blocks[second].key) == (b"b", b"a")


async def _lose(rig: Rig, log: ColdLog) -> int:
    """The device of this log is gone, and that has been noticed; returns which it is."""
    at = rig.tier._logs.index(log)
    rig.engines[at].lost = True
    log.health.lost = True
    return at


async def _reclaim_all(rig: Rig) -> None:
    for log in rig.tier._logs:
        if not log.health.lost:
            log.space.close_open()
            closed = [each for each in log.space.segments if each.kept]
            for segment in closed:
                await log._reclaimer.round([segment])


async def test_what_was_synced_of_blocks_on_a_lost_device_holds_when_it_is_back() -> None:
    rig, changed, _ = await _rig()
    dropped = await rig.put(100)
    assert _log(rig, dropped) is _log(rig, changed)
    removed = rig.make_directory()
    await rig.tier.sync()
    rig.change(changed, expires_ns=7)
    rig.drop(dropped)
    rig.remove_directory(removed)
    await _lose(rig, _log(rig, changed))
    await rig.tier.sync()
    await _reclaim_all(rig)
    recovered = await rig.crash()
    assert recovered.blocks[changed].expires_ns == 7
    assert dropped not in recovered.blocks
    assert recovered.directories == []
    again = await rig.crash()
    assert (again.blocks, again.directories) == (recovered.blocks, [])


@pytest.mark.parametrize("tables", [None, OFTEN])
async def test_what_was_synced_holds_though_other_starts_come_before_the_device_is_back(
    tables: object,
) -> None:
    rig, changed, _ = await _rig()
    rig.tables = OFTEN if tables else None
    dropped = await rig.put(100)
    assert _log(rig, dropped) is _log(rig, changed)
    removed = rig.make_directory()
    await rig.tier.sync()
    absent = await _lose(rig, _log(rig, changed))
    rig.change(changed, expires_ns=7)
    rig.drop(dropped)
    rig.remove_directory(removed)
    await rig.tier.sync()
    for _ in range(2):
        rig.engines = [device.crash() for device in rig.engines]
        rig.engines[absent].fail_write = lambda offset: True
        recovered = await rig.open()
        assert not {changed, dropped} & set(recovered.blocks)
        later = rig.make_directory()
        await rig.tier.sync()
        rig.remove_directory(later)
        await _reclaim_all(rig)
        await rig.tier.sync()
    recovered = await rig.crash()
    assert recovered.blocks[changed].expires_ns == 7
    assert dropped not in recovered.blocks
    assert recovered.directories == []


async def test_sync_fails_where_no_device_can_keep_what_is_said_of_a_lost_one() -> None:
    rig = Rig(engine(16))
    await rig.open()
    block = await rig.put(100)
    await rig.tier.sync()
    await _lose(rig, rig.tier._logs[0])
    rig.change(block, expires_ns=7)
    with pytest.raises(DeviceLost, match="memory0 is gone"):
        await rig.tier.sync()
    with pytest.raises(DeviceLost, match="memory0 is gone"):
        await rig.tier.sync(block)


async def test_what_is_kept_for_a_lost_device_outlives_the_drain_of_the_one_that_keeps_it() -> None:
    rig, changed, _ = await _rig()
    removed = rig.make_directory()
    await rig.tier.sync()
    rig.change(changed, expires_ns=7)
    rig.remove_directory(removed)
    lost = await _lose(rig, _log(rig, changed))
    await rig.tier.sync()
    await add(rig, engine(16, seed=2))
    await drain(rig, f"memory{1 - lost}")
    assert [each.state for each in rig.tier.statistics()] == ["lost", "ok", "drained"]
    recovered = await rig.crash()
    assert recovered.blocks[changed].expires_ns == 7
    assert recovered.directories == []
