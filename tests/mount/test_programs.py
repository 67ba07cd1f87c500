"""Everyday programs on the mount: what people type, and what scripts and numpy do."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.mount.calls import attribute, wait_sealed
from tests.mount.harness import MIB, Daemon, elsewhere, noise, other_process

FIVE_NS = 5_000_000_000


@pytest.fixture(scope="module")
def shared(channel: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """As elsewhere, but small and over a cold file: blocks leave and come back meanwhile."""
    base = tmp_path_factory.mktemp("shared")
    with Daemon(base, hot="64MiB", cold="256MiB", channel=channel) as one:
        yield one


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree of files outside, with modes and times of their own."""
    top = tmp_path / "tree"
    for number, name in enumerate(("a", "b/c", "b/d e", "b/f/.g", "empty")):
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(noise(number, number * 70_000) if name != "empty" else b"")
        path.chmod(0o640)
        os.utime(path, ns=(FIVE_NS, FIVE_NS + number))
    (top / "b/hollow").mkdir()
    return top


def contents(top: Path) -> dict[str, bytes | None]:
    """Content by path below `top`; None for directories."""
    return {
        str(path.relative_to(top)): None if path.is_dir() else path.read_bytes()
        for path in top.rglob("*")
    }


def facts(top: Path) -> dict[str, tuple[int, int]]:
    """Mode and modification time of every file below `top`."""
    found = {str(p.relative_to(top)): p.stat() for p in top.rglob("*") if p.is_file()}
    return {name: (stat.S_IMODE(f.st_mode), f.st_mtime_ns) for name, f in found.items()}


def run(*words: object, cwd: Path | None = None, stdin: bytes = b"") -> str:
    """Run a program that must succeed and say nothing to stderr; return its output."""
    command = [str(word) for word in words]
    done = subprocess.run(command, cwd=cwd, input=stdin, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b""), (command, done)
    return done.stdout.decode()


def bash(script: str, cwd: Path) -> str:
    """Run a script of bash in a directory."""
    return run("bash", "-e", "-c", script, cwd=cwd)


# -- trees


def test_cp_a_keeps_content_modes_and_times(place: Path, tree: Path, tmp_path: Path) -> None:
    run("cp", "-a", tree, place / "tree")
    assert contents(place / "tree") == contents(tree)
    assert facts(place / "tree") == facts(tree)
    run("cp", "-a", place / "tree", place / "again")
    run("cp", "-a", place / "again", tmp_path / "back")
    run("diff", "-r", tree, tmp_path / "back")
    assert facts(tmp_path / "back") == facts(tree)


def test_mv_brings_a_tree_in_and_takes_it_out(place: Path, tree: Path, tmp_path: Path) -> None:
    expected, expected_facts = contents(tree), facts(tree)
    run("mv", tree, place / "in")
    assert not tree.exists()
    assert contents(place / "in") == expected
    # It copies attributes as well, and complains of those that only the daemon sets.
    subprocess.run(["mv", place / "in", place / "moved"], check=True, capture_output=True)
    assert facts(place / "moved") == expected_facts
    run("mv", place / "moved", tmp_path / "out")
    assert (contents(tmp_path / "out"), facts(tmp_path / "out")) == (expected, expected_facts)
    assert os.listdir(place) == []


def test_tar_packs_and_unpacks(place: Path, tree: Path) -> None:
    run("tar", "--format=posix", "-cf", place / "tree.tar", "-C", tree, ".")
    (place / "unpacked").mkdir()
    run("tar", "-xpf", place / "tree.tar", "-C", place / "unpacked")
    assert contents(place / "unpacked") == contents(tree)
    assert facts(place / "unpacked") == facts(tree)
    run("tar", "-df", place / "tree.tar", "-C", place / "unpacked")
    run("tar", "--format=posix", "-rf", place / "tree.tar", "-C", tree, "a")
    assert run("tar", "-tf", place / "tree.tar").count("a\n") == 2


def test_rsync_brings_a_tree_and_then_nothing_more(place: Path, tree: Path) -> None:
    if shutil.which("rsync") is None:
        pytest.skip("rsync is not installed")
    run("rsync", "-a", f"{tree}/", place / "tree")
    assert (contents(place / "tree"), facts(place / "tree")) == (contents(tree), facts(tree))
    generation = attribute(place / "tree/b/c", "generation")
    assert "b/c" not in run("rsync", "-ai", "--inplace", f"{tree}/", place / "tree")
    assert attribute(place / "tree/b/c", "generation") == generation


def test_copytree_and_rmtree_of_python(place: Path, tree: Path) -> None:
    shutil.copytree(tree, place / "tree")
    assert (contents(place / "tree"), facts(place / "tree")) == (contents(tree), facts(tree))
    shutil.copytree(tree, place / "tree", dirs_exist_ok=True)
    shutil.move(place / "tree", place / "moved")
    assert contents(place / "moved") == contents(tree)
    shutil.rmtree(place / "moved")
    assert os.listdir(place) == []


def test_find_grep_and_wc_see_what_is_there(place: Path, tree: Path) -> None:
    run("cp", "-r", tree, place / "tree")
    (place / "tree/text").write_text("one\ntwo needle\nthree\n")
    large = run("find", place, "-type", "f", "-size", "+200k").splitlines()
    assert large == [str(place / "tree/b/f/.g")]
    empty = run("find", place, "-type", "f", "-empty").split()
    assert sorted(empty) == [str(place / "tree/a"), str(place / "tree/empty")]
    assert run("grep", "-rn", "needle", place) == f"{place}/tree/text:2:two needle\n"
    assert run("wc", "-lwc", place / "tree/text").split()[:3] == ["3", "4", "21"]
    run("find", place, "-name", "text", "-delete")
    assert not (place / "tree/text").exists()


def test_du_says_what_the_daemon_says(hot_only: Daemon) -> None:
    (hot_only.mount / "below").mkdir()
    names = [f"below/{number}" for number in range(5)] + ["above"]
    for number, name in enumerate(names):
        hot_only.put(name, noise(number, number * 123_456))
        hot_only.wait_sealed(name)
    used = int(run("du", "-s", "-B1", hot_only.mount).split()[0])
    assert used == sum(int(hot_only.get(name, "stored")) for name in names)
    assert hot_only.stats()["tiers"]["hot"]["blocks"] == len(names)
    apparent = int(run("du", "-s", "-b", hot_only.mount / "below").split()[0])
    assert apparent == sum(number * 123_456 for number in range(5)) + 4096


# -- single files


def test_dd_writes_in_place_and_syncs(place: Path, tmp_path: Path) -> None:
    source, block = tmp_path / "source", place / "block"
    content = noise(1, 3 * MIB)
    source.write_bytes(content)
    run("dd", f"if={source}", f"of={block}", "bs=64k", "conv=fsync", "status=none")
    assert block.read_bytes() == content
    patch = noise(2, 8192)
    dd = ("dd", f"of={block}", "bs=4096", "status=none")
    run(*dd, "seek=10", "conv=notrunc,fdatasync", stdin=patch)
    expected = content[:40960] + patch + content[49152:]
    assert elsewhere(block.read_bytes) == expected
    run(*dd, "seek=1", "count=1", stdin=patch)  # without notrunc it cuts behind what it wrote
    assert elsewhere(block.read_bytes) == expected[:4096] + patch[:4096]
    run("dd", f"if={source}", f"of={block}", "bs=1M", "oflag=direct", "status=none")
    run("dd", f"if={block}", "iflag=direct", f"of={tmp_path / 'back'}", "bs=1M", "status=none")
    assert (tmp_path / "back").read_bytes() == content


def test_truncate_makes_shorter_longer_and_new_ones(place: Path) -> None:
    block = place / "block"
    block.write_bytes(b"0123456789")
    run("truncate", "-s", "4", block)
    assert elsewhere(block.read_bytes) == b"0123"
    run("truncate", "-s", "+3", block)
    assert elsewhere(block.read_bytes) == b"0123\0\0\0"
    run("truncate", "-s", "1M", place / "new")
    assert (place / "new").stat().st_size == MIB
    run("truncate", "-s", "0", block)
    assert elsewhere(block.read_bytes) == b""


def test_install_ln_touch_and_cmp(place: Path, tree: Path) -> None:
    run("install", "-m", "600", "-D", tree / "b/c", place / "deep/er/c")
    run("cmp", tree / "b/c", place / "deep/er/c")
    assert stat.S_IMODE((place / "deep/er/c").stat().st_mode) == 0o600
    run("touch", "-d", "@77", place / "deep/er/c")
    assert (place / "deep/er/c").stat().st_mtime == 77
    run("cp", "-u", "-p", tree / "b/c", place / "deep/er/c")
    assert (place / "deep/er/c").stat().st_mtime == 77
    done = subprocess.run(["ln", tree / "b/c", place / "hard"], capture_output=True, check=False)
    assert done.returncode != 0


# -- the shell


def test_shell_redirections_do_what_they_do_elsewhere(place: Path) -> None:
    bash("echo one > f; echo two >> f; cat f; cat < f > g; printf x >> g", place)
    assert elsewhere((place / "f").read_text) == "one\ntwo\n"
    assert elsewhere((place / "g").read_text) == "one\ntwo\nx"
    assert bash("cat <<END > h; cat h\nhere $((1 + 1))\nEND", place) == "here 2\n"
    bash("(echo a; echo b; /bin/echo c) > group; /bin/echo d 2>> group 1>&2", place)
    assert elsewhere((place / "group").read_text) == "a\nb\nc\nd\n"
    bash("exec 5<> both; echo hello >&5; exec 5>&-", place)
    assert elsewhere((place / "both").read_text) == "hello\n"
    bash(": > f; test ! -s f; test -f f", place)
    assert elsewhere((place / "f").read_bytes) == b""


def test_noclobber_protects_what_is_there(place: Path) -> None:
    bash("set -o noclobber; echo first > f", place)
    done = subprocess.run(
        ["bash", "-c", "set -o noclobber; echo second > f"], cwd=place, capture_output=True
    )
    assert done.returncode != 0
    assert b"cannot overwrite" in done.stderr
    assert (place / "f").read_text() == "first\n"
    bash("set -o noclobber; echo third >| f", place)
    assert elsewhere((place / "f").read_text) == "third\n"


def test_tee_writes_and_appends_to_several(place: Path) -> None:
    assert run("tee", place / "a", place / "b", stdin=b"one\n") == "one\n"
    run("tee", "-a", place / "a", stdin=b"two\n")
    assert elsewhere((place / "a").read_text) == "one\ntwo\n"
    assert elsewhere((place / "b").read_text) == "one\n"
    content = noise(3, 5 * MIB)
    subprocess.run(["tee", place / "c"], input=content, stdout=subprocess.DEVNULL, check=True)
    assert elsewhere((place / "c").read_bytes) == content


def test_sed_in_place_and_sort_into_its_input(place: Path) -> None:
    (place / "f").write_text("c\nb\na\n")
    run("sed", "-i", "s/b/B/", place / "f")
    run("sort", "-o", place / "f", place / "f")
    assert sorted(elsewhere((place / "f").read_text).split()) == ["B", "a", "c"]
    assert os.listdir(place) == ["f"]


def test_program_is_run_from_the_mount(place: Path) -> None:
    (place / "script").write_text("#!/bin/sh\necho from $0\n")
    (place / "script").chmod(0o755)
    assert run(place / "script") == f"from {place}/script\n"
    shutil.copy("/bin/true", place / "true")
    run(place / "true")


# -- numpy


def test_numpy_saves_and_loads_mapped(place: Path) -> None:
    path = place / "tensor.npy"
    tensor = np.random.default_rng(4).standard_normal((32, 2, 128, 64), dtype=np.float32)
    np.save(path, tensor)
    assert np.array_equal(np.load(path), tensor)
    wait_sealed(path)
    os.setxattr(path, "user.ctx.tier", b"cold")
    assert np.array_equal(np.load(path, mmap_mode="r"), tensor)
    assert np.array_equal(np.load(path, mmap_mode="c"), tensor)
    total = other_process(
        "import sys, numpy as np; print(np.load(sys.argv[1], mmap_mode='r').sum())", path
    )
    assert np.isclose(float(total), tensor.sum(), rtol=1e-3, atol=1.0)


def test_numpy_makes_a_block_through_a_mapping(place: Path) -> None:
    path = place / "mapped"
    tensor = np.arange(1_000_000, dtype=np.int32)
    mapped = np.memmap(path, dtype=np.int32, mode="w+", shape=tensor.shape)
    assert mapped.shape == tensor.shape
    mapped[:] = tensor
    mapped.flush()
    del mapped
    wait_sealed(path)
    assert np.array_equal(np.memmap(path, dtype=np.int32, mode="r"), tensor)
    assert elsewhere(path.read_bytes) == tensor.tobytes()
    again = np.memmap(path, dtype=np.int32, mode="r+")
    again[0] = 77
    del again
    assert elsewhere(lambda: int(np.fromfile(path, dtype=np.int32, count=1)[0])) == 77


def test_numpy_tofile_of_more_than_16_mib_is_whole(place: Path) -> None:
    # SGLang's HiCacheFile; numpy asks for fallocate from 16 MiB on
    path, temporary = place / "page.bin", place / ".page.tmp"
    tensor = np.frombuffer(noise(5, 17 * MIB), dtype=np.uint8)
    tensor.tofile(temporary)
    assert temporary.stat().st_size == 17 * MIB
    os.rename(temporary, path)

    def read() -> bool:
        back = np.empty(17 * MIB, dtype=np.uint8)
        with open(path, "rb", buffering=0) as file:
            return file.readinto(back.data) == 17 * MIB and np.array_equal(back, tensor)

    assert elsewhere(read)
