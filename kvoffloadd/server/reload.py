"""Reloads the config on SIGHUP, and applies the settings that can change at run time. The others wait for a restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import aiofiles.os

from kvoffloadd import log as logs
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.requeue import change_quotas
from kvoffloadd.config import Config, reloaded, remarks
from kvoffloadd.errors import ConfigError
from kvoffloadd.linux.systemd import Systemd
from kvoffloadd.scheduling.steps import in_turns
from kvoffloadd.server.context import Context
from kvoffloadd.server.peers.account import caps

log = logging.getLogger(__name__)


def adapt(cache: Cache, config: Config) -> None:
    """Sets what the cache takes from the config at the start and at each reload; quotas come in steps of their own."""
    cache.entries.keyspaces.groups_max = config.limits.groups
    cache.retention.change_shares(config.retain.memory_share, config.retain.disk_share)


class Reload:
    """Replaces the daemon's config. `read` makes the config anew, as at the start; it may wait for files and for user
    databases. `check_peers` ends sessions that the new config does not allow.
    """

    def __init__(
        self, context: Context, read: Callable[[], Config], systemd: Systemd, check_peers: Callable[[], None]
    ) -> None:
        self._context = context
        self._read = read
        self._systemd = systemd
        self._check_peers = check_peers
        self._one_at_a_time = asyncio.Lock()

    def begin(self) -> None:
        """Reloads in the background. A wrong config changes nothing, and is reported in the log."""
        self._context.spawn(self._run())

    async def _run(self) -> None:
        async with self._one_at_a_time:
            self._systemd.reloading()
            try:
                config = await aiofiles.os.wrap(self._read)()
            except ConfigError as error:
                log.error("not reloaded, nothing has changed: %s", "; ".join(map(str.strip, str(error).splitlines())))
            else:
                self._adopt(config)
            finally:
                self._systemd.ready()

    def _adopt(self, config: Config) -> None:
        """Applies the new config. Sessions keep the limits of their welcome; caps apply to all users, but users above
        them keep their charges.
        """
        context = self._context
        was = context.config
        context.config, changed, waiting = reloaded(was, config)
        context.accounts.change(caps(context.config.limits))
        adapt(context.cache, context.config)
        if context.config.quotas != was.quotas:
            context.spawn(in_turns(change_quotas(context.cache, context.config.quotas)))
        self._check_peers()
        if context.config.log != was.log:
            logs.setup(context.config.log)
        log.info("reloaded: %s", "; ".join(changed) or "nothing has changed")
        for remark in remarks(context.config):
            log.info("%s", remark)
        if waiting:
            log.warning("takes effect at the next start: %s", ", ".join(waiting))
