"""Names and addresses of members of a cluster, between what people write and values."""

import re
from typing import NamedTuple
from urllib.parse import urlsplit

import xxhash

from ctxfs.errors import BadValue
from ctxfs.units import parse_size, write_size

SLOTS = 1024  # a member's number is one of so many: it is part of every version that it issues
ZONE_DEFAULT = "default"

NAMES_ACCEPTED = "a member's name: at most 63 letters, digits, dots and dashes"
ADDRESSES_ACCEPTED = "an address like node1:7440, 10.0.0.1:7440 or [fd00::1]:7440"
URLS_ACCEPTED = "the URL of an etcd, like http://10.0.0.1:2379"
MEMBERS_ACCEPTED = "a member like node1=10.0.0.1:7440,zone=a,weight=1TiB,slot=5"

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.%a-z]{2,64}\]", re.ASCII)
_ZONE = re.compile(r"[A-Za-z0-9._/-]{1,64}", re.ASCII)


class ListedMember(NamedTuple):
    """One entry of a fixed list. `weight` in bytes; `slot` None: where its name leads."""

    name: str
    address: str
    zone: str = ZONE_DEFAULT
    weight: int = 1
    slot: int | None = None


def _refusal(text: str, accepts: str) -> BadValue:
    return BadValue(f"{text if len(text) <= 80 else text[:80] + '…'!r} is not {accepts}")


def check_name(text: str) -> str:
    """The name. Raises BadValue where it can be no member's: it is part of keys, and of lists."""
    if _NAME.fullmatch(text) is None:
        raise _refusal(text, NAMES_ACCEPTED)
    return text


def check_zone(text: str) -> str:
    """The zone. Raises BadValue."""
    if _ZONE.fullmatch(text) is None:
        raise _refusal(text, "a zone's name: at most 64 letters, digits, dots, dashes and slashes")
    return text


def check_address(text: str) -> str:
    """The address. Raises BadValue where it has no host, or no port."""
    split_address(text)
    return text


def split_address(text: str) -> tuple[str, int]:
    """Host, without the brackets of IPv6, and port. Raises BadValue."""
    host, _, port = text.rpartition(":")
    is_port = re.fullmatch("[0-9]{1,5}", port, re.ASCII) and 1 <= int(port) <= 65535
    if _HOST.fullmatch(host) is None or not is_port:
        raise _refusal(text, ADDRESSES_ACCEPTED)
    return host.strip("[]"), int(port)


def check_url(text: str) -> str:
    """The URL. Raises BadValue."""
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good or not text.isascii() or not text.isprintable() or parts.path not in ("", "/"):
        raise _refusal(text, URLS_ACCEPTED)
    if parts.query or parts.fragment or "@" in parts.netloc or " " in text:
        raise _refusal(text, URLS_ACCEPTED)
    return text


def parse_member(text: str) -> ListedMember:
    """Read an entry of a fixed list. Raises BadValue."""
    first, *rest = text.split(",")
    name, equals, address = first.partition("=")
    if not equals:
        raise _refusal(text, MEMBERS_ACCEPTED)
    member = ListedMember(check_name(name), check_address(address))
    for word in rest:
        key, _, value = word.partition("=")
        if key == "zone":
            member = member._replace(zone=check_zone(value))
        elif key == "weight":
            member = member._replace(weight=max(1, parse_size(value)))
        elif key == "slot" and re.fullmatch("[0-9]{1,4}", value, re.ASCII) and int(value) < SLOTS:
            member = member._replace(slot=int(value))
        else:
            raise _refusal(text, MEMBERS_ACCEPTED)
    return member


def write_member(member: ListedMember) -> str:
    """What `parse_member` reads back as this."""
    text = f"{member.name}={member.address},zone={member.zone},weight={write_size(member.weight)}"
    return text if member.slot is None else f"{text},slot={member.slot}"


def preferred_slot(name: str) -> int:
    """Where the search for a slot begins: the same for one name, everywhere."""
    return int(xxhash.xxh3_128_intdigest(name.encode())) % SLOTS


def slot_of(member: ListedMember) -> int:
    """The slot that an entry says, or that its name leads to."""
    return preferred_slot(member.name) if member.slot is None else member.slot
