"""Whose a device is: blank, ours, damaged, somebody else's."""

import struct

import pytest

from ctxfs.errors import ConfigError, DeviceError, ForeignSignature
from ctxfs.ondisk import superblock
from ctxfs.ondisk.layout import SEGMENTS_OFFSET
from tests.fakes import MemoryEngine
from tests.tiers.cold_rig import SEGMENT, Rig, content, engine

_SUPERBLOCKS = (0, 4096)


async def _rig_with_a_block() -> Rig:
    rig = Rig(engine())
    await rig.open()
    await rig.put(5000)
    await rig.tier.close()
    return rig


async def test_blank_device_is_formatted_at_once() -> None:
    rig = Rig(engine())
    assert (await rig.open()).blocks == {}
    assert superblock.newest(rig.engines[0].medium) is not None


@pytest.mark.parametrize("damaged", _SUPERBLOCKS)
async def test_one_good_superblock_is_enough(damaged: int) -> None:
    rig = await _rig_with_a_block()
    rig.engines[0].medium[damaged + 100] ^= 1
    assert set((await rig.open()).blocks) == {1}
    await rig.check(1)


async def test_two_damaged_superblocks_are_refused_and_nothing_is_written() -> None:
    rig = await _rig_with_a_block()
    for offset in _SUPERBLOCKS:
        rig.engines[0].medium[offset + 100] ^= 1
    before = bytes(rig.engines[0].medium)
    with pytest.raises(ConfigError, match="both superblocks are damaged"):
        await rig.open()
    assert rig.engines[0].medium == before
    assert (await rig.open(format=True)).blocks == {}


async def test_wiped_superblocks_with_segments_behind_them_are_not_a_blank_device() -> None:
    rig = await _rig_with_a_block()
    rig.engines[0].medium[:SEGMENTS_OFFSET] = bytes(SEGMENTS_OFFSET)
    with pytest.raises(ConfigError, match="both superblocks are damaged"):
        await rig.open()


async def test_foreign_data_is_refused_by_name_and_nothing_is_written() -> None:
    rig = Rig(engine())
    rig.engines[0].medium[1080:1082] = b"\x53\xef"
    before = bytes(rig.engines[0].medium)
    with pytest.raises(ForeignSignature, match=r"memory0 holds an ext2, ext3 or ext4 file system"):
        await rig.open()
    assert rig.engines[0].medium == before
    await rig.open(format=True)
    assert rig.engines[0].medium[1080:1082] == bytes(2)
    await rig.put(5000)
    await rig.check(1)


async def test_formatting_leaves_a_good_cold_tier_alone() -> None:
    rig = await _rig_with_a_block()
    assert set((await rig.open(format=True)).blocks) == {1}
    await rig.check(1)


async def test_formatting_a_damaged_device_forgets_what_was_there() -> None:
    rig = await _rig_with_a_block()
    for offset in _SUPERBLOCKS:
        rig.engines[0].medium[offset + 100] ^= 1
    assert (await rig.open(format=True)).blocks == {}
    assert (await rig.crash()).blocks == {}


async def test_later_format_is_refused_and_nothing_is_written() -> None:
    rig = await _rig_with_a_block()
    medium = rig.engines[0].medium
    for offset in _SUPERBLOCKS:
        struct.pack_into("<I", medium, offset + 16, superblock.VERSION + 1)
        block = memoryview(medium)[offset : offset + 4096]
        struct.pack_into("<Q", medium, offset + 8, superblock.checksum(block))
        block.release()
    before = bytes(medium)
    with pytest.raises(ConfigError, match="memory0: written by a later ctxfs"):
        await rig.open()
    assert medium == before


async def test_device_smaller_than_it_was_is_refused() -> None:
    rig = await _rig_with_a_block()
    medium = rig.engines[0].medium[:-SEGMENT]
    rig.engines = [MemoryEngine(len(medium), medium=medium)]
    with pytest.raises(ConfigError, match="was made with"):
        await rig.open()


async def test_device_larger_than_it_was_is_used_to_its_end() -> None:
    rig = await _rig_with_a_block()
    medium = rig.engines[0].medium + bytes(SEGMENT)
    rig.engines = [MemoryEngine(len(medium), medium=medium)]
    assert set((await rig.open()).blocks) == {1}
    assert rig.tier.statistics()[0].segments == 17
    assert set((await rig.crash()).blocks) == {1}
    assert rig.tier.statistics()[0].segments == 17


@pytest.mark.parametrize("size", [4096, SEGMENTS_OFFSET + (4 << 20)])
async def test_device_too_small_for_a_log_is_refused(size: int) -> None:
    rig = Rig(MemoryEngine(size), segment_bytes=None)
    with pytest.raises(ConfigError):
        await rig.open()
    assert not any(rig.engines[0].medium)


async def test_device_that_cannot_be_read_at_all_is_an_error() -> None:
    rig = Rig(engine())
    rig.engines[0].fail_read = lambda offset: True
    with pytest.raises(DeviceError):
        await rig.open()


async def test_device_that_cannot_be_written_at_the_start_is_left_out() -> None:
    rig = Rig(engine(), engine(seed=1))
    await rig.open()
    await rig.tier.close()
    rig.engines[0].fail_write = lambda offset: True
    await rig.open()
    assert [found.state for found in rig.tier.statistics()] == ["lost", "ok"]
    await rig.check(await rig.put(5000))


async def test_superblock_says_clean_only_between_close_and_open() -> None:
    rig = await _rig_with_a_block()
    assert _is_clean(rig)
    await rig.open()
    assert not _is_clean(rig)
    for offset in _SUPERBLOCKS:
        found = superblock.decode(rig.engines[0].medium[offset : offset + 4096])
        assert found is not None
        assert not found.clean


def _is_clean(rig: Rig) -> bool:
    found = superblock.newest(rig.engines[0].medium)
    assert found is not None
    return found.clean


@pytest.mark.parametrize("clean", [True, False])
async def test_flipped_bits_cost_blocks_but_never_give_wrong_ones(clean: bool) -> None:
    rig = Rig(engine(8))
    await rig.open()
    for size in (0, 100, 5000, 60_000, 200_000, 300, 4096):
        await rig.put(size)
    rig.change(2, expires_ns=4)
    rig.make_directory()
    await rig.tier.sync()
    known = dict(rig.blocks)
    if clean:
        await rig.tier.close()
    device = rig.engines[0]
    pristine = bytes(device.medium)
    found = 0
    for _ in range(150):
        device.medium[:] = pristine
        for _ in range(device.random.randrange(1, 4)):
            at = SEGMENTS_OFFSET + device.random.randrange(4 * SEGMENT)
            device.medium[at] ^= 1 << device.random.randrange(8)
        recovered = await rig.open()
        for generation, block in recovered.blocks.items():
            assert block == known[generation] or generation == 2
            # A bit flipped in data that was kept long ago is for the caller's digest to find;
            # after a crash, all that may be torn is verified.
            if not clean:
                assert await rig.get(generation, block.size) == content(generation, block.size)
        found += len(recovered.blocks)
    assert found > 150 * len(known) // 2


async def test_garbage_in_all_segments_is_an_empty_tier() -> None:
    rig = await _rig_with_a_block()
    device = rig.engines[0]
    device.medium[SEGMENTS_OFFSET:] = device.random.randbytes(16 * SEGMENT)
    assert (await rig.open()).blocks == {}
    await rig.put(5000)
    await rig.tier.sync()
    assert set((await rig.crash()).blocks) == {rig.number}
