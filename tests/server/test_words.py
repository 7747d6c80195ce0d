"""What refusals say: what is wrong and what to do, as a user of the client library reads it."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffloadd.client import Client, Group, GroupKind, KvCache, NamespaceSpec, Ref, SharedTensor
from kvoffloadd.errors import RemoteError
from scripts.harness.daemon import Daemon
from tests.client.flavours import NAMESPACE


def test_too_many_keys_are_to_be_asked_in_pieces(daemon: Daemon) -> None:
    client = daemon.welcome(Client(daemon.socket, namespace=NAMESPACE))
    tensor = SharedTensor.allocate(1, 4096)
    registration = client.register(KvCache([tensor], [Group(0, GroupKind.FULL, 16, [Ref(0, 0, 4096)])]))
    keys = np.arange(20_000 * 4, dtype="<u8").view(np.uint8).reshape(20_000, 32)
    for ask in (
        lambda: client.lookup({0: keys}),
        lambda: client.reserve({0: keys}),
        lambda: client.load(registration, {0: (keys, np.zeros(20_000, np.uint32))}),
    ):
        with pytest.raises(RemoteError, match=r"20000 keys in one request.*the cap is \d+: ask in pieces"):
            ask()


def test_a_schema_mismatch_is_said_in_words(daemon: Daemon) -> None:
    client = daemon.welcome(Client(daemon.socket, namespace=NamespaceSpec(model="a mismatch")))
    client.register(KvCache([], [Group(0, GroupKind.FULL, 16)]))
    with pytest.raises(RemoteError) as caught:
        client.register(KvCache([], [Group(0, GroupKind.SLIDING, 32, window_keys=2)]))
    assert str(caught.value) == (
        "schema_mismatch: group 0 is registered as (kind full, tokens_per_key 16, window_keys 0, blocks_per_key 1, "
        "parts 1) in this namespace, not as (kind sliding, tokens_per_key 32, window_keys 2, blocks_per_key 1, parts 1)"
    )
