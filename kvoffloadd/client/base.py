"""The common part of both clients, and what happens to them in a forked process."""

from __future__ import annotations

import os
import weakref
from typing import Literal

from kvoffloadd.client.arguments import instance_of
from kvoffloadd.client.connector import Settings
from kvoffloadd.client.core import ClientCore
from kvoffloadd.client.jobs import Job
from kvoffloadd.client.memory.kvcache import KvCache
from kvoffloadd.client.transport import Poller
from kvoffloadd.errors import UsageError
from kvoffloadd.protocol.messages import Limits, NamespaceSpec

GPU_OPEN_S = 120.0
"""How long a daemon may take to register memory of a GPU that it does not use yet. It creates a context and registers
all pinned memory with it, while the driver also works for other GPUs. The daemon itself gives up sooner: by default
after 30 seconds plus 0.1 s for each GiB that is pinned.
"""


class BaseClient:
    """Constructs clients, and implements the calls that need no I/O."""

    def __init__(
        self,
        socket_path: str | os.PathLike[str] | None = None,
        *,
        namespace: NamespaceSpec | None,
        role: Literal["worker", "scheduler", "observer"] = "worker",
        instance: bytes | None = None,
        deadline_s: float = 10.0,
        connect_deadline_s: float = 5.0,
        reconnect: bool = True,
        retry_busy: bool = True,
    ) -> None:
        """Stores the settings; does not connect yet. Raises UsageError, or ConfigError for an invalid variable.

        Args:
            socket_path: where the daemon listens. None: at KVOFFLOADD_SOCKET, or without it at the first socket where
                one answers, of this user's own and /run/kvoffloadd/kvoffloadd.sock; the client then stays with it.
            namespace: decides which sessions share keys; None for an observer only.
            role: decides which requests this session may make.
            instance: 16 unguessable bytes that an engine's scheduler and ranks share; None: a new instance.
            deadline_s: bound of every call; `register` may take `GPU_OPEN_S` where memory is on a GPU.
            connect_deadline_s: how long attempts to connect are repeated; 0: a single attempt.
            reconnect: make a new connection when the old one was lost; if False, only `connect` does.
            retry_busy: repeat a request when the daemon is busy.
        """
        settings = Settings(
            socket_path=None if socket_path is None else _path(socket_path),
            namespace=namespace,
            role=role,
            instance=os.urandom(16) if instance is None else instance,
            deadline_s=deadline_s,
            connect_deadline_s=connect_deadline_s,
            reconnect=reconnect,
            retry_busy=retry_busy,
        )
        self._deadline_s = deadline_s
        self._core = ClientCore(settings, self._make_poller())
        self._made_in = os.getpid()
        self._is_forked = False
        _clients.add(self)

    def _register_s(self, caches: KvCache) -> float:
        """Returns the bound of a registration, in seconds. Raises UsageError."""
        on_gpu = instance_of(KvCache, caches, "caches").is_on_gpu
        return max(self._deadline_s, GPU_OPEN_S) if on_gpu else self._deadline_s

    def _make_poller(self) -> Poller:
        """Returns what the client waits with. Called once, before anything else."""
        raise NotImplementedError

    @property
    def socket_path(self) -> str | None:
        """The path of the daemon's socket; None: no path was given, and no daemon has answered yet."""
        return self._core.socket_path

    @property
    def boot_id(self) -> bytes:
        """The 16 bytes that name the daemon's run that was greeted last; empty before the first greeting."""
        return self._core.boot_id

    @property
    def is_connected(self) -> bool:
        """Whether requests have a connection, as far as is known: a call notices that it is lost. False also after a
        daemon has refused a new one.
        """
        return self._core.is_connected

    @property
    def limits(self) -> Limits | None:
        """Limits of frames and requests of the daemon that was greeted last; None before the first greeting."""
        return self._core.limits

    @property
    def features(self) -> frozenset[str]:
        """Features of the daemon that was greeted last, such as `disk` and `remote`; empty before the first
        greeting.
        """
        return self._core.features

    def open_jobs(self) -> list[Job]:
        """Returns the jobs that may still use their blocks, oldest first; also those whose request failed in
        mid-call.
        """
        self._check_process()
        return self._core.open_jobs()

    def _check_process(self) -> None:
        """Raises UsageError in a forked child."""
        if self._is_forked:
            raise UsageError(_FORKED.format(self._made_in))

    def _enter_child(self) -> None:
        """Disables the client in a forked child."""
        self._is_forked = True
        self._core.abandon(_FORKED.format(self._made_in))


def _path(path: str | os.PathLike[str]) -> str:
    """Returns the path as a str. Raises UsageError."""
    try:
        return os.fsdecode(path)
    except TypeError:
        raise UsageError(f"socket_path must be a path, not {path!r:.80}") from None


_FORKED = "this client was made in process {}, of which this one is a fork: make a client of your own after a fork"
_clients: weakref.WeakSet[BaseClient] = weakref.WeakSet()


def _enter_child() -> None:
    """Runs in every forked child, and not as a comparison of process ids in each call: a child that never calls would
    keep its parent's connections open, and the daemon would notice the parent's death only after the child's.
    """
    for client in list(_clients):
        client._enter_child()


os.register_at_fork(after_in_child=_enter_child)
