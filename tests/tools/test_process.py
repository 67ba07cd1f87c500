"""`ctx` as a process: signals, closed pipes, terminals, completion."""

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.fakemount import FakeMount

CTX = (sys.executable, "-m", "tools.ctx")
LONGEST_S = 30  # a test that hangs ends; none waits for this to pass


@pytest.fixture
def environment(mount: FakeMount) -> dict[str, str]:
    root = Path(__file__).parents[2]
    return {
        **os.environ,
        "CTXFS_MOUNT": str(mount.path),
        "PYTHONPATH": str(root),
        "TERM": "xterm",
        "COLUMNS": "120",
        "LINES": "40",
    }


def test_ctrl_c_ends_following_quietly_with_130(
    mount: FakeMount, environment: dict[str, str]
) -> None:
    fifo = mount.path / ".ctx" / "events"
    fifo.unlink()
    os.mkfifo(fifo)
    process = subprocess.Popen(
        [*CTX, "events", "-f", "--json"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with open(fifo, "wb", buffering=0) as events:
        events.write(b'{"event": "sealed", "key": "k"}\n')
        assert process.stdout is not None
        assert process.stdout.readline() == b'{"event": "sealed", "key": "k"}\n'
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LONGEST_S)
    assert (process.returncode, out, err) == (130, b"", b"")


def words_of(command: str, mount: FakeMount, tmp_path: Path) -> list[str]:
    """A command that has something to say."""
    mount.block("a")
    device = tmp_path / "device"
    device.write_bytes(bytes(2 << 20))
    return [command, str(device)] if command == "dump" else [command]


@pytest.mark.parametrize("command", ["ls", "dump"])
def test_closed_pipe_ends_quietly(
    mount: FakeMount, environment: dict[str, str], tmp_path: Path, command: str
) -> None:
    words = words_of(command, mount, tmp_path)
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*CTX, *words], env=environment, stdout=writing, stderr=subprocess.PIPE, timeout=LONGEST_S
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("command", ["ls", "df", "dump"])
def test_output_that_has_no_room_is_told_as_such_and_of_nothing_else(
    mount: FakeMount, environment: dict[str, str], tmp_path: Path, command: str
) -> None:
    words = words_of(command, mount, tmp_path)
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*CTX, *words], env=environment, stdout=full, stderr=subprocess.PIPE, timeout=LONGEST_S
        )
    said = b"ctx: standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_name_that_the_terminal_cannot_write_ends_nothing(
    mount: FakeMount, environment: dict[str, str]
) -> None:
    mount.block("größe")
    ascii_only = environment | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run([*CTX, "ls"], env=ascii_only, capture_output=True, timeout=LONGEST_S)
    assert (done.returncode, done.stdout) == (0, b"gr\\xf6\\xdfe\n")


class Terminal:
    """`ctx` on a terminal of its own."""

    def __init__(self, words: list[str], environment: dict[str, str]) -> None:
        self._keyboard, screen = pty.openpty()
        self.process = subprocess.Popen(
            [*CTX, *words], env=environment, stdin=screen, stdout=screen, stderr=screen
        )
        os.close(screen)
        self.text = b""

    def wait_for(self, text: bytes) -> None:
        while text not in self.text:
            assert self._read(), f"ended without {text!r}: {self.text!r}"

    def _read(self) -> bool:
        ready, _, _ = select.select([self._keyboard], [], [], LONGEST_S)
        try:
            piece = os.read(self._keyboard, 65536) if ready else b""
        except OSError:  # the other end is closed
            piece = b""
        self.text += piece
        return bool(piece)

    def press(self, keys: bytes) -> None:
        os.write(self._keyboard, keys)

    def finish(self) -> int:
        while self._read():
            pass
        os.close(self._keyboard)
        return self.process.wait(LONGEST_S)


@pytest.mark.parametrize(("key", "code"), [(b"q", 0), (b"\x03", 130)])
def test_live_view_ends_on_q_and_ctrl_c_and_gives_the_screen_back(
    mount: FakeMount, environment: dict[str, str], key: bytes, code: int
) -> None:
    mount.block("hottest\x1b", hits=77)
    terminal = Terminal(["top", "--interval", "20s"], environment)
    if key == b"\x03":
        # A terminal that is nobody's controlling one sends no signal by itself.
        terminal.wait_for(b"q quits")
        terminal.process.send_signal(signal.SIGINT)
    else:
        terminal.wait_for(b"q quits")
        terminal.press(key)
    assert terminal.finish() == code
    assert rb"hottest\x1b" in terminal.text
    assert b"\x1b[?1049l" in terminal.text  # the alternate screen is left
    assert b"\x1b[?25h" in terminal.text  # the cursor is back
    assert b"Traceback" not in terminal.text


def test_live_view_goes_on_until_the_daemon_is_gone(
    mount: FakeMount, environment: dict[str, str]
) -> None:
    terminal = Terminal(["top", "--interval", "100ms"], environment)
    terminal.wait_for(b"q quits")
    shutil.rmtree(mount.path)
    assert terminal.finish() == 1
    assert b"is not a ctxfs mount" in terminal.text


def test_listing_on_a_terminal_has_a_header_and_colours(
    mount: FakeMount, environment: dict[str, str]
) -> None:
    mount.block("k")
    coloured = {name: value for name, value in environment.items() if name != "NO_COLOR"}
    terminal = Terminal(["ls", "-l"], coloured)
    assert terminal.finish() == 0
    assert b"TIER" in terminal.text
    assert b"\x1b[31mhot" in terminal.text
    plain = Terminal(["ls", "-l"], coloured | {"NO_COLOR": "1"})
    plain.finish()
    assert b"\x1b[" not in plain.text


@pytest.mark.parametrize("words", [["df"], ["stat", "k"], ["doctor"], ["events"], ["tier", "k"]])
def test_every_picture_can_be_drawn_on_a_terminal(
    mount: FakeMount, environment: dict[str, str], words: list[str]
) -> None:
    mount.block("k")
    terminal = Terminal(words, environment)
    # The doctor looks at the whole machine, where other mounts may be in trouble.
    assert terminal.finish() in ((0, 1) if words == ["doctor"] else (0,))
    assert b"Traceback" not in terminal.text


def test_verify_on_a_terminal_shows_a_bar_and_a_summary(
    mount: FakeMount, environment: dict[str, str]
) -> None:
    for number in range(3):
        mount.block(f"k{number}")
    terminal = Terminal(["verify", "--all"], environment)
    assert terminal.finish() == 0
    assert b"verifying" in terminal.text
    assert b"3 blocks, 12.0KiB: 3 good" in re.sub(rb"\x1b\[[0-9;]*m", b"", terminal.text)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_what_the_shell_reads(environment: dict[str, str], shell: str) -> None:
    done = subprocess.run(
        [*CTX, "completion", shell], env=environment, capture_output=True, text=True, check=True
    )
    assert "_ARGCOMPLETE" in done.stdout
    # The code for zsh is also bash's, written for both; fish has a grammar of its own.
    checker = shutil.which("fish") if shell == "fish" else shutil.which("bash")
    if checker is not None:
        checked = subprocess.run([checker, "-n"], input=done.stdout, capture_output=True, text=True)
        assert (checked.returncode, checked.stderr) == (0, "")
    assert re.search(r"^ *(complete|compdef) .*ctx", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ctx pre", ["prefetch"]),
        ("ctx stat al", ["alpha", "alphabet"]),
        ("ctx stat sub/", ["sub/inner"]),
        ("ctx rm --rec", ["--recursive"]),
        ("ctx ls --sort i", ["idle"]),
        ("ctx completion ", ["bash", "fish", "zsh"]),
    ],
)
def test_commands_options_and_keys_are_completed(
    mount: FakeMount, environment: dict[str, str], tmp_path: Path, line: str, expected: list[str]
) -> None:
    for key in ("alpha", "alphabet", "beta", "sub/inner"):
        mount.block(key)
    answer = tmp_path / "answer"
    asked = environment | {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    subprocess.run(CTX, env=asked, timeout=LONGEST_S, cwd=tmp_path)
    words = [word.strip() for word in answer.read_text().split("\n")]
    assert sorted(word for word in words if word not in ("-h", "--help")) == expected
