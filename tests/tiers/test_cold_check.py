"""Checking cold devices offline: each kind of damage is found and named, nothing else is."""

import contextlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random

import pytest
from xxhash import xxh3_128_digest

from ctxfs.codec.keyring import Key, KeyRing
from ctxfs.errors import ConfigError, DeviceLost
from ctxfs.ondisk import blob, facts, record
from ctxfs.ondisk import segment as segment_header
from ctxfs.ondisk.layout import ALIGN_BYTES
from ctxfs.ondisk.record import Place
from ctxfs.store.coding import Coding, CodingSettings
from ctxfs.tiers.cold_check import Checked, check
from ctxfs.tiers.cold_faults import Fault, FaultKind
from ctxfs.tiers.cold_mend import mend, plan
from ctxfs.tiers.cold_parts import pack_part, part_position, part_segment
from ctxfs.tiers.cold_space import SegmentState
from tests.fakes import MemoryEngine
from tests.tiers.cold_rig import OFTEN, SEGMENT, Rig, content, engine, is_encoded, meta


@contextlib.contextmanager
def no_progress(_what: str, _total: int) -> Iterator[Callable[[int], None]]:
    yield lambda amount: None


@dataclass
class Result:
    """What a check told."""

    checked: Checked
    faults: list[Fault]

    @property
    def kinds(self) -> set[FaultKind]:
        return {fault.kind for fault in self.faults if not fault.expected}

    def of(self, kind: FaultKind) -> list[Fault]:
        return [fault for fault in self.faults if fault.kind is kind]


async def run_check(*engines: MemoryEngine, keys: KeyRing | None = None) -> Result:
    faults: list[Fault] = []
    named = [(f"memory{at}", each) for at, each in enumerate(engines)]
    before = [bytes(each.medium) for each in engines]
    checked = await check(named, faults.append, no_progress, content=True, keys=keys, tables=OFTEN)
    assert [bytes(each.medium) for each in engines] == before, "a check never writes"
    return Result(checked, faults)


class PlainRig(Rig):
    """Stores blocks as they are; those that the rig makes unlike that are no streams of a codec."""

    def next_number(self) -> int:
        number = super().next_number()
        return super().next_number() if is_encoded(number) else number


async def used_rig(*, segments: int = 24, tables: bool = True, shared: bool = False) -> Rig:
    """A device on which everything happened, closed cleanly. `shared`: blocks share contents."""
    rig = PlainRig(engine(segments), tables=OFTEN if tables else None)
    await rig.open()
    made: list[int] = []
    for number in range(60):
        made.append(await rig.put((number * 7919) % (SEGMENT // 2)))
        if shared and number % 4 == 1:
            await rig.put_copy(made[-1])
        if number % 3 == 2:
            rig.drop(made[-2])
        if number % 5 == 0:
            rig.change(made[-1], mode=0o600)
        if number % 7 == 0:
            rig.make_directory()
        if number % 10 == 9:
            await rig.tier.sync()
            await rig.tend()
    await rig.put(3 * SEGMENT)
    await rig.tier.close()
    return rig


def find_pages(device: MemoryEngine, magic: bytes) -> list[int]:
    """Offsets at which a structure with this magic begins."""
    pages = range(0, device.size_bytes, ALIGN_BYTES)
    return [at for at in pages if device.medium.startswith(magic, at)]


def flip(device: MemoryEngine, offset: int, bit: int = 0) -> None:
    device.medium[offset] ^= 1 << bit


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("tables", [True, False])
async def test_a_device_that_was_closed_cleanly_has_no_faults(tables: bool, shared: bool) -> None:
    rig = await used_rig(tables=tables, shared=shared)
    found = await run_check(*rig.engines)
    assert found.faults == []
    (report,) = found.checked.reports
    assert report.clean
    assert report.blocks == len(rig.blocks)
    assert bool(report.aliases) == shared
    assert report.content_bytes == sum(each.size for each in rig.blocks.values())
    assert report.blocks_read == report.blocks


@pytest.mark.parametrize("shared", [True, False])
async def test_room_is_counted_as_the_daemon_counts_it(shared: bool) -> None:
    rig = await used_rig(segments=32, shared=shared)
    found = await run_check(*rig.engines)
    (report,) = found.checked.reports
    rig.engines = [each.reopen() for each in rig.engines]
    await rig.open()
    (counted,) = rig.tier.statistics()
    assert report.live_bytes == counted.live_bytes
    assert report.capacity_bytes == counted.capacity_bytes
    assert report.room_bytes == counted.free_bytes
    assert report.free_segments == counted.free_segments


# -- one bit, anywhere


async def test_a_damaged_superblock_is_named_and_the_other_one_is_used() -> None:
    rig = await used_rig()
    (device,) = rig.engines
    flip(device, 4096 + 60)
    found = await run_check(device)
    assert found.kinds == {FaultKind.SUPERBLOCK}
    assert found.of(FaultKind.SUPERBLOCK)[0].offset == 4096
    assert found.checked.reports[0].blocks == len(rig.blocks)


async def test_a_device_without_a_good_superblock_cannot_be_checked_further() -> None:
    rig = await used_rig()
    (device,) = rig.engines
    flip(device, 60)
    flip(device, 4096 + 60)
    found = await run_check(device)
    assert found.kinds == {FaultKind.SUPERBLOCK, FaultKind.SIZE}
    with pytest.raises(ConfigError, match="cannot be mended"):
        plan(found.checked)


async def test_a_device_that_shrank_is_told() -> None:
    rig = await used_rig()
    (device,) = rig.engines
    shorter = MemoryEngine(device.size_bytes - SEGMENT, medium=device.medium[:-SEGMENT])
    assert (await run_check(shorter)).kinds == {FaultKind.SIZE}


@pytest.mark.parametrize(
    ("start", "told"), [(b"XFSB", "an XFS file system"), (b"", "nothing at all")]
)
async def test_a_device_that_is_none_of_ours_is_refused(start: bytes, told: str) -> None:
    device = engine()
    device.medium[: len(start)] = start
    with pytest.raises(ConfigError, match=told):
        await run_check(device)


async def test_a_damaged_header_of_a_segment_is_told_with_what_is_in_it() -> None:
    rig = await used_rig()
    (device,) = rig.engines
    offset = find_pages(device, segment_header.MAGIC)[0]
    for bit in (3, 9 * 8, 20 * 8, 34 * 8, 40 * 8):  # magic, checksum, uuid, sequence, index
        damaged = device.copy()
        flip(damaged, offset + bit // 8, bit % 8)
        found = await run_check(damaged)
        (fault,) = found.of(FaultKind.SEGMENT)
        assert fault.offset == offset
        assert "records are in it" in fault.what
        assert fault.consequence.startswith("the start takes the segment for free")


async def test_a_damaged_header_of_a_table_segment_costs_no_block() -> None:
    rig = await used_rig()
    (device,) = rig.engines
    offset = find_pages(device, segment_header.TABLE_MAGIC)[0]
    flip(device, offset + 33)
    found = await run_check(device)
    assert found.kinds == {FaultKind.SEGMENT}
    assert found.checked.reports[0].blocks == len(rig.blocks)


@pytest.mark.parametrize("at", [2, 10, 17, 22, 30, 36, 44, 50, 60, 90, 100, 200, 4000])
async def test_a_bit_anywhere_in_a_record_header_is_found(at: int) -> None:
    rig = await used_rig()
    (device,) = rig.engines
    live = await live_records(device)
    for offset in live[:: len(live) // 4]:
        damaged = device.copy()
        flip(damaged, offset + at, 5)
        found = await run_check(damaged)
        assert [fault.offset for fault in found.of(FaultKind.HEADER)] == [offset]
        lost = found.of(FaultKind.MISSED)
        assert all(fault.offset is not None for fault in lost)


async def live_records(device: MemoryEngine) -> list[int]:
    """Offsets of the records that live blocks are read from, in order."""
    (examined,) = (await run_check(device)).checked.devices
    generations = examined.live.array("generation").tolist()
    parts = [part for number in generations for part in examined.index.parts(number)]
    return sorted(examined.offset(part_segment(part), part_position(part)) for part in parts)


async def test_data_that_changed_is_told_with_its_key_where_a_block_needs_it() -> None:
    rig = await used_rig()
    (device,) = rig.engines
    generation = next(number for number, each in rig.blocks.items() if each.size > 5000)
    offset = device.medium.rfind(content(generation, 5000)[:4096])
    flip(device, offset + 1234)
    found = await run_check(device)
    assert found.kinds == {FaultKind.DATA, FaultKind.CONTENT}
    for fault in found.faults:
        assert fault.key == rig.blocks[generation].key
        assert fault.generation == generation


async def test_bad_data_that_nothing_needs_is_no_fault() -> None:
    rig = PlainRig(engine())
    await rig.open()
    generation = await rig.put(9000)
    await rig.put(9000)
    rig.drop(generation)
    await rig.tier.close()
    (device,) = rig.engines
    flip(device, device.medium.find(content(generation, 9000)[:4096]))
    found = await run_check(device)
    assert found.faults == []
    assert found.checked.reports[0].dead_corrupt == 1


@pytest.mark.parametrize("at", [0, 9, 20, 26, 41, 60, 75, ALIGN_BYTES + 50])
async def test_a_bit_anywhere_in_a_blob_is_found(at: int) -> None:
    rig = await used_rig()
    (device,) = rig.engines
    offset = (await live_blobs(device))[0]
    flip(device, offset + at)
    found = await run_check(device)
    assert FaultKind.TABLE in found.kinds
    assert found.of(FaultKind.TABLE)[0].offset == offset
    assert found.checked.reports[0].blocks == len(rig.blocks)


async def live_blobs(device: MemoryEngine) -> list[int]:
    """Offsets of blobs in table segments that count."""
    (examined,) = (await run_check(device)).checked.devices
    sequences = {
        each.sequence for each in examined.space.segments if each.state is SegmentState.TABLE
    }
    pages = find_pages(device, blob.MAGIC)
    return [at for at in pages if struct.unpack_from("<Q", device.medium, at + 24)[0] in sequences]


async def test_tables_that_contradict_the_records_are_told() -> None:
    rig = await used_rig()
    (device,) = rig.engines
    await forge_tables(device, "stamp", lambda stamp: stamp + 1)
    found = await run_check(device)
    assert found.kinds == {FaultKind.UNBORNE, FaultKind.MISSED}
    unborne, missed = found.of(FaultKind.UNBORNE), found.of(FaultKind.MISSED)
    assert {each.generation for each in unborne} == {each.generation for each in missed}
    assert {each.offset for each in unborne} == {each.offset for each in missed}


async def test_tables_that_speak_of_segments_that_are_not_there_are_told_and_mended() -> None:
    rig = await used_rig()
    (device,) = rig.engines
    await forge_tables(device, "part", lambda part: pack_part(1000, 4096, 4096, 4096))
    found = await run_check(device)
    assert found.kinds == {FaultKind.MISSED}  # what is said of nowhere is not even heard
    started = await mend_and_start(rig, device)
    assert started.blocks == rig.blocks


async def forge_tables(device: MemoryEngine, name: str, forge: Callable[[int], int]) -> None:
    """Change one value in the parts of each blob, as if it had been written so: of a block that
    is in one piece, where there is any.
    """
    for offset in await live_blobs(device):
        place = Place(*struct.unpack_from("<QQQ", device.medium, offset + 16))
        header = blob.decode(device.medium[offset : offset + ALIGN_BYTES], place)
        assert header is not None
        start = offset + ALIGN_BYTES
        said = facts.decode(bytes(device.medium[start : start + header.data_length]))
        assert said is not None
        if not len(said.parts):
            continue
        values = said.parts.array(name).copy()
        sizes = dict(zip(said.metas.array("generation"), said.metas.array("size"), strict=True))
        lengths = zip(said.parts.array("generation"), said.parts.array("length"), strict=True)
        whole = [row for row, (number, length) in enumerate(lengths) if sizes.get(number) == length]
        if not whole:
            continue
        at = whole[0]
        values[at] = forge(int(values[at]))
        forged = facts.encode(replace(said, parts=said.parts.with_array(name, values)))
        if len(forged) != header.data_length:
            continue
        device.medium[start : start + len(forged)] = forged
        checksum = blob.data_checksum(forged)
        page = blob.encode(replace(header, data_checksum=checksum), place)
        device.medium[offset : offset + ALIGN_BYTES] = page


async def test_what_cannot_be_read_is_told_and_the_rest_is_checked() -> None:
    rig = await used_rig()
    (device,) = rig.engines
    header, inside = find_pages(device, segment_header.MAGIC)[1:3]
    device.fail_read = lambda offset: offset in (header, inside)
    found = await run_check(device)
    assert {fault.offset for fault in found.of(FaultKind.UNREADABLE)} == {header, inside}
    assert 0 < found.checked.reports[0].blocks < len(rig.blocks)


async def test_a_device_that_goes_away_ends_the_check() -> None:
    rig = await used_rig()
    (device,) = rig.engines
    device.lost = True
    with pytest.raises(DeviceLost):
        await run_check(device)


# -- what is there twice


async def test_a_block_that_two_devices_hold_is_told_and_the_newer_one_kept() -> None:
    rig = PlainRig(engine())
    await rig.open()
    generation = await rig.put(5000)
    other = PlainRig(engine(seed=5))
    await other.open()
    await other.put_again(replace(rig.blocks[generation], stamp=77))
    await rig.tier.close()
    await other.tier.close()
    found = await run_check(rig.engines[0], other.engines[0])
    assert found.kinds == {FaultKind.COPY}
    assert found.faults[0].path == "memory0"
    assert [each.blocks for each in found.checked.reports] == [0, 1]


async def test_two_blocks_of_one_key_are_told_and_the_newer_one_kept() -> None:
    rig = PlainRig(engine())
    await rig.open()
    older = await rig.put(5000, key=b"same")
    await rig.put(6000, key=b"same")
    await rig.tier.close()
    found = await run_check(*rig.engines)
    assert found.kinds == {FaultKind.KEY}
    assert (found.faults[0].generation, found.faults[0].key) == (older, b"same")
    assert found.checked.reports[0].blocks == 1


async def test_a_copy_of_a_device_beside_it_is_told() -> None:
    rig = await used_rig()
    found = await run_check(rig.engines[0], rig.engines[0].copy())
    (fault,) = found.of(FaultKind.COPY)
    assert fault.what == "it is a copy of memory0, or the same device"
    with pytest.raises(ConfigError, match="memory1 cannot be mended"):
        plan(found.checked)


# -- crashes


@pytest.mark.parametrize("seed", range(8))
async def test_what_a_crash_leaves_is_no_fault(seed: int) -> None:
    rig = PlainRig(engine(24, seed=seed), tables=OFTEN)
    await rig.open()
    for number in range(60):
        generation = await rig.put((number * 7919 + seed) % SEGMENT // 2)
        if number % 3:
            rig.drop(generation)
        if number % 11 == 10:
            await rig.tier.sync()
            await rig.tend()
    (device,) = [each.crash() for each in rig.engines]
    found = await run_check(device)
    assert found.kinds == set()
    assert not found.checked.reports[0].clean
    rig.engines = [device.copy()]
    recovered = await rig.open()
    assert found.checked.reports[0].blocks == len(recovered.columns)


# -- mending


async def mend_and_start(rig: Rig, device: MemoryEngine) -> Rig:
    """Mend a device, see that it is good then, and start a tier on it."""
    found = await run_check(device)
    assert plan(found.checked)
    await mend(found.checked, OFTEN)
    again = await run_check(device)
    assert again.faults == []
    assert again.checked.reports[0].clean
    started = PlainRig(device.reopen(), tables=OFTEN)
    await started.open()
    assert started.recovered.corrupt == started.recovered.torn == 0
    for generation in started.blocks:
        await started.check(generation)
    return started


@pytest.mark.parametrize("seed", range(12))
async def test_after_mending_all_blocks_that_were_not_hit_are_there(seed: int) -> None:
    rig = await used_rig()
    (device,) = rig.engines
    random = Random(seed)
    magics = (record.MAGIC, segment_header.MAGIC, segment_header.TABLE_MAGIC, blob.MAGIC)
    pages = [at for magic in magics for at in find_pages(device, magic)]
    hit: set[int] = set()
    for page in random.sample(pages, 6):
        hit.add(generation_at(device, page))
        flip(device, page + random.randrange(256), random.randrange(8))
    started = await mend_and_start(rig, device)
    assert rig.blocks.keys() - started.blocks.keys() <= hit
    # What was dropped by a note that was hit may come back; nothing else does.
    for generation in started.blocks.keys() & rig.blocks.keys():
        assert started.blocks[generation].key == rig.blocks[generation].key


def generation_at(device: MemoryEngine, page: int) -> int:
    """Whose data the record is that begins here; anything where none begins."""
    (generation,) = struct.unpack_from("<Q", device.medium, page + 56)
    return int(generation)


async def test_a_header_of_a_segment_is_written_anew_and_nothing_in_it_is_lost() -> None:
    rig = await used_rig()
    (device,) = rig.engines
    for offset in find_pages(device, segment_header.MAGIC):
        device.medium[offset : offset + 16] = b"\xff" * 16
    started = await mend_and_start(rig, device)
    assert started.blocks == rig.blocks


async def test_blocks_with_bad_content_are_dropped_by_mending_and_no_others() -> None:
    rig = await used_rig()
    (device,) = rig.engines
    generation = next(number for number, each in rig.blocks.items() if each.size > 5000)
    flip(device, device.medium.rfind(content(generation, 5000)[:4096]))
    started = await mend_and_start(rig, device)
    assert started.blocks.keys() == rig.blocks.keys() - {generation}


@pytest.mark.parametrize("seed", range(5))
async def test_mending_interrupted_by_a_power_cut_can_be_done_again(seed: int) -> None:
    rig = await used_rig()
    (device,) = rig.engines
    for page in (await live_records(device))[::9]:
        flip(device, page + 60)
    found = await run_check(device)
    device.requests_left = 2 + 3 * seed
    with contextlib.suppress(DeviceLost):
        await mend(found.checked, OFTEN)
    after = device.crash()
    await mend_and_start(rig, after)


# -- encoded blocks


async def encoded_rig(keys: KeyRing | None) -> tuple[Rig, list[int]]:
    """A device with blocks that a codec made smaller, or secret."""
    rig = PlainRig(engine(24))
    await rig.open()
    coding = Coding(CodingSettings(compress=True, keys=keys))
    made: list[int] = []
    for number in range(6):
        generation, data = rig.next_number(), b"%d " % number * 40_000
        block = replace(meta(generation, rig.next_stamp(), len(data)), digest=xxh3_128_digest(data))
        rig.blocks[generation] = block
        async with coding.encoded(memoryview(data), b"", generation) as encoded:
            assert encoded is not None
            await rig.tier.put(block, encoded.span, method=encoded.method)
        made.append(generation)
    coding.close()
    await rig.put(10_000)
    await rig.tier.close()
    return rig, made


def key_ring(id: bytes, byte: int = 7) -> KeyRing:
    return KeyRing([Key(id, bytes([byte]) * 32)], lambda length: bytes(range(length)))


@pytest.mark.parametrize("keys", [None, key_ring(b"a")])
async def test_shared_contents_are_decoded_as_whom_they_were_made_for(keys: KeyRing | None) -> None:
    rig, made = await encoded_rig(keys)
    rig.engines = [each.reopen() for each in rig.engines]
    await rig.open()
    copy = replace(rig.blocks[made[0]], generation=99, key=b"copy", stamp=rig.next_stamp())
    twin = rig.tier.twin(copy)
    assert twin is not None
    with twin.held():
        await rig.tier.put_alias(copy, twin)
    rig.drop(made[0])
    await rig.tier.close()
    found = await run_check(*rig.engines, keys=keys)
    assert found.faults == []
    assert found.checked.reports[0].aliases == 1


async def test_a_shared_content_that_is_damaged_is_told_of_all_who_share_it() -> None:
    rig = PlainRig(engine(24))
    await rig.open()
    first = await rig.put(9000)
    copies = {await rig.put_copy(first) for _ in range(2)}
    rig.drop(first)
    await rig.tier.close()
    (device,) = rig.engines
    flip(device, device.medium.find(content(first, 9000)[:4096]))
    found = await run_check(device)
    assert {fault.generation for fault in found.of(FaultKind.CONTENT)} == copies


@pytest.mark.parametrize("keys", [None, key_ring(b"a")])
async def test_encoded_blocks_are_decoded_and_compared(keys: KeyRing | None) -> None:
    rig, made = await encoded_rig(keys)
    found = await run_check(*rig.engines, keys=keys)
    assert found.faults == []
    assert found.checked.reports[0].blocks_read == len(made) + 1


async def test_blocks_whose_key_is_not_here_are_counted_and_not_bad() -> None:
    rig, made = await encoded_rig(key_ring(b"a"))
    for keys in (None, key_ring(b"b")):
        found = await run_check(*rig.engines, keys=keys)
        assert found.faults == []
        (report,) = found.checked.reports
        assert (report.undecoded, report.blocks_read) == (len(made), 1)


async def test_a_wrong_key_is_told_and_mending_drops_nothing_for_it() -> None:
    rig, made = await encoded_rig(key_ring(b"a"))
    found = await run_check(*rig.engines, keys=key_ring(b"a", 8))
    assert {fault.generation for fault in found.of(FaultKind.CONTENT)} == set(made)
    assert found.checked.bad_content == []


async def test_an_encoded_block_that_is_damaged_is_told() -> None:
    rig, made = await encoded_rig(None)
    (device,) = rig.engines
    records = await live_records(device)
    flip(device, records[2] + ALIGN_BYTES + 20)
    found = await run_check(device)
    assert found.kinds == {FaultKind.DATA, FaultKind.CONTENT}
    (generation,) = {fault.generation for fault in found.faults}
    assert generation in made
