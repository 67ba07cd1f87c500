"""`ctx fsck` on the cold file of a real daemon: refused while it runs, good after, mended."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ctxfs.ondisk import record
from tests.mount.harness import MIB, Daemon, noise
from tools import ctx

Capture = pytest.CaptureFixture[str]

BLOCKS = 12
ENCRYPTED = """
[codec]
key_file = "{path}"
"""


def fsck(capsys: Capture, daemon: Daemon, *options: str, code: int = 0) -> Any:
    """What a check of its cold file tells, as JSON."""
    capsys.readouterr()
    assert ctx.main(["fsck", "--json", *options, str(daemon.cold_path)]) == code
    return json.loads(capsys.readouterr().out)


def put_cold(daemon: Daemon) -> dict[str, bytes]:
    """Blocks that are nowhere but cold, some of which compress."""
    blocks = {f"chain/{number}": noise(number, MIB + number) for number in range(BLOCKS)}
    blocks |= {f"text/{number}": b"%d words " % number * 50_000 for number in range(4)}
    for directory in ("chain", "text"):
        (daemon.mount / directory).mkdir()
    for key, content in blocks.items():
        daemon.put(key, content)
        daemon.set(key, "tier", "cold")
    os.unlink(daemon.mount / "chain/0")
    del blocks["chain/0"]
    return blocks


def read_all(daemon: Daemon, blocks: dict[str, bytes]) -> set[str]:
    """The keys of blocks that are there; each has its own bytes."""
    found = {key for key in blocks if (daemon.mount / key).exists()}
    assert all((daemon.mount / key).read_bytes() == blocks[key] for key in found)
    return found


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    key_file = tmp_path / "keys"
    key_file.write_text("a " + (bytes([9]) * 32).hex())
    key_file.chmod(0o600)
    return Daemon(tmp_path, cold="64MiB", config=ENCRYPTED.format(path=key_file))


def test_what_a_daemon_left_is_good_and_what_is_damaged_is_mended(
    daemon: Daemon, tmp_path: Path, capsys: Capture
) -> None:
    keys = ("--content", "--key-file", str(tmp_path / "keys"))
    with daemon:
        blocks = put_cold(daemon)
        assert ctx.main(["fsck", str(daemon.cold_path)]) == 2
        assert f"is in use by the process {daemon.pid}" in capsys.readouterr().err
        assert daemon.stop() == 0
        (row,) = fsck(capsys, daemon, *keys)["devices"]
        assert (row["blocks"], row["blocks_read"], row["clean"]) == (len(blocks), len(blocks), True)

        lost = damage(daemon.cold_path)
        faults = fsck(capsys, daemon, *keys, code=1)["faults"]
        assert {fault["kind"] for fault in faults} >= {"header", "data"}
        assert fsck(capsys, daemon, *keys, "--repair", "--yes")["ok"]
        daemon.start()
        assert blocks.keys() - read_all(daemon, blocks) == lost


def damage(path: Path) -> set[str]:
    """Flip a bit in the header of one block's record and in the data of another's; their keys."""
    content = bytearray(path.read_bytes())
    offsets = {
        key: content.find(key.encode(), content.find(record.MAGIC)) & ~4095
        for key in ("chain/3", "chain/7")
    }
    content[offsets["chain/3"] + 50] ^= 1
    content[offsets["chain/7"] + 4096 + 12_345] ^= 1
    path.write_bytes(content)
    return set(offsets)


def test_what_a_killed_daemon_left_has_no_faults(
    daemon: Daemon, tmp_path: Path, capsys: Capture
) -> None:
    with daemon:
        blocks = put_cold(daemon)
        descriptor = os.open(daemon.mount / "chain/1", os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        daemon.kill()
        daemon.clean()
        found = fsck(capsys, daemon, "--content", "--key-file", str(tmp_path / "keys"))
        assert not found["devices"][0]["clean"]
        daemon.start()
        assert read_all(daemon, blocks) == blocks.keys()
