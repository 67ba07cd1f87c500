"""Extended attributes: what `user.ctx.*` says and does, and what programs keep beside it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from tests.mount.harness import MIB, Daemon, elsewhere, noise, wait_until

CTX = "user.ctx."
READ_ONLY = (
    "copies", "digest", "state", "generation", "stored", "codec", "hits", "idle", "created",
    "story",
)  # fmt: skip
ALWAYS_LISTED = {
    "copies", "state", "generation", "stored", "codec", "hits", "idle", "created", "digest",
}  # fmt: skip
# version 2; user::rw-, user:65534:r--, group::r--, mask::r--, other::r--
ACL = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", tag, bits, who)
    for tag, bits, who in (
        (1, 6, 2**32 - 1), (2, 4, 65534), (4, 4, 2**32 - 1), (16, 4, 2**32 - 1), (32, 4, 2**32 - 1),
    )
)  # fmt: skip


@pytest.fixture(scope="module")
def one(channel: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with both tiers for all tests that leave it as it is."""
    base = tmp_path_factory.mktemp("attributes")
    with Daemon(base, hot="64MiB", cold="256MiB", channel=channel) as daemon:
        yield daemon
        assert "Traceback" not in daemon.log(), daemon.log()


@pytest.fixture
def name(one: Daemon, request: pytest.FixtureRequest) -> Iterator[str]:
    """A name for the one block of a test."""
    name = request.node.name.replace("/", "_")[:200]
    yield name
    path = one.mount / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def error_of(action: Callable[..., object], *arguments: object) -> int:
    """The errno of a call; 0 if it went well."""
    try:
        action(*arguments)
    except OSError as error:
        return error.errno or -1
    return 0


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


# -- tier and copies


def test_writing_a_tier_moves_the_block_before_the_call_returns(one: Daemon, name: str) -> None:
    # LMCache#1721: a move that is neither done nor to be seen
    content = noise(1, 3 * MIB + 11)
    one.put(name, content)
    for tier, first, copies in (
        ("cold", "cold", "cold"),
        ("hot", "hot", "hot,cold"),
        ("cold", "cold", "cold"),
        ("auto", "cold", "cold"),
    ):
        one.set(name, "tier", tier)
        assert (one.get(name, "tier"), one.get(name, "copies")) == (first, copies)
    assert elsewhere((one.mount / name).read_bytes) == content
    assert one.get(name, "tier") == "hot"


def test_block_placed_cold_is_hot_only_while_it_is_open(one: Daemon, name: str) -> None:
    path = one.put(name, noise(2, MIB))
    one.set(name, "tier", "cold")
    with open(path, "rb") as file:
        assert file.read() == noise(2, MIB)
        assert one.get(name, "copies") == "hot,cold"
    wait_until(lambda: one.get(name, "copies") == "cold")
    one.set(name, "tier", "auto")
    path.read_bytes()
    assert one.get(name, "copies") == "hot,cold"


def test_tier_asked_for_while_writing_is_carried_out_when_sealed(one: Daemon, name: str) -> None:
    path = one.mount / name
    with open(path, "wb") as file:
        file.write(noise(3, MIB))
        os.setxattr(file.fileno(), CTX + "tier", b"cold")
    wait_until(lambda: one.get(name, "copies") == "cold")
    assert path.read_bytes() == noise(3, MIB)


def test_cold_is_refused_where_there_is_no_cold_tier(hot_only: Daemon) -> None:
    path = hot_only.put("k", b"content")
    assert error_of(os.setxattr, path, CTX + "tier", b"cold") == errno.EINVAL
    assert "user.ctx.tier takes auto, hot here, not 'cold'" in hot_only.log()
    hot_only.set("k", "tier", "hot")
    assert hot_only.get("k", "copies") == "hot"


# -- values that are not accepted


@pytest.mark.parametrize(
    ("attribute", "value", "told"),
    [
        ("tier", b"warm", "user.ctx.tier takes auto, hot, cold here"),
        ("tier", b"remote", "user.ctx.tier takes auto, hot, cold here"),
        ("tier", b"HOT", "user.ctx.tier takes auto, hot, cold here"),
        ("tier", b"", "user.ctx.tier takes auto, hot, cold here"),
        ("ttl", b"soon", "user.ctx.ttl: 'soon' is not a duration like 90"),
        ("ttl", b"\xff", "user.ctx.ttl takes text"),
        ("pin", b"yes", "user.ctx.pin: 'yes' is not a duration"),
        ("pin", b"none", "user.ctx.pin takes 1, 0 or a duration"),
        ("prefetch", b"2", "user.ctx.prefetch takes 1 or chain"),
        ("verify", b"0", "user.ctx.verify takes 1"),
        ("dtype", b"bf\x0116", "user.ctx.dtype takes a name such as bf16"),
        ("dtype", b"x" * 65, "user.ctx.dtype takes a name such as bf16"),
        ("parent", b"../up", "not a name: b'..'"),
        ("parent", b"a//b", "not a name: b''"),
        ("together", b"1", "no attribute user.ctx.together"),
        ("no-such-thing", b"1", "no attribute user.ctx.no-such-thing"),
    ],
)
def test_value_that_is_not_accepted_is_told_in_the_log(
    one: Daemon, name: str, attribute: str, value: bytes, told: str
) -> None:
    path = one.put(name, b"content")
    before = len(one.log())
    assert error_of(os.setxattr, path, CTX + attribute, value) == errno.EINVAL
    assert told in one.log()[before:]
    assert path.read_bytes() == b"content"


@pytest.mark.parametrize("attribute", READ_ONLY)
def test_what_can_only_be_read_is_not_written(one: Daemon, name: str, attribute: str) -> None:
    path = one.put(name, b"content")
    one.wait_sealed(name)
    before = one.get(name, "generation")
    assert error_of(os.setxattr, path, CTX + attribute, b"1") == errno.EPERM
    assert error_of(os.removexattr, path, CTX + attribute) == errno.EPERM
    assert one.get(name, "generation") == before


def test_newline_that_a_shell_left_does_no_harm(one: Daemon, name: str) -> None:
    one.put(name, b"content")
    for attribute, value, reads in (
        ("tier", "cold\n", "cold"),
        ("pin", "1\n", "1"),
        ("ttl", "none\n", "none"),
        ("parent", "a/b\n", "a/b"),
        ("dtype", "fp8\n", "fp8"),
    ):
        one.set(name, attribute, value)
        assert one.get(name, attribute) == reads
    one.set(name, "verify", "1\n")
    one.set(name, "prefetch", "1\n")


# -- what is told of a block


def test_attributes_tell_what_is_true_of_the_block(one: Daemon, name: str) -> None:
    content = noise(4, 2 * MIB + 5)
    before_ns = time.time_ns()
    path = one.put(name, content)
    one.wait_sealed(name)
    assert one.get(name, "digest") == f"xxh3-128:{xxhash.xxh3_128_hexdigest(content)}"
    assert one.get(name, "generation") == str(path.stat().st_ino)
    assert one.get(name, "codec") == "raw"
    assert one.get(name, "ttl") == "none"
    assert one.get(name, "pin") == "0"
    created = time.strptime(one.get(name, "created")[:19], "%Y-%m-%dT%H:%M:%S")
    assert 0 <= time.mktime(created) - time.timezone - before_ns // 10**9 + 3600 < 7200
    hot_bytes = int(one.get(name, "stored"))
    assert hot_bytes >= len(content)
    one.set(name, "tier", "cold")
    cold_bytes = int(one.get(name, "stored"))
    assert cold_bytes >= len(content)
    one.set(name, "tier", "hot")
    assert int(one.get(name, "stored")) == hot_bytes + cold_bytes
    wait_until(lambda: path.stat().st_blocks == -(-(hot_bytes + cold_bytes) // 512))


def test_opening_counts_as_use_and_looking_does_not(one: Daemon, name: str) -> None:
    path = one.put(name, b"content")
    one.wait_sealed(name)
    hits = int(one.get(name, "hits"))
    for _ in range(3):
        path.stat()
        os.listdir(one.mount)
        os.listxattr(path)
    assert int(one.get(name, "hits")) == hits
    wait_until(lambda: float(one.get(name, "idle")) > 0.05)
    started = time.monotonic()
    elsewhere(path.read_bytes)
    idle_s = float(one.get(name, "idle"))
    assert idle_s <= time.monotonic() - started + 0.001
    assert int(one.get(name, "hits")) == hits + 1


def test_listing_names_all_that_is_set(one: Daemon, name: str) -> None:
    path = one.put(name, b"content")
    one.wait_sealed(name)
    assert set(os.listxattr(path)) == {CTX + each for each in ALWAYS_LISTED}
    one.set(name, "parent", "before")
    one.set(name, "dtype", "bf16")
    os.setxattr(path, "user.vendor.layer", b"17")
    expected = {CTX + each for each in ALWAYS_LISTED | {"parent", "dtype"}} | {"user.vendor.layer"}
    assert set(os.listxattr(path)) == expected
    told = run("getfattr", "-d", "--absolute-names", path)
    assert told.returncode == 0, told.stderr
    lines = dict(line.split("=", 1) for line in told.stdout.splitlines() if "=" in line)
    assert set(lines) == expected
    assert lines["user.ctx.parent"] == '"before"'
    assert lines["user.vendor.layer"] == '"17"'
    assert lines["user.ctx.copies"] == '"hot"'


def test_copies_of_a_block_do_not_take_over_what_nobody_set(one: Daemon, name: str) -> None:
    path = one.put(name, b"content")
    one.wait_sealed(name)
    copied = run("cp", "-a", "--preserve=all", path, path.with_name(f"{name} copy"))
    assert (copied.returncode, copied.stderr) == (0, "")
    moved = run("sh", "-c", 'cp -a "$1" "$2/m" && mv "$2/m" "$1 moved"', "-", path, one.state)
    assert (moved.returncode, moved.stderr) == (0, "")
    for other in (f"{name} copy", f"{name} moved"):
        one.wait_sealed(other)
        assert json.loads(one.get(other, "story"))["placement"] == "auto"
        assert one.get(other, "digest") == one.get(name, "digest")


def test_what_was_set_is_copied(one: Daemon, name: str) -> None:
    path = one.put(name, b"content")
    one.set(name, "pin", "1")
    one.set(name, "ttl", "1h")
    one.set(name, "dtype", "bf16")
    assert {CTX + each for each in ("pin", "ttl", "dtype")} < set(os.listxattr(path))
    copied = run("cp", "-a", path, path.with_name(f"{name} copy"))
    assert (copied.returncode, copied.stderr) == (0, "")
    assert one.get(f"{name} copy", "pin") == "1"
    assert float(one.get(f"{name} copy", "ttl")) > 3500
    assert one.get(f"{name} copy", "dtype") == "bf16"


# -- chains


def test_prefetch_of_a_chain_brings_its_descendants(one: Daemon, name: str) -> None:
    (one.mount / name).mkdir()
    keys = [f"{name}/{number}" for number in range(6)]
    for number, key in enumerate(keys):
        one.put(key, noise(number, MIB))
        if number:
            # 0 ← 1 ← 2 ← 3, and 4 a second child of 1; 5 belongs to nobody here
            one.set(key, "parent", {4: keys[1], 5: "elsewhere"}.get(number, keys[number - 1]))
        one.set(key, "tier", "cold")
        one.set(key, "tier", "auto")
    one.set(keys[0], "prefetch", "1")
    wait_until(lambda: one.get(keys[0], "tier") == "hot")
    one.set(keys[1], "prefetch", "chain")
    wait_until(lambda: all(one.get(key, "tier") == "hot" for key in keys[:5]))
    assert one.get(keys[5], "tier") == "cold"


def test_chain_of_parents_that_is_a_ring_ends(one: Daemon, name: str) -> None:
    one.put(name, b"one")
    other = one.put(f"{name}.other", b"two")
    one.set(name, "parent", other.name)
    one.set(other.name, "parent", name)
    for key in (name, other.name):
        one.set(key, "tier", "cold")
        one.set(key, "tier", "auto")
    one.set(name, "prefetch", "chain")
    wait_until(lambda: all(one.get(key, "tier") == "hot" for key in (name, other.name)))
    other.unlink()


def test_verify_of_a_good_block_answers_and_changes_nothing(one: Daemon, name: str) -> None:
    path = one.put(name, noise(5, MIB))
    one.set(name, "tier", "hot")
    one.set(name, "verify", "1")
    one.set(name, "tier", "cold")
    one.set(name, "verify", "1")
    assert one.get(name, "copies") == "cold"
    assert path.read_bytes() == noise(5, MIB)


# -- what belongs to programs


@pytest.mark.parametrize(
    "value", [b"", b"\0", bytes(range(256)), b"line\n", b"\xff" * 60_000], ids=len
)
def test_foreign_value_is_kept_byte_for_byte(one: Daemon, name: str, value: bytes) -> None:
    path = one.put(name, b"content")
    os.setxattr(path, "user.mine", value)
    assert os.getxattr(path, "user.mine") == value
    one.set(name, "tier", "cold")
    assert os.getxattr(path, "user.mine") == value
    os.setxattr(path, "user.mine", value[:1])
    assert os.getxattr(path, "user.mine") == value[:1]


def test_foreign_attributes_have_a_limit_that_leaves_the_others_whole(
    one: Daemon, name: str
) -> None:
    path = one.put(name, b"content")
    os.setxattr(path, "user.a", b"a" * 40_000)
    assert error_of(os.setxattr, path, "user.b", b"b" * 40_000) == errno.ENOSPC
    assert error_of(os.setxattr, path, "user.a", b"a" * 65_536) == errno.ENOSPC
    assert os.getxattr(path, "user.a") == b"a" * 40_000
    assert "user.b" not in os.listxattr(path)
    os.setxattr(path, "user.a", b"a")
    os.setxattr(path, "user.b", b"b" * 40_000)


def test_names_of_attributes_have_255_bytes_and_are_always_listed(one: Daemon, name: str) -> None:
    path = one.put(name, b"content")
    longest = "user." + "n" * 250
    os.setxattr(path, longest, b"v")
    assert os.getxattr(path, longest) == b"v"
    assert error_of(os.setxattr, path, longest + "n", b"v") == errno.ERANGE
    assert error_of(os.setxattr, path, "user.", b"v") == errno.EINVAL
    # more names than the kernel lists at once
    names = [f"user.{number:0250}" for number in range(400)]
    answers = [error_of(os.setxattr, path, each, b"") for each in names]
    assert set(answers) == {0, errno.ENOSPC}
    assert len(os.listxattr(path)) == len(ALWAYS_LISTED) + 1 + answers.count(0)


def test_create_and_replace_do_as_on_other_file_systems(one: Daemon, name: str) -> None:
    path = one.put(name, b"content")
    create, replace = os.XATTR_CREATE, os.XATTR_REPLACE
    assert error_of(os.setxattr, path, "user.x", b"1", replace) == errno.ENODATA
    os.setxattr(path, "user.x", b"1", create)
    assert error_of(os.setxattr, path, "user.x", b"2", create) == errno.EEXIST
    assert os.getxattr(path, "user.x") == b"1"
    os.setxattr(path, "user.x", b"3", replace)
    assert os.getxattr(path, "user.x") == b"3"
    assert error_of(os.setxattr, path, CTX + "parent", b"p", replace) == errno.ENODATA
    os.setxattr(path, CTX + "parent", b"p", create)
    assert error_of(os.setxattr, path, CTX + "ttl", b"1h", create) == errno.EEXIST


def test_removing_takes_back_to_the_default(one: Daemon, name: str) -> None:
    path = one.put(name, b"content")
    assert error_of(os.removexattr, path, "user.mine") == errno.ENODATA
    assert error_of(os.removexattr, path, CTX + "parent") == errno.ENODATA
    assert error_of(os.removexattr, path, CTX + "nothing") == errno.ENODATA
    os.setxattr(path, "user.mine", b"")
    for attribute, value in (("ttl", "1h"), ("pin", "1"), ("parent", "p"), ("dtype", "fp8")):
        one.set(name, attribute, value)
    one.set(name, "tier", "cold")
    for attribute in ("ttl", "pin", "parent", "dtype", "tier"):
        os.removexattr(path, CTX + attribute)
    os.removexattr(path, "user.mine")
    assert (one.get(name, "ttl"), one.get(name, "pin")) == ("none", "0")
    assert set(os.listxattr(path)) == {CTX + each for each in ALWAYS_LISTED}
    path.read_bytes()
    assert one.get(name, "copies") == "hot,cold"  # kept nowhere any more


def test_other_kinds_of_attributes_are_not_there_and_not_supported(one: Daemon, name: str) -> None:
    path = one.put(name, b"content")
    for other, value in (
        ("security.selinux", b"label\0"),
        ("trusted.overlay.opaque", b"y"),
        ("system.posix_acl_access", ACL),
    ):
        assert error_of(os.getxattr, path, other) == errno.ENODATA
        assert error_of(os.removexattr, path, other) == errno.ENODATA
        assert error_of(os.setxattr, path, other, value) == errno.EOPNOTSUPP


def test_cp_ls_and_getfacl_have_nothing_to_complain_of(
    one: Daemon, name: str, tmp_path: Path
) -> None:
    # cp tries to set an access list, and takes no error but "not supported"
    plain = tmp_path / "plain"
    plain.write_bytes(noise(6, 100_000))
    plain.chmod(0o640)
    os.setxattr(plain, "user.mine", b"\0\1")
    path = one.mount / name
    back = tmp_path / "back"
    for command in (
        ("cp", "-a", plain, path),
        ("cp", "-p", plain, path),
        ("ls", "-la", path),
        ("getfacl", "-p", path),
        ("cp", "-a", path, back),
        ("cp", "-a", back, path),
    ):
        done = run(*command)
        assert (done.returncode, done.stderr) == (0, ""), command
    assert path.read_bytes() == plain.read_bytes()
    assert os.getxattr(path, "user.mine") == b"\0\1"
    assert path.stat().st_mode & 0o777 == 0o640
    assert path.stat().st_mtime_ns == plain.stat().st_mtime_ns


# -- what attributes outlast


def test_attributes_outlast_rename_tiers_fsync_restart_and_death(daemon: Daemon) -> None:
    values = {f"user.vendor.{number}": noise(number, 50 * number) for number in range(1, 6)}
    values["user.empty"] = b""
    written = daemon.put("before", noise(7, MIB))
    for each, value in values.items():
        os.setxattr(written, each, value)
    daemon.set("before", "dtype", "bf16")
    daemon.set("before", "pin", "1")
    os.setxattr(written, CTX + "parent", b"odd\xff/key")

    def check() -> None:
        assert {each: os.getxattr(path, each) for each in os.listxattr(path)
                if not each.startswith(CTX)} == values  # fmt: skip
        assert os.getxattr(path, CTX + "parent") == b"odd\xff/key"
        assert daemon.get("after", "dtype") == "bf16"
        assert daemon.get("after", "pin") == "1"
        assert daemon.get("after", "generation") == generation

    generation = daemon.get("before", "generation")
    path = written.rename(daemon.mount / "after")
    check()
    for step in ("cold", "hot", "fsync", "restart", "crash", "auto", "change", "crash", "restart"):
        match step:
            case "fsync":
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            case "restart":
                daemon.restart()
            case "crash":
                daemon.crash()
            case "change":
                values["user.vendor.1"] = b"changed"
                os.setxattr(path, "user.vendor.1", b"changed")
                del values["user.vendor.2"]
                os.removexattr(path, "user.vendor.2")
            case tier:
                daemon.set("after", "tier", tier)
        check()
    assert path.read_bytes() == noise(7, MIB)


def test_attributes_set_while_writing_are_the_blocks_when_it_is_published(
    one: Daemon, name: str
) -> None:
    temporary, path = one.mount / f"{name}.tmp1", one.mount / name
    with open(temporary, "wb") as file:
        number = file.fileno()
        os.setxattr(number, "user.mine", b"1")
        file.write(b"half")
        os.setxattr(number, CTX + "parent", b"p")
        os.setxattr(number, CTX + "ttl", b"1h")
        os.setxattr(number, CTX + "pin", b"1")
        os.setxattr(temporary, CTX + "dtype", b"int8")
        assert os.getxattr(number, CTX + "state") == b"writing"
        assert error_of(os.getxattr, number, CTX + "digest") == errno.ENODATA
        file.flush()
        os.rename(temporary, path)
        os.setxattr(number, "user.late", b"2")
    one.wait_sealed(name)
    assert os.getxattr(path, "user.mine") == b"1"
    assert os.getxattr(path, "user.late") == b"2"
    assert (one.get(name, "parent"), one.get(name, "dtype")) == ("p", "int8")
    assert one.get(name, "pin") == "1"
    assert 0 < float(one.get(name, "ttl")) <= 3600


def test_attributes_set_through_a_descriptor_that_writes_nothing_stay(
    one: Daemon, name: str
) -> None:
    path = one.put(name, b"content")
    one.set(name, "tier", "cold")
    one.set(name, "tier", "auto")
    before = one.get(name, "generation")
    with open(path, "r+b") as file:
        os.setxattr(file.fileno(), "user.mine", b"1")
    wait_until(lambda: "user.mine" in elsewhere(lambda: os.listxattr(path)))
    assert one.get(name, "generation") == before


def test_overwriting_in_place_keeps_mode_owner_and_attributes(one: Daemon, name: str) -> None:
    path = one.put(name, b"old")
    path.chmod(0o640)
    os.chown(path, 65534, 65533)
    os.setxattr(path, "user.mine", b"1")
    one.set(name, "parent", "p")
    one.set(name, "ttl", "1h")
    before = one.get(name, "generation")
    for flags in (os.O_TRUNC, 0):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o600)
        os.write(fd, b"new")
        os.close(fd)
        status = path.stat()
        assert (status.st_mode & 0o7777, status.st_uid, status.st_gid) == (0o640, 65534, 65533)
        assert os.getxattr(path, "user.mine") == b"1"
        assert one.get(name, "parent") == "p"
        assert one.get(name, "ttl") == "none"  # a new generation starts over
        assert one.get(name, "generation") != before
        before = one.get(name, "generation")
        one.set(name, "ttl", "1h")
        elsewhere(path.read_bytes)


# -- directories


def test_directory_has_a_default_lifetime_for_what_is_made_beneath(one: Daemon, name: str) -> None:
    outer = one.mount / name
    inner = outer / "inner"
    inner.mkdir(parents=True)
    one.put(f"{name}/earlier", b"x")
    one.set(name, "ttl", "1h")
    assert float(one.get(name, "ttl")) == 3600
    one.put(f"{name}/outer", b"x")
    one.put(f"{name}/inner/inherits", b"x")
    one.set(f"{name}/inner", "ttl", "none")
    assert one.get(f"{name}/inner", "ttl") == "none"
    one.put(f"{name}/inner/none", b"x")
    one.set(f"{name}/inner", "ttl", "2d\n")
    one.put(f"{name}/inner/own", b"x")
    os.removexattr(inner, CTX + "ttl")
    assert error_of(os.getxattr, inner, CTX + "ttl") == errno.ENODATA
    assert error_of(os.removexattr, inner, CTX + "ttl") == errno.ENODATA
    one.put(f"{name}/inner/again", b"x")
    assert one.get(f"{name}/earlier", "ttl") == "none"
    assert 0 < float(one.get(f"{name}/outer", "ttl")) <= 3600
    assert 0 < float(one.get(f"{name}/inner/inherits", "ttl")) <= 3600
    assert one.get(f"{name}/inner/none", "ttl") == "none"
    assert 3600 < float(one.get(f"{name}/inner/own", "ttl")) <= 2 * 86400
    assert 0 < float(one.get(f"{name}/inner/again", "ttl")) <= 3600


def test_root_has_a_default_lifetime_too_and_it_outlasts_the_daemon(daemon: Daemon) -> None:
    assert os.listxattr(daemon.mount) == []
    daemon.set("", "ttl", "1h")
    daemon.put("a", b"x")
    os.mkdir(daemon.mount / "d")
    daemon.set("d", "ttl", "none")
    os.setxattr(daemon.mount / "d", "user.mine", b"\0\xff")
    for again in (daemon.restart, daemon.crash):
        again()
        assert os.listxattr(daemon.mount) == [CTX + "ttl"]
        assert set(os.listxattr(daemon.mount / "d")) == {CTX + "ttl", "user.mine"}
        assert os.getxattr(daemon.mount / "d", "user.mine") == b"\0\xff"
        daemon.put("b", b"x")
        daemon.put("d/c", b"x")
        assert 0 < float(daemon.get("b", "ttl")) <= 3600
        assert daemon.get("d/c", "ttl") == "none"
    os.removexattr(daemon.mount, CTX + "ttl")
    daemon.put("c", b"x")
    assert daemon.get("c", "ttl") == "none"


def test_directory_refuses_what_belongs_to_blocks(one: Daemon, name: str) -> None:
    path = one.mount / name
    path.mkdir()
    for attribute, value in (("tier", b"hot"), ("pin", b"1"), ("digest", b"1"), ("together", b"2"),
                             ("ttl", b"soon"), ("nonsense", b"1")):  # fmt: skip
        assert error_of(os.setxattr, path, CTX + attribute, value) == errno.EINVAL
    assert os.listxattr(path) == []
    for other in ("system.posix_acl_default", "security.selinux"):
        assert error_of(os.setxattr, path, other, ACL) == errno.EOPNOTSUPP


def fill(daemon: Daemon, mib: int) -> None:
    for number in range(mib // 4):
        daemon.put(f"filler{number}", noise(number, 4 * MIB))
        daemon.wait_sealed(f"filler{number}")


def folder(daemon: Daemon, name: str, *, together: bool = True) -> Path:
    """A directory of four blocks of 4 MiB, two of them one level down."""
    path = daemon.mount / name
    (path / "sub").mkdir(parents=True)
    if together:
        daemon.set(name, "together", "1")
    for key in ("a", "b", "sub/c", "sub/d"):
        daemon.put(f"{name}/{key}", noise(1, 4 * MIB))
        daemon.wait_sealed(f"{name}/{key}")
    return path


def test_blocks_of_a_together_directory_are_evicted_as_one(hot_only: Daemon) -> None:
    whole = folder(hot_only, "whole")
    plain = folder(hot_only, "plain", together=False)
    fill(hot_only, 40)
    wait_until(lambda: not whole.exists())
    assert plain.is_dir()
    evicted = [event["key"] for event in hot_only.events("evicted")]
    assert set(evicted[:4]) == {"whole/a", "whole/b", "whole/sub/c", "whole/sub/d"}
    fill(hot_only, 80)
    wait_until(lambda: not any(path.is_file() for path in plain.rglob("*")))
    assert (plain / "sub").is_dir()  # an ordinary directory stays


def test_one_pinned_block_keeps_its_together_directory(hot_only: Daemon) -> None:
    whole = folder(hot_only, "whole")
    hot_only.set("whole/sub/d", "pin", "1")
    fill(hot_only, 120)
    for key in ("a", "b", "sub/c", "sub/d"):
        assert (whole / key).read_bytes() == noise(1, 4 * MIB)
    hot_only.set("whole/sub/d", "pin", "0")
    hot_only.set("whole", "together", "0")
    fill(hot_only, 120)
    wait_until(lambda: not (whole / "a").exists())
    assert whole.is_dir()


def test_together_directory_expires_as_one_and_goes(hot_only: Daemon) -> None:
    whole = folder(hot_only, "whole")
    plain = folder(hot_only, "plain", together=False)
    for directory in ("whole", "plain"):
        hot_only.set(f"{directory}/sub/c", "ttl", "0.2")
    wait_until(lambda: not whole.exists() and not (plain / "sub/c").exists())
    assert {event["key"] for event in hot_only.events("expired")} == {
        "whole/a", "whole/b", "whole/sub/c", "whole/sub/d", "plain/sub/c",
    }  # fmt: skip
    assert (plain / "a").exists()
    whole.mkdir()
    assert os.listxattr(whole) == []
