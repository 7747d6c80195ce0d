"""The largest number that is accepted from outside has a next one, which is written, and accepted, too."""

from __future__ import annotations

import asyncio
import os

import pytest

from kvoffloadd.cache.claimsaver import ClaimSaver
from kvoffloadd.cache.memory.epochs import AHEAD_MAX_US, LEAP_US, RECALLED_MAX_US, Epochs
from kvoffloadd.cache.memory.savedclaims import VERSION_MAX, read_saved_claims
from kvoffloadd.client import calls as client_calls
from kvoffloadd.client.connection import ConnectionState
from kvoffloadd.client.events import EventQueue
from kvoffloadd.errors import LimitError
from kvoffloadd.model import EPOCH_MAX, PAGE_BYTES
from kvoffloadd.protocol import messages as m
from kvoffloadd.protocol.state import ProtocolState
from kvoffloadd.storage.arenafile import SEQUENCE_MAX, ArenaFile
from kvoffloadd.storage.disk.format import SegmentHeader
from kvoffloadd.storage.disk.manifest import Manifest, decode_manifest, encode_manifest
from kvoffloadd.storage.disk.segment import PLACE_MAX, SequenceNumbers
from kvoffloadd.storage.slotrecords import SlotRecords
from tests.cache.conftest import Open, open_tier  # noqa: F401  a fixture
from tests.cache.fakes import keys_of, make_keyspace, store
from tests.outside.earlier import PAGES, SLAB_PAGES, estate, taken_over
from tests.outside.peers import greeted
from tests.protocol.samples import in_state
from tests.storage.disk.builders import SEGMENT_BYTES, Folder, entries_of
from tests.storage.disk.conftest import folder  # noqa: F401  a fixture

FINGERPRINT = b"n" * 16


def test_after_the_last_place_on_a_disk_comes_one_that_is_read(folder: Folder) -> None:  # noqa: F811
    numbers = SequenceNumbers()
    numbers.seen(PLACE_MAX, PLACE_MAX)
    entries = entries_of([1, 4096, 9000])
    entries["sequence"] = numbers.sequences(len(entries))
    header = SegmentHeader(b"u" * 16, numbers.number(), SEGMENT_BYTES, 0)
    folder.build(entries, header=header)
    found = folder.recover()
    assert found.header == header
    assert (found.entries["sequence"] > PLACE_MAX).all()


@pytest.mark.parametrize("ahead_us", [AHEAD_MAX_US, RECALLED_MAX_US])
def test_after_the_last_clear_that_is_believed_comes_one_that_is_recalled(ahead_us: int) -> None:
    """It comes from the manifest that this host writes, as soon as the clock has moved by one step of numbers."""
    now = 1_800_000_000 * 10**6
    epochs = Epochs(clock=lambda: now)
    taken = epochs.believes if ahead_us == AHEAD_MAX_US else epochs.recalls
    assert taken(now + ahead_us)
    assert not taken(now + ahead_us + 1)
    epochs.merge(0, now + ahead_us, {FINGERPRINT: now + ahead_us})
    epochs.advance(FINGERPRINT)
    manifest = decode_manifest(encode_manifest(Manifest(b"u" * 16, epochs.base, epochs.last, epochs.by_namespace)))
    assert manifest.epochs[FINGERPRINT] > now + ahead_us
    later = Epochs(clock=lambda: now + LEAP_US)
    assert later.recalls(manifest.last_epoch, *manifest.epochs.values())


def test_after_the_last_epoch_comes_none_and_nothing_is_changed() -> None:
    epochs = Epochs(clock=lambda: EPOCH_MAX - 1)
    epochs.merge(0, EPOCH_MAX, {FINGERPRINT: EPOCH_MAX})
    before = (epochs.base, epochs.last, dict(epochs.by_namespace))
    with pytest.raises(LimitError):
        epochs.advance(FINGERPRINT)
    assert (epochs.base, epochs.last, epochs.by_namespace) == before
    assert decode_manifest(encode_manifest(Manifest(b"u" * 16, *before))).last_epoch == EPOCH_MAX


def test_after_the_last_number_of_a_request_comes_the_first() -> None:
    state = greeted(ConnectionState(EventQueue(None)))
    state._seq = m.SEQ_END - 2
    daemon = in_state(ProtocolState.READY, daemon=True)
    for seq in (m.SEQ_END - 1, 1):
        state.ask(client_calls.ping())
        daemon.receive_data(bytes(state.outbox[-1].unsent))
        came = daemon.next_message()
        assert came is not None
        assert came[0] == m.Ping(seq=seq)
        state.receive(daemon.send(m.Done(seq=seq)), [])


def test_after_the_last_saved_state_of_an_arena_comes_one_that_is_found() -> None:
    pool = ArenaFile.make(PAGES * PAGE_BYTES, SLAB_PAGES * PAGE_BYTES)
    pool._sequence = SEQUENCE_MAX - 2
    for names in (b"last", b"next", b"and so on"):
        assert pool.save_names(names)
        heir = ArenaFile(os.dup(pool.fd), PAGES * PAGE_BYTES, SLAB_PAGES * PAGE_BYTES, is_old=True)
        assert heir.names() == names
        heir.close()
    pool.close()


def test_after_the_last_order_of_slot_records_comes_one_that_is_read() -> None:
    cache = estate()
    cache.tier.slot_records._order = (1 << 31) - 1
    store(cache, make_keyspace(cache, FINGERPRINT)[1], keys_of(9))
    found = SlotRecords(cache.tier.pool.records, cache.tier.pool.slabs, SLAB_PAGES, cache.tier.pool.seed).read()
    assert (len(found), found.damaged) == (10, 0)
    taken_over(cache, cache.tier.pool.names())


def test_after_the_last_version_of_saved_claims_comes_one_that_is_read() -> None:
    cache = estate()
    cache.retention.memory.share = 0.5
    (keyspace, *_) = cache.namespaces[FINGERPRINT].keyspaces.values()
    cache.retention.retain(keyspace.namespace, [(keyspace, 0, keys_of(1))], priority=5, seconds=60.0, name="a")
    saver = ClaimSaver(cache, None, 1.0)
    saver._version = VERSION_MAX
    asyncio.run(saver.save())
    saved = read_saved_claims(cache.saved_claims, "memory")
    assert saved is not None
    assert saved.version == VERSION_MAX
    assert [claim.name for claim in saved.claims] == ["a"]
