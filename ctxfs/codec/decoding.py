"""From stream to content."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ctxfs.codec.header import (
    LENGTH_FIELD_BYTES,
    Entry,
    Header,
    associated,
    length_field,
    lengths_from,
    nonce,
    read_table,
)
from ctxfs.codec.keyring import KeyRing, find_key
from ctxfs.codec.offload import CPU, Ciphering, Decompression, Offload
from ctxfs.codec.planes import PLAIN, SCRATCHES, Bytes, Layout, Scratch, join
from ctxfs.codec.spreading import Spread, spread_out
from ctxfs.errors import BadStream


def decode_into(
    encoded: memoryview,
    target: memoryview,
    *,
    keys: KeyRing | None = None,
    context: bytes = b"",
    offload: Offload = CPU,
    spread: Spread = map,
) -> None:
    """Decode a stream into all of `target`, which has the length of its content.

    Bytes behind the stream are ignored. Raises BadStream, BadTag, UnknownKey, NewerStream; what is
    then in `target` is of no use, and nothing writes to it any more.
    """
    header, table = read_table(encoded, len(target), context, offload)
    key = find_key(keys, header.key_id).stream_key(header.salt) if header.key_id else b""
    stored, position = [], header.header_bytes
    for entry in table:
        stored.append(encoded[position : position + entry.stored_bytes])
        position += entry.stored_bytes
    decoder = _Decoder(header, table, stored, target, key, associated(header, context), offload)
    for _ in spread_out(decoder.decode, len(table), offload.batch_chunks, spread):
        pass


@dataclass(frozen=True, slots=True)
class _Decoder:
    """One block on its way. `key` is empty where nothing is encrypted."""

    header: Header
    table: Sequence[Entry]
    stored: Sequence[memoryview]
    target: memoryview
    key: bytes
    associated: bytes
    offload: Offload

    def decode(self, numbers: Sequence[int]) -> None:
        """Write the contents of these chunks to the target."""
        scratches = {number: SCRATCHES.take() for number in numbers}
        try:
            self._decode(scratches)
        finally:
            for scratch in scratches.values():
                SCRATCHES.give(scratch)

    def _decode(self, scratches: dict[int, Scratch]) -> None:
        if self.key:
            texts = self._decrypted(scratches)
        else:
            texts = {number: self._checked(number) for number in scratches}
            for number, text in texts.items():
                if self.table[number].as_it_is:
                    self._content(number)[:] = text
        opened = [
            self._opened(number, text, scratches[number])
            for number, text in texts.items()
            if not self.table[number].as_it_is
        ]
        self.offload.decompress([job for each in opened for job in each.jobs])
        for each in opened:
            each.finish(self.header.layout)

    def _content(self, number: int) -> memoryview:
        return self.target[self.header.chunk(number)]

    def _checked(self, number: int) -> memoryview:
        stored = self.stored[number]
        if self.offload.checksum((stored,)) != self.table[number].checksum:
            raise BadStream(f"chunk {number} does not match its checksum")
        return stored

    def _decrypted(self, scratches: dict[int, Scratch]) -> dict[int, memoryview]:
        """The texts of chunks; one that is stored as it is, right where it belongs."""
        jobs, texts = [], {}
        for number, scratch in scratches.items():
            entry, stored = self.table[number], self.stored[number]
            if entry.checksum:
                raise BadStream(f"chunk {number} is encrypted and has a checksum")
            length = len(stored) - self.header.tag_bytes
            if length < 0:
                raise BadStream(f"chunk {number} is too short for a tag")
            direct = entry.as_it_is
            texts[number] = self._content(number) if direct else scratch.memory("text", length)
            field = length_field(entry.stored_bytes, entry.as_it_is)
            jobs.append(Ciphering(nonce(number), self.associated + field, stored, texts[number]))
        self.offload.decrypt(self.key, jobs)
        return texts

    def _opened(self, number: int, text: memoryview, scratch: Scratch) -> "_Opened":
        """Take a chunk's text apart, and put its edges in their place."""
        layout = self.header.layout
        content = self._content(number)
        before, behind = self.header.edges(number)
        body = content[before : len(content) - behind]
        position = LENGTH_FIELD_BYTES * layout.planes
        fields = lengths_from(text[:position]) if len(text) >= position else []
        if position + before + behind + sum(length for length, _ in fields) != len(text):
            raise BadStream(f"chunk {number}: its planes are not as long as it is")
        content[:before] = text[position : position + before]
        position += before
        content[len(content) - behind :] = text[position : position + behind]
        position += behind
        opened = _Opened(body, [], [], scratch)
        for plane, (length, as_it_is) in enumerate(fields):
            opened.add(plane, text[position : position + length], as_it_is, layout)
            position += length
        return opened


@dataclass(frozen=True, slots=True)
class _Opened:
    """A chunk taken apart: its planes, and what is to be inflated first."""

    body: memoryview
    planes: list[Bytes]
    jobs: list[Decompression]
    scratch: Scratch

    def add(self, plane: int, stored: memoryview, as_it_is: bool, layout: Layout) -> None:
        length = len(self.body) // layout.element_bytes
        if (len(stored) != length) if as_it_is else (len(stored) >= length):
            raise BadStream("a plane has a length that it cannot have")
        if as_it_is:
            self.planes.append(np.frombuffer(stored, np.uint8))
        elif layout == PLAIN:
            self.jobs.append(Decompression(stored, self.body))
        else:
            self.planes.append(self.scratch.words(f"plane{plane}", length, 1))
            self.jobs.append(Decompression(stored, self.planes[-1].data))

    def finish(self, layout: Layout) -> None:
        """Write the elements, now that all planes are there."""
        if self.planes:
            join(self.planes, layout, self.body, self.scratch)
