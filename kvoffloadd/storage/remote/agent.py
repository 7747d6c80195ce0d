"""Keeps one agent alive: starts it, gives it the arena, and starts another one after its end. Event loop only.

There is never more than one: the next one starts when the kernel has reported the death of the previous one. The
arena's file names each agent before that agent gets the arena, so that a successor of the daemon waits for its end.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
from functools import partial
from typing import Final, Protocol

from kvoffloadd.agentwire.frames import VERSION, FromAgent, Greeting, Refused, Reply, Start, Started, encode
from kvoffloadd.errors import FramingError
from kvoffloadd.scheduling.changes import Changes
from kvoffloadd.scheduling.lanes import Lane
from kvoffloadd.storage.arenafile import ArenaFile
from kvoffloadd.storage.remote.agentprocess import (
    AgentProcess,
    Spawned,
    agent_command,
    agent_environment,
    printable,
    spawn_agent,
)

log = logging.getLogger(__name__)

BACKOFF_S_MIN, BACKOFF_S_MAX = 0.5, 60.0
"""The delay between an agent's end and the next one's start: doubled each time, until one lives for the maximum."""

HANG_UP_S = 1.5
"""The time that an agent has to end by itself."""


class AgentState(enum.Enum):
    """WAITING: there is none; the next one starts soon. STARTING, READY. DYING: it is being killed. CLOSED: there will
    be none.
    """

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    DYING = "dying"
    CLOSED = "closed"


class AgentUser(Protocol):
    """The user of the agent."""

    def on_ready(self, started: Started) -> None:
        """Allows calls."""

    def on_answer(self, message: Reply) -> None:
        """Takes an answer. Raises FramingError for an answer that fits no call: the agent is killed."""

    def on_silence(self) -> None:
        """Handles an agent that gives no more answers: it is being killed, or ends by itself."""

    def on_end(self, reason: str) -> None:
        """Handles the death of the agent: only this process touches the arena."""


class AgentSupervisor:
    """Supervises one agent at a time. `changes` reports each new `state`. `reason`: why the last agent ended, or did
    not start; for people.
    """

    def __init__(
        self,
        pool: ArenaFile,
        headers_fd: int,
        start: Start,
        python: str,
        start_s: float,
        loop: asyncio.AbstractEventLoop,
        user: AgentUser,
        changes: Changes,
    ) -> None:
        """`start_s`: how long an agent may take to become ready."""
        self.state = AgentState.WAITING
        self.reason = ""
        self.about = ""
        self.starts = 0  # agents that became ready
        self.ends = 0
        self._pool = pool
        self._headers_fd = headers_fd
        self._start_frame: Final = start
        self._python = python
        self._start_s = start_s
        self._loop = loop
        self._user = user
        self._changes = changes
        # The thread lives as long as any agent: the kernel kills an agent when the thread that started it ends.
        self._lane = Lane("agent", 1, loop)
        self._spawning = False
        self._process: AgentProcess | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._backoff_s = BACKOFF_S_MIN
        self._ready_s = 0.0
        self._greeted = False
        self._refusal = ""
        self._closing = False

    @property
    def pid(self) -> int:
        """Returns the pid of the agent, or 0 if there is none."""
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """Starts an agent, and further ones. Returns at once."""
        self._timer = None
        self._set(AgentState.STARTING)
        self._spawning = True
        self._greeted = False
        self._refusal = ""
        environment = agent_environment(self._python, os.environ)
        self._lane.submit(partial(spawn_agent, agent_command(self._python), environment), self._on_spawned)

    def send(self, frame: bytes) -> None:
        """Sends a frame to an agent that is READY."""
        if self._process is not None:
            self._process.send(frame)

    def kill(self, why: str) -> None:
        """Kills the present agent; another one follows."""
        if self._process is not None and not self._process.killed:
            log.warning("remote: the agent %d is killed: %s", self._process.pid, why)
            self._process.kill(why)

    async def close(self, deadline_s: float) -> bool:
        """Ends the agent for good. True: there is none, and the arena belongs to this process alone."""
        self._closing = True
        self._cancel_timer()
        ends_s = self._loop.time() + deadline_s
        if self._process is not None:
            self._process.hang_up()
        if not await self._changes.wait_for(self._is_gone, min(HANG_UP_S, deadline_s / 2)):
            self.kill("it did not end by itself")
        if not await self._changes.wait_for(self._is_gone, max(ends_s - self._loop.time(), 0.0)):
            return False
        self._set(AgentState.CLOSED)
        return await self._lane.close(max(ends_s - self._loop.time(), 0.1))

    def _is_gone(self) -> bool:
        return self._process is None and not self._spawning

    # --- events of the agent ---

    def _on_spawned(self, result: Spawned | BaseException) -> None:
        self._spawning = False
        if isinstance(result, BaseException):
            self._failed(f"it can't be started: {result}")
            return
        self._process = AgentProcess(result, self._loop, self._on_message, self._on_silence, self._on_end)
        if self._closing:
            self._process.kill("the daemon ends")
        self._timer = self._loop.call_later(self._start_s, self.kill, f"it was not ready within {self._start_s:g} s")
        self._changes.notify_all()

    def _on_message(self, message: FromAgent) -> None:
        if isinstance(message, Reply):
            if self.state is not AgentState.READY:
                raise FramingError("an answer that was not expected")
            self._user.on_answer(message)
        elif self.state is not AgentState.STARTING or self._process is None:
            raise FramingError(f"a {type(message).__name__} after its start")
        elif isinstance(message, Greeting):
            self._greet(self._process, message)
        elif not self._greeted:
            raise FramingError(f"a {type(message).__name__} before its greeting")
        elif isinstance(message, Refused):
            self._refusal = f"{printable(message.reason)} (fault: {printable(message.fault)})"
            self._process.kill("its engine can't start")
        else:
            self._on_started(message)

    def _greet(self, process: AgentProcess, message: Greeting) -> None:
        """Gives the agent the memory, now that the greeting has come from the process behind the pidfd."""
        if self._greeted:
            raise FramingError("a second greeting")
        if message.version != VERSION:
            raise FramingError(
                f"the agent has version {message.version}, the daemon {VERSION}: remote.python must have the "
                "daemon's release of kvoffloadd"
            )
        if message.pid != process.pid:
            raise FramingError(
                "the agent is not the process that was started: remote.python must be the interpreter itself"
            )
        self._greeted = True
        self._pool.record_agent(process.pid)
        try:
            # Opened anew: this process's descriptor would share its lock with the agent, beyond this process.
            arena_fd = os.open(f"/proc/self/fd/{self._pool.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            process.kill(f"the arena can't be opened for it: {error}")
            return
        try:
            process.send(encode(self._start_frame), [arena_fd, self._headers_fd])
        finally:
            os.close(arena_fd)

    def _on_started(self, message: Started) -> None:
        self._cancel_timer()
        self.about = printable(message.about)
        self.reason = ""
        self.starts += 1
        self._ready_s = self._loop.time()
        log.info("remote: the agent %d is ready: %s", self.pid, self.about)
        self._set(AgentState.READY)
        self._user.on_ready(message)

    def _on_silence(self) -> None:
        self._user.on_silence()
        self._set(AgentState.DYING)

    def _on_end(self, reason: str) -> None:
        self._process = None
        self._pool.erase_agent()
        self.ends += 1
        if self._ready_s and self._loop.time() - self._ready_s >= BACKOFF_S_MAX:
            self._backoff_s = BACKOFF_S_MIN
        self._ready_s = 0.0
        self._failed(reason)
        self._user.on_end(reason)

    def _failed(self, reason: str) -> None:
        """Starts the next agent after a while, as there is none."""
        self._cancel_timer()
        self._set(AgentState.WAITING)
        if self._closing:
            return
        self.reason = self._refusal or reason
        log.warning("remote: no agent: %s; the next one starts in %g s", self.reason, self._backoff_s)
        self._timer = self._loop.call_later(self._backoff_s, self.start)
        self._backoff_s = min(2 * self._backoff_s, BACKOFF_S_MAX)

    def _set(self, state: AgentState) -> None:
        self.state = state
        self._changes.notify_all()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
