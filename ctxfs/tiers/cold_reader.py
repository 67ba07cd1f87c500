"""The reading end of one cold device."""

import contextlib
from collections.abc import Iterator, Sequence

import trio

from ctxfs.device.engine import Engine, Span
from ctxfs.errors import BlockNotFound, DeviceError
from ctxfs.tiers.cold_buffers import slice_span
from ctxfs.tiers.cold_health import Health
from ctxfs.tiers.cold_index import ColdIndex
from ctxfs.tiers.cold_parts import (
    part_data_bytes,
    part_header_bytes,
    part_position,
    part_record_bytes,
    part_segment,
)
from ctxfs.tiers.cold_space import Segment, Space


class ColdReader:
    """A read holds its segments: what is in them stays there until it ends."""

    def __init__(
        self,
        engine: Engine,
        health: Health,
        space: Space,
        index: ColdIndex,
        readers_left: trio.lowlevel.ParkingLot,
    ) -> None:
        self._engine = engine
        self._health = health
        self._space = space
        self._index = index
        self._readers_left = readers_left

    async def read(self, generation: int, target: Span) -> None:
        """The block's bytes, with the zeros behind them, straight into `target`.

        Raises BlockNotFound, DeviceError.
        """
        await self._read(generation, self._index.parts(generation), target)

    async def read_content(self, content: int, target: Span) -> None:
        """The same of what was written for this generation, be the block gone itself."""
        await self._read(content, self._index.own_parts(content), target)

    async def _read(self, generation: int, parts: Sequence[int], target: Span) -> None:
        if not parts:
            raise BlockNotFound(f"generation {generation} is not in the cold tier")
        self._health.check_present()
        if sum(part_data_bytes(part) for part in parts) > target.length:
            raise ValueError("the target is shorter than the block")
        with self.held(parts):
            await self._read_parts(parts, target)

    @contextlib.contextmanager
    def held(self, parts: Sequence[int]) -> Iterator[list[Segment]]:
        """The segments of these parts keep what is in them; errors of the device are noted."""
        segments = [self._space.segments[part_segment(part)] for part in parts]
        for segment in segments:
            segment.readers += 1
        try:
            yield segments
        except DeviceError as error:
            self._health.note_trouble(error)
            raise
        finally:
            self._let_go(segments)

    async def read_record(self, part: int, target: Span) -> None:
        """All of a record, its header too, while its segment is held. Raises DeviceError."""
        start = self._space.geometry.segment_offset(part_segment(part))
        await self._engine.read(
            start + part_position(part), slice_span(target, 0, part_record_bytes(part))
        )

    async def _read_parts(self, parts: Sequence[int], target: Span) -> None:
        if len(parts) == 1:
            await self._read_part(parts[0], target, 0)
            return
        errors: list[DeviceError] = []

        async def read(part: int, at: int) -> None:
            try:
                await self._read_part(part, target, at)
            except DeviceError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            at = 0
            for part in parts:
                nursery.start_soon(read, part, at)
                at += part_data_bytes(part)
        if errors:
            raise errors[0]

    async def _read_part(self, part: int, target: Span, at: int) -> None:
        length = part_data_bytes(part)
        if length:
            start = self._space.geometry.segment_offset(part_segment(part))
            offset = start + part_position(part) + part_header_bytes(part)
            await self._engine.read(offset, slice_span(target, at, length))

    def _let_go(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            segment.readers -= 1
        self._readers_left.unpark_all()
