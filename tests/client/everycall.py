"""Each call of a client, asked for in a way that is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvoffloadd.client import Job, KvCache, Registration
from kvoffloadd.model import U8Array


@dataclass
class Stage:
    """What calls are made with. `keys`: of group 0, one to a block. `job`: a store that was asked for before."""

    client: Any
    caches: KvCache
    registration: Registration
    keys: U8Array
    job: Job
    deadline_s: float = 60.0

    @property
    def groups(self) -> dict[int, U8Array]:
        return {0: self.keys}

    @property
    def transfers(self) -> dict[int, tuple[U8Array, Any]]:
        return {0: (self.keys, np.arange(len(self.keys)))}


CALLS: dict[str, Callable[[Stage], Any]] = {
    "connect": lambda on: on.client.connect(),
    "ping": lambda on: on.client.ping(),
    "register": lambda on: on.client.register(on.caches),
    "unregister": lambda on: on.client.unregister(on.registration),
    "lookup": lambda on: on.client.lookup(on.groups),
    "pin": lambda on: on.client.pin(on.groups),
    "prefetch": lambda on: on.client.prefetch(on.groups),
    "wait_ready": lambda on: on.client.wait_ready(on.client.prefetch(on.groups), on.deadline_s),
    "touch": lambda on: on.client.touch(on.groups),
    "keep": lambda on: on.client.keep(on.groups, "soon"),
    "retain": lambda on: on.client.retain(on.groups, 60.0),
    "forget": lambda on: on.client.forget("a"),
    "prefetch_claims": lambda on: on.client.prefetch_claims("a", deadline_s=on.deadline_s),
    "prefetch_claims_page": lambda on: on.client.prefetch_claims_page("a"),
    "claims": lambda on: on.client.claims(),
    "release": lambda on: on.client.release(1),
    "reserve": lambda on: on.client.reserve(on.groups),
    "clear": lambda on: on.client.clear(),
    "delete": lambda on: on.client.delete(on.groups),
    "snapshot": lambda on: on.client.snapshot(0),
    "snapshot_page": lambda on: on.client.snapshot_page(0),
    "store": lambda on: on.client.store(on.registration, on.transfers),
    "load": lambda on: on.client.load(on.registration, on.transfers),
    "wait": lambda on: on.client.wait(on.job, on.deadline_s),
    "wait_any": lambda on: on.client.wait_any([on.job], on.deadline_s),
    "cancel": lambda on: on.client.cancel(on.job),
    "drain": lambda on: on.client.drain(1.0),
    "status": lambda on: on.client.status(),
    "verify": lambda on: on.client.verify(),
    "subscribe": lambda on: on.client.subscribe(),
    "events": lambda on: on.client.events(),
    "open_jobs": lambda on: on.client.open_jobs(),
}
"""All but `close`."""


def public_calls(cls: type) -> set[str]:
    """The names of a client's methods."""
    return {name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name))}
