"""A cold device as such: whose it is, making it ours, and its two superblocks."""

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from ctxfs.device.engine import Engine
from ctxfs.errors import ConfigError, ForeignSignature
from ctxfs.ondisk import foreign, segment, superblock
from ctxfs.ondisk.layout import ALIGN_BYTES, SEGMENTS_OFFSET, choose_geometry
from ctxfs.ondisk.superblock import SUPERBLOCK_OFFSETS, Superblock
from ctxfs.tiers.cold_buffers import Scratch

log = logging.getLogger(__name__)


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


class Volume:
    """The superblocks of one open device."""

    def __init__(self, engine: Engine, current: Superblock) -> None:
        self._engine = engine
        self.current = current

    async def write(self, *, good_sequence: int, clean: bool) -> None:
        """Write the next superblock and have it on the medium. Raises DeviceError."""
        following = replace(
            self.current,
            sequence=self.current.sequence + 1,
            good_sequence=good_sequence,
            clean=clean,
        )
        scratch = Scratch(ALIGN_BYTES)
        scratch.view[:] = superblock.encode(following)
        # Where this fails, the next try goes to the same place: the other one is never at risk.
        await self._engine.write(following.offset, [scratch.span(0, ALIGN_BYTES)])
        await self._engine.sync()
        self.current = following

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
    length = SEGMENTS_OFFSET + ALIGN_BYTES
    if device.engine.size_bytes < length:
        raise ConfigError(f"{device.path} is too small: {device.engine.size_bytes} bytes")
    start = Scratch(length)
    await device.engine.read(0, start.span(0, length))
    found = None
    try:
        found = _recognise(device, start.view)
    except ConfigError:
        if not device.format:
            raise
    if found is not None:
        return Volume(device.engine, found)
    return await _format(device, start, make_uuid().bytes)


def _recognise(device: ColdDevice, start: memoryview) -> Superblock | None:
    """None: it is blank."""
    path = device.path
    try:
        found = superblock.newest(start)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if found is not None:
        size = device.engine.size_bytes
        if found.geometry.size_bytes > size:
            raise ConfigError(
                f"{path} has {size} bytes, but was made with {found.geometry.size_bytes}"
            )
        _compare_size(device, found.geometry.size_bytes)
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
    """A cold tier keeps the size it was formatted with; a cap below that would not be kept."""
    asked = device.size_bytes
    if asked is None:
        return
    if made_bytes > asked:
        raise ConfigError(
            f"{device.path} was formatted with {made_bytes} bytes, more than the {asked} it is to "
            "use: give it that size again, or remove the file (or clear the device's first MiB) "
            "to begin anew, without its blocks"
        )
    if made_bytes + ALIGN_BYTES <= asked:
        log.warning(
            "%s: %d bytes are used, as it was formatted, of the %d it may use",
            device.path,
            made_bytes,
            asked,
        )


async def _format(device: ColdDevice, start: Scratch, new_uuid: bytes) -> Volume:
    engine = device.engine
    try:
        usable = min(engine.size_bytes, device.size_bytes or engine.size_bytes)
        geometry = choose_geometry(usable - usable % ALIGN_BYTES, device.segment_bytes)
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
