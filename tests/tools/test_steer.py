"""The commands that change something: what they write, what they answer, how they fail."""

import errno
import os
from typing import Any

import pytest

from ctxfs import xattrs
from tests.tools.conftest import Run
from tests.tools.fakemount import FakeMount
from tools import _common, verify
from tools._common import Mount


@pytest.fixture(autouse=True)
def two_blocks(mount: FakeMount) -> None:
    mount.block("a")
    mount.block("b", tier="cold", copies=["cold"], ttl_s=60.5)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (("tier", "cold"), xattrs.TIER, b"cold"),
        (("tier", "auto"), xattrs.TIER, b"auto"),
        (("ttl", "72h"), xattrs.TTL, b"72h"),
        (("ttl", "none"), xattrs.TTL, b"none"),
        (("pin",), xattrs.PIN, b"1"),
        (("pin", "--for", "1"), xattrs.PIN, b"1s"),
        (("pin", "--for", "2h"), xattrs.PIN, b"2h"),
        (("unpin",), xattrs.PIN, b"0"),
        (("prefetch",), xattrs.PREFETCH, b"1"),
        (("prefetch", "--chain"), xattrs.PREFETCH, b"chain"),
        (("verify",), xattrs.VERIFY, b"1"),
    ],
)
def test_command_writes_its_attribute_to_every_block(
    mount: FakeMount, run: Run, words: tuple[str, ...], name: bytes, value: bytes
) -> None:
    assert run(*words, "a", str(mount.path / "b")).code == 0
    assert (mount.attribute("a", name), mount.attribute("b", name)) == (value, value)


@pytest.mark.parametrize(
    "words",
    [("tier", "hot"), ("ttl", "1h"), ("pin",), ("unpin",), ("prefetch",), ("rm",), ("verify",)],
)
def test_one_bad_key_never_stops_the_rest(
    mount: FakeMount, run: Run, words: tuple[str, ...]
) -> None:
    answer = run(*words, "--json", "gone", "/etc/passwd", "b")
    assert answer.code == 1  # one not found, one no key: different reasons
    assert answer.err.count("\n") == 2
    assert answer.json[-1]["key"] == "b"
    assert run(*words, "nowhere").code == 3


def test_tier_without_a_value_shows_where_blocks_are(mount: FakeMount, run: Run) -> None:
    rows = run("tier", "--json", "a", "b").json
    assert [(row["tier"], row["placement"], row["copies"]) for row in rows] == [
        ("hot", "auto", ["hot"]),
        ("cold", "auto", ["cold"]),
    ]
    assert run("tier", "b").out.splitlines()[1].split() == ["cold", "auto", "cold", "b"]


def test_single_word_is_a_block_even_if_it_is_named_like_a_value(
    mount: FakeMount, run: Run
) -> None:
    mount.block("hot")
    mount.block("90", ttl_s=5.0)
    assert "hot" in run("tier", "hot").out
    assert run("ttl", "--json", "90").json[0]["ttl_s"] == 5.0


@pytest.mark.parametrize("words", [("tier", "cold"), ("ttl", "15m")])
def test_value_without_a_block_is_a_usage_error(run: Run, words: tuple[str, ...]) -> None:
    answer = run(*words)
    assert answer.code == 2
    assert "which blocks?" in answer.err


def test_ttl_shows_what_is_left(mount: FakeMount, run: Run) -> None:
    os.mkdir(mount.path / "d")
    assert run("ttl", "a", "b", "d").out.splitlines()[1:] == [
        "     none  a",
        "     1m0s  b".replace("1m0s", "  1m"),
        "inherited  d",
    ]


def test_misspelt_ttl_is_not_taken_for_a_block(run: Run) -> None:
    answer = run("ttl", "15x", "a")
    assert answer.code == 2
    assert "neither a time nor a block" in answer.err


@pytest.mark.parametrize("duration", ["none", "soon", ""])
def test_pin_for_what_is_no_time_is_refused(mount: FakeMount, run: Run, duration: str) -> None:
    assert run("pin", "--for", duration, "a").code == 2
    assert mount.attribute("a", xattrs.PIN) is None


def test_remove_takes_blocks_and_with_r_directories(mount: FakeMount, run: Run) -> None:
    mount.block("d/e/x")
    mount.block("d/.y.tmp")
    answer = run("rm", "d", "a")
    assert answer.code == 1
    assert "-r removes it with all beneath it" in answer.err
    assert not (mount.path / "a").exists()
    assert run("rm", "-r", "--json", "d").json == [{"key": "d", "ok": True, "removed": 2}]
    assert not (mount.path / "d").exists()


def test_remove_with_f_is_silent_about_missing_blocks(run: Run) -> None:
    assert run("rm", "gone").code == 3
    answer = run("rm", "-f", "gone")
    assert (answer.code, answer.err) == (0, "")


def test_mount_itself_is_never_removed(mount: FakeMount, run: Run) -> None:
    assert run("rm", "-rf", str(mount.path)).code == 2
    assert (mount.path / "a").exists()


@pytest.mark.parametrize("key", [".ctx", ".ctx/stats"])
def test_daemons_own_directory_is_never_removed(mount: FakeMount, run: Run, key: str) -> None:
    assert "belongs to the daemon" in run("rm", "-rf", key).err
    assert (mount.path / ".ctx" / "stats").exists()


def test_verify_all_with_read_compares_every_byte(mount: FakeMount, run: Run) -> None:
    mount.block("sub/c", b"other bytes")
    mount.block("open", state="writing", digest=None)
    rows = {row["key"]: row["result"] for row in run("verify", "--all", "--read", "--json").json}
    assert rows == {"a": "good", "b": "good", "sub/c": "good", "open": "writing"}


def test_verify_read_finds_bytes_that_are_not_the_digests(mount: FakeMount, run: Run) -> None:
    mount.block("wrong", b"these bytes", digest="xxh3-128:" + "0" * 32)
    answer = run("verify", "--read", "wrong", "a")
    assert answer.code == 1
    assert "1 corrupt, 1 good" in answer.out
    assert "gave other bytes than its digest says" in answer.err


@pytest.mark.parametrize("lives_on", [True, False])
def test_verify_tells_a_bad_copy_and_whether_the_block_lives_on(
    mount: FakeMount, run: Run, monkeypatch: pytest.MonkeyPatch, lives_on: bool
) -> None:
    def refuse(place: Mount, key: str, name: bytes, value: str) -> None:
        if key == "a":
            if not lives_on:
                os.unlink(place.path(key))
            raise OSError(errno.EIO, "bad")

    monkeypatch.setattr(verify, "set_attribute", refuse)
    answer = run("verify", "--json", "a", "b")
    assert answer.code == 1
    bad, good = answer.json
    assert (bad["result"], bad["lives_on"], good["result"]) == ("corrupt", lives_on, "good")
    assert ("another one is good" in answer.err) == lives_on


@pytest.mark.parametrize("words", [(), ("--all", "a")])
def test_verify_wants_blocks_or_all(run: Run, words: tuple[str, ...]) -> None:
    assert run("verify", *words).code == 2


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOENT, 3),
        (errno.EINVAL, 2),
        (errno.ENOSPC, 4),
        (errno.ETIMEDOUT, 5),
        (errno.EACCES, 1),
        (errno.EXDEV, 1),
    ],
)
def test_errno_has_its_exit_code_and_its_words(
    mount: FakeMount, run: Run, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "setxattr", refuse)
    answer = run("ttl", "1h", "a", "b")
    assert answer.code == code
    assert answer.err.startswith("ctx: a: ")
    assert answer.err.count("\n") == 2


def test_answers_agree_with_the_daemons_errors() -> None:
    from ctxfs import errors

    for each in (errors.BlockNotFound, errors.BadValue, errors.NameTooLong, errors.TierFull):
        assert _common.ANSWERS[each.code].exit_code == each.exit_code
    assert _common.ANSWERS[errno.EIO].exit_code == errors.DeviceError.exit_code
    assert _common.ANSWERS[errno.ETIMEDOUT].exit_code == errors.DeadlineExceeded.exit_code


@pytest.mark.parametrize("words", [("fly",), ("ls", "--sort", "smell"), ("tier",), ("--frob",)])
def test_usage_errors_exit_with_2(run: Run, words: tuple[str, ...]) -> None:
    assert run(*words).code == 2


def test_no_command_shows_the_help(run: Run) -> None:
    answer = run()
    assert answer.code == 2
    assert "commands:" in answer.err


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (("ttl", "--", "72h"), xattrs.TTL, b"72h"),
        (("ttl", "72h", "--"), xattrs.TTL, b"72h"),
        (("tier", "cold", "--"), xattrs.TIER, b"cold"),
        (("pin", "--"), xattrs.PIN, b"1"),
        (("pin", "--for", "2h", "--"), xattrs.PIN, b"2h"),
        (("unpin", "--"), xattrs.PIN, b"0"),
        (("prefetch", "--chain", "--"), xattrs.PREFETCH, b"chain"),
        (("verify", "--"), xattrs.VERIFY, b"1"),
    ],
)
@pytest.mark.parametrize("key", ["-rf", "--json", "--", "-1", "--for"])
def test_word_after_two_dashes_is_a_key_whatever_it_looks_like(
    mount: FakeMount, run: Run, words: tuple[str, ...], name: bytes, value: bytes, key: str
) -> None:
    mount.block(key)
    answer = run(*words, "a", key)
    assert (answer.code, answer.err) == (0, "")
    assert (mount.attribute("a", name), mount.attribute(key, name)) == (value, value)


@pytest.mark.parametrize("words", [("stat",), ("ttl",), ("tier",), ("ls",)])
def test_key_that_looks_like_an_option_is_shown_after_two_dashes(
    mount: FakeMount, run: Run, words: tuple[str, ...]
) -> None:
    for key in ("-rf", "--json"):
        mount.block(key)
    rows = run(*words, "--json", "--", "-rf", "--json", "a").json
    assert [row["key"] for row in rows] == ["-rf", "--json", "a"]
    rows = run(*words, "a", "--json", "--", "-rf").json
    assert [row["key"] for row in rows] == ["a", "-rf"]


def test_key_that_looks_like_an_option_is_removed_after_two_dashes(
    mount: FakeMount, run: Run
) -> None:
    mount.block("-rf")
    assert run("rm", "-rf").code == 2
    assert (mount.path / "-rf").exists()
    assert run("rm", "-f", "--", "-rf", "a").code == 0
    assert not (mount.path / "-rf").exists()
    assert not (mount.path / "a").exists()
    assert (mount.path / "b").exists()


def test_stray_word_after_two_dashes_is_told_as_it_was_typed(run: Run) -> None:
    assert "unrecognized arguments: -x" in run("df", "--", "-x").err
    assert "'-x'" in run("completion", "--", "-x").err
