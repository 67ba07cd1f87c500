"""Names, addresses and entries of member lists: what is taken, and what is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxfs.addresses import (
    ListedMember,
    check_name,
    check_url,
    parse_member,
    preferred_slot,
    split_address,
    write_member,
)
from ctxfs.errors import BadValue


@pytest.mark.parametrize("name", ["n", "node-1.example.org", "A_b", "x" * 63])
def test_host_names_are_names_of_members(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "-a", "a-", "a b", "ä", "x" * 64, "a/b", "a\n"])
def test_what_is_no_part_of_a_key_is_no_name(name: str) -> None:
    with pytest.raises(BadValue):
        check_name(name)


def test_addresses_are_split_in_host_and_port() -> None:
    assert split_address("node1:7440") == ("node1", 7440)
    assert split_address("[fd00::1]:1") == ("fd00::1", 1)


@pytest.mark.parametrize("address", ["", "a", "a:", ":1", "a:0", "a:65536", "a:1x", "fd00::1:9"])
def test_an_address_without_host_or_port_is_refused(address: str) -> None:
    with pytest.raises(BadValue):
        split_address(address)


@pytest.mark.parametrize(
    "url", ["http://10.0.0.1:2379", "https://etcd.example.org", "http://[::1]:2379/"]
)
def test_urls_of_hosts_are_endpoints(url: str) -> None:
    assert check_url(url) == url


@pytest.mark.parametrize(
    "url",
    ["", "10.0.0.1:2379", "ftp://a", "http://", "http://a:99999", "http://a/v3", "http://u@a",
     "http://a?b", "http://a b", "http://ä"],
)  # fmt: skip
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(BadValue):
        check_url(url)


names = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)


@given(
    st.builds(
        ListedMember,
        names,
        names.map("{}:7440".format),
        st.sampled_from(["a", "rack-1/left"]),
        st.integers(1, 1 << 50),
        st.none() | st.integers(0, 1023),
    )
)
def test_an_entry_reads_back_as_it_was_written(member: ListedMember) -> None:
    assert parse_member(write_member(member)) == member


def test_of_an_entry_only_name_and_address_are_needed() -> None:
    assert parse_member("n1=h:1") == ListedMember("n1", "h:1", "default", 1, None)


@pytest.mark.parametrize(
    "text",
    ["", "n1", "n1=h", "=h:1", "n1=h:1,", "n1=h:1,colour=red", "n1=h:1,slot=1024",
     "n1=h:1,slot=-1", "n1=h:1,weight=lots", "n1=h:1,zone=", "n1=h:1,zone=a b"],
)  # fmt: skip
def test_other_entries_are_refused(text: str) -> None:
    with pytest.raises(BadValue):
        parse_member(text)


def test_the_slot_that_is_tried_first_depends_on_the_name_alone() -> None:
    # Written down: another number would give every member of a fixed list another slot.
    assert preferred_slot("node1") == 464


def test_members_that_are_called_as_usual_need_no_slots_in_a_list() -> None:
    for prefix in ("node", "host", "gpu", "kv", "n"):
        assert len({preferred_slot(f"{prefix}{number}") for number in range(1, 10)}) == 9
