"""`ctx fsck` and `ctx dump` on files that are cold devices."""

import fcntl
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from ctxfs.ondisk import record
from ctxfs.ondisk import segment as segment_header
from tests.tiers.test_cold_check import encoded_rig, find_pages, key_ring, live_records, used_rig
from tools import ctx, fsck

Capture = pytest.CaptureFixture[str]


class Image:
    """A device that was used and closed cleanly. Offsets of some of what lies there."""

    def __init__(self) -> None:
        async def make() -> None:
            rig = await used_rig()
            (device,) = rig.engines
            self.content = bytes(device.medium)
            self.records = await live_records(device)
            self.tables = find_pages(device, segment_header.TABLE_MAGIC)
            self.segments = find_pages(device, segment_header.MAGIC)
            self.all_records = find_pages(device, record.MAGIC)
            self.keys = {block.key.decode() for block in rig.blocks.values()}
            self.encoded = bytes((await encoded_rig(key_ring(b"a")))[0].engines[0].medium)

        trio.run(make)


@pytest.fixture(scope="module")
def image() -> Image:
    return Image()


@pytest.fixture
def device(image: Image, tmp_path: Path) -> Path:
    path = tmp_path / "cold0"
    path.write_bytes(image.content)
    return path


def flip(path: Path, offset: int) -> bytes:
    """Change one bit; the whole file, as it is then."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)
    return bytes(content)


def answer(capsys: Capture, *argv: str, code: int = 0) -> Any:
    """What a command prints with --json."""
    assert ctx.main([*argv, "--json"]) == code
    return json.loads(capsys.readouterr().out)


# -- fsck


def test_a_good_device_is_good(device: Path, image: Image, capsys: Capture) -> None:
    assert ctx.main(["fsck", "--content", str(device)]) == 0
    out = capsys.readouterr().out
    assert out.endswith("  good\n")
    assert f"contents of {len(image.keys)} blocks compared" in out
    assert device.read_bytes() == image.content


def test_a_fault_is_told_with_offset_key_and_consequence(
    device: Path, image: Image, capsys: Capture
) -> None:
    changed = flip(device, image.records[3] + 60)
    assert ctx.main(["fsck", str(device)]) == 1
    out = capsys.readouterr().out
    assert f"{device} at {image.records[3]}: header: the header of a record is damaged" in out
    assert "the start reads no further in this segment" in out
    assert device.read_bytes() == changed


def test_json_has_every_count_and_fault(device: Path, image: Image, capsys: Capture) -> None:
    flip(device, image.records[3] + 4096)
    found = answer(capsys, "fsck", str(device), code=1)
    assert not found["ok"]
    (fault,) = found["faults"]
    assert fault["kind"] == "data"
    assert fault["offset_bytes"] == image.records[3]
    assert fault["key"] in image.keys
    (row,) = found["devices"]
    assert row["faults"] == {"data": 1}
    assert row["blocks"] == len(image.keys)


def test_a_device_that_somebody_has_open_is_refused_with_the_pid(
    device: Path, capsys: Capture
) -> None:
    with device.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert ctx.main(["fsck", str(device)]) == 2
    assert f"is in use by the process {os.getpid()}" in capsys.readouterr().err


def test_what_is_no_cold_device_is_refused_by_name(tmp_path: Path, capsys: Capture) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"XFSB" + bytes(32 << 20))
    assert ctx.main(["fsck", str(other)]) == 2
    assert "it holds an XFS file system" in capsys.readouterr().err
    assert ctx.main(["fsck", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert ctx.main(["fsck", "/dev/null"]) == 2


def test_repair_asks_nobody_unless_somebody_is_there(
    device: Path, image: Image, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = flip(device, image.records[3] + 60)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    assert ctx.main(["fsck", "--repair", str(device)]) == 2
    assert "say --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert ctx.main(["fsck", "--repair", str(device)]) == 1
    assert "put void records where damaged ones cut segments short: 1" in capsys.readouterr().out
    assert device.read_bytes() == changed


def test_repair_leaves_a_device_without_faults(device: Path, image: Image, capsys: Capture) -> None:
    flip(device, image.records[3] + 60)
    flip(device, image.segments[4] + 40)
    flip(device, image.tables[0] + 8)
    before = answer(capsys, "fsck", str(device), code=1)
    assert {fault["kind"] for fault in before["faults"]} >= {"header", "segment"}
    after = answer(capsys, "fsck", "--repair", "--yes", str(device))
    assert after["ok"]
    assert after["devices"][0]["clean"]
    assert after["devices"][0]["blocks"] >= len(image.keys) - 1
    assert answer(capsys, "fsck", "--content", str(device))["ok"]


def test_ctrl_c_leaves_a_device_as_it_was(
    device: Path, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(amount: int) -> None:
        raise KeyboardInterrupt

    class Bar:
        def __enter__(self) -> Callable[[int], None]:
            return interrupt

        def __exit__(self, *error: object) -> None:
            return

    changed = flip(device, image.records[3] + 60)
    monkeypatch.setattr(fsck, "progress", lambda what, total, sizes: Bar())
    assert ctx.main(["fsck", "--repair", "--yes", str(device)]) == 130
    assert device.read_bytes() == changed


def test_encrypted_blocks_want_their_keys(image: Image, tmp_path: Path, capsys: Capture) -> None:
    device, keys = tmp_path / "cold0", tmp_path / "keys"
    device.write_bytes(image.encoded)
    (row,) = answer(capsys, "fsck", "--content", str(device))["devices"]
    assert (row["undecoded"], row["blocks_read"]) == (6, 1)
    keys.write_text("a " + (bytes([7]) * 32).hex())
    keys.chmod(0o600)
    argv = ("fsck", "--content", "--key-file", str(keys), str(device))
    (row,) = answer(capsys, *argv)["devices"]
    assert (row["undecoded"], row["blocks_read"]) == (0, 7)


# -- dump


def test_an_overview_has_superblocks_and_a_line_for_each_segment(
    device: Path, capsys: Capture
) -> None:
    assert ctx.main(["dump", str(device)]) == 0
    out = capsys.readouterr().out
    assert out.count("superblock at") == 2
    assert len(re.findall(r"^ *\d+ +\d+ +(?:records|tables|free)", out, re.MULTILINE)) == 24
    found = answer(capsys, "dump", str(device))
    assert [each["index"] for each in found["segments"]] == list(range(24))
    assert {each["state"] for each in found["segments"]} == {"records", "tables", "free"}


def test_a_record_is_decoded_wherever_in_it_the_offset_is(
    device: Path, image: Image, capsys: Capture
) -> None:
    start = image.records[3]
    found = answer(capsys, "dump", str(device), str(start))
    assert (found["kind"], found["offset_bytes"], found["problems"]) == ("record", start, [])
    (put,) = found["entries"]
    assert put["entry"] == "put"
    assert put["key"] in image.keys
    inside = answer(capsys, "dump", str(device), hex(start + found["length_bytes"] - 1))
    assert inside == found
    assert ctx.main(["dump", str(device), str(start)]) == 0
    out = capsys.readouterr().out
    assert "1970-01-01 00:00:00.000000002 UTC" in out
    assert put["key"] in out


@pytest.mark.parametrize(
    ("where", "told"),
    [
        (0, "bad magic"),
        (30, "belongs to another device"),
        (36, "belongs to another life of the segment"),
        (44, "but this is"),
        (60, "the header does not match its checksum"),
        (4096 + 5, "the data does not match its checksum"),
    ],
)
def test_a_damaged_record_says_what_is_wrong(
    device: Path, image: Image, capsys: Capture, where: int, told: str
) -> None:
    flip(device, image.records[3] + where)
    found = answer(capsys, "dump", str(device), str(image.records[3]), code=1)
    assert found["kind"] == "record"
    assert any(told in problem for problem in found["problems"]), found["problems"]
    assert ctx.main(["dump", str(device), str(image.records[3])]) == 1
    assert "  WRONG: " in capsys.readouterr().out


def test_headers_of_segments_and_superblocks_say_what_is_wrong(
    device: Path, image: Image, capsys: Capture
) -> None:
    for offset in (4096 + 60, image.segments[2] + 34):
        assert answer(capsys, "dump", str(device), str(offset))["problems"] == []
        flip(device, offset)
        found = answer(capsys, "dump", str(device), str(offset), code=1)
        assert "the header does not match its checksum" in found["problems"]
    found = answer(capsys, "dump", str(device), code=1)
    assert [each["state"] for each in found["segments"]].count("damaged") == 1


def test_a_blob_is_shown_with_its_columns(device: Path, image: Image, capsys: Capture) -> None:
    start = image.tables[0] + 4096
    found = answer(capsys, "dump", str(device), str(start))
    assert found["kind"] == "blob"
    assert found["fields"]["kind"] in ("summary", "checkpoint")
    names = [column["name"] for column in found["columns"]]
    assert {"parts.generation", "metas.key", "covers.segment"} <= set(names)
    flip(device, start + 4096 + 3)
    found = answer(capsys, "dump", str(device), str(start), code=1)
    assert "the data does not match its checksum" in found["problems"]


def test_free_space_and_the_rest_of_a_device_have_a_name(
    device: Path, image: Image, capsys: Capture
) -> None:
    free = next(
        each["offset"]
        for each in answer(capsys, "dump", str(device))["segments"]
        if each["state"] == "free"
    )
    assert answer(capsys, "dump", str(device), str(free))["kind"] == "free segment"
    assert answer(capsys, "dump", str(device), "512KiB")["kind"] == "reserved"
    assert ctx.main(["dump", str(device), "1TiB"]) == 2
    assert "ends before" in capsys.readouterr().err


def test_raw_bytes_are_shown_in_hex(device: Path, image: Image, capsys: Capture) -> None:
    assert ctx.main(["dump", "--raw", str(device), str(image.records[3])]) == 0
    out = capsys.readouterr().out
    assert "43 54 58 46 53 52 45 43" in out
    assert "\n*\n" in out
    found = answer(capsys, "dump", "--raw", str(device), str(image.records[3]))
    assert bytes.fromhex(found["raw"])[:8] == record.MAGIC
    assert ctx.main(["dump", "--raw", str(device)]) == 2


def test_encoded_data_is_described_by_the_codec(
    image: Image, tmp_path: Path, capsys: Capture
) -> None:
    device = tmp_path / "cold0"
    device.write_bytes(image.encoded)
    offsets = [
        at
        for at in range(1 << 20, len(image.encoded), 4096)
        if image.encoded.startswith(record.MAGIC, at)
    ]
    told = [answer(capsys, "dump", str(device), str(at))["fields"].get("codec") for at in offsets]
    assert told.count("zstd+aes256gcm:a") == 6


def test_a_record_of_before_is_told_to_be_out_of_reach(
    device: Path, image: Image, capsys: Capture
) -> None:
    problems: list[list[str]] = []
    for offset in image.all_records:
        code = ctx.main(["dump", str(device), str(offset), "--json"])
        found = json.loads(capsys.readouterr().out)
        assert code == bool(found["problems"])
        problems += [found["problems"]] * code
    assert problems
    out_of_reach = "no chain of good headers leads here: a start does not find it"
    assert all(out_of_reach in each for each in problems)
