"""An engine's ends of the two lines to a real daemon, without the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvoffloadd.client import Client, Group, GroupKind, KvCache, Ref
from kvoffloadd.integrations.vllm.event_thread import EventThread
from kvoffloadd.integrations.vllm.lookup_thread import LookupThread
from kvoffloadd.integrations.vllm.transfer_thread import TransferThread
from scripts.harness.daemon import Daemon
from tests.e2e.rank import NAMESPACE, PAGE, Rank

GROUPS = (0, 1)
CALL_S, CLOSE_S = 10.0, 5.0


def registered(refs: bool) -> tuple[Group, ...]:
    """Two groups, as a rank registers them, or its scheduler."""
    return tuple(Group(at, GroupKind.FULL, 16, refs=(Ref(at, 0, PAGE),) if refs else ()) for at in GROUPS)


class Lines:
    """What one engine has: a rank's memory, and what is asked for of it, all closed at the end."""

    def __init__(self, daemon: Daemon, stack: ExitStack) -> None:
        self.daemon = daemon
        self._stack = stack
        self._instance = os.urandom(16)

    def rank(self, **options: Any) -> Rank:
        """Not of this engine, and registered by itself."""
        return self.daemon.welcome(Rank(self.daemon.socket, registered(refs=True), num_blocks=256, **options))

    def lookup_thread(self) -> LookupThread:
        lookup_thread = LookupThread(self._client("scheduler"), KvCache((), registered(refs=False)))
        self._stack.callback(lookup_thread.close, CLOSE_S)
        return lookup_thread

    def transfer_thread(self, job_deadline_s: float = 60.0) -> tuple[TransferThread, Rank]:
        """Makes a transfer thread with the rank whose memory it carries."""
        rank = Rank(self.daemon.socket, registered(refs=True), num_blocks=256, register=False)
        rank.client.close()
        transfer_thread = TransferThread(self._client("worker"), rank.cache, job_deadline_s=job_deadline_s)
        self._stack.callback(transfer_thread.close, CLOSE_S)
        return transfer_thread, rank

    def event_thread(self) -> EventThread:
        event_thread = EventThread(self._client("observer"), GROUPS)
        self._stack.callback(event_thread.close, CLOSE_S)
        return event_thread

    def _client(self, role: Any) -> Client:
        return Client(
            self.daemon.socket,
            namespace=NAMESPACE,
            role=role,
            instance=self._instance,
            deadline_s=CALL_S,
            connect_deadline_s=0.0,
        )


@pytest.fixture
def lines() -> Iterator[Callable[[Daemon], Lines]]:
    """`lines(daemon)` -> an engine's."""
    with ExitStack() as stack:
        yield lambda daemon: Lines(daemon, stack)
