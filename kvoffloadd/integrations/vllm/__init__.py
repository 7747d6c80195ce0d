"""vLLM offloads its KV cache through the daemon: `KVOffloaddConnector`, or `KVOffloaddSpec` for vLLM's connector.

Importing this loads neither vLLM nor torch; the two names do, and raise ImportError where the installed vLLM is not
supported.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KVOffloaddConnector", "KVOffloaddSpec"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Not at the top: only vLLM's processes have vLLM, and our tests of the pure parts run without it.
    from kvoffloadd.integrations.vllm import versions

    versions.check()
    if name == "KVOffloaddSpec":
        from kvoffloadd.integrations.vllm.spec import KVOffloaddSpec

        return KVOffloaddSpec
    from kvoffloadd.integrations.vllm.connector import KVOffloaddConnector

    return KVOffloaddConnector
