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


def test_a_descriptor_is_kept_and_forgotten_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    reader, writer = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        assert systemd.store("mount", reader)
        os.close(reader)
        text, (kept,), _, _ = socket.recv_fds(manager, 4096, 4)
        assert text == b"FDSTORE=1\nFDNAME=mount\nFDPOLL=0"
        os.write(writer, b"through")
        assert os.read(kept, 10) == b"through"
        assert systemd.forget("mount")
        assert manager.recv(4096) == b"FDSTOREREMOVE=1\nFDNAME=mount"
    os.close(kept)
    os.close(writer)


def test_what_was_kept_is_for_the_process_it_is_given_to() -> None:
    told = {"LISTEN_FDS": "1", "LISTEN_FDNAMES": "mount"}
    for environ in ({}, told, told | {"LISTEN_PID": str(os.getppid())}):
        given = dict(environ)
        assert systemd.stored("mount", given) == []
        assert given == {}


def test_what_was_kept_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = os.memfd_create("kept", 0)
    fds = [os.dup2(kept, number) for number in (500, 501, 502)]
    os.close(kept)
    monkeypatch.setattr(systemd, "FIRST_FD", fds[0])
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", "3")
    monkeypatch.setenv("LISTEN_FDNAMES", "other:mount:mount")
    assert systemd.keeps()
    assert systemd.stored("mount") == fds[1:]
    assert not systemd.keeps()
    assert not any(os.get_inheritable(fd) for fd in fds)
    for fd in fds:
        os.close(fd)
