"""Builds the tiers below memory from their sections of the config."""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from kvoffloadd.cache.clearing import clear_here
from kvoffloadd.cache.disk.demotion import DiskSettings
from kvoffloadd.cache.disk.disktier import DiskTier
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.keyhash import SEED_BITS
from kvoffloadd.cache.remote.contents import RemotePolicy
from kvoffloadd.cache.remote.remotetier import RemoteTier
from kvoffloadd.config import Config, DiskConfig
from kvoffloadd.lanes import Lane
from kvoffloadd.storage.disk.faults import FaultyFiles
from kvoffloadd.storage.disk.files import Files
from kvoffloadd.storage.disk.root import Root, RootSettings
from kvoffloadd.storage.disk.segment import SequenceNumbers
from kvoffloadd.storage.remote.store import RemoteSettings, RemoteStore

log = logging.getLogger(__name__)


def make_disk(chosen: DiskConfig, cache: Cache, loop: asyncio.AbstractEventLoop, switch: Path | None) -> DiskTier:
    """The disk tier. `switch`: of its faults."""
    numbers = SequenceNumbers()
    files = FaultyFiles(switch) if switch else Files()
    each = RootSettings(
        segment_bytes=chosen.segment_bytes,
        read_threads=chosen.read_threads,
        write_threads=chosen.write_threads,
        direct=None if chosen.direct == "auto" else bool(chosen.direct),
        min_free_bytes=chosen.min_free_bytes,
        retry_s=chosen.retry_s,
        stuck_s=chosen.stuck_s,
    )
    roots = [Root(root.path, root.capacity_bytes, each, files, loop, numbers) for root in chosen.roots]
    settings = DiskSettings(
        on_evict=chosen.demote == "evict",
        second_use=chosen.admit == "second-use",
        write_bytes_per_s=chosen.write_bytes_per_s,
        write_ops_per_s=chosen.write_ops_per_s,
        backlog_bytes=chosen.backlog_bytes,
        rewrite_hot=chosen.rewrite_hot,
        retry_s=chosen.retry_s,
        stuck_s=chosen.stuck_s,
    )
    return DiskTier(cache, roots, numbers, settings, loop, secrets.randbits(SEED_BITS))


def make_remote(
    config: Config,
    cache: Cache,
    disk: DiskTier | None,
    loop: asyncio.AbstractEventLoop,
    hash_lane: Lane,
    boot_id: bytes,
    switch: Path | None,
) -> RemoteTier:
    """The remote tier; its agent is not started. `switch`: of its engine's faults."""
    chosen = config.remote
    inflight_bytes = min(chosen.inflight_bytes, cache.tier.capacity_bytes // 16)
    each = RemoteSettings(
        engine=chosen.engine,
        engine_settings=_engine_settings(config, switch),
        python=chosen.python,
        stuck_s=chosen.stuck_s,
        inflight_bytes=inflight_bytes,
        get_threads=chosen.get_threads,
        put_threads=chosen.put_threads,
    )
    store = RemoteStore(cache.tier.pool, each, loop, hash_lane, boot_id)
    policy = RemotePolicy(
        push=chosen.push,
        lookup_s=chosen.lookup_s,
        fetch_s=chosen.fetch_s,
        prefetch_s=chosen.prefetch_s,
        lookup_keys=chosen.lookup_keys,
        min_keys=chosen.min_keys,
        inflight_bytes=inflight_bytes,
        backlog_bytes=chosen.backlog_bytes,
        write_bytes_per_s=chosen.write_bytes_per_s,
        miss_ttl_s=chosen.miss_ttl_s,
        era_poll_s=chosen.era_poll_s,
    )
    return RemoteTier(cache, store, policy, loop, partial(clear_here, cache, disk))


def _engine_settings(config: Config, switch: Path | None) -> dict[str, Any]:
    """Of the remote store's engine, as it takes them."""
    engine = config.remote.engine
    if engine == "memory":
        return {"directory": config.remote.directory, "faults": str(switch) if switch else ""}
    return asdict(config.mooncake if engine == "mooncake" else config.valkey)
