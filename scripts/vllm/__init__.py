"""vLLM with this daemon: a first look, and what it costs."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "PYTHONHASHSEED": "0",
}
"""Of small engines on the CPU, which ask no server on the network."""

MODULE = "kvoffloadd.integrations.vllm"


def transfer_config(route: str, **extra: object) -> dict[str, object]:
    """`kv_transfer_config`. `route`: "connector", ours, which outlives the daemon, or "spec", ours in vLLM's own."""
    if route == "spec":
        named = {"kv_connector": "OffloadingConnector"}
        extra |= {"spec_name": "KVOffloaddSpec", "spec_module_path": MODULE}
    else:
        named = {"kv_connector": "KVOffloaddConnector"}
    return {**named, "kv_role": "kv_both", "kv_connector_extra_config": extra}
