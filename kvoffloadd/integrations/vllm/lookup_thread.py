"""The scheduler's client of the daemon: a thread that makes queued requests, so that the scheduler never waits.

Ownership: the thread alone has the client. The scheduler's thread queues commands and takes answers; a `PinRequest` is
the scheduler's until it is queued, the thread's until it is answered, and the scheduler's again.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

import numpy as np

from kvoffloadd.client import Client, Found, KeepHow, KeyState, KvCache
from kvoffloadd.errors import KvOffloadError
from kvoffloadd.integrations.common.bugs import log_bug
from kvoffloadd.integrations.common.claims import FEATURE, TOO_OLD, requests_of
from kvoffloadd.integrations.common.keys import Piece
from kvoffloadd.integrations.common.link import DaemonLink
from kvoffloadd.integrations.vllm.claims import RequestKeys, claims_of
from kvoffloadd.integrations.vllm.keys import KeyNames, pack_by_group
from kvoffloadd.model import Tier, U8Array

logger = logging.getLogger("vllm.kvoffloadd")

_PROMOTION_POLL_S = 0.002
_HEARTBEAT_S = 1.0
_WEIGH_S = 0.5
_USED_MAX = 1024
"""Limit of prompts that wait to be reported as used. Beyond it the oldest are dropped."""


@dataclass(slots=True, eq=False)
class PinRequest:
    """Keys of one request that are pinned together. `states`: group -> u8 KeyState per key, once it is answered.

    `ends`: where in the prompt the first key of a group ends, in tokens; groups that are not in it begin the prompt.
    `tiers`: in the same way from where keys come that were not in memory; empty where all were, or that is not known.
    `promoting`: it will be answered once more, when keys have come from disk. `holds`: how many keys it pins; until its
    last answer, how many it may. `found` and `leases` are the thread's: the result of each piece, and the leases to
    release.
    """

    request: str
    groups: dict[int, list[bytes]]
    ends: dict[int, int] = field(default_factory=dict)
    states: dict[int, bytes] = field(default_factory=dict)
    tiers: dict[int, bytes] = field(default_factory=dict)
    promoting: bool = False
    holds: int = 0
    abandoned: bool = False
    found: list[tuple[Piece, Found]] = field(default_factory=list)
    leases: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.holds = sum(map(len, self.groups.values()))


@dataclass(frozen=True, slots=True, eq=False)
class UsedKeys:
    """Keys of one prompt that a request was served with from the engine's own cache, as vLLM names them: those of each
    group follow one another. `end_of`: where in the prompt a key ends, in tokens.
    """

    offload_keys: Sequence[bytes]
    names: KeyNames
    end_of: Callable[[bytes], int | None]


class LookupThread:
    """Pins for a scheduler. All methods but `clear` and `close` return at once. `answers`: those since the last
    call.
    """

    def __init__(self, client: Client, groups: KvCache) -> None:
        """Starts the thread. `groups`: those that the engine's ranks register, without memory."""
        warning, refused = "no cache until the daemon answers", "the daemon has refused a request"
        self._link = DaemonLink(client, groups, logger, lost=warning, refused=refused, greet=self._weigh)
        self._groups = {group.group: group for group in groups.groups}
        self._missed_claims = False  # a daemon without them was noticed
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._answers: deque[PinRequest] = deque()
        self._promoting: list[PinRequest] = []
        self._unreleased: list[int] = []
        self._used: deque[UsedKeys] = deque(maxlen=_USED_MAX)
        self._closing = False
        self._weigh_at = 0.0
        # Written by the thread, read by all.
        self.half_tier_keys = sys.maxsize
        """How many keys, as large as those that are there, fill half of the daemon's memory."""
        self.lost_claims = 0
        """How many requests have lost their claims, as a whole or in part."""
        self._commands.put(self._link.connect)
        self._thread = threading.Thread(target=self._run, name="kvoffloadd-lookups", daemon=True)
        self._thread.start()

    # --- for the scheduler's thread ----------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether the daemon answered last, and no clear is due."""
        return self._link.connected and not self._link.clearing

    def ask(self, pin: PinRequest) -> None:
        """Pins a request's keys."""
        self._commands.put(lambda: self._ask(pin))

    def forget(self, pin: PinRequest) -> None:
        """Releases a pin's leases, even those that are still to come."""
        pin.abandoned = True
        self._commands.put(lambda: self._release(pin))

    def keep(self, groups: dict[int, list[bytes]], how: KeepHow) -> None:
        """Reports when a request's keys will be used again: a hint, lost if the daemon does not answer now."""

        def tell() -> None:
            if self.connected:
                self._attempt(partial(self._keep, groups, how))

        self._commands.put(tell)

    def retain(self, request: RequestKeys) -> None:
        """Claims keys of a request that has ended: lost if the daemon does not answer now, or knows no claims."""
        self._commands.put(lambda: self._retain(request))

    def touch(self, used: Collection[UsedKeys]) -> None:
        """Reports which keys were used, when no lookup is queued: a hint, lost if the daemon does not answer."""
        self._commands.put(lambda: self._used.extend(used))

    def clear(self, wait_s: float) -> None:
        """Drops every key of the namespace, before all requests from now on; as soon as there is a daemon.

        `wait_s`: how long to wait for one that answers. Until it has answered, nothing hits and nothing is stored.
        """
        was_connected = self.connected
        attempted = threading.Event()

        def begin() -> None:
            self._link.connect()
            attempted.set()

        self._link.want_clear()
        self._commands.put(begin)
        if was_connected:
            attempted.wait(wait_s)

    @property
    def has_answers(self) -> bool:
        """Whether `answers` has any."""
        return bool(self._answers)

    def answers(self) -> Iterator[PinRequest]:
        """Yields the pins that were answered, once or anew."""
        while self._answers:
            yield self._answers.popleft()

    def close(self, deadline_s: float) -> None:
        """Ends the session, and with it every lease."""

        def stop() -> None:
            self._closing = True

        self._commands.put(stop)
        self._thread.join(deadline_s)

    # --- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except Exception as error:  # noqa: BLE001  the thread's boundary: the engine goes on, without a cache
                log_bug(logger, self._thread.name, error)
                waiting, self._promoting = self._promoting, []
                for pin in waiting:
                    self._answer_nothing(pin)
                self._link.lost(error)
        self._link.close(_HEARTBEAT_S)

    def _turn(self) -> None:
        try:
            command = self._commands.get(timeout=self._patience_s)
        except queue.Empty:
            self._tell_used()
        else:
            command()
        if not self.connected and not self._link.retry_in_s:
            self._link.connect()
        if self._promoting:
            self._look_for_promotions()
        if self._unreleased:
            self._release_all()
        if self.connected and monotonic() >= self._weigh_at:
            self._attempt(self._weigh)  # a death must be known before the next request is promised anything

    @property
    def _patience_s(self) -> float:
        """Returns how long to wait for a command before other work is due."""
        if self._used:
            return 0.0
        return _PROMOTION_POLL_S if self._promoting else _HEARTBEAT_S

    def _weigh(self, client: Client) -> None:
        self._weigh_at = monotonic() + _WEIGH_S
        status = client.status()
        memory, keys = status["memory"], status["cache"]["keys"]
        used = memory["used_bytes"]
        self.half_tier_keys = memory["capacity_bytes"] * keys // (2 * used) if used else sys.maxsize

    def _ask(self, pin: PinRequest) -> None:
        if pin.abandoned:
            return
        pinned = False
        try:
            pinned = self.connected and self._attempt(partial(self._pin, pin))
        finally:
            if not pinned:
                self._answer_nothing(pin)
        if not pinned:
            return
        pin.promoting = any(found.promotion is not None for _, found in pin.found)  # one of them may have ended by now
        self._answer(pin)
        if pin.promoting:
            self._promoting.append(pin)

    def _pin(self, pin: PinRequest, client: Client) -> None:
        for piece, first in self._link.pieces(_counts(pin.groups), self._starts(pin.ends)):
            found = client.pin(_packed(pin.groups, piece), first)
            pin.found.append((piece, found))
            if found.lease:
                pin.leases.append(found.lease)

    def _starts(self, ends: Mapping[int, int]) -> dict[int, int]:
        """Returns the position of each group's first key, given the token in the prompt where that key ends."""
        return {group: -(-end // self._groups[group].tokens_per_key) - 1 for group, end in ends.items()}

    def _keep(self, groups: dict[int, list[bytes]], how: KeepHow, client: Client) -> None:
        for piece, first in self._link.pieces(_counts(groups)):
            client.keep(_packed(groups, piece), how, first)

    def _retain(self, request: RequestKeys) -> None:
        if not self._claim(request):
            self.lost_claims += 1

    def _claim(self, request: RequestKeys) -> bool:
        """Returns whether all that the request wants is claimed."""
        if not self.connected:
            return False
        if FEATURE not in self._link.client.features:
            if not self._missed_claims:
                self._missed_claims = True
                logger.warning(TOO_OLD)
            return False
        made = True
        for asked in requests_of(claims_of(request, self._groups), self._link.pieces):
            # A refused claim refuses no other. A daemon that is gone would cost a deadline for each.
            made &= self._attempt(asked) if self._link.connected else False
        return made

    def _tell_used(self) -> None:
        """Reports one prompt that waits as used. Only one: a lookup may have come meanwhile."""
        if not self._used:
            return
        used = self._used.popleft()
        if self.connected:
            self._attempt(partial(self._touch, used))

    def _touch(self, used: UsedKeys, client: Client) -> None:
        packed = pack_by_group(used.offload_keys, used.names)
        ends = {group: used.end_of(used.offload_keys[first]) for group, (first, _) in packed.items()}
        starts = self._starts({group: end for group, end in ends.items() if end is not None})
        for piece, positions in self._link.pieces({group: len(keys) for group, (_, keys) in packed.items()}, starts):
            client.touch({group: packed[group][1][span] for group, span in piece.items()}, positions)

    def _answer_nothing(self, pin: PinRequest) -> None:
        pin.found.clear()
        pin.promoting = False
        self._answer(pin)
        self._unreleased += pin.leases
        pin.leases = []

    def _answer(self, pin: PinRequest) -> None:
        """Answers with the results of its pieces; without any, with nothing."""
        if pin.found:
            pin.states = _by_group(pin, [found.states for _, found in pin.found])
            if any(found.tiers for _, found in pin.found):
                pin.tiers = _by_group(pin, [found.tiers or _in_memory(found) for _, found in pin.found])
        else:
            pin.states = {group: bytes(len(keys)) for group, keys in pin.groups.items()}
        if not pin.promoting:
            pin.holds = sum(states.count(KeyState.HIT) for states in pin.states.values())
        self._answers.append(pin)

    def _look_for_promotions(self) -> None:
        self._promoting = [pin for pin in self._promoting if not pin.abandoned]
        due = [found for pin in self._promoting for _, found in pin.found if not found.ready]
        if due:
            with suppress(KvOffloadError):
                self._link.client.wait_ready(due[0], _PROMOTION_POLL_S / 4)  # receives all that has come for the others
        for pin in list(self._promoting):
            if not all(found.ready for _, found in pin.found):
                continue
            try:  # no attempt: what has come already does not prove that the daemon still answers
                pin.found = [(piece, self._link.client.wait_ready(found, 0.0)) for piece, found in pin.found]
            except KvOffloadError as error:
                self._link.lost(error)
                pin.found.clear()
            self._promoting.remove(pin)
            pin.promoting = False
            self._answer(pin)

    def _release(self, pin: PinRequest) -> None:
        self._unreleased += pin.leases
        pin.leases = []
        self._release_all()

    def _release_all(self) -> None:
        """Releases leases; if the daemon does not answer now, later: each attempt would hang as long as a call may."""
        while self._unreleased and self._link.connected:
            lease = self._unreleased[-1]
            # A lease that ended with its daemon, or its instance, needs no release; the client library knows.
            if self._attempt(partial(Client.release, lease=lease)) or self._link.connected:
                self._unreleased.pop()

    def _attempt(self, call: Callable[[Client], object]) -> bool:
        """Returns whether it was done. A request to a daemon that is gone counts as a miss, even if the next one is
        there.
        """
        return self._link.attempt(call, reconnects=True)


def _counts(groups: Mapping[int, Sequence[bytes]]) -> dict[int, int]:
    return {group: len(keys) for group, keys in groups.items()}


def _packed(groups: Mapping[int, Sequence[bytes]], piece: Piece) -> dict[int, bytes]:
    return {group: b"".join(groups[group][span]) for group, span in piece.items()}


def _by_group(pin: PinRequest, pieces: Sequence[Sequence[U8Array]]) -> dict[int, bytes]:
    """Returns the answers of the pieces, joined for each group: a byte of each key."""
    joined = {group: bytearray() for group in pin.groups}
    for (piece, _), states in zip(pin.found, pieces, strict=True):
        for group, of_keys in zip(piece, states, strict=True):
            joined[group] += of_keys.tobytes()
    return {group: bytes(states) for group, states in joined.items()}


def _in_memory(found: Found) -> list[U8Array]:
    return [np.full_like(states, Tier.MEMORY) for states in found.states]
