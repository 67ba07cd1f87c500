"""Devices that are remembered from life to life, and found under whatever name they have."""

import json
import os
from pathlib import Path

import pytest
import trio

from ctxfs.errors import ConfigError, DeviceBusy, ForeignSignature
from ctxfs.settings import ColdConfig
from ctxfs.tiers.cold_volume import open_volume
from mountd.devices import LIST_FILE, Devices

SIZE = 16 << 20


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return [tmp_path / "one", tmp_path / "two"]


async def _life(state: Path, paths: list[Path]) -> bool:
    """Open these and remember them, as a daemon does; whether some were missing."""
    async with trio.open_nursery() as nursery:
        devices = Devices(nursery, state)
        for path in paths:
            await devices.open(ColdConfig(path=path, size_bytes=SIZE))
        missing = devices.look_for_missing()
        devices.say_what_is_missing()
        devices.remember()
        nursery.cancel_scope.cancel()
    devices.close_all()
    return missing


async def test_device_that_is_not_there_any_more_is_told_of_until_it_is(
    tmp_path: Path, paths: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    assert not await _life(tmp_path, paths)
    assert await _life(tmp_path, paths[:1])
    assert await _life(tmp_path, paths[:1])
    assert caplog.text.count(f"{paths[1]} was a device of this cold tier") == 2
    caplog.clear()
    assert not await _life(tmp_path, paths)
    assert not caplog.text


async def test_list_that_is_no_list_is_written_anew(tmp_path: Path, paths: list[Path]) -> None:
    for content in (b"", b"{}", b"\xff", b"[1"):
        (tmp_path / LIST_FILE).write_bytes(content)
        assert not await _life(tmp_path, paths)
        assert json.loads((tmp_path / LIST_FILE).read_text()) == sorted(map(str, paths))


async def test_without_devices_nothing_is_written(tmp_path: Path) -> None:
    assert not await _life(tmp_path, [])
    assert not (tmp_path / LIST_FILE).exists()


async def test_device_is_known_by_its_links_and_open_once(
    tmp_path: Path, paths: list[Path]
) -> None:
    link = tmp_path / "link"
    link.symlink_to(paths[0])
    async with trio.open_nursery() as nursery:
        devices = Devices(nursery, tmp_path)
        await devices.open(ColdConfig(path=paths[0], size_bytes=SIZE))
        assert devices.find(str(link)) == str(paths[0])
        assert devices.find(str(paths[1])) is None
        for again in (paths[0], link):
            with pytest.raises(DeviceBusy):
                await devices.open(ColdConfig(path=again, size_bytes=SIZE))
        devices.remember()
        await devices.close(str(paths[0]))
        devices.remember(gone=str(paths[0]))
        assert json.loads((tmp_path / LIST_FILE).read_text()) == []
        await devices.open(ColdConfig(path=paths[0], size_bytes=SIZE))
        nursery.cancel_scope.cancel()
    devices.close_all()


async def test_file_that_is_cut_short_or_somebody_elses_is_refused_as_it_is(
    tmp_path: Path, paths: list[Path]
) -> None:
    cut, foreign = paths
    async with trio.open_nursery() as nursery:
        devices = Devices(nursery, tmp_path)
        await open_volume(await devices.open(ColdConfig(path=cut, size_bytes=SIZE)))
        await devices.close(str(cut))
        os.truncate(cut, SIZE - 4096)
        foreign.write_bytes(b"hello")
        with pytest.raises(ConfigError, match=f"has {SIZE - 4096} bytes, but was made with {SIZE}"):
            await devices.open(ColdConfig(path=cut, size_bytes=SIZE))
        with pytest.raises(ForeignSignature, match="data that is not ours"):
            await devices.open(ColdConfig(path=foreign, size_bytes=SIZE))
        assert cut.stat().st_size == SIZE - 4096
        assert foreign.read_bytes() == b"hello"
        nursery.cancel_scope.cancel()
    devices.close_all()
