"""Entries as hypothesis makes them up."""

from hypothesis import strategies as st

from ctxfs.core.meta import (
    Alias,
    BlockMeta,
    DirectoryMeta,
    Drop,
    Entry,
    JournalEntry,
    MakeDirectory,
    Placement,
    Put,
    RemoveDirectory,
    Transient,
    TransientFlag,
)

_u16 = st.integers(0, 2**16 - 1)
_u32 = st.integers(0, 2**32 - 1)
_u64 = st.integers(0, 2**64 - 1)
_time = st.integers(-(2**63), 2**63 - 1)
_name = st.binary(min_size=1, max_size=255)
_attributes = st.lists(
    st.tuples(_name, st.binary(max_size=300)), max_size=4, unique_by=lambda pair: pair[0]
).map(tuple)

blocks: st.SearchStrategy[BlockMeta] = st.builds(
    BlockMeta,
    generation=_u64,
    stamp=_u64,
    key=_name,
    size=_u64,
    digest=st.binary(min_size=16, max_size=16),
    mode=st.integers(0, 0o7777),
    uid=_u32,
    gid=_u32,
    created_ns=_time,
    mtime_ns=_time,
    atime_ns=_time,
    expires_ns=_u64,
    pin_until_ns=_u64,
    placement=st.sampled_from(Placement),
    origin=_u64,
    revision=_u64,
    replicas=_u16,
    parent=st.binary(max_size=255),
    dtype=st.binary(max_size=16),
    attributes=_attributes,
)

directories: st.SearchStrategy[DirectoryMeta] = st.builds(
    DirectoryMeta,
    inode=_u64,
    stamp=_u64,
    key=st.binary(max_size=255),
    mode=st.integers(0, 0o7777),
    uid=_u32,
    gid=_u32,
    mtime_ns=_time,
    default_ttl_ns=_time,
    together=st.booleans(),
    default_replicas=_u16,
    attributes=_attributes,
)

entries: st.SearchStrategy[Entry] = st.one_of(
    st.builds(Put, blocks),
    st.builds(Drop, _u64, _u64),
    st.builds(MakeDirectory, directories),
    st.builds(RemoveDirectory, _u64, _u64),
    st.builds(Alias, blocks, _u64),
)

journal_entries: st.SearchStrategy[JournalEntry] = entries | st.builds(
    Transient,
    blocks,
    owner=_u32,
    flags=st.sampled_from(TransientFlag) | st.just(TransientFlag(0)),
    opener=_u32,
    base=_u64,
    refused_at=_u64,
    shadow=_u64,
    coming=_u64,
)
