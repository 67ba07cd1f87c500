"""Which mount is meant, and which key a word names."""

import os
from pathlib import Path

import pytest

from tools import _mounts
from tools._common import USAGE, Mount, ToolError
from tools._mounts import Mounted, choose, parse_mountinfo

TABLE = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
40 27 0:45 / /ctx rw,nosuid,relatime shared:7 - fuse.ctxfs ctxfs rw,user_id=0,allow_other
41 27 0:46 / /mnt/with\040blank rw - fuse.ctxfs ctxfs rw,user_id=0
42 27 0:47 / /mnt/other rw - fuse.sshfs host: rw
"""
CTX = Mounted("/ctx", "0:45", "rw")
INNER = Mounted("/ctx/inner", "0:46", "rw")
ELSEWHERE = Mounted("/mnt/b", "0:47", "rw")


def test_mount_table_gives_ctxfs_mounts_only() -> None:
    first, second = parse_mountinfo(TABLE)
    assert (first.point, first.connection) == ("/ctx", "45")
    assert "allow_other" in first.options
    assert second.point == "/mnt/with blank"


@pytest.mark.parametrize(
    ("explicit", "environment", "words", "directory", "mounts", "expected"),
    [
        ("/a", {"CTXFS_MOUNT": "/b"}, ["/ctx/k"], "/ctx", [CTX], "/a"),
        (None, {"CTXFS_MOUNT": "/b"}, ["/ctx/k"], "/ctx", [CTX], "/b"),
        (None, {}, ["/mnt/b/k"], "/ctx", [CTX, ELSEWHERE], "/mnt/b"),
        (None, {}, ["k"], "/ctx/sub", [CTX, ELSEWHERE], "/ctx"),
        (None, {}, ["/ctx/inner/k"], "/", [CTX, INNER], "/ctx/inner"),
        (None, {}, [], "/", [ELSEWHERE], "/mnt/b"),
        (None, {}, [], "/", [], "/ctx"),
        (None, {}, [], "/", [CTX, Mounted("/bound/there", "0:45", "rw")], "/ctx"),
    ],
)
def test_mount_is_found_in_the_documented_order(
    explicit: str | None,
    environment: dict[str, str],
    words: list[str],
    directory: str,
    mounts: list[Mounted],
    expected: str,
) -> None:
    assert choose(explicit, environment, words, directory, mounts) == expected


def test_several_mounts_without_a_hint_are_an_error_that_names_them() -> None:
    with pytest.raises(LookupError, match=r"/ctx, /mnt/b"):
        choose(None, {}, ["key"], "/", [CTX, ELSEWHERE])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mount:
    (tmp_path / "ctx" / "sub").mkdir(parents=True)
    (tmp_path / "ctx" / "sub" / "k").touch()
    (tmp_path / "ctx" / "k").touch()
    monkeypatch.chdir(tmp_path)
    return Mount(str(tmp_path / "ctx"))


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("k", "k"),
        ("sub/k", "sub/k"),
        ("sub//k/", "sub/k"),
        ("ctx/k", "k"),
        ("./ctx/new", "new"),
        ("ctx/new", "ctx/new"),
        ("./ctx", ""),
        ("..k", "..k"),
    ],
)
def test_word_names_a_key_or_a_path(place: Mount, word: str, key: str) -> None:
    assert place.key(word) == key


def test_relative_word_below_the_mount_is_looked_up_there_first(
    place: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(place.point) / "sub")
    assert place.key("k") == "sub/k"
    assert place.key("../k") == "k"
    assert place.key("sub/k") == "sub/k"  # as `ctx ls` prints it: not there, so it is a key
    assert place.key(".") == "sub"


def test_path_by_a_symbolic_link_names_the_block(place: Mount, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(place.point)
    assert place.key(str(tmp_path / "link" / "sub" / "k")) == "sub/k"


@pytest.mark.parametrize("word", ["/etc/passwd", "../ctx-not", "a/../../etc", "", ".."])
def test_word_outside_the_mount_is_refused(place: Mount, word: str) -> None:
    with pytest.raises(ToolError) as caught:
        place.key(word)
    assert caught.value.exit_code == USAGE


def test_mount_point_is_known_without_asking_the_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    real = os.path.realpath

    def realpath(path: str) -> str:
        asked.append(path)
        return str(real(path))

    monkeypatch.setattr(os.path, "realpath", realpath)
    point = str(tmp_path / "hung")
    assert _mounts.resolve(point, [Mounted(point, "0:45", "rw")]) == point
    assert point not in asked
