"""Keys as people write them, and the keys that streams have."""

import base64
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxfs.codec.keyring import Key, KeyRing, parse_keys
from ctxfs.errors import ConfigError, UnknownKey
from tests.codec.contents import KEY, OTHER_KEY, Counting, noise

HEX = KEY.secret.hex()
BASE64 = base64.b64encode(OTHER_KEY.secret).decode()


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        (f"first {HEX}\nsecond {BASE64}\n", [KEY, OTHER_KEY]),
        (f"# two keys\n\n  first\t{HEX.upper()}  # old\r\n", [KEY]),
        (BASE64, [Key(b"75877bb4", OTHER_KEY.secret)]),
    ],
)
def test_a_key_file_is_lines_of_an_id_and_a_key(text: str, keys: list[Key]) -> None:
    assert parse_keys(text.encode()) == keys


@settings(deadline=None)
@given(st.binary(min_size=32, max_size=32))
def test_a_key_file_of_32_bytes_is_the_key(content: bytes) -> None:
    (key,) = parse_keys(content)
    assert key.secret == content
    assert len(key.id) == 8


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing",
        "first",
        f"first {HEX[:-2]}",
        f"first {HEX} third",
        f"a-name-of-17-char {HEX}",
        f"two,words {HEX}",
        f"first {BASE64}=",
        f"first {HEX[:-1]}g",
        f"schlüssel {HEX}",
    ],
)
def test_what_is_no_key_file_is_refused_without_showing_keys(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        KeyRing.parse(text.encode(), noise, "keys.txt")
    assert str(caught.value).startswith("keys.txt: ")
    assert HEX[:-2] not in str(caught.value)
    assert BASE64 not in str(caught.value)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_keys_or_refused(content: bytes) -> None:
    with contextlib.suppress(ConfigError):
        assert all(len(key.secret) == 32 for key in parse_keys(content))


def test_two_keys_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="same id"):
        KeyRing([KEY, Key(KEY.id, OTHER_KEY.secret)], noise)


def test_the_last_key_is_the_newest() -> None:
    ring = KeyRing([KEY, OTHER_KEY], noise)
    assert ring.newest is OTHER_KEY
    assert ring.ids == (b"first", b"second")
    assert ring.find(b"first") is KEY
    with pytest.raises(UnknownKey):
        ring.find(b"third")


def test_every_salt_gives_another_key() -> None:
    salts = Counting()
    keys = {KEY.stream_key(salts(32)) for _ in range(100)}
    assert len(keys | {KEY.secret}) == 101
    assert all(len(key) == 32 for key in keys)


def test_a_key_is_not_shown() -> None:
    assert "secret" not in repr(KEY)
    assert HEX not in repr(KEY)
