"""An engine whose every byte shows which version of the weights it was computed with: each clear begins another one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kvoffloadd.client import Client, Group, GroupKind, KeyState, KvCache, NamespaceSpec, Ref, SharedTensor
from kvoffloadd.model import I64Array, U8Array
from kvoffloadd.testing.oracle import digest, key_digests, mixed

KEYS: Final = 24
PAYLOAD_BYTES: Final = 8192
CALL_S: Final = 30.0
READY_S: Final = 10.0
_GROUPS: Final = (Group(0, GroupKind.FULL, 16, refs=(Ref(0, 0, PAYLOAD_BYTES),)),)
_WORDS: Final = np.arange(PAYLOAD_BYTES // 8, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class LoadedVersions:
    """The versions of the keys that came, and how many came whose bytes are of no version."""

    versions: I64Array
    wrong: int


class Sentinel:
    """A client of one daemon, in one namespace. Raises ClientError, as all its methods do."""

    def __init__(self, socket: Path, spec: NamespaceSpec, memory_name: str) -> None:
        self.client = Client(socket, namespace=spec, deadline_s=CALL_S, connect_deadline_s=CALL_S)
        self.client.connect()
        self._tensor = SharedTensor.allocate(KEYS, PAYLOAD_BYTES, name=memory_name)
        self._registration = self.client.register(KvCache([self._tensor], _GROUPS))

    def store(self, keys: U8Array, version: int) -> None:
        """Compute them with weights of this version, and store those that are not there."""
        blocks = np.arange(len(keys))
        self._tensor.array[blocks] = contents(keys, version)
        self.client.wait(self.client.store(self._registration, {0: (keys, blocks)}), CALL_S)

    def load(self, keys: U8Array, *, wait: bool) -> LoadedVersions:
        """All of these keys that hit. `wait`: for what comes from the disk or the store."""
        found = self.client.pin({0: keys})
        try:
            if wait and found.promoting:
                found = self.client.wait_ready(found, READY_S)
            there = keys[found.states[0] == KeyState.HIT]
            if not len(there):
                return LoadedVersions(np.zeros(0, np.int64), 0)
            blocks = np.arange(len(there))
            self._tensor.array[:] = 0xEE
            job = self.client.load(self._registration, {0: (there, blocks)}, lease=found.lease)
            came = self.client.wait(job, CALL_S).valid(0)
        finally:
            if found.lease:
                self.client.release(found.lease)
        return read(there[came], self._tensor.array[blocks[came]])

    def close(self) -> None:
        """Also if its daemon has gone."""
        self.client.close(1.0, force=True)


def contents(keys: U8Array, version: int) -> U8Array:
    """u8 (keys, PAYLOAD_BYTES): the version, then words that follow from it and the key."""
    seeds = key_digests(keys) ^ np.uint64(digest(version))
    words = mixed(_WORDS[None, :] ^ seeds[:, None])
    words[:, 0] = version
    return words.view(np.uint8)


def read(keys: U8Array, payloads: U8Array) -> LoadedVersions:
    """What was loaded for these keys."""
    versions, wrong = [], 0
    for at, payload in enumerate(payloads):
        version = int(payload[:8].view(np.uint64)[0])
        if np.array_equal(contents(keys[at : at + 1], version)[0], payload):
            versions.append(version)
        else:
            wrong += 1
    return LoadedVersions(np.array(versions, np.int64), wrong)
