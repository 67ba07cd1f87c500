"""The cold tier on a device in memory: what is put is found, what fails is said."""

import pytest
import trio
import trio.testing

from ctxfs.errors import BadValue, BlockNotFound, DeviceError, DeviceLost, TierFull
from ctxfs.ondisk.layout import padded
from ctxfs.tiers.cold_buffers import Scratch
from ctxfs.tiers.cold_writer import BATCHES_AT_ONCE
from tests.tiers.cold_rig import SEGMENT, Rig, content, engine, meta


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, SEGMENT, 5 * SEGMENT + 3])
async def test_block_comes_back_after_a_clean_stop_and_after_a_crash(size: int) -> None:
    rig = Rig(engine())
    await rig.open()
    generation = await rig.put(size)
    await rig.check(generation)
    before = dict(rig.blocks)
    assert (await rig.restart()).blocks == before
    await rig.check(generation)
    assert (await rig.crash()).blocks == before
    await rig.check(generation)
    rig.check_accounts()


async def test_synced_block_survives_a_crash() -> None:
    rig = Rig(engine())
    await rig.open()
    generation = await rig.put(50_000)
    await rig.tier.sync()
    await rig.crash()
    await rig.check(generation)


async def test_dropped_block_is_gone_and_stays_gone() -> None:
    rig = Rig(engine())
    await rig.open()
    kept, gone = await rig.put(9000), await rig.put(9000)
    await rig.tier.sync()
    rig.drop(gone)
    assert not rig.tier.holds(gone)
    assert rig.tier.physical_bytes(gone) == 0
    with pytest.raises(BlockNotFound):
        await rig.get(gone, 9000)
    await rig.tier.sync()
    assert set((await rig.crash()).blocks) == {kept}
    assert set((await rig.restart()).blocks) == {kept}


async def test_encoded_block_is_as_long_as_it_was_made_wherever_it_is_carried() -> None:
    rig = Rig(engine(segments=8))
    await rig.open()
    block = meta(rig.next_number(), rig.next_stamp(), 3 * SEGMENT // 2)
    rig.blocks[block.generation] = block
    stored = Scratch(SEGMENT // 2 + 4096)
    stored.view[:] = content(99, stored.length_bytes)
    await rig.tier.put(block, stored.span(0, stored.length_bytes), method=5)
    for _ in range(3):  # what is live is carried from segment to segment
        fillers = [await rig.put(SEGMENT // 2) for _ in range(8)]
        for filler in fillers:
            rig.drop(filler)
        await rig.tier.sync()
    await rig.crash()
    assert rig.tier.encoded_bytes(block.generation) == stored.length_bytes
    assert rig.tier.method(block.generation) == 5
    found = Scratch(stored.length_bytes)
    await rig.tier.get(block.generation, found.span(0, found.length_bytes), found.length_bytes)
    assert bytes(found.view) == bytes(stored.view)


async def test_physical_bytes_are_header_and_padded_data() -> None:
    rig = Rig(engine())
    await rig.open()
    generation = await rig.put(5000)
    assert rig.tier.physical_bytes(generation) == 4096 + 8192
    (counted,) = rig.tier.statistics()
    assert counted.live_bytes == 4096 + 8192
    assert counted.state == "ok"
    assert counted.blocks == 1


async def test_newest_attributes_are_found() -> None:
    rig = Rig(engine())
    await rig.open()
    generation = await rig.put(100)
    rig.change(generation, expires_ns=77)
    changed = rig.change(generation, key=b"renamed", attributes=((b"a", b"b" * 20_000),))
    await rig.tier.sync()
    assert (await rig.crash()).blocks == {generation: changed}


async def test_attributes_longer_than_a_header_are_refused() -> None:
    rig = Rig(engine())
    await rig.open()
    generation = await rig.put(100)
    with pytest.raises(BadValue, match="the cold tier keeps"):
        rig.change(generation, attributes=((b"a", bytes(SEGMENT)),))


async def test_note_for_a_block_that_is_being_put_is_not_lost() -> None:
    rig = Rig(engine())
    await rig.open()
    rig.engines[0].gate = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.put, 5000)
        await trio.testing.wait_all_tasks_blocked()
        changed = rig.change(1, expires_ns=9)
        rig.engines[0].gate.set()
    await rig.tier.sync()
    assert (await rig.crash()).blocks == {1: changed}


async def test_block_dropped_while_it_is_being_put_is_gone() -> None:
    rig = Rig(engine())
    await rig.open()
    rig.engines[0].gate = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.put, 5000)
        await trio.testing.wait_all_tasks_blocked()
        rig.drop(1)
        rig.engines[0].gate.set()
    assert not rig.tier.holds(1)
    await rig.tier.sync()
    assert (await rig.crash()).blocks == {}


async def test_directories_are_kept_and_removed() -> None:
    rig = Rig(engine(), engine(seed=1))
    await rig.open()
    kept, gone = rig.make_directory(), rig.make_directory()
    await rig.tier.sync()
    rig.remove_directory(gone)
    await rig.tier.sync()
    assert [found.inode for found in (await rig.crash()).directories] == [kept]
    never = rig.make_directory()
    rig.remove_directory(never)
    assert [found.inode for found in (await rig.restart()).directories] == [kept]


async def test_block_put_again_after_a_drop_is_there() -> None:
    rig = Rig(engine())
    await rig.open()
    generation = await rig.put(5000)
    block = rig.blocks[generation]
    await rig.tier.sync()
    rig.drop(generation)
    await rig.tier.sync()
    await rig.put_again(block)
    await rig.tier.sync()
    assert set((await rig.crash()).blocks) == {generation}
    await rig.check(generation)


async def test_of_two_generations_with_one_key_the_newer_wins() -> None:
    rig = Rig(engine(), engine(seed=1))
    await rig.open()
    old, new = await rig.put(5000, b"key"), await rig.put(5000, b"key")
    await rig.tier.sync()
    recovered = await rig.crash()
    assert set(recovered.blocks) == {new}
    assert recovered.dropped == [old]
    assert (await rig.restart()).dropped == []


async def test_full_tier_says_so_at_once_and_takes_blocks_again_after_drops() -> None:
    rig = Rig(engine())
    await rig.open()
    held = await _fill(rig)
    assert rig.tier.room_bytes < 60_000
    assert len(held) * 45_056 > 0.9 * rig.tier.statistics()[0].capacity_bytes
    for generation in held[::2]:
        rig.drop(generation)
    for _ in held[4::2]:  # what is carried over takes a little more room: it may be split
        await rig.put(40_000)
    for generation in rig.blocks:
        await rig.check(generation)
    rig.check_accounts()


async def _fill(rig: Rig) -> list[int]:
    held: list[int] = []
    try:
        while True:
            held.append(await rig.put(40_000))
    except TierFull:
        return held


@pytest.mark.parametrize("order", ["oldest", "random"])
async def test_room_is_used_again_and_again(order: str) -> None:
    rig = Rig(engine())
    await rig.open()
    capacity = rig.tier.statistics()[0].capacity_bytes
    random = rig.engines[0].random
    written = 0
    while written < 5 * capacity:
        size = random.randrange(60_000)
        while True:
            try:
                await rig.put(size)
            except TierFull:
                rig.drop(
                    min(rig.blocks) if order == "oldest" else random.choice(sorted(rig.blocks))
                )
            else:
                break
        written += padded(size) + 4096
    rig.check_accounts()
    await rig.tier.sync()
    before = dict(rig.blocks)
    assert (await rig.crash()).blocks == before
    for generation in before:
        await rig.check(generation)
    rig.check_accounts()
    assert rig.tier.statistics()[0].live_bytes > capacity // 2


async def test_graves_are_forgotten_when_no_record_is_left() -> None:
    rig = Rig(engine())
    await rig.open()
    for _ in range(400):
        generation = await rig.put(10_000)
        rig.drop(generation)
        await rig.tier.sync()
    (log,) = rig.tier._logs
    assert len(log.index.graves) < 16 * SEGMENT // 14_000
    assert (await rig.crash()).blocks == {}


async def test_many_writers_and_readers_at_once() -> None:
    rig = Rig(engine(32))
    await rig.open()

    async def work(count: int) -> None:
        for size in range(count):
            generation = await rig.put(size * 1000)
            await rig.check(generation)
            await rig.tier.sync()
            if size % 2:
                rig.drop(generation)

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(work, 10)
    rig.check_accounts()
    assert rig.engines[0].statistics().syncs < 200
    before = dict(rig.blocks)
    assert len(before) == 100
    await rig.tier.sync()
    assert (await rig.crash()).blocks == before


async def test_cancelled_put_leaves_nothing_and_does_not_touch_memory() -> None:
    rig = Rig(engine())
    await rig.open()
    gate = rig.engines[0].gate = trio.Event()
    scope = trio.CancelScope()
    ended: list[str] = []

    async def put_cancelled() -> None:
        with scope:
            await rig.put(5000)
        ended.append("cancelled" if scope.cancelled_caught else "put")

    async with trio.open_nursery() as nursery:
        for _ in range(BATCHES_AT_ONCE):
            nursery.start_soon(rig.put, 5000)
            await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(put_cancelled)
        await trio.testing.wait_all_tasks_blocked()
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert ended == ["cancelled"]
        gate.set()
    assert all(rig.tier.holds(generation) for generation in range(1, BATCHES_AT_ONCE + 1))
    assert not rig.tier.holds(BATCHES_AT_ONCE + 1)
    rig.check_accounts()


async def test_put_cancelled_while_it_is_written_is_finished_first() -> None:
    rig = Rig(engine())
    await rig.open()
    gate = rig.engines[0].gate = trio.Event()
    ended: list[bool] = []
    scope = trio.CancelScope()

    async def put() -> None:
        with scope:
            await rig.put(5000)
        ended.append(scope.cancelled_caught)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(put)
        await trio.testing.wait_all_tasks_blocked()
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert ended == []
        gate.set()
    assert rig.tier.holds(1) == (ended == [False])


async def test_failed_write_is_said_and_the_log_goes_on() -> None:
    rig = Rig(engine())
    await rig.open()
    before = await rig.put(5000)
    rig.engines[0].fail_write = lambda offset: True
    with pytest.raises(DeviceError):
        await rig.put(5000)
    rig.engines[0].fail_write = lambda offset: False
    after = await rig.put(5000)
    await rig.tier.sync()
    rig.check_accounts()
    assert set((await rig.crash()).blocks) == {before, after}


async def test_block_that_failed_can_be_put_again() -> None:
    rig = Rig(engine())
    await rig.open()
    block = meta(7, rig.next_stamp(), 30_000)
    rig.engines[0].fail_write = lambda offset: True
    with pytest.raises(DeviceError):
        await rig.put_again(block)
    rig.engines[0].fail_write = lambda offset: False
    await rig.put_again(block)
    await rig.tier.sync()
    assert set((await rig.crash()).blocks) == {7}
    await rig.check(7)


async def test_device_that_keeps_failing_is_left_alone_for_a_while(
    autojump_clock: trio.testing.MockClock,
) -> None:
    rig = Rig(engine())
    await rig.open()
    rig.engines[0].fail_write = lambda offset: True
    for _ in range(3):
        with pytest.raises(DeviceError):
            await rig.put(5000)
    assert rig.tier.statistics()[0].state == "failing"
    writes = rig.engines[0].statistics().writes
    with pytest.raises(DeviceError, match="later"):
        await rig.put(5000)
    assert rig.engines[0].statistics().writes == writes
    rig.engines[0].fail_write = lambda offset: False
    await trio.sleep(60)
    await rig.put(5000)
    assert rig.tier.statistics()[0].state == "ok"


async def test_failing_device_is_passed_over_for_another(
    autojump_clock: trio.testing.MockClock,
) -> None:
    rig = Rig(engine(), engine(12, seed=1))
    await rig.open()
    rig.engines[0].fail_write = lambda offset: True
    for _ in range(3):
        with pytest.raises(DeviceError):
            await rig.put(5000)
    generation = await rig.put(5000)
    await rig.check(generation)


async def test_failed_read_is_an_error_and_the_block_stays() -> None:
    rig = Rig(engine())
    await rig.open()
    generation = await rig.put(3 * SEGMENT)
    rig.engines[0].fail_read = lambda offset: True
    with pytest.raises(DeviceError):
        await rig.get(generation, 3 * SEGMENT)
    rig.engines[0].fail_read = lambda offset: False
    await rig.check(generation)
    rig.check_accounts()


async def test_lost_device_takes_no_more_requests() -> None:
    rig = Rig(engine(), engine(12, seed=1))
    await rig.open()
    generation = await rig.put(5000)
    rig.engines[0].lost = True
    with pytest.raises(DeviceLost):
        await rig.get(generation, 5000)
    reads = rig.engines[0].statistics().reads
    with pytest.raises(DeviceLost):
        await rig.get(generation, 5000)
    assert rig.engines[0].statistics().reads == reads
    assert [found.state for found in rig.tier.statistics()] == ["lost", "ok"]
    other = await rig.put(5000)
    await rig.tier.sync(other)
    await rig.check(other)
    await rig.tier.close()


async def test_failed_flush_is_said() -> None:
    rig = Rig(engine())
    await rig.open()
    await rig.put(5000)
    rig.engines[0].fail_sync = lambda offset: True
    with pytest.raises(DeviceError):
        await rig.tier.sync()
    rig.engines[0].fail_sync = lambda offset: False
    await rig.tier.sync()


async def test_notes_that_could_not_be_written_are_tried_again() -> None:
    rig = Rig(engine())
    await rig.open()
    gone = await rig.put(5000)
    await rig.tier.sync()
    rig.drop(gone)
    inode = rig.make_directory()
    rig.engines[0].fail_write = lambda offset: True
    with pytest.raises(DeviceError):
        await rig.tier.sync()
    rig.engines[0].fail_write = lambda offset: False
    await rig.tier.sync()
    recovered = await rig.crash()
    assert recovered.blocks == {}
    assert [found.inode for found in recovered.directories] == [inode]


async def test_segment_is_not_used_again_while_it_is_read() -> None:
    rig = Rig(engine(8))
    await rig.open()
    first = await rig.put(60_000)
    for _ in range(3):
        await rig.put(60_000)
    gate = rig.engines[0].gate = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_read_whole, rig, first)
        await trio.testing.wait_all_tasks_blocked()
        rig.engines[0].gate = None
        for generation in list(rig.blocks):
            rig.drop(generation)
        nursery.start_soon(_churn, rig, 40)
        await trio.testing.wait_all_tasks_blocked()
        gate.set()
    rig.check_accounts()


async def _churn(rig: Rig, count: int) -> None:
    for _ in range(count):
        rig.drop(await rig.put(60_000))


async def _read_whole(rig: Rig, generation: int) -> None:
    assert await rig.get(generation, 60_000) == content(generation, 60_000)


async def test_segment_that_cannot_be_read_is_left_until_it_is_not_needed() -> None:
    rig = Rig(engine(8))
    await rig.open()
    held = [await rig.put(20_000) for _ in range(20)]
    for generation in held[1::2]:
        rig.drop(generation)
    rig.engines[0].fail_read = lambda offset: True
    more = await _fill(rig)
    assert rig.tier.statistics()[0].errors
    rig.engines[0].fail_read = lambda offset: False
    for generation in held[::2] + more:
        await rig.check(generation)
        rig.drop(generation)
    for _ in range(40):
        rig.drop(await rig.put(20_000))
    rig.check_accounts()


async def test_background_commits_notes_and_frees_segments(
    autojump_clock: trio.testing.MockClock,
) -> None:
    rig = Rig(engine())
    await rig.open()
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: rig.tier.run(task_status=task_status))
        for _ in range(60):
            rig.drop(await rig.put(40_000))
        inode = rig.make_directory()
        await trio.sleep(5)
        (counted,) = rig.tier.statistics()
        assert counted.free_segments >= 3
        nursery.cancel_scope.cancel()
    recovered = await rig.crash()
    assert recovered.blocks == {}
    assert [found.inode for found in recovered.directories] == [inode]


async def test_twenty_thousand_tiny_blocks() -> None:
    rig = Rig(engine(200, segment_bytes=1 << 20), segment_bytes=1 << 20)
    await rig.open()
    memory = Scratch(4096)
    for start in range(0, 20_000, 500):
        async with trio.open_nursery() as nursery:
            for generation in range(start, start + 500):
                nursery.start_soon(rig.tier.put, meta(generation, 1, 0), memory.span(0, 0))
    assert rig.engines[0].statistics().writes < 2_000
    recovered = await rig.restart()
    assert len(recovered.blocks) == 20_000
    assert rig.engines[0].statistics().reads < 2_000


async def test_large_block_lies_in_many_segments() -> None:
    rig = Rig(engine(80, segment_bytes=1 << 20), segment_bytes=1 << 20)
    await rig.open()
    await rig.put(10_000)
    size = (40 << 20) + 5
    generation = await rig.put(size)
    assert rig.tier.physical_bytes(generation) <= padded(size) + 42 * 4096
    await rig.tier.sync()
    await rig.crash()
    await rig.check(generation)


async def test_one_task_writes_what_comes_while_the_first_is_given_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ctxfs.tiers.cold_buffers._INLINE_BYTES_MAX", 0)  # checksums are awaited
    rig = Rig(engine())
    await rig.open()
    async with trio.open_nursery() as nursery:
        for size in (SEGMENT, 5000, 5000, SEGMENT, 5000):
            nursery.start_soon(rig.put, size)
            await trio.lowlevel.checkpoint()
    root = trio.lowlevel.current_root_task()
    assert root is not None
    await trio.testing.wait_all_tasks_blocked()
    tasks = [task.name for nursery in root.child_nurseries for task in nursery.child_tasks]
    assert "ctxfs cold writer" not in tasks
