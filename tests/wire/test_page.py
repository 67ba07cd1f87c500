"""docs/wire.md says of every message what the code does."""

from ctxfs.core.key import KEY_BYTES_MAX
from ctxfs.wire import fields, limits
from ctxfs.wire import messages as m
from ctxfs.wire.fields import codecs_of
from tests.sources import ROOT
from tests.wire.talk import SESSION, greeting

PAGE = (ROOT / "docs/wire.md").read_text(encoding="utf-8")


def kind_of(codec: fields.Codec) -> str:
    """How the page calls a codec."""
    match codec:
        case fields.Whole(size):
            return f"u{size * 8}"
        case fields.Fixed(size):
            return f"{size} bytes"
        case fields.Blob(size_max):
            return "key" if size_max == KEY_BYTES_MAX else f"blob {size_max}"
        case fields.Text(size_max):
            return f"text {size_max}"
        case fields.Choice(kind):
            return f"u8 {kind.__name__}"
        case fields.Many(each, count_max):
            return f"{kind_of(each)} × {count_max}"
        case fields.Pair(first, second):
            return f"({kind_of(first)}, {kind_of(second)})"
        case fields.Nested():
            return f"nested {codec.kind.__name__}"
        case fields.OneOf():
            return "one of " + ", ".join(each.__name__ for each in codec.kinds.values())
    raise AssertionError(codec)


def row_of(kind: type) -> str:
    return "; ".join(f"{name} {kind_of(codec)}" for name, codec, _ in codecs_of(kind))


def test_every_message_is_on_the_page_with_its_fields() -> None:
    for number, kind in m.TYPES.items():
        assert f"| 0x{number:02x} | {kind.__name__} | {row_of(kind)} |" in PAGE


def test_every_part_of_messages_is_on_the_page_with_its_fields() -> None:
    for kind in (m.Attributes, m.GoneKey, m.Miss, m.Gone, m.Have):
        assert f"| {kind.__name__} | {row_of(kind)} |" in PAGE


def test_every_number_with_a_meaning_is_on_the_page() -> None:
    for kind in (m.Reason, m.Durability, m.Role, m.Tiers):
        for each in kind:
            assert f"{each.value} {each.name}" in PAGE


def test_what_may_be_answered_is_on_the_page() -> None:
    for request, replies in m.REPLIES.items():
        names = ", ".join(sorted(each.__name__ for each in replies))
        assert f"| {request.__name__} | {names} |" in PAGE


def test_every_limit_is_on_the_page() -> None:
    for value in (limits.BODY_BYTES_MAX, limits.HELLO_BYTES_MAX, limits.REQUESTS_MAX):
        assert str(value) in PAGE
    for value in (limits.STRIPE_BYTES_MIN, limits.STRIPE_BYTES_MAX, limits.LANES_MAX):
        assert str(value) in PAGE


def test_the_example_is_what_is_sent() -> None:
    _, asked, _, _ = greeting()
    assert SESSION in asked
    for start in range(0, len(asked), 16):
        assert asked[start : start + 16].hex(" ") in PAGE
