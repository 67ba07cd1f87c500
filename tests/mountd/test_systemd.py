"""What systemd is told, and that nobody is needed to hear it."""

import os
import socket
from pathlib import Path

import pytest

from mountd import systemd


@pytest.mark.parametrize("abstract", [False, True])
def test_ready_is_told_to_the_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool
) -> None:
    address = f"@ctxfs-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + address[1:] if abstract else address)
        assert systemd.ready("/ctx is mounted")
        assert manager.recv(4096).decode().splitlines() == [
            "READY=1",
            f"MAINPID={os.getpid()}",
            "STATUS=/ctx is mounted",
        ]
        assert systemd.stopping("writing 3 blocks")
        assert manager.recv(4096) == b"STOPPING=1\nSTATUS=writing 3 blocks"
        assert systemd.status("fine")
        assert manager.recv(4096) == b"STATUS=fine"


def test_without_a_manager_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not systemd.ready("x")


def test_a_manager_that_is_gone_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    assert not systemd.ready("x")


def test_a_socket_whose_name_is_too_long_is_said_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / ("n" * 200)))
    assert not systemd.ready("x")
    assert "systemd was not told READY=1: AF_UNIX path too long" in caplog.text
