"""The composition root: the one place that names concrete devices and tiers. Four verbs: start, serve, drain, close."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import secrets
import signal
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from kvoffloadd.cache.cache import Cache
from kvoffloadd.cache.policy import DEFAULT_POLICY, POLICIES, create_policy
from kvoffloadd.cache.transfer import Transfers
from kvoffloadd.config import check_memory_fits
from kvoffloadd.device.faults import Faults, FaultyDevice, parse_faults
from kvoffloadd.device.host import HostDevice
from kvoffloadd.errors import ConfigError
from kvoffloadd.lanes import Lane
from kvoffloadd.server.account import Accounts
from kvoffloadd.server.context import Context
from kvoffloadd.server.events import EventFeed
from kvoffloadd.server.listener import Listener, bind
from kvoffloadd.tiers.memory import MemoryTier

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine

    from kvoffloadd.config import Config
    from kvoffloadd.device.base import Device

log = logging.getLogger(__name__)

EXIT_OK, EXIT_FORCED, EXIT_FATAL = 0, 1, 70
CLOSE_S = 5.0
"""What the lanes get to end once all sessions are gone."""


def run(config: Config, faults: str = "") -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status. Raises ConfigError if the daemon can't start."""
    policy = config.memory.policy or DEFAULT_POLICY
    if policy not in POLICIES:
        raise ConfigError(f"memory.policy = {policy!r}: unknown; known are {', '.join(sorted(POLICIES))}")
    planted = parse_faults(faults) if faults else Faults()
    check_memory_fits(config.memory.capacity_bytes)
    _raise_descriptor_limit()
    listener, lock = bind(config.server.socket, config.server.socket_mode)
    runner = _runner(config.server.use_uvloop)
    try:
        return runner(Daemon(config, listener, planted).serve())
    finally:
        os.close(lock)


def _runner(use_uvloop: bool | str) -> Callable[[Coroutine[Any, Any, int]], int]:
    """uvloop if it is installed and wanted, asyncio otherwise."""
    if use_uvloop is False:
        return asyncio.run
    try:
        import uvloop
    except ImportError:
        if use_uvloop is True:
            raise ConfigError(
                "server.use_uvloop = true: uvloop is not installed (pip install kvoffloadd[uvloop])"
            ) from None
        return asyncio.run
    return uvloop.run


def _raise_descriptor_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Daemon:
    """One run. Owns the listening socket, the arena, the device, the lanes."""

    def __init__(self, config: Config, listener: socket.socket, faults: Faults) -> None:
        self._config = config
        self._listener = listener
        self._faults = faults
        self._stop = asyncio.Event()
        self._signals = 0

    async def serve(self) -> int:
        """start, serve, drain, close."""
        loop = asyncio.get_running_loop()
        context = self._start(loop)
        listener = Listener(context, self._listener, self._config.server.socket)
        listener.start()
        feed = context.spawn(EventFeed(context).run())
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        log.info("serving at %s, %d MiB in memory", self._config.server.socket, context.cache.tier.capacity_bytes >> 20)
        await self._stop.wait()
        context.draining = True
        log.info("draining: %d jobs under way", len(context.transfers.running))
        await context.transfers.settle(set(context.transfers.running), self._config.server.drain_s)
        await listener.close(self._config.copy.worker_drain_s + CLOSE_S)
        feed.cancel()
        return await self._close(context)

    def _start(self, loop: asyncio.AbstractEventLoop) -> Context:
        config = self._config
        tier = MemoryTier(config.memory.capacity_bytes, config.memory.slab_bytes)
        # Beside serving: the kernel provides pages that are used before they are prefaulted just the same.
        threading.Thread(
            target=tier.prefault, args=(config.memory.prefault_threads,), name="kvo-prefault", daemon=True
        ).start()
        policy = partial(create_policy, config.memory.policy or DEFAULT_POLICY)
        cache = Cache(tier, policy, secrets.randbits(63))
        hash_lane = Lane("hash", config.memory.hash_threads, loop)
        host = HostDevice(loop, config.copy.threads, config.copy.chunk_bytes)
        device: Device = host
        if self._faults:
            log.warning("faults are planted: %s", self._faults)
            device = FaultyDevice(host, **self._faults)
        limits = config.limits
        caps = {
            "sessions": limits.sessions,
            "jobs": limits.jobs,
            "mapped_bytes": limits.mapped_bytes,
            "fds": limits.fds,
            "leases": limits.leases,
        }
        return Context(
            config=config,
            boot_id=secrets.token_bytes(16),
            loop=loop,
            cache=cache,
            transfers=Transfers(cache, hash_lane, config.memory.verify_loads),
            devices={"host": device},
            hash_lane=hash_lane,
            fatal=self._fatal,
            accounts=Accounts(caps),
        )

    def _on_signal(self) -> None:
        self._signals += 1
        if self._signals == 1:
            self._stop.set()
            return
        log.warning("forced: running copies end with the process")
        logging.shutdown()
        os._exit(EXIT_FORCED)

    def _fatal(self, reason: str) -> None:
        """What can't be mended while the process lives, such as a mapping that a copy will not let go."""
        log.critical("exiting: %s", reason)
        logging.shutdown()
        os._exit(EXIT_FATAL)

    async def _close(self, context: Context) -> int:
        """Lanes before memory: nothing is unmapped while a thread may touch it."""
        for device in context.devices.values():
            if not await device.close(CLOSE_S):
                self._fatal("copies do not end")
        if not await context.hash_lane.close(CLOSE_S):
            self._fatal("the hash lane does not end")
        if context.tasks:
            await asyncio.wait(context.tasks, timeout=CLOSE_S)
        context.cache.tier.close()
        log.info("closed")
        return EXIT_OK
