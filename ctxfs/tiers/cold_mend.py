"""Mending cold devices: what a check found is put right, and the tier's own recovery does the rest.

Before that, what leads to good records is made good again where it can be: a segment's header, from
what its records say; a record's header that is damaged, by a void one in its place, so that those
behind it are found. Summaries and checkpoints are erased, since all they say is in the records. The
superblock then says that nothing is known to be good, so that the recovery reads and verifies
everything. A crash at any moment leaves what a start recovers from.
"""

import numpy as np

from ctxfs.core.columns import BlockColumns
from ctxfs.core.meta import BlockMeta, DirectoryMeta
from ctxfs.device.engine import Engine
from ctxfs.errors import ConfigError
from ctxfs.ondisk import record
from ctxfs.ondisk import segment as segment_header
from ctxfs.ondisk.layout import ALIGN_BYTES
from ctxfs.ondisk.record import Place, RecordHeader, RecordKind
from ctxfs.tiers.cold import ColdDevice, ColdTier, Recovered
from ctxfs.tiers.cold_buffers import Scratch
from ctxfs.tiers.cold_check import Checked
from ctxfs.tiers.cold_examine import Examination
from ctxfs.tiers.cold_space import SegmentState
from ctxfs.tiers.cold_tables import TablePolicy
from ctxfs.tiers.cold_volume import open_volume
from ctxfs.tiers.cold_walk import Chain, Walker


def plan(checked: Checked) -> list[str]:
    """What `mend` would do, in words. Raises ConfigError where a device cannot be mended."""
    steps: list[str] = []
    for device in checked.devices:
        if not device.is_usable:
            raise ConfigError(f"{device.path} cannot be mended as it is; see its faults")
        steps += [f"{device.path}: {step}" for step in _steps(device, checked)]
    return steps


def _steps(device: Examination, checked: Checked) -> list[str]:
    headers = sum(each.sequence is not None for each in device.damaged)
    chains = sum(each.damaged or bool(each.behind) for each in device.chains)
    bad_data = sum(len(each.bad) for each in device.chains)
    tables = sum(each.state is SegmentState.TABLE for each in device.space.segments)
    bad_content = sum(generation in device.index for generation in checked.bad_content)
    counted = (
        (headers, "write headers of segments anew"),
        (len(device.damaged) - headers, "erase headers of segments that hold no records"),
        (chains, "put void records where damaged ones cut segments short"),
        (bad_data, "make records void whose data is bad"),
        (tables, "erase segments of summaries and checkpoints, to be written anew"),
        (bad_content, "drop blocks whose content is bad"),
    )
    steps = [f"{what}: {count}" for count, what in counted if count]
    return [*steps, "recover what is there, as a start after a crash does, and close it cleanly"]


async def mend(checked: Checked, tables: TablePolicy | None = None) -> Recovered:
    """Do it. The engines write; nobody else uses them. Raises DeviceError, TierFull."""
    for device in checked.devices:
        await _prepare(device)
    columns: list[BlockColumns] = []
    directories: dict[int, DirectoryMeta] = {}

    def describe(generation: int) -> BlockMeta | None:
        return _meta_of(columns[0], generation) if columns else None

    tier = await ColdTier.open(
        [ColdDevice(each.path, each.engine) for each in checked.devices],
        describe=describe,
        describe_directory=directories.get,
        tables=tables,
    )
    recovered = await tier.recover()
    columns.append(recovered.columns)
    directories.update({each.inode: each for each in recovered.directories})
    for generation in checked.bad_content:
        if tier.holds(generation):
            tier.drop(generation, recovered.highest_stamp + 1)
    await tier.sync()
    await tier.close()
    return recovered


def _meta_of(columns: BlockColumns, generation: int) -> BlockMeta | None:
    rows = np.flatnonzero(columns.generation == np.uint64(generation))
    return columns.meta(int(rows[0])) if len(rows) else None


async def _prepare(device: Examination) -> None:
    """Make what is good reachable, and have the recovery trust nothing. Raises DeviceError."""
    volume = await open_volume(ColdDevice(device.path, device.engine))
    # First of all: from here on a start verifies everything, whatever becomes of the rest.
    for _ in range(2):
        await volume.write(good_sequence=0, clean=False)
    for segment in device.space.segments:
        if segment.state is SegmentState.TABLE:
            await _write(device.engine, device.offset(segment.index), bytes(ALIGN_BYTES))
    for each in device.damaged:
        page = bytes(ALIGN_BYTES)
        if each.sequence is not None:
            page = segment_header.encode(device.found.uuid, each.index, each.sequence)
        await _write(device.engine, device.offset(each.index), page)
    salt = record.make_salt(device.found.uuid)
    walker = Walker(device.engine, device.found.geometry, salt)
    todo = [(each.index, each.sequence) for each in device.chains]
    todo += [(each.index, each.sequence) for each in device.damaged if each.sequence is not None]
    for index, sequence in todo:
        await _mend_chain(device, walker, salt, index, sequence)
    await device.engine.sync()


async def _mend_chain(
    device: Examination, walker: Walker, salt: int, index: int, sequence: int
) -> None:
    """Put void records where the chain of a segment ends too early, until it ends in nothing."""
    while True:
        chain = await walker.records(index, sequence, trusted=True)
        if chain.error is not None or not (chain.damaged or chain.behind):
            return
        page = Scratch(ALIGN_BYTES)
        place = Place(salt, sequence, chain.end)
        record.encode_into(page.view, _void_up_to(chain), place, b"")
        await _write(device.engine, device.offset(index, chain.end), bytes(page.view))


def _void_up_to(chain: Chain) -> RecordHeader:
    """A void record from the end of a chain to the first good record behind it."""
    until = min((each.position for each in chain.behind), default=chain.end + ALIGN_BYTES)
    gap_bytes = until - chain.end - ALIGN_BYTES
    return RecordHeader(
        kind=RecordKind.NOTE,
        header_bytes=ALIGN_BYTES,
        stamp=0,
        part_length=gap_bytes,
        data_bytes=gap_bytes,
    )


async def _write(engine: Engine, offset: int, page: bytes) -> None:
    memory = Scratch(len(page))
    memory.view[:] = page
    await engine.write(offset, [memory.span(0, len(page))])
