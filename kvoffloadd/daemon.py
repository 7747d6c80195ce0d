"""The composition root: builds devices, tiers and the server, and runs them: start, serve, drain, close."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import secrets
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kvoffloadd import socketpath, startup
from kvoffloadd.cache.clearing import clear_here
from kvoffloadd.cache.disk.disktier import DiskTier
from kvoffloadd.cache.jobs.jobs import Jobs
from kvoffloadd.cache.lowertiers import LowerTiers
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.keyhash import SEED_BITS
from kvoffloadd.cache.memory.requeue import change_quotas
from kvoffloadd.cache.memory.savedstate import read_saved_state
from kvoffloadd.cache.policy import DEFAULT_POLICY, create_policy
from kvoffloadd.cache.policy.base import Clock
from kvoffloadd.cache.remote.remotetier import RemoteTier
from kvoffloadd.cache.warm_restart import adopt
from kvoffloadd.config import Config, exposures, remarks
from kvoffloadd.device.base import HostMemory
from kvoffloadd.device.cuda.gpus import CudaGpus
from kvoffloadd.device.cuda.pinning import Arena
from kvoffloadd.device.faults import Faults, FaultyDevice, parse_faults
from kvoffloadd.device.host import HostDevice
from kvoffloadd.device.signals import Signals
from kvoffloadd.device.userfaultguard import UserfaultGuard
from kvoffloadd.errors import ConfigError, ResourceError
from kvoffloadd.linux.memorylimits import has_memory_limit, worker_totals
from kvoffloadd.linux.numa import cpus_near, place_memory
from kvoffloadd.linux.standarderror import leave
from kvoffloadd.linux.systemd import Systemd
from kvoffloadd.log import log_held_back, log_held_back_forever
from kvoffloadd.metrics import endpoint
from kvoffloadd.metrics.endpoint import Endpoint
from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.scheduling.collector import Collector
from kvoffloadd.scheduling.lag import Lag
from kvoffloadd.scheduling.lanes import Lane
from kvoffloadd.scheduling.steps import in_turns
from kvoffloadd.scheduling.turns import Turns
from kvoffloadd.server import status
from kvoffloadd.server.context import Context
from kvoffloadd.server.listener import Listener
from kvoffloadd.server.peers.account import Accounts, caps
from kvoffloadd.server.peers.descriptorcloser import DescriptorCloser
from kvoffloadd.server.reload import Reload, adapt
from kvoffloadd.server.socketplace import SocketPlace, keep_socket
from kvoffloadd.server.watchdog import Watchdog
from kvoffloadd.storage.arenafile import ArenaFile
from kvoffloadd.storage.disk.faults import FaultyFiles
from kvoffloadd.storage.disk.files import Files
from kvoffloadd.storage.memory import MemoryTier
from kvoffloadd.storage.pool import take_pool
from kvoffloadd.storage.remote.store import RemoteStore
from kvoffloadd.units import format_path

log = logging.getLogger(__name__)

T = TypeVar("T")

EXIT_OK, EXIT_FORCED, EXIT_FATAL = 0, 1, 70
SWITCH_S = 0.0005
"""How long a lane's thread may run Python before the loop has its turn: a tenth of the default. Lanes spend most of
their time in system calls and hashing, which release the GIL; the rest is short, but there are many lanes.
"""

USERS_AT_START = 16
"""The users of `allowed_uids` with threads that are made at the start, if threads can be made. The threads of others
are made at their first connection: many of them may never connect, and each costs 8 threads by default.
"""

CLOSE_S = 5.0
"""The time that the lanes have to end once all sessions are gone."""


def run(
    config: Config,
    faults: str = "",
    read_config: Callable[[], Config] | None = None,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Serves until SIGTERM or SIGINT. Returns the exit status. `read_config`: reads the config again at SIGHUP.
    `check`: is called once no other daemon can have this one's place, and raises ConfigError.

    Raises:
        ConfigError: the daemon can't start.
        TryAgainError: it can't start yet.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is a daemon to reload
    faulthandler.enable(file=2)  # the watchdog's SIGABRT shows where each thread is
    switches, text = _switches(faults)
    planted = parse_faults(text)
    systemd = Systemd.from_environment()
    startup.raise_descriptor_limit()
    startup.check_proc()
    startup.check_user(os.getuid())
    sys.setswitchinterval(SWITCH_S)
    runner = startup.choose_runner(config.server.use_uvloop)
    place = SocketPlace(config.server.socket, config.server.socket_mode, systemd.listening())
    place.claim()
    try:
        check()
        listen = config.metrics.listen
        # before any peer connects, so that a failure here ends no session
        metrics = endpoint.bind(listen) if listen else None
        listener = place.listen()
        place_memory(config.memory.numa)
        with startup.refusals():
            pool = take_pool(config.memory, systemd)
        daemon = Daemon(config, place, listener, metrics, pool, planted, switches, systemd)
        return runner(daemon.serve(read_config or (lambda: config)))
    except RuntimeError as error:
        if isinstance(error.__context__, ConfigError):  # the loop's own end needs a thread, too
            raise error.__context__ from None
        raise
    finally:
        place.close()


def _holes(fill: bool | str) -> UserfaultGuard | None:
    """Returns the object that forbids holes in workers' memory; None: they may be filled."""
    if fill is True or (fill == "auto" and not has_memory_limit()):
        return None
    try:
        return UserfaultGuard()
    except OSError as error:
        if fill is False:
            raise ConfigError(f"copy.fill_holes = false: this kernel can't forbid such pages ({error})") from None
        log.warning("pages that workers have not populated count towards this daemon's memory limit: %s", error)
        return None


def _switches(faults: str) -> tuple[dict[str, Path], str]:
    """Returns the switch files of faults below memory ("disk=PATH", "remote=PATH"), and the text of the other
    faults.
    """
    entries = [entry.strip().partition("=") for entry in faults.split(",")]
    paths = {name: Path(path) for name, _, path in entries if name in ("disk", "remote")}
    return paths, ",".join("".join(entry) for entry in entries if entry[0] not in ("disk", "remote"))


def _longest_stop_s(config: Config) -> float:
    """Returns the longest time that the drain and `_close` may take."""
    return config.server.drain_s + config.copy.worker_drain_s + config.disk.flush_s + config.cuda.stuck_s + 11 * CLOSE_S


def _serve_metrics(context: Context, listener: socket.socket) -> Endpoint:
    """Serves metrics at this socket from now on."""
    metrics = Endpoint(listener, context.loop, lambda: in_turns(status.describe(context)))
    metrics.start()
    log.info("metrics at %s", context.config.metrics.listen)
    return metrics


class Daemon:
    """One run. Owns the listening socket, the arena, the device, the lanes."""

    def __init__(
        self,
        config: Config,
        place: SocketPlace,
        listener: socket.socket,
        metrics: socket.socket | None,
        pool: ArenaFile,
        faults: Faults,
        switches: Mapping[str, Path],
        systemd: Systemd,
    ) -> None:
        self._config = config
        self._systemd = systemd
        self._place = place
        self._listener = listener
        self._metrics = metrics
        self._pool = pool
        self._faults = faults
        self._switches = switches
        self._collector = Collector()
        self._stop = asyncio.Event()
        self._signals = 0
        self._taking_over = False

    async def serve(self, read_config: Callable[[], Config]) -> int:
        """Starts, serves, drains and closes."""
        loop = asyncio.get_running_loop()
        with startup.refusals():
            loop.set_default_executor(startup.make_executor())
            context = self._start(loop)
            socket_lane = Lane("socket", 1, loop)  # its path may hang
        loop.set_exception_handler(context.on_loop_error)
        endpoint = _serve_metrics(context, self._metrics) if self._metrics is not None else None
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        self._taking_over = True
        await self._take_over(context)
        self._taking_over = False
        path = format_path(self._config.server.socket)
        self._collector.start()
        listener = Listener(context, self._listener)
        listener.start()
        context.lag.start()
        feed = context.spawn(context.events.run())
        loop.add_signal_handler(signal.SIGHUP, Reload(context, read_config, self._systemd, listener.check_all).begin)
        log.info("serving at %s, %s", path, status.tier_sizes(context))
        is_found = self._config.server.socket == socketpath.own_socket(os.environ, os.geteuid())
        option = "" if is_found else f" --socket {shlex.quote(path)}"
        log.info("next: `kvoffloadd flags vllm%s` prints an engine's flag; so does `flags sglang`", option)
        self._systemd.close_rest()
        self._systemd.ready(f"serving at {path}")
        context.claims.start(context.spawn)
        beside = [
            context.spawn(self._watch(context, socket_lane)),
            context.spawn(log_held_back_forever()),
            context.spawn(keep_socket(self._place, socket_lane, listener.replace)),
        ]
        await self._stop.wait()
        context.draining = True
        for task in beside:
            task.cancel()
        running = context.jobs.running.difference(context.quarantine)
        log.info("draining: %d jobs under way", len(running))
        self._systemd.stopping("draining")
        self._systemd.extend(_longest_stop_s(context.config))
        await context.jobs.settle(running, context.config.server.drain_s)
        removing = context.spawn(socket_lane.perform(self._place.remove))
        await listener.close(self._config.copy.worker_drain_s + CLOSE_S)
        _, left = await asyncio.wait([removing], timeout=CLOSE_S)
        if left or not await socket_lane.close(CLOSE_S):
            log.warning("the socket at %s is not removed: its directory does not answer", path)
        feed.cancel()
        if endpoint is not None:
            await endpoint.close()
        context.lag.stop()
        return await self._close(context)

    async def _watch(self, context: Context, lane: Lane) -> None:
        if self._systemd.watchdog_s is not None:
            path, patience_s = self._config.server.socket, self._systemd.watchdog_s
            await Watchdog(context, path, lane, patience_s, self._systemd.beat).run()

    async def _take_over(self, context: Context) -> None:
        """Takes over what earlier runs left on disk and in memory."""
        await self._take_over_keys(context)
        await context.claims.restore()
        await in_turns(change_quotas(context.cache, self._config.quotas))
        if context.remote is not None:
            context.remote.start(context.spawn)

    async def _take_over_keys(self, context: Context) -> None:
        cache = context.cache
        if self._pool.is_old:
            self._pool.record_attempt()
        saved = read_saved_state(self._pool.names()) if self._pool.is_old else None
        if saved is not None and not cache.epochs.recalls(saved.base, saved.last, *saved.epochs.values()):
            log.warning("memory: the previous run knew of clears of the future, and its keys are not taken over")
            saved = None
        if saved is not None:
            cache.epochs.merge(saved.base, saved.last, saved.epochs)
            cache.tombstones.add(saved.tombstones)
            await context.claims.inherit(saved.claims)
        if context.disk is not None:
            await context.disk.start(context.spawn)
        if not self._pool.is_old:
            cache.save_state()  # the clears that the disks record
            return
        rows = adopt(cache, saved)
        if self._config.memory.verify_adopted == "start":
            await context.jobs.verify_adopted()
        if context.disk is not None:
            context.disk.demotion.adopted(rows)
        self._pool.record_success()
        log.info("memory: %d keys were taken over from the previous run", len(rows))

    def _start(self, loop: asyncio.AbstractEventLoop) -> Context:
        config = self._config
        tier = MemoryTier(config.memory.capacity_bytes, config.memory.slab_bytes, self._pool)
        # Prefaults during serving: the kernel provides pages that are used before they are prefaulted just the same.
        threading.Thread(target=self._prefault, args=(loop, tier), name="kvo-prefault", daemon=True).start()
        policy = partial(create_policy, config.memory.policy or DEFAULT_POLICY, clock=Clock())
        cache = Cache(tier, policy, secrets.randbits(SEED_BITS))
        hash_lane = Lane("hash", config.memory.hash_threads, loop)
        trusted, copy = {0, os.getuid()}, config.copy
        cache.entries.held.trusted = trusted
        host = HostDevice(loop, copy.threads, copy.chunk_bytes, holes=_holes(copy.fill_holes), trusted=trusted)
        device: HostMemory = host
        for remark in remarks(config):
            log.info("%s", remark)
        for exposure in exposures(config):
            log.warning("%s", exposure)
        if self._faults:
            log.warning("faults are injected: %s", self._faults)
            device = FaultyDevice(host, **self._faults)
        disk = self._make_disk(cache, loop) if config.disk.roots else None
        boot_id = secrets.token_bytes(16)
        remote = self._make_remote(cache, disk, loop, hash_lane, boot_id) if config.remote.engine else None
        lower = LowerTiers(disk, remote) if disk or remote else None
        adapt(cache, config)
        arena = Arena(tier.address, tier.capacity_bytes, tier.slab_pages * PAGE_BYTES)
        signals = Signals(loop, trusted)
        context = Context(
            config=config,
            boot_id=boot_id,
            loop=loop,
            cache=cache,
            jobs=Jobs(cache, lower, hash_lane, signals, config.memory.verify_loads),
            host=device,
            gpus=CudaGpus(
                loop, arena, copy.chunk_bytes, config.cuda, self._fatal, self._near(config), config.server.trials
            ),
            signals=signals,
            hash_lane=hash_lane,
            fatal=self._fatal,
            accounts=Accounts(caps(config.limits), worker_totals(), trusted),
            lag=Lag(loop, self._collector.on_idle),
            turns=Turns(loop),
            lower=lower,
            closer=DescriptorCloser(loop, trusted),
        )
        for uid in config.server.allowed_uids[:USERS_AT_START]:
            context.admit(uid)
        return context

    def _make_disk(self, cache: Cache, loop: asyncio.AbstractEventLoop) -> DiskTier:
        files = FaultyFiles(switch) if (switch := self._switches.get("disk")) else Files()
        return DiskTier(cache, self._config.disk, files, loop, secrets.randbits(SEED_BITS))

    def _make_remote(
        self, cache: Cache, disk: DiskTier | None, loop: asyncio.AbstractEventLoop, hash_lane: Lane, boot_id: bytes
    ) -> RemoteTier:
        """Makes the remote tier, without starting its agent."""
        inflight_bytes = min(self._config.remote.inflight_bytes, cache.tier.capacity_bytes // 16)
        config = replace(self._config.remote, inflight_bytes=inflight_bytes)
        store = RemoteStore(cache.tier.pool, config, self._engine_settings(), loop, hash_lane, boot_id)
        return RemoteTier(cache, store, config, loop, partial(clear_here, cache, disk))

    def _engine_settings(self) -> dict[str, Any]:
        """Returns the settings of the remote store's engine."""
        config = self._config.remote
        if config.engine == "memory":
            return {"directory": config.directory, "faults": str(self._switches.get("remote", ""))}
        return asdict(getattr(self._config, config.engine))  # the section has the engine's name

    @staticmethod
    def _near(config: Config) -> Callable[[str], frozenset[int]]:
        """Returns the CPUs for a GPU's threads, by its PCI address; none: any."""
        if config.memory.numa == "off":
            return lambda _: frozenset()
        return partial(cpus_near, allowed=os.sched_getaffinity(0))

    def _prefault(self, loop: asyncio.AbstractEventLoop, tier: MemoryTier) -> None:
        """Runs in a separate thread. Touching a page that the kernel can't provide would end the process."""
        try:
            tier.prefault(self._config.memory.prefault_threads)
        except ResourceError as error:
            with suppress(RuntimeError):  # the loop is closed: the process ends
                loop.call_soon_threadsafe(self._fatal, f"memory.capacity_bytes: {error}")

    def _on_signal(self) -> None:
        if self._taking_over:
            # No peer is served yet, and running operations survive a crash. But this is none, and does not count as
            # one.
            if self._pool.is_old:
                self._pool.withdraw_attempt()
            log.info("stopped before all keys were taken over; the next start will take them over")
            leave(EXIT_OK)
        self._signals += 1
        if self._signals == 1:
            self._stop.set()
            return
        log.warning("forced to exit: running copies end with the process")
        leave(EXIT_FORCED)

    def _fatal(self, reason: str) -> None:
        """Ends the process for an error that can't be repaired while it lives, such as a mapping that a copy never
        releases.
        """
        log.critical("exiting: %s", reason)
        leave(EXIT_FATAL)

    async def _close_lower(self, context: Context) -> None:
        if context.disk is not None:
            self._systemd.status("writing keys that are not on disk yet")
            if not await context.disk.close(self._config.disk.flush_s, CLOSE_S):
                self._fatal("disk I/O does not end")
        if context.remote is not None and not await context.remote.close(CLOSE_S):
            self._fatal("the remote store's agent does not end")

    async def _close(self, context: Context) -> int:
        """Closes everything, lanes before memory: nothing is unmapped while a thread may touch it."""
        context.signals.close()
        for device in context.devices:
            if not await device.close(CLOSE_S):
                self._fatal("copies do not end")
        # Before the hash lane ends: only sealed keys are written to disk, or taken over by a successor.
        if not await context.jobs.until_sealed(context.loop.time() + CLOSE_S):
            log.warning("%d payloads have no checksum yet and are lost", context.jobs.unsealed)
        await context.clearings.close(CLOSE_S)
        await context.deletions.close(CLOSE_S)
        await context.claims.close(CLOSE_S)
        await self._close_lower(context)
        if not await context.hash_lane.close(CLOSE_S):
            self._fatal("the hash lane does not end")
        if context.tasks:
            await asyncio.wait(context.tasks, timeout=CLOSE_S)
        if not await context.gpus.close(self._config.cuda.stuck_s):
            self._fatal("the CUDA driver does not answer")
        if context.host.others_late:  # their memory, and slots, may be touched until the process ends
            log.warning("closed, but copies of another user's memory have not ended: they end with the process")
            leave(EXIT_OK)
        context.cache.tier.close()
        log.info("closed")
        log_held_back(ending=True)
        return EXIT_OK
