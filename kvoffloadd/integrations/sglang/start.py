"""Starts the storage or the linker: shares its rank's pools with the daemon under the name of the engine's model."""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import ExitStack

from kvoffloadd.client import Client
from kvoffloadd.integrations.common.contents import ContentsError, Fingerprint
from kvoffloadd.integrations.common.naming import digest_of
from kvoffloadd.integrations.common.options import EngineOptions
from kvoffloadd.integrations.sglang import engine, versions
from kvoffloadd.integrations.sglang.environment import VARIABLES
from kvoffloadd.integrations.sglang.files import FILES
from kvoffloadd.integrations.sglang.identity import from_elsewhere, identity_of
from kvoffloadd.integrations.sglang.namespace import Computed, namespace_of
from kvoffloadd.integrations.sglang.pagestore import PageStore, Purpose
from kvoffloadd.integrations.sglang.pools import Pools
from kvoffloadd.integrations.sglang.weights import WEIGHTS

logger = logging.getLogger("sglang.kvoffloadd")

_WORKER_S = 10.0  # includes attaching an engine's memory


def page_store(pools: Pools, options: EngineOptions, tp_size: int, *, retry_busy: bool) -> PageStore:
    """Makes the page store. All ranks that hold parts of the same keys come here, once. Without a daemon it keeps
    trying.

    `retry_busy`: whether lookups and loads repeat requests to a busy daemon, until their deadlines. Stores do. An error
    in one rank is raised in all.
    """
    number = WEIGHTS.number_engine(lambda: engine.agreed(secrets.randbits(64)))
    computed = _computed(options.fingerprint, number)
    instance = secrets.token_bytes(16)
    with ExitStack() as undone:
        with engine.all_or_none():
            namespace = namespace_of(computed, pools, tp_size)

            def client(purpose: Purpose) -> Client:
                lookups = purpose == "lookups"
                return Client(
                    options.socket,
                    namespace=namespace,
                    role="scheduler" if lookups else "worker",
                    instance=instance,
                    deadline_s=options.timeout_s if lookups else max(_WORKER_S, options.timeout_s),
                    connect_deadline_s=0.0,
                    retry_busy=retry_busy or purpose == "stores",
                )

            pages = PageStore(pools, client, job_deadline_s=options.job_deadline_s)
            undone.callback(pages.close)
        undone.pop_all()
    WEIGHTS.follow(pages, options.fingerprint)
    if engine.rank().rank == 0:
        engine.tell_hits(pages)
        engine.tell_hints(pages)
    where = options.socket or "the socket that is found"
    logger.info("kvoffloadd: pools %s, daemon at %s", ", ".join(pools.pools), where)
    return pages


def _computed(how: Fingerprint, number: int) -> Computed:
    """Returns what this engine computes with. `number`: the engine's unique number, which is its identity where one of
    its ranks is in doubt.
    """
    with engine.all_or_none():
        arguments, version, amx = engine.arguments(), versions.check(), engine.has_amx()
        variables = VARIABLES.counted(os.environ)
        identity: object = None
        doubt = from_elsewhere(arguments)
        if not doubt:
            try:
                identity = (identity_of(arguments, lambda source: FILES.identity(source, how)), variables)
            except ContentsError as error:
                doubt = str(error)
    unlike = _unlike((identity, variables))
    if not engine.all_agree(not (doubt or unlike)):
        logger.warning(
            "kvoffloadd: this engine shares with no other: %s", doubt or unlike or "another rank is in doubt"
        )
        identity = ("in doubt", number)
    return Computed(arguments, identity, version, amx)


def _unlike(computes_with: object) -> str:
    """Returns why this rank computes with something else than the first rank. Empty: with the same."""
    number = int(digest_of(computes_with)[:15], 16)
    return "" if engine.agreed(number) == number else "its ranks have other environment variables (SGLANG_*), or files"
