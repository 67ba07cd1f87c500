"""The same content under several keys lies on a cold device once, and as long as any key has it."""

import pytest
import trio

from ctxfs.errors import DeviceError
from ctxfs.ondisk import superblock
from ctxfs.ondisk.describe import Device
from ctxfs.ondisk.layout import ALIGN_BYTES, SEGMENTS_OFFSET
from tests.tiers.cold_devices import add, check_all, damage, drain, homes
from tests.tiers.cold_rig import OFTEN, SEGMENT, Rig, content, engine, meta
from tests.tiers.sharing import aliases, live_bytes

SIZE = 40_000
NOTE_BYTES_MAX = 512


async def _pair(rig: Rig, size: int = SIZE) -> tuple[int, int]:
    """A block, and one that has its content."""
    first = await rig.put(size)
    return first, await rig.put_copy(first)


@pytest.mark.parametrize("number", [1, 3])  # stored as it is, and encoded
async def test_a_content_is_stored_once_whatever_its_keys_are(number: int) -> None:
    rig = Rig(engine())
    await rig.open()
    rig.number = number - 1
    first = await rig.put(SIZE)
    alone = live_bytes(rig.tier)
    copies = [await rig.put_copy(first) for _ in range(5)]
    assert aliases(rig.tier) == 5
    assert live_bytes(rig.tier) - alone < 5 * NOTE_BYTES_MAX
    await check_all(rig)
    (counted,) = rig.tier.statistics()
    assert counted.blocks == 6
    assert counted.saved_bytes == 5 * 40_960
    taken = sum(rig.tier.physical_bytes(each) for each in (first, *copies))
    assert abs(taken - live_bytes(rig.tier)) < 6
    rig.check_accounts()


async def test_a_content_stays_for_whoever_is_left_and_its_room_is_free_with_the_last() -> None:
    rig = Rig(engine())
    await rig.open()
    first, second = await _pair(rig)
    third = await rig.put_copy(second)
    rig.drop(first)
    await check_all(rig)
    rig.drop(third)
    await check_all(rig)
    await rig.tier.sync()
    assert set((await rig.crash()).blocks) == {second}
    await check_all(rig)
    rig.drop(second)
    await rig.tier.sync()
    assert live_bytes(rig.tier) < 3 * NOTE_BYTES_MAX
    assert rig.tier.statistics()[0].saved_bytes == 0
    assert (await rig.crash()).blocks == {}
    rig.check_accounts()


@pytest.mark.parametrize("tables", [None, OFTEN])
async def test_a_content_outlives_its_block_over_every_kind_of_end(tables: object) -> None:
    rig = Rig(engine(), tables=OFTEN if tables else None)
    await rig.open()
    first, second = await _pair(rig)
    third = await rig.put_copy(first)
    rig.drop(first)
    rig.change(third, expires_ns=77)
    await rig.tier.sync()
    before = dict(rig.blocks)
    for end in (rig.crash, rig.restart, rig.restart, rig.crash):
        assert (await end()).blocks == before
        await check_all(rig)
        assert aliases(rig.tier) == 2
        rig.check_accounts()
    assert second in before


async def test_what_is_put_again_later_finds_a_content_whose_block_is_gone() -> None:
    rig = Rig(engine())
    await rig.open()
    first, second = await _pair(rig)
    rig.drop(first)
    await rig.restart()
    await rig.put_copy(second)
    assert aliases(rig.tier) == 2
    # Its own number, too.
    await rig.put_again(meta(first, rig.next_stamp(), SIZE))
    assert aliases(rig.tier) == 3
    await check_all(rig)
    await rig.tier.sync()
    assert set((await rig.crash()).blocks) == set(rig.blocks)
    await check_all(rig)
    rig.check_accounts()


async def test_reclaiming_carries_a_content_with_all_who_share_it() -> None:
    rig = Rig(engine(segments=10))
    await rig.open()
    first, second = await _pair(rig, 3 * SEGMENT // 2)  # in two parts at least
    third = await rig.put_copy(first)
    rig.drop(first)
    for _ in range(6):
        for filler in [await rig.put(SEGMENT // 2) for _ in range(8)]:
            rig.drop(filler)
        await rig.tier.sync()
        await check_all(rig)
    assert rig.tier.statistics()[0].reclaimed_segments > 10
    assert set((await rig.crash()).blocks) == {second, third}
    await check_all(rig)
    assert live_bytes(rig.tier) < 2 * SEGMENT
    rig.check_accounts()


async def test_blocks_that_come_at_once_share_one_page_of_notes() -> None:
    rig = Rig(engine())
    await rig.open()
    first = await rig.put(SIZE)
    before = rig.engines[0].statistics().written_bytes
    async with trio.open_nursery() as nursery:
        for _ in range(40):
            nursery.start_soon(rig.put_copy, first)
    assert aliases(rig.tier) == 40
    assert rig.engines[0].statistics().written_bytes - before < 8 * ALIGN_BYTES
    await rig.tier.sync()
    assert len((await rig.crash()).blocks) == 41
    await check_all(rig)


async def test_an_alias_that_fails_to_be_written_is_not_there_and_may_come_again() -> None:
    rig = Rig(engine())
    await rig.open()
    first = await rig.put(SIZE)
    rig.engines[0].fail_write = lambda offset: True
    with pytest.raises(DeviceError):
        await rig.put_copy(first)
    rig.engines[0].fail_write = lambda offset: False
    assert aliases(rig.tier) == 0
    assert set(rig.blocks) == {first}
    rig.check_accounts()
    copy = await rig.put_copy(first)
    assert aliases(rig.tier) == 1
    await rig.tier.sync()
    assert set((await rig.crash()).blocks) == {first, copy}


@pytest.mark.parametrize("gone", [False, True])
async def test_a_drained_device_hands_on_a_content_once_with_all_who_share_it(gone: bool) -> None:
    rig = Rig(engine(), engine())
    await rig.open()
    firsts = [await rig.put(SIZE) for _ in range(6)]
    for first in firsts:
        await rig.put_copy(first)
        await rig.put_copy(first)
        if gone:
            rig.drop(first)
    leaving = await drain(rig)
    assert leaving.moved_blocks
    assert all(homes(rig, each) == ["memory1"] for each in rig.blocks)
    assert aliases(rig.tier) == 12
    await check_all(rig)
    assert live_bytes(rig.tier) < 6 * (SIZE + 2 * ALIGN_BYTES) + 18 * NOTE_BYTES_MAX
    rig.engines = rig.engines[1:]
    before = dict(rig.blocks)
    assert (await rig.crash()).blocks == before
    await check_all(rig)
    rig.check_accounts()


async def test_a_dump_shows_whose_content_a_block_has() -> None:
    rig = Rig(engine())
    await rig.open()
    first, copy = await _pair(rig)
    medium = rig.engines[0].medium
    device = Device(lambda offset, length: bytes(medium[offset : offset + length]))
    pages = range(SEGMENTS_OFFSET, SEGMENTS_OFFSET + SEGMENT, ALIGN_BYTES)
    found = [entry for page in pages for entry in device.at(page).entries]
    (alias,) = (entry for entry in found if entry["entry"] == "alias")
    assert (alias["holder"], alias["generation"]) == (first, copy)


async def test_no_block_shares_a_content_on_a_device_that_is_to_go() -> None:
    rig = Rig(engine())
    await rig.open()
    first = await rig.put(SIZE)
    await add(rig, engine())
    rig.tier.begin_drain("memory0")
    copy = await rig.put_copy(first)
    assert homes(rig, copy) == ["memory1"]
    assert aliases(rig.tier) == 0


async def test_a_stored_content_with_a_changed_bit_is_not_shared() -> None:
    rig = Rig(engine())
    await rig.open()
    first = await rig.put(SIZE)
    damage(rig, 0, first)
    copy = await rig.put_copy(first)
    assert aliases(rig.tier) == 0
    await rig.check(copy)
    await rig.put_copy(copy)  # the newest is the one that is found from now on
    assert aliases(rig.tier) == 1


async def test_a_device_of_before_is_opened_and_made_one_of_now() -> None:
    rig = Rig(engine())
    await rig.open()
    first = await rig.put(SIZE)
    await rig.tier.close()
    device = rig.engines[0].reopen()
    for offset in superblock.SUPERBLOCK_OFFSETS:
        page = memoryview(device.medium)[offset : offset + ALIGN_BYTES]
        page[16:20] = (superblock.VERSION - 1).to_bytes(4, "little")
        page[8:16] = superblock.checksum(page).to_bytes(8, "little")
        page.release()
    rig.engines = [device]
    assert set((await rig.open()).blocks) == {first}
    for offset in superblock.SUPERBLOCK_OFFSETS:
        assert (
            int.from_bytes(device.medium[offset + 16 : offset + 20], "little") == superblock.VERSION
        )
    await rig.put_copy(first)
    assert aliases(rig.tier) == 1


async def test_a_twin_that_goes_while_it_is_held_stays_until_it_is_let_go() -> None:
    rig = Rig(engine())
    await rig.open()
    first = await rig.put(SIZE)
    twin = rig.tier.twin(meta(first + (1 << 40), 9, SIZE))
    assert twin is not None
    with twin.held() as is_here:
        assert is_here
        rig.drop(first)
        assert live_bytes(rig.tier) > SIZE
    assert live_bytes(rig.tier) < NOTE_BYTES_MAX
    with twin.held() as is_here:
        assert not is_here
    assert content(first, SIZE) == content(first + (1 << 40), SIZE)
