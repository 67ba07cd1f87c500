"""A whole mount whose cold tier is an NVMe drive that is sent commands."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.lab.drives import Drive
from tests.mount.harness import MIB, Daemon, is_mounted, noise, read_or_none, wait_until

CONTENTS = {f"block{n}": noise(n, n * 200_001) for n in range(12)} | {"large": noise(99, 5 * MIB)}

Start = Callable[..., Daemon]


@pytest.fixture(params=["direct", "pyfuse3"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """Starts a daemon with one cold device and further keys of its table."""
    with ExitStack() as stack:

        def start_daemon(device: Path, *keys: str) -> Daemon:
            config = "\n".join(["[[cold]]", f'path = "{device}"', *keys])
            daemon = Daemon(tmp_path, config=config, channel=request.param)
            return stack.enter_context(daemon)

        yield start_daemon


def put_all_cold(daemon: Daemon) -> None:
    """By fsync, then out of the hot tier."""
    for key, content in CONTENTS.items():
        with (daemon.mount / key).open("wb") as file:
            file.write(content)
            os.fsync(file.fileno())
    for key in CONTENTS:
        daemon.wait_sealed(key)
        daemon.set(key, "tier", "cold")
        assert daemon.get(key, "copies") == "cold"


def device_facts(daemon: Daemon) -> dict[str, object]:
    (facts,) = daemon.stats()["tiers"]["cold"]["devices"]
    assert isinstance(facts, dict)
    return facts


def test_blocks_go_down_come_back_and_survive_any_end(any_drive: Drive, start: Start) -> None:
    daemon = start(any_drive.command)
    assert device_facts(daemon)["engine"] == "nvme"
    put_all_cold(daemon)
    for key, content in CONTENTS.items():
        assert (daemon.mount / key).read_bytes() == content
    for end in (daemon.restart, daemon.crash):
        end()
        assert {path.name for path in daemon.mount.iterdir()} == set(CONTENTS)
        for key, content in CONTENTS.items():
            assert (daemon.mount / key).read_bytes() == content
    facts = device_facts(daemon)
    assert (facts["state"], facts["errors"]) == ("ok", 0)


def test_a_crash_that_takes_the_memory_too_leaves_what_was_synced(
    any_drive: Drive, start: Start
) -> None:
    daemon = start(any_drive.command)
    put_all_cold(daemon)
    daemon.kill()
    daemon.clean()
    daemon.start()
    for key, content in CONTENTS.items():
        assert (daemon.mount / key).read_bytes() == content


def test_what_commands_wrote_is_the_same_cold_tier_through_the_block_device(
    one_drive: Drive, start: Start
) -> None:
    daemon = start(one_drive.command)
    put_all_cold(daemon)
    assert daemon.stop() == 0
    text = (daemon.mount.parent / "ctxfs.toml").read_text()
    for engine in ("threads", "io_uring", "nvme"):
        changed = text.replace(str(one_drive.command), str(one_drive.block))
        (daemon.mount.parent / "ctxfs.toml").write_text(f'{changed}\nengine = "{engine}"\n')
        daemon.start()
        assert device_facts(daemon)["engine"] == engine
        for key, content in CONTENTS.items():
            assert (daemon.mount / key).read_bytes() == content
        assert daemon.stop() == 0


@pytest.mark.parametrize("engine", ["nvme", "io_uring", "threads"])
@pytest.mark.parametrize("how", ["pulled", "taken back"])
def test_a_drive_that_goes_makes_its_blocks_misses_and_the_mount_goes_on(
    one_drive: Drive, start: Start, engine: str, how: str
) -> None:
    daemon = start(one_drive.block, f'engine = "{engine}"')
    put_all_cold(daemon)
    daemon.put("hot", b"stays")
    if how == "pulled":
        one_drive.lose()
    else:
        one_drive.disable()
    pid = daemon.pid
    for key in CONTENTS.keys() - {"block0"}:  # which has no bytes to read
        assert read_or_none(daemon.mount / key) is None
    wait_until(lambda: device_facts(daemon)["state"] == "lost")
    assert (daemon.mount / "hot").read_bytes() == b"stays"
    daemon.put("new", b"as before")
    assert (daemon.mount / "new").read_bytes() == b"as before"
    assert daemon.pid == pid
    assert daemon.stats()["counters"]["trouble"] > 0
    assert "the device is gone" in daemon.log()
    assert daemon.stop() == 0
    assert not is_mounted(daemon.mount)


def test_a_drive_in_use_is_refused_at_the_start(
    one_drive: Drive, start: Start, tmp_path: Path
) -> None:
    first = start(one_drive.command)
    other = tmp_path / "other"
    other.mkdir()
    second = Daemon(other, config=f'[[cold]]\npath = "{one_drive.block}"\nengine = "nvme"')
    with pytest.raises(AssertionError, match="used by another program"):
        second.start()
    assert second.refused_with == 2
    first.put("k", b"v")
    assert (first.mount / "k").read_bytes() == b"v"
