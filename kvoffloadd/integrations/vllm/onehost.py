"""Restricts an engine to one host: one that is spread over several is refused at the start.

A daemon has the keys that the ranks on its host store. With ranks elsewhere it would have only parts of keys, which
never hit; and bytes that all ranks hold alike are stored by one rank: every load of them would fail on the other hosts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from kvoffloadd.errors import UsageError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""The kernel's boot id: containers of one host have the same."""


@dataclass(frozen=True)
class RankHost(KVConnectorHandshakeMetadata):
    """A rank's message to the scheduler: the host on which it runs."""

    boot_id: str

    @classmethod
    def here(cls) -> RankHost:
        """Returns this process's host."""
        return cls(_BOOT_ID.read_text(encoding="ascii").strip())


def refuse_nodes(engine: Any) -> None:
    """Raises UsageError where the ranks of `engine`, a VllmConfig, are configured to run on several hosts. Replicas of
    data parallel are separate engines.
    """
    parallel = engine.parallel_config
    if parallel.nnodes_within_dp > 1:
        raise UsageError(
            f"kvoffloadd needs all ranks of an engine on one host, and --nnodes {parallel.nnodes} spreads them over "
            f"{parallel.nnodes_within_dp}: each host's daemon would have only parts of keys, and nothing would hit. "
            "Leave --nnodes at 1, with a --tensor-parallel-size and --pipeline-parallel-size that fit one host"
        )


def refuse_ranks_elsewhere(ranks: Mapping[tuple[int, int], RankHost]) -> None:
    """Raises UsageError for ranks on other hosts than this process: Ray places them where there is room, which no
    option shows. `ranks`: by number in pipeline and tensor parallel.
    """
    here = RankHost.here()
    if away := [rank for rank, host in sorted(ranks.items()) if host != here]:
        named = ", ".join(f"PP {pp} TP {tp}" for pp, tp in away)
        raise UsageError(
            "kvoffloadd needs all ranks of an engine on its scheduler's host, and these run on others, where "
            f"--distributed-executor-backend ray has placed them: {named}. Each host's daemon would have only parts "
            "of keys, and nothing would hit. Use --distributed-executor-backend mp, or a Ray placement group on one "
            "node"
        )
