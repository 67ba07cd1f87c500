"""The commands that only look: ls, stat, df, events, top --once, and how they show names."""

import copy
import errno
import os
import re

import pytest

from tests.tools.conftest import Run
from tests.tools.fakemount import STATS, FakeMount
from tools import _output, ls


@pytest.fixture
def blocks(mount: FakeMount) -> FakeMount:
    mount.block("small", b"x", hits=5, idle_s=1.0, ttl_s=60.0, created="2026-01-03T00:00:00Z")
    mount.block("large", b"x" * 9000, hits=0, idle_s=9.0, created="2026-01-01T00:00:00Z")
    mount.block("mid", b"x" * 500, tier="cold", copies=["cold"], hits=9, idle_s=5.0, ttl_s=30.0)
    mount.block("sub/deep", b"x" * 50, tier="cold", copies=["cold"])
    mount.block(".part.tmp", b"x")
    return mount


def test_names_alone_are_one_a_line_and_hide_dots(blocks: FakeMount, run: Run) -> None:
    assert run("ls").out.splitlines() == ["large", "mid", "small", "sub/"]


def test_all_shows_dots_but_never_the_daemons_own(blocks: FakeMount, run: Run) -> None:
    assert run("ls", "-a").out.splitlines() == [".part.tmp", "large", "mid", "small", "sub/"]


def test_recursive_listing_gives_keys_that_other_commands_take(blocks: FakeMount, run: Run) -> None:
    names = run("ls", "-R").out.splitlines()
    assert names == ["large", "mid", "small", "sub/", "sub/deep"]
    assert run("stat", *names).code == 0


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("name", ["large", "mid", "small"]),
        ("size", ["large", "mid", "small"]),
        ("ttl", ["mid", "small", "large"]),
        ("idle", ["large", "mid", "small"]),
        ("tier", ["large", "small", "mid"]),
        ("created", ["small", "mid", "large"]),
        ("hits", ["mid", "small", "large"]),
    ],
)
def test_each_order_begins_with_what_one_looks_for(
    blocks: FakeMount, run: Run, order: str, expected: list[str]
) -> None:
    listed = [row["key"] for row in run("ls", "--json", "--sort", order).json]
    assert [key for key in listed if key != "sub"] == expected
    turned = [row["key"] for row in run("ls", "--json", "-r", "--sort", order).json]
    assert [key for key in turned if key != "sub"] == expected[::-1]


def test_tier_filter_keeps_only_blocks_of_that_tier(blocks: FakeMount, run: Run) -> None:
    assert run("ls", "-R", "--tier", "cold").out.splitlines() == ["mid", "sub/deep"]


def test_long_line_has_tier_flags_size_times_hits_and_key(mount: FakeMount, run: Run) -> None:
    mount.block("k", b"x" * 2048, ttl_s=90.2, idle_s=3700.0, hits=3, pin="1", placement="hot")
    mount.block("w", b"", state="writing", tier=None, copies=[], digest=None)
    first, second = (line.split() for line in run("ls", "-l").out.splitlines())
    assert first == ["hot", "-pf", "2.0KiB", "1m30s", "1h1m", "3", "k"]
    assert second == ["-", "w--", "0B", "none", "1s", "0", "w"]


def test_json_row_has_the_whole_story(blocks: FakeMount, run: Run) -> None:
    rows = {row["key"]: row for row in run("ls", "--json").json}
    assert rows["small"]["size_bytes"] == 1
    assert rows["small"]["ttl_s"] == 60.0
    assert rows["sub"] == {"key": "sub", "type": "directory"}


def test_empty_listing_is_an_empty_json_list(mount: FakeMount, run: Run) -> None:
    assert run("ls", "--json").json == []


def test_missing_name_is_told_and_the_rest_is_listed(blocks: FakeMount, run: Run) -> None:
    answer = run("ls", "gone", "mid")
    assert answer.code == 3
    assert answer.out == "mid\n"
    assert answer.err == "ctx: gone: no such block or directory\n"


def test_file_that_is_no_block_is_told_but_names_are_listed(mount: FakeMount, run: Run) -> None:
    (mount.path / "stranger").touch()
    assert run("ls").code == 0
    answer = run("ls", "-l")
    assert answer.code == 1
    assert "not known to ctxfs" in answer.err


HOSTILE = [
    (b"a\x1b[31mred", r"a\x1b[31mred"),
    (b"line\nbreak", r"line\x0abreak"),
    (b"\xff\xfe", r"\xff\xfe"),
    (b"back\\slash", r"back\\slash"),
    ("\u202etxt".encode(), r"\xe2\x80\xaetxt"),
    ("größe".encode(), "größe"),
    (b"with blank", "with blank"),
]


@pytest.mark.parametrize(("name", "shown"), HOSTILE)
def test_names_are_shown_escaped_and_never_raw(
    mount: FakeMount, run: Run, name: bytes, shown: str
) -> None:
    mount.block(name)
    assert run("ls").out == shown + "\n"
    assert run("ls", "-l").out.endswith(f"  {shown}\n")
    assert f"key  {shown}\n" in run("stat", os.fsdecode(name)).out
    assert run("rm", os.fsdecode(name) + "x").err.startswith("ctx: " + shown + "x: ")


@pytest.mark.parametrize(("name", "shown"), HOSTILE)
def test_json_names_give_back_the_very_bytes(
    mount: FakeMount, run: Run, name: bytes, shown: str
) -> None:
    mount.block(name)
    assert os.fsencode(run("ls", "--json").json[0]["key"]) == name


def test_stat_shows_a_block_in_full(mount: FakeMount, run: Run) -> None:
    mount.block(
        "k", b"x" * 4096, parent="before\x07", dtype="bf16", pin="61.5", attributes={"user.a": "b"}
    )
    out = run("stat", "k").out
    for line in (
        "size  4.0KiB (4096 bytes)",
        "pinned  for 1m1s",
        r"parent  before\x07",
        "dtype  bf16",
        "user.a  b",
        "mode  0644, uid 0, gid 0",
    ):
        assert line in out


def test_stat_of_a_directory_shows_its_defaults(blocks: FakeMount, run: Run) -> None:
    os.setxattr(blocks.path / "sub", "user.ctx.ttl", b"3600.000")
    os.setxattr(blocks.path / "sub", "user.ctx.together", b"1")
    os.setxattr(blocks.path / "sub", "user.mine", b"kept")
    row = run("stat", "--json", "sub").json[0]
    assert (row["type"], row["default_ttl"], row["together"]) == ("directory", "3600.000", True)
    assert row["attributes"] == {"user.mine": "kept"}
    assert "default ttl  1h" in run("stat", "sub").out


def test_stat_json_tells_failures_apart(blocks: FakeMount, run: Run) -> None:
    answer = run("stat", "--json", "mid", "gone")
    good, bad = answer.json
    assert (good["key"], good["ok"], good["type"]) == ("mid", True, "block")
    assert bad == {"key": "gone", "ok": False, "error": "no such block or directory"}
    assert answer.code == 3


def test_df_shows_tiers_and_devices(mount: FakeMount, run: Run) -> None:
    lines = run("df").out.splitlines()
    assert lines[1].split() == ["hot", "8.0GiB", "2.0GiB", "2.0GiB", "6.0GiB", "25%", "2", "1.0MiB"]
    assert lines[2].split()[:5] == ["cold", "100.0GiB", "25.0GiB", "10.0GiB", "75.0GiB"]
    assert lines[-1].split()[-2:] == ["threads", "/var/lib/ctxfs/cold0"]


def test_df_json_is_the_daemons_own_account(mount: FakeMount, run: Run) -> None:
    answer = run("df", "--json").json
    assert answer["tiers"] == STATS["tiers"]
    assert answer["blocks"] == STATS["blocks"]
    assert answer["mount"] == str(mount.path)


def test_df_without_a_cold_tier_shows_one_table(mount: FakeMount, run: Run) -> None:
    stats = copy.deepcopy(STATS)
    del stats["tiers"]["cold"]
    mount.write_stats(stats)
    assert len(run("df").out.splitlines()) == 2


def test_directory_that_is_no_mount_is_told_with_the_remedy(
    mount: FakeMount, run: Run, tmp_path: os.PathLike[str]
) -> None:
    answer = run("df", "--mount", os.fspath(tmp_path))
    assert answer.code == 1
    assert "is not a ctxfs mount (`ctx mount` makes one)" in answer.err


@pytest.mark.parametrize("words", [("ls",), ("stat", "k"), ("rm", "k"), ("events",), ("top",)])
def test_place_that_is_not_there_is_no_mount(
    mount: FakeMount, run: Run, words: tuple[str, ...]
) -> None:
    answer = run(*words, "--mount", "/nowhere/at/all")
    assert answer.code == 1
    assert answer.err == "ctx: /nowhere/at/all: is not a ctxfs mount (`ctx mount` makes one)\n"


def test_mount_whose_daemon_is_gone_is_told_once(
    mount: FakeMount, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(os, "statvfs", refuse)
    answer = run("stat", "a", "b")
    assert answer.code == 1
    assert answer.err == (
        f"ctx: {mount.path}: the daemon is gone (`ctx umount`, then `ctx mount` again)\n"
    )


def test_options_may_stand_before_the_command(mount: FakeMount, run: Run) -> None:
    answer = run("--mount", str(mount.path), "--json", "df")
    assert answer.json["mount"] == str(mount.path)


def test_events_are_lines_with_escaped_keys(mount: FakeMount, run: Run) -> None:
    first, second = run("events").out.splitlines()
    assert first.split() == ["2026-01-02T03:04:05Z", "sealed", "4.0KiB", "hot", "alpha"]
    assert second.split() == ["2026-01-02T03:04:05Z", "moved", "8.0KiB", "hot→cold", r"be\x1bta"]


def test_events_of_one_kind_as_json_lines(mount: FakeMount, run: Run) -> None:
    (line,) = run("events", "--json", "--kind", "moved").out.splitlines()
    assert '"from": "hot", "to": "cold"' in line


def test_broken_event_lines_are_passed_over(mount: FakeMount, run: Run) -> None:
    with open(mount.path / ".ctx" / "events.recent", "a") as file:
        file.write('half a line"}\n[1]\n{"event": "expired", "key": "k"}')
    assert len(run("events").out.splitlines()) == 3


def test_top_once_gives_averages_since_start_and_the_most_used(blocks: FakeMount, run: Run) -> None:
    view = run("top", "--once", "--json", "--blocks", "2").json
    assert view["rates"]["opens_per_s"] == 10.0
    assert view["rates"]["read_bytes_per_s"] == 1 << 20
    assert [block["key"] for block in view["hottest"]] == ["mid", "small"]
    assert view["rss_bytes"] == 64 << 20


def test_top_once_in_plain_text(blocks: FakeMount, run: Run) -> None:
    out = run("top", "--once").out
    assert out.startswith("ctxfs 0.1.0 at /ctx, pid 4242, pyfuse3 channel, up 1m40s")
    assert re.search(r"hit ratio +80%", out)
    assert "\x1b" not in out


@pytest.mark.parametrize("interval", ["none", "soon"])
def test_top_refuses_what_is_no_interval(mount: FakeMount, run: Run, interval: str) -> None:
    assert run("top", "--interval", interval).code == 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0, "0s"),
        (0.0004, "0s"),
        (0.25, "250ms"),
        (59.99, "59s"),
        (3661.0, "1h1m"),
        (93784.0, "1d2h"),
    ],
)
def test_durations_are_short(seconds: float | None, text: str) -> None:
    assert _output.short_duration(seconds) == text


def test_names_fill_columns_downwards() -> None:
    assert ls.in_columns(["a", "bb", "c", "d", "e"], 13) == ["a   c   e", "bb  d"]
    assert ls.in_columns(["wider than the screen"], 5) == ["wider than the screen"]
    assert ls.in_columns([], 80) == []
