"""From content to stream."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice

from ctxfs.codec.header import (
    NO_SALT,
    SALT_BYTES,
    Entry,
    Header,
    Method,
    associated,
    length_field,
    nonce,
    write_header,
)
from ctxfs.codec.keyring import KeyRing
from ctxfs.codec.offload import (
    CPU,
    TAG_BYTES,
    Buffer,
    Ciphering,
    Compression,
    Offload,
)
from ctxfs.codec.plan import Plan, encoded_length_max
from ctxfs.codec.planes import SCRATCHES, split
from ctxfs.codec.spreading import Spread, spread_out


def encode(
    source: memoryview,
    plan: Plan,
    allocate: Callable[[int], memoryview],
    *,
    keys: KeyRing | None = None,
    context: bytes = b"",
    offload: Offload = CPU,
    spread: Spread = map,
) -> memoryview | None:
    """Encode `source`; encrypted with the newest key where there are `keys`.

    `allocate` is called once, with the most bytes that the stream may take, and returns writable
    memory of at least that length; what is returned is its used beginning. None: the stream would
    not be shorter by `gain_min`, and nothing has to be encrypted; keep `source` as it is.

    `context`: what the stream belongs to; decoding wants the same. `source` must not change
    meanwhile. An empty source has no stream: ValueError.
    """
    if not source:
        raise ValueError("there is nothing to encode")
    header = Header(
        method=plan.method,
        layout=plan.layout,
        phase=plan.phase,
        chunk_bytes=plan.settings.chunk_bytes,
        raw_bytes=len(source),
        encoded_bytes=0,
        key_id=keys.newest.id if keys else b"",
        salt=keys.random(SALT_BYTES) if keys else NO_SALT,
    )
    budget = encoded_length_max(len(source), plan.settings)
    if keys is None:
        budget = min(budget, int(len(source) * (1 - plan.settings.gain_min)))
    if header.header_bytes > budget:
        return None
    target = allocate(budget)
    key = keys.newest.stream_key(header.salt) if keys else b""
    encoder = _Encoder(source, plan, header, key, associated(header, context), offload)
    table: list[Entry] = []
    position = header.header_bytes
    results = spread_out(encoder.encode, header.chunks, offload.batch_chunks, spread)
    with closing(results):
        for entry, stored in (each for batch in results for each in batch):
            if position + len(stored) > budget:
                return None
            target[position : position + len(stored)] = stored
            position += len(stored)
            table.append(entry)
    write_header(target, replace(header, encoded_bytes=position), table, context, offload)
    return target[:position]


@dataclass(frozen=True, slots=True)
class _Encoder:
    """One block on its way. `key` is empty where nothing is encrypted."""

    source: memoryview
    plan: Plan
    header: Header
    key: bytes
    associated: bytes
    offload: Offload

    def encode(self, numbers: Sequence[int]) -> list[tuple[Entry, Buffer]]:
        """The entries and stored bytes of these chunks."""
        contents = [self.source[self.header.chunk(number)] for number in numbers]
        if self.header.method is Method.STORED:
            payloads: list[Buffer | None] = [None] * len(contents)
        else:
            payloads = self._packed(numbers, contents)
        as_they_are = [payload is None for payload in payloads]
        texts = [
            content if payload is None else payload
            for payload, content in zip(payloads, contents, strict=True)
        ]
        if self.key:
            stored = self._encrypted(numbers, texts, as_they_are)
            checksums = [0] * len(stored)
        else:
            stored = texts
            checksums = [self.offload.checksum((each,)) for each in stored]
        lengths = [len(each) for each in stored]
        entries = map(Entry, lengths, as_they_are, checksums)
        return list(zip(entries, stored, strict=True))

    def _packed(
        self, numbers: Sequence[int], contents: Sequence[memoryview]
    ) -> list[Buffer | None]:
        """Planes, compressed; None for a chunk that would not be shorter."""
        scratches = [SCRATCHES.take() for _ in contents]
        bodies, edges = [], []
        for number, content in zip(numbers, contents, strict=True):
            before, behind = self.header.edges(number)
            end = len(content) - behind
            bodies.append(content[before:end])
            edges.append((content[:before], content[end:]))
        planes = [
            [plane.data for plane in split(body, self.header.layout, scratch)]
            for body, scratch in zip(bodies, scratches, strict=True)
        ]
        level = self.plan.settings.level
        frames = iter(
            self.offload.compress(
                [
                    Compression(plane, effort, level)
                    for each in planes
                    for plane, effort in zip(each, self.plan.efforts, strict=True)
                ]
            )
        )
        packed = [
            _payload(each, list(islice(frames, len(each))), edge)
            for each, edge in zip(planes, edges, strict=True)
        ]
        for scratch in scratches:
            SCRATCHES.give(scratch)
        return [
            each if len(each) < len(content) else None
            for each, content in zip(packed, contents, strict=True)
        ]

    def _encrypted(
        self, numbers: Sequence[int], texts: Sequence[Buffer], as_they_are: Sequence[bool]
    ) -> list[Buffer]:
        targets: list[Buffer] = [bytearray(len(text) + TAG_BYTES) for text in texts]
        jobs = [
            Ciphering(
                nonce(number),
                self.associated + length_field(len(target), as_it_is),
                text,
                memoryview(target),
            )
            for number, text, as_it_is, target in zip(
                numbers, texts, as_they_are, targets, strict=True
            )
        ]
        self.offload.encrypt(self.key, jobs)
        return targets


def _payload(
    planes: Sequence[memoryview],
    frames: Sequence[Buffer | None],
    edges: tuple[memoryview, memoryview],
) -> bytes:
    """What a chunk is stored as: lengths of the planes, the edges, the planes."""
    fields, stored = [], []
    for plane, frame in zip(planes, frames, strict=True):
        stored.append(plane if frame is None else frame)
        fields.append(length_field(len(stored[-1]), frame is None))
    return b"".join((*fields, *edges, *stored))
