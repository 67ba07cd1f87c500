"""What lies at an offset of a cold device, decoded for people: pure, given a way to read.

Nothing is believed: each checksum is compared, and what does not match is said in words.
"""

from collections.abc import Callable, Iterator
from typing import Final

from ctxfs.errors import ConfigError
from ctxfs.ondisk import columnar, foreign, ledger, record, segment, structs, superblock
from ctxfs.ondisk.found import (
    OTHER_DEVICE,
    Found,
    SegmentLine,
    as_found,
    basic_problems,
    entry_fields,
    place_problems,
)
from ctxfs.ondisk.layout import ALIGN_BYTES, HEADER_BYTES_MAX, SEGMENTS_OFFSET, padded
from ctxfs.ondisk.record import (
    FRAMES_AT,
    VERSION,
    VERSION_BY_DIGEST,
    VERSION_ENCODED,
    DataSum,
    Place,
    RecordKind,
)
from ctxfs.ondisk.segment import SEGMENT_HEADER_BYTES
from ctxfs.ondisk.structs import Kind, Stated
from ctxfs.ondisk.superblock import SUPERBLOCK_OFFSETS, Superblock

Read = Callable[[int, int], bytes]  # offset and length; fewer bytes where the device ends

_HASH_BYTES: Final = 4 << 20


class Device:
    """A cold device to be looked at. Raises OSError from `read`."""

    def __init__(self, read: Read) -> None:
        self._read = read
        start = read(0, SEGMENTS_OFFSET)
        self.superblock = _newest(start)
        self.foreign = foreign.name_of(start) if self.superblock is None else None
        self._salt = record.make_salt(self.superblock.uuid) if self.superblock else 0

    def superblocks(self) -> list[Found]:
        """Both places."""
        return [self._superblock(offset) for offset in SUPERBLOCK_OFFSETS]

    def segments(self) -> Iterator[SegmentLine]:
        """All of them, each with its records counted by their headers."""
        for index in range(self.superblock.geometry.segment_count if self.superblock else 0):
            yield self._segment_line(index)

    def at(self, offset: int) -> Found:
        """What the byte at `offset` is a part of."""
        if offset < ALIGN_BYTES * len(SUPERBLOCK_OFFSETS):
            return self._superblock(offset - offset % ALIGN_BYTES)
        if self.superblock is None:
            return self._loose(offset - offset % ALIGN_BYTES, None)
        geometry = self.superblock.geometry
        if offset < SEGMENTS_OFFSET:
            start = ALIGN_BYTES * len(SUPERBLOCK_OFFSETS)
            return Found(kind="reserved", offset=start, length_bytes=SEGMENTS_OFFSET - start)
        index, position = divmod(offset - SEGMENTS_OFFSET, geometry.segment_bytes)
        if index >= geometry.segment_count:
            start = geometry.segment_offset(geometry.segment_count)
            return Found(
                kind="behind the last segment",
                offset=start,
                length_bytes=geometry.size_bytes - start,
            )
        if position < SEGMENT_HEADER_BYTES:
            return self._segment(index)
        return self._within(index, position)

    # -- superblocks and segments

    def _superblock(self, offset: int) -> Found:
        page = self._page(offset)
        kind = structs.SUPERBLOCK_KIND
        found = as_found(structs.state(page, kind), offset)
        if not any(page):
            found.problems.append("all zero: none was written here")
            return found
        found.problems += basic_problems(page, kind)
        if not found.problems:
            try:
                if superblock.decode(page) is None:
                    found.problems.append("its numbers contradict each other")
            except ConfigError as error:
                found.problems.append(str(error))
        found.fields["clean"] = bool(found.fields.pop("flags") & 1)
        return found

    def _segment(self, index: int) -> Found:
        assert self.superblock is not None
        offset = self.superblock.geometry.segment_offset(index)
        page = self._page(offset)
        length = self.superblock.geometry.segment_bytes
        if not any(page):
            return Found(
                kind="free segment", offset=offset, length_bytes=length, fields={"index": index}
            )
        kind = structs.kind_of(page)
        if kind is None or "segment" not in kind.name:
            stated = structs.state(page, structs.SEGMENT_KIND)
            found = as_found(stated, offset)
            found.problems.append("bad magic: a start takes the segment for free")
        else:
            stated = structs.state(page, kind)
            found = as_found(stated, offset)
            found.problems += basic_problems(page, kind)
        if stated.uuid != self.superblock.uuid:
            found.problems.append(OTHER_DEVICE)
        if stated["index"] != index:
            found.problems.append(f"says it is segment {stated['index']}, but this is {index}")
        found.length_bytes = length
        line = self._segment_line(index)
        found.fields |= {"used_bytes": line.used_bytes, "items": line.items}
        return found

    def _segment_line(self, index: int) -> SegmentLine:
        assert self.superblock is not None
        offset = self.superblock.geometry.segment_offset(index)
        page = self._page(offset)
        state, sequence, problem = self._life(page, index)
        used, items = SEGMENT_HEADER_BYTES, 0
        if state in ("records", "tables"):
            for at, length in self._chain(index, sequence, state):
                used, items = at + length, items + 1
        else:
            used = 0
        return SegmentLine(
            index=index,
            offset=offset,
            state=state,
            sequence=sequence,
            used_bytes=used,
            items=items,
            problem=problem,
        )

    def _life(self, page: bytes, index: int) -> tuple[str, int, str]:
        """State, sequence and what is wrong of the segment whose header this is."""
        assert self.superblock is not None
        uuid = self.superblock.uuid
        for magic, state in ((segment.MAGIC, "records"), (segment.TABLE_MAGIC, "tables")):
            sequence = segment.decode(page, uuid, index, magic)
            if sequence is not None:
                return state, sequence, ""
        if not any(page):
            return "free", 0, ""
        kind = structs.kind_of(page)
        stated = structs.state(page, structs.SEGMENT_KIND)
        ours = kind is not None and "segment" in kind.name
        if stated.uuid == uuid or (ours and not structs.has_good_sum(page)):
            return "damaged", stated["sequence"], "its header is damaged"
        return "stale", stated["sequence"], "of an earlier use of the device: free"

    # -- records and blobs

    def _chain(self, index: int, sequence: int, state: str) -> Iterator[tuple[int, int]]:
        """Position and length of each record, or blob, from the first on, as a reader goes."""
        assert self.superblock is not None
        geometry = self.superblock.geometry
        kind = structs.RECORD_KIND if state == "records" else structs.BLOB_KIND
        position = SEGMENT_HEADER_BYTES
        while position < geometry.segment_bytes:
            place = Place(self._salt, sequence, position)
            page = self._page(geometry.segment_offset(index) + position)
            found = structs.state(page, kind)
            header_bytes = found["header_bytes"] if kind is structs.RECORD_KIND else ALIGN_BYTES
            length = header_bytes + padded(found["data_bytes"])
            if not _is_here(found, place) or position + length > geometry.segment_bytes:
                return
            if header_bytes > HEADER_BYTES_MAX:
                return
            if header_bytes > ALIGN_BYTES:
                page = self._read(geometry.segment_offset(index) + position, header_bytes)
            if not structs.has_good_sum(page, header_bytes):
                return
            yield position, length
            position += length

    def _within(self, index: int, position: int) -> Found:
        """What covers this position of a segment: something of its chain, else what is there."""
        assert self.superblock is not None
        start = self.superblock.geometry.segment_offset(index)
        state, sequence, _ = self._life(self._page(start), index)
        end = SEGMENT_HEADER_BYTES
        if state in ("records", "tables"):
            for at, length in self._chain(index, sequence, state):
                end = at + length
                if at <= position < end:
                    return self._item(start + at, Place(self._salt, sequence, at))
        at = position - position % ALIGN_BYTES
        live = state in ("records", "tables")
        place = Place(self._salt, sequence, at) if live else None
        found = self._loose(start + at, place)
        found.fields["segment"] = index
        found.fields["chain_end"] = start + end if live else None
        return found

    def _loose(self, offset: int, place: Place | None) -> Found:
        """A page that no chain leads to: free space, remains of before, or something damaged."""
        page = self._page(offset)
        kind = structs.kind_of(page)
        if kind in (structs.RECORD_KIND, structs.BLOB_KIND):
            found = self._item(offset, place)
            found.problems.append("no chain of good headers leads here: a start does not find it")
            return found
        if kind is not None:
            found = as_found(structs.state(page, kind), offset)
            found.problems += basic_problems(page, kind)
            found.problems.append("out of place")
            return found
        found = Found(kind="free space", offset=offset, length_bytes=len(page))
        if place is None:
            return found
        for kind in (structs.RECORD_KIND, structs.BLOB_KIND):
            if structs.is_damaged_here(page, kind, place):
                found = self._item(offset, place, kind)
        return found

    def _item(self, offset: int, place: Place | None, kind: Kind | None = None) -> Found:
        page = self._page(offset)
        kind = kind or structs.kind_of(page)
        if kind is structs.BLOB_KIND:
            return self._blob(offset, page, place)
        return self._record(offset, page, place)

    def _record(self, offset: int, page: bytes, place: Place | None) -> Found:
        stated = structs.state(page, structs.RECORD_KIND)
        found = as_found(stated, offset)
        header_bytes = stated["header_bytes"]
        header = page
        if header_bytes % ALIGN_BYTES or not ALIGN_BYTES <= header_bytes <= HEADER_BYTES_MAX:
            found.problems.append(f"a header of {header_bytes} bytes cannot be")
        else:
            header = self._read(offset, header_bytes)
        found.problems += basic_problems(header, structs.RECORD_KIND, len(header))
        found.problems += place_problems(stated, place)
        if stated["version"] not in (VERSION, VERSION_ENCODED, VERSION_BY_DIGEST):
            found.problems.append(f"record version {stated['version']} is not known here")
        if stated["kind"] not in tuple(RecordKind):
            found.problems.append(f"kind {stated['kind']} is not known here")
        frames = header[FRAMES_AT : FRAMES_AT + stated["frames_bytes"]]
        entries, good_bytes = ledger.decode_all(frames)
        found.entries = [entry_fields(entry) for entry in entries]
        if good_bytes < stated["frames_bytes"]:
            found.problems.append(
                f"its ledger is bad from byte {good_bytes} of {stated['frames_bytes']} on"
            )
        if structs.has_good_sum(header, len(header)):
            found.length_bytes = header_bytes + stated["data_bytes"]
            found.data_offset = offset + header_bytes
            if stated["kind"] == RecordKind.DATA:
                by_digest = stated["version"] == VERSION_BY_DIGEST
                length = stated["part_bytes" if by_digest else "data_bytes"]
                data_sum = DataSum(by_digest=by_digest)
                self._compare_data(found, length, stated["data_checksum"], data_sum)
        return found

    def _blob(self, offset: int, page: bytes, place: Place | None) -> Found:
        stated = structs.state(page, structs.BLOB_KIND)
        found = as_found(stated, offset)
        found.fields["last"] = bool(found.fields.pop("flags") & 1)
        found.problems += basic_problems(page, structs.BLOB_KIND)
        found.problems += place_problems(stated, place)
        if stated["version"] != 1:
            found.problems.append(f"blob version {stated['version']} is not known here")
        if not structs.has_good_sum(page):
            return found
        length = stated["data_bytes"]
        found.length_bytes = ALIGN_BYTES + padded(length)
        found.data_offset = offset + ALIGN_BYTES
        self._compare_data(found, length, stated["data_checksum"], DataSum(by_digest=False))
        try:
            found.columns = columnar.describe(self._read(found.data_offset, length))
        except ValueError as error:
            found.problems.append(f"its columns: {error}")
        return found

    def _compare_data(
        self, found: Found, length_bytes: int, expected: int, data_sum: DataSum
    ) -> None:
        assert found.data_offset is not None
        at, end = found.data_offset, found.data_offset + length_bytes
        while at < end:
            piece = self._read(at, min(_HASH_BYTES, end - at))
            if not piece:
                found.problems.append("the device ends before its data does")
                return
            data_sum.update(piece)
            at += len(piece)
        if data_sum.value() != expected:
            found.problems.append("the data does not match its checksum")

    def _page(self, offset: int) -> bytes:
        page = self._read(offset, ALIGN_BYTES)
        return page + bytes(ALIGN_BYTES - len(page))


def _newest(start: bytes) -> Superblock | None:
    if len(start) < ALIGN_BYTES * len(SUPERBLOCK_OFFSETS):
        return None
    try:
        return superblock.newest(start)
    except ConfigError:
        return None


def _is_here(found: Stated, place: Place) -> bool:
    there = (found["salt"], found["sequence"], found["position"])
    return found.magic_good and there == (place.salt, place.sequence, place.position)
