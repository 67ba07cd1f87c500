"""A cold device as such: whose it is, making it ours, and its two superblocks."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import trio

from ctxfs.device.engine import Engine
from ctxfs.errors import ConfigError, ForeignSignature
from ctxfs.ondisk import foreign, segment, superblock
from ctxfs.ondisk.layout import ALIGN_BYTES, SEGMENTS_OFFSET, Bytes, Geometry, choose_geometry
from ctxfs.ondisk.superblock import SUPERBLOCK_OFFSETS, Superblock
from ctxfs.tiers.cold_buffers import Scratch

START_BYTES = SEGMENTS_OFFSET + ALIGN_BYTES  # what shows whose a device is


@dataclass(frozen=True, slots=True)
class ColdDevice:
    """A device or file for the cold tier. Whoever opened the engine runs and closes it.

    `format`: what is on it is overwritten, unless it is a cold tier that can be used as it is. It
    may stand in a configuration file, and must not cost the blocks at every start.
    """

    path: str
    engine: Engine
    format: bool = False
    segment_bytes: int | None = None  # when it is formatted; by its size if none is given
    size_bytes: int | None = None  # how much of it may be used; all if none is given

    @property
    def usable_bytes(self) -> int:
        """How much of it there is to use, in whole pages."""
        usable = min(self.engine.size_bytes, self.size_bytes or self.engine.size_bytes)
        return usable - usable % ALIGN_BYTES


class Volume:
    """The superblocks of one open device."""

    def __init__(self, engine: Engine, current: Superblock) -> None:
        self._engine = engine
        self._writing = trio.Lock()
        self.current = current

    async def write(self, *, good_sequence: int, clean: bool) -> None:
        """Write the next superblock and have it on the medium. Raises DeviceError."""
        await self._write(good_sequence=good_sequence, clean=clean)

    async def _write(self, **changes: Any) -> None:
        async with self._writing:
            following = replace(self.current, sequence=self.current.sequence + 1, **changes)
            scratch = Scratch(ALIGN_BYTES)
            scratch.view[:] = superblock.encode(following)
            # Where this fails, the next try goes to the same place: the other is never at risk.
            await self._engine.write(following.offset, [scratch.span(0, ALIGN_BYTES)])
            await self._engine.sync()
            self.current = following

    async def resize(self, geometry: Geometry) -> None:
        """The device is cut so from now on; what lies in its segments stays. Raises DeviceError.

        Both superblocks say so before anything goes to a segment that is new: the older one alone
        would not know of it.
        """
        for _ in SUPERBLOCK_OFFSETS:
            await self._write(geometry=geometry)

    async def renew(self, new_uuid: bytes) -> None:
        """Nothing on the device counts any more: all of it is of another uuid. Raises DeviceError.

        The first superblock that says so does it, in one step; the second makes sure of it.
        """
        for _ in SUPERBLOCK_OFFSETS:
            await self._write(uuid=new_uuid, good_sequence=0, clean=True)

    async def mark_open(self, good_sequence: int) -> None:
        """From here on neither superblock calls the device clean. Raises DeviceError."""
        for _ in SUPERBLOCK_OFFSETS:
            await self.write(good_sequence=good_sequence, clean=False)


async def open_volume(
    device: ColdDevice, make_uuid: Callable[[], uuid.UUID] = uuid.uuid4
) -> Volume:
    """Read the superblocks; format a blank device, or any other if the caller says so.

    Raises ForeignSignature where somebody else's data is on it, ConfigError where ours cannot be
    used (too small, damaged, of a later format), DeviceError. In all these cases nothing was
    written.
    """
    if device.engine.size_bytes < START_BYTES:
        raise ConfigError(f"{device.path} is too small: {device.engine.size_bytes} bytes")
    start = Scratch(START_BYTES)
    await device.engine.read(0, start.span(0, START_BYTES))
    try:
        found = recognise(device.path, start.view, device.engine.size_bytes)
        if found is not None:
            _compare_size(device, found.geometry.size_bytes)
    except ConfigError:
        if not device.format:
            raise
        found = None
    if found is not None:
        volume = Volume(device.engine, found)
        larger = found.geometry.grown(device.usable_bytes)
        if larger is not None:
            await volume.resize(larger)
        return volume
    return await _format(device, start, make_uuid().bytes)


def recognise(path: str, start: Bytes, size_bytes: int) -> Superblock | None:
    """What the first `START_BYTES` of a device of this size show of a cold tier; None: blank.

    Raises ForeignSignature where they are somebody else's, ConfigError where they are ours and
    cannot be used.
    """
    try:
        found = superblock.newest(start)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if found is not None:
        made = found.geometry.size_bytes
        if made > size_bytes:
            raise ConfigError(f"{path} has {size_bytes} bytes, but was made with {made}")
        return found
    first_segment = bytes(start[SEGMENTS_OFFSET : SEGMENTS_OFFSET + len(segment.MAGIC)])
    if superblock.has_magic(start) or first_segment == segment.MAGIC:
        raise ConfigError(
            f"{path}: both superblocks are damaged; --format makes it anew, without its blocks"
        )
    name = foreign.name_of(start)
    if name is not None:
        raise ForeignSignature(f"{path} holds {name}; --format overwrites it")
    return None


def _compare_size(device: ColdDevice, made_bytes: int) -> None:
    """A cold tier never shrinks: a cap below its size would not be kept."""
    asked = device.size_bytes
    if asked is not None and made_bytes > asked:
        raise ConfigError(
            f"{device.path} was formatted with {made_bytes} bytes, more than the {asked} it is to "
            "use: give it that size again, or remove the file (or clear the device's first MiB) "
            "to begin anew, without its blocks"
        )


async def _format(device: ColdDevice, start: Scratch, new_uuid: bytes) -> Volume:
    engine = device.engine
    try:
        geometry = choose_geometry(device.usable_bytes, device.segment_bytes)
    except ConfigError as error:
        raise ConfigError(f"{device.path}: {error}") from error
    fresh = Superblock(
        uuid=new_uuid,
        sequence=1,
        geometry=geometry,
        good_sequence=0,
        clean=True,
    )
    # Signatures of others lie all over the first megabyte; a formatted device shows only ours.
    start.view[:] = bytes(start.length_bytes)
    await engine.write(0, [start.span(0, start.length_bytes)])
    volume = Volume(engine, fresh)
    await volume.write(good_sequence=0, clean=True)
    await volume.write(good_sequence=0, clean=True)
    return volume
