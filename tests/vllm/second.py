"""A second connector for tests of `MultiConnector`: vLLM's example, which hands prompts over like NIXL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


@dataclass(frozen=True)
class SecondMetadata(KVConnectorHandshakeMetadata):
    """The report of its ranks to its scheduler."""


class SecondConnector(ExampleConnector, SupportsHMA):
    """Serves models with a single group. It answers prompts that are handed over with vLLM's parameters, as our
    connector does, and needs the reports of its ranks.
    """

    def get_handshake_metadata(self) -> SecondMetadata:
        return SecondMetadata()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        assert all(isinstance(report, SecondMetadata) for report in metadata.values()), metadata

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params or {}
        return False, {"do_remote_prefill": True, "do_remote_decode": False} if params.get("do_remote_decode") else None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids)
