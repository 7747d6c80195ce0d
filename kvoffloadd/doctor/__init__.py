"""Finds what on this host would keep the daemon from working: `examine` looks, and changes nothing that lasts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from kvoffloadd.config import Config
from kvoffloadd.device.userfaultguard import UserfaultGuard
from kvoffloadd.doctor.diagnosis import Diagnosis, Verdict, ok
from kvoffloadd.doctor.gpus import MakeDriver, check_gpus
from kvoffloadd.doctor.host import Host
from kvoffloadd.doctor.places import check_account, check_disks, check_metrics, check_pool, check_socket
from kvoffloadd.doctor.remote import check_remote
from kvoffloadd.doctor.system import (
    check_helpers,
    check_holes,
    check_kernel,
    check_limits,
    check_loads,
    check_memory,
    check_shm,
    check_system_calls,
)
from kvoffloadd.linux.sockets import is_listening

__all__ = ["Diagnosis", "Host", "Verdict", "examine"]


def examine(config: Config, host: Host, make_driver: MakeDriver | None = None) -> Iterator[Diagnosis]:
    """Runs all checks, in the order in which a start would meet their subjects. Blocks: for seconds, if a disk or a
    store does not answer.
    """
    running = is_listening(config.server.socket)
    yield ok("config", "all values are valid")  # a wrong one can't be loaded
    yield from chain(
        check_kernel(host),
        check_system_calls(),
        check_helpers(),
        check_account(config, host),
        check_socket(config.server.socket, host, is_running=running),
        check_limits(config, host),
        check_memory(config.memory, host, is_running=running),
        check_loads(config.memory),
        check_pool(config.memory, host, is_running=running),
        check_holes(config.copy, host, _has_userfaultfd()),
        check_shm(host),
        check_gpus(config, host, *([make_driver] if make_driver else [])),
        check_disks(config.disk, host),
        check_remote(config, host),
        check_metrics(config.metrics.listen, is_running=running),
    )


def _has_userfaultfd() -> bool:
    try:
        UserfaultGuard().close()
    except OSError:
        return False
    return True
