"""Reading blocks of a cold device as a promotion does, and comparing them with their digests."""

import struct
from collections.abc import Iterator
from typing import Final

import numpy as np
import trio
import xxhash

from ctxfs.codec import stream
from ctxfs.codec.keyring import KeyRing
from ctxfs.core.columns import I64
from ctxfs.device.mapping import bytes_at
from ctxfs.errors import BadStream, BadTag, DeviceError, DeviceLost, NewerStream, UnknownKey
from ctxfs.ondisk.columnar import Table
from ctxfs.tiers.cold_buffers import Scratch
from ctxfs.tiers.cold_examine import Advance, Examination
from ctxfs.tiers.cold_faults import FaultKind
from ctxfs.tiers.cold_parts import part_data_bytes, part_header_bytes, part_position, part_segment

_BLOCKS_AT_ONCE: Final = 4
_PIECE_BYTES: Final = 4 << 20
_INLINE_BYTES_MAX: Final = 256 << 10  # hashing less takes less time than the way to a thread
# What a stream is bound to: generation, bytes of content.
_CONTEXT: Final = struct.Struct("<QQ")


class ContentCheck:
    """Live blocks of one device that were not compared when their records were read.

    `metas`: the attributes of all that are live, rows of facts.METAS. `keys`: for those that are
    encrypted.
    """

    def __init__(self, device: Examination, metas: Table, keys: KeyRing | None) -> None:
        self._device = device
        self._metas = metas
        self._keys = keys
        self._rows = self._find_rows()
        # Blocks whose content is not what it should be, whatever the keys.
        self.bad: list[int] = []

    @property
    def work_bytes(self) -> int:
        """The content of all that is to be read."""
        return int(self._metas.array("size")[self._rows].sum())

    async def run(self, advance: Advance) -> None:
        """Check all. Raises DeviceLost."""
        rows = iter(self._rows.tolist())
        lost: list[DeviceLost] = []

        async def work() -> None:
            memory = Scratch(_PIECE_BYTES)
            for row in rows:
                try:
                    await self._check(row, memory)
                except DeviceLost as error:
                    lost.append(error)
                if lost:
                    return
                advance(int(self._metas.array("size")[row]))

        async with trio.open_nursery() as nursery:
            for _ in range(_BLOCKS_AT_ONCE):
                nursery.start_soon(work)
        if lost:
            raise lost[0]

    def _find_rows(self) -> I64:
        """Rows of the contents, in the order in which they lie on the device."""
        index = self._device.index
        generations = self._metas.array("generation").tolist()
        self._firsts = np.array([index.parts(each)[0] for each in generations], np.uint64)
        compared = np.isin(self._firsts, np.frombuffer(self._device.compared, np.uint64))
        self._device.report.blocks_read += int(compared.sum())
        self._order: I64 = np.argsort(self._firsts, kind="stable")
        in_order = self._firsts[self._order]
        own = np.append(True, in_order[1:] != in_order[:-1])[: len(in_order)]
        rows: I64 = self._order[own]  # of those that share one, one
        return rows[~compared[rows]]

    def _who_share(self, row: int) -> list[int]:
        """Rows of the blocks that are read from the same records."""
        first = self._firsts[row]
        start = int(np.searchsorted(self._firsts, first, "left", sorter=self._order))
        end = int(np.searchsorted(self._firsts, first, "right", sorter=self._order))
        rows: list[int] = self._order[start:end].tolist()
        return rows

    async def _check(self, row: int, memory: Scratch) -> None:
        generation = int(self._metas.array("generation")[row])
        try:
            encoded_bytes = self._device.index.encoded_bytes(generation)
            if encoded_bytes:
                good = await self._is_good_decoded(row, generation, encoded_bytes)
            else:
                good = await self._is_good(row, generation, memory)
        except DeviceLost:
            raise
        except (UnknownKey, NewerStream):
            self._device.report.undecoded += len(self._who_share(row))
            return
        except BadTag:
            # What is stored may well be good, and the key another one of this name.
            self._tell(row, "the content does not match its tag, or the key is wrong")
            return
        except DeviceError as error:
            self._tell(row, f"the content cannot be read: {error}")
            return
        sharing = self._who_share(row)
        self._device.report.blocks_read += len(sharing)
        if not good:
            self.bad += self._metas.array("generation")[sharing].tolist()
            self._tell(row, "the content does not match its digest")

    def _tell(self, row: int, what: str) -> None:
        part = int(self._firsts[row])
        for each in self._who_share(row):
            self._device.tell(
                FaultKind.CONTENT,
                what,
                self._device.offset(part_segment(part), part_position(part)),
                key=self._metas.ragged("key").row(each),
                generation=int(self._metas.array("generation")[each]),
            )

    async def _is_good(self, row: int, generation: int, memory: Scratch) -> bool:
        left = int(self._metas.array("size")[row])
        digest = xxhash.xxh3_128()
        for offset, length in self._pieces(generation):
            span = memory.span(0, length)
            await self._device.engine.read(offset, span)
            taken = bytes_at(span)[: min(left, length)]
            if length <= _INLINE_BYTES_MAX:
                digest.update(taken)
            else:
                await trio.to_thread.run_sync(digest.update, taken)
            left -= len(taken)
        expected = self._metas.array("digest")[row].tobytes()
        return not left and digest.digest() == expected

    async def _is_good_decoded(self, row: int, generation: int, encoded_bytes: int) -> bool:
        encoded = Scratch(encoded_bytes)
        at = 0
        for offset, length in self._pieces(generation):
            await self._device.engine.read(offset, encoded.span(at, length))
            at += length
        size = int(self._metas.array("size")[row])
        expected = self._metas.array("digest")[row].tobytes()

        def decode() -> bool:
            content = bytearray(size)
            context = _CONTEXT.pack(self._device.index.content(generation), size)
            try:
                stream.decode_into(
                    encoded.view, memoryview(content), keys=self._keys, context=context
                )
            except BadStream:
                return False
            return bool(xxhash.xxh3_128_digest(content) == expected)

        return await trio.to_thread.run_sync(decode)

    def _pieces(self, generation: int) -> Iterator[tuple[int, int]]:
        """Offset and length on the device of all that is stored of a block, in order."""
        for part in self._device.index.parts(generation):
            position = part_position(part) + part_header_bytes(part)
            end = position + part_data_bytes(part)
            while position < end:
                length = min(_PIECE_BYTES, end - position)
                yield self._device.offset(part_segment(part), position), length
                position += length
