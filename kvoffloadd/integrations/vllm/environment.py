"""vLLM's environment variables, judged: does one decide what is in a KV cache?

Deny by default, as `fields` does: each `VLLM_*` that is set and in no table here is part of an engine's identity,
whatever vLLM or a plug-in makes of it. docs/VLLM.md has the table of harmless ones for users.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

PREFIX: Final = "VLLM_"


@dataclass(frozen=True, slots=True)
class HarmlessVariables:
    """Why variables are left out."""

    names: frozenset[str]
    reason: str


def _names(names: str, prefix: str = "") -> frozenset[str]:
    return frozenset(prefix + name for name in names.split())


def _left_out(names: str, reason: str) -> HarmlessVariables:
    """`names`: without their prefix."""
    return HarmlessVariables(_names(names, PREFIX), reason)


HARMLESS: Final = (
    _left_out(
        "HOST_IP PORT LOOPBACK_IP RPC_BASE_PATH DP_MASTER_IP DP_MASTER_PORT NIXL_SIDE_CHANNEL_HOST "
        "NIXL_SIDE_CHANNEL_PORT P2P_SIDE_CHANNEL_HOST P2P_SIDE_CHANNEL_PORT P2P_MAX_PEERS EC_SIDE_CHANNEL_HOST "
        "EC_SIDE_CHANNEL_PORT MOONCAKE_BOOTSTRAP_PORT GPU_NIC_PCIE_MAPPING NIC_SELECTION_VARS",
        "hosts, ports and network cards",
    ),
    _left_out(
        "DP_RANK DP_RANK_LOCAL DP_SIZE RANDOMIZE_DP_DUMMY_INPUTS RAY_PER_WORKER_GPUS RAY_BUNDLE_INDICES "
        "RAY_DP_PACK_STRATEGY RAY_DP_PLACEMENT_NODE_IPS RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY "
        "RAY_EXTRA_ENV_VARS_TO_COPY USE_RAY_V2_EXECUTOR_BACKEND USE_RAY_COMPILED_DAG_CHANNEL_TYPE "
        "ELASTIC_EP_SCALE_UP_LAUNCH ELASTIC_EP_DRAIN_REQUESTS DIST_IDENT PROCESS_NAME_PREFIX",
        "which process or replica this is, and how Ray places it",
    ),
    _left_out(
        "WORKER_MULTIPROC_METHOD ENABLE_V1_MULTIPROCESSING USE_RUST_FRONTEND RUST_FRONTEND_PATH USE_SPINLOOP_EXT "
        "MQ_MAX_CHUNK_BYTES_MB MSGPACK_ZERO_COPY_THRESHOLD OBJECT_STORAGE_SHM_BUFFER_NAME "
        "RINGBUFFER_WARNING_INTERVAL KEEP_ALIVE_ON_ENGINE_DEATH ENABLE_CUDAGRAPH_GC V1_OUTPUT_PROC_CHUNK_SIZE",
        "how processes are started and talk",
    ),
    _left_out(
        "CPU_KVCACHE_SPACE CPU_OMP_THREADS_BIND CPU_NUM_OF_RESERVED_CPU CPU_CI_ENV MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS",
        "how many blocks there are, and on which cores threads run",
    ),
    _left_out(
        "ENGINE_READY_TIMEOUT_S EXECUTE_MODEL_TIMEOUT_SECONDS WORKER_SHUTDOWN_TIMEOUT_SECONDS "
        "HTTP_TIMEOUT_KEEP_ALIVE IMAGE_FETCH_TIMEOUT VIDEO_FETCH_TIMEOUT AUDIO_FETCH_TIMEOUT "
        "P2P_HANDSHAKE_TIMEOUT_S P2P_IDLE_TIMEOUT_S MOONCAKE_CONNECTOR_TIMEOUT MOONCAKE_ABORT_REQUEST_TIMEOUT "
        "CHAT_TEMPLATE_RENDER_TIMEOUT CHAT_TEMPLATE_FUEL REGEX_COMPILATION_TIMEOUT_S "
        "TOOL_PARSE_REGEX_TIMEOUT_SECONDS",
        "timeouts: what is late fails",
    ),
    _left_out(
        "CONFIGURE_LOGGING LOGGING_CONFIG_PATH LOGGING_LEVEL LOGGING_STREAM LOGGING_PREFIX LOGGING_COLOR "
        "LOG_STATS_INTERVAL LOG_BATCHSIZE_INTERVAL LOG_MODEL_INSPECTION DISABLE_LOG_LOGO TRACE_FUNCTION "
        "DEBUG_LOG_API_SERVER_RESPONSE DEBUG_DUMP_PATH DEBUG_MFU_METRICS DEBUG_WORKSPACE GC_DEBUG "
        "PATTERN_MATCH_DEBUG REQUEST_BODY_LOG_LEVEL MOONCAKE_STORE_TIER_LOG CUSTOM_SCOPES_FOR_PROFILING "
        "NVTX_SCOPES_FOR_PROFILING USAGE_STATS_SERVER NO_USAGE_STATS DO_NOT_TRACK USAGE_SOURCE",
        "logs, profiles and usage reports",
    ),
    _left_out(
        "CONFIG_ROOT CACHE_ROOT ASSETS_CACHE ASSETS_CACHE_MODEL_CLEAN MEDIA_CACHE MEDIA_CACHE_MAX_SIZE_MB "
        "MEDIA_CACHE_TTL_HOURS XLA_CACHE_PATH FLASHINFER_AUTOTUNE_CACHE_DIR LORA_RESOLVER_CACHE_DIR "
        "LORA_RESOLVER_HF_REPO_LIST",
        "where caches are, and adapters: what is in their files is named",
    ),
    _left_out(
        "DISABLE_COMPILE_CACHE COMPILE_CACHE_SAVE_FORMAT USE_STANDALONE_COMPILE USE_AOT_COMPILE FORCE_AOT_LOAD "
        "USE_MEGA_AOT_ARTIFACT USE_BYTECODE_HOOK USE_BREAKABLE_CUDAGRAPH ENABLE_STARTUP_PLAN "
        "TRITON_JIT_WARMUP_NUM_THREADS DEEP_GEMM_WARMUP",
        "how the model's own graph is compiled and captured, as compilation_config",
    ),
    _left_out(
        "API_KEY SERVER_DEV_MODE ALLOW_RUNTIME_LORA_UPDATING ALLOW_LONG_MAX_MODEL_LEN ALLOW_INSECURE_SERIALIZATION "
        "SKIP_MODEL_NAME_VALIDATION HTTP_MAX_REQUEST_BODY_SIZE MAX_N_SEQUENCES MAX_COMPLETION_PROMPTS "
        "MAX_STOP_STRINGS MAX_NUM_BAD_WORDS MAX_BAD_WORDS_TOTAL_TOKENS MEDIA_FETCH_MAX_RETRIES "
        "MAX_MEDIA_DOWNLOAD_SIZE_MB MAX_MEDIA_REQUEST_DECODE_BYTES MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB "
        "MEDIA_URL_ALLOW_REDIRECTS MEDIA_LOADING_THREAD_COUNT MAX_AUDIO_CLIP_FILESIZE_MB "
        "MAX_AUDIO_DECODE_DURATION_S MAX_AUDIO_DECODE_BYTES MAX_EMBED_DECODE_BYTES MAX_AUDIO_PREPROCESS_WORKERS "
        "MAX_IMAGE_PIXELS ENABLE_RESPONSES_API_STORE ENABLE_COHERE_API DISABLE_REQUEST_ID_RANDOMIZATION",
        "which requests are served, and which are refused",
    ),
    _left_out(
        "USE_FLASHINFER_SAMPLER XPU_USE_SAMPLER_KERNEL XGRAMMAR_CACHE_MB V1_USE_OUTLINES_CACHE "
        "ENFORCE_STRICT_TOOL_CALLING BEAM_ALWAYS_CONSTRAIN_OUTPUT TOOL_JSON_ERROR_AUTOMATIC_RETRY "
        "USE_EXPERIMENTAL_PARSER_CONTEXT GPT_OSS_SYSTEM_TOOL_MCP_LABELS GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS "
        "SYSTEM_START_DATE USE_FASTOKENS",
        "texts and answers: prompts' and generated tokens are in the block hashes",
    ),
    _left_out(
        "USE_PRECOMPILED USE_PRECOMPILED_RUST SKIP_PRECOMPILED_VERSION_SUFFIX SKIP_VERSION_SUFFIX "
        "MAIN_CUDA_VERSION DOCKER_BUILD_CONTEXT BUILD_COMMIT BUILD_PIPELINE BUILD_URL IMAGE_TAG",
        "read when vLLM is built: its whole version is named",
    ),
    _left_out("PLUGINS", "which of the installed plug-ins run: none of them is named, installed or not"),
    _left_out(
        "ENABLE_CUDA_COMPATIBILITY CUDA_COMPATIBILITY_PATH",
        "which of the installed drivers' libraries is taken: none of them is named",
    ),
    _left_out(
        "KV_EVENTS_USE_INT_BLOCK_HASHES KV_OFFLOAD_MAX_BATCH_DESCRIPTORS USE_SIMPLE_KV_OFFLOAD "
        "MOONCAKE_LOAD_RECV_THREADS MOONCAKE_DISK_STAGING_USABLE_RATIO WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY "
        "WEIGHT_OFFLOADING_DISABLE_UVA WSL2_ENABLE_PIN_MEMORY FASTSAFETENSORS_QUEUE_SIZE",
        "how blocks, weights and events are moved",
    ),
)

ELSEWHERE: Final = (
    _left_out("KV_CACHE_LAYOUT SSM_CONV_STATE_LAYOUT TARGET_DEVICE", "in the layout"),
    _left_out("MODEL_REDIRECT_PATH", "model.model and model.hf_config_path are what the file makes of them"),
    _left_out("USE_MODELSCOPE", "a doubt, unless the model is a place on this host"),
)
"""As HARMLESS: what these say is named in another way."""

OTHERS_HARMLESS: Final = _names(
    "CMAKE_BUILD_TYPE CUDA_HOME CUDA_VISIBLE_DEVICES FORCE_COLOR LD_LIBRARY_PATH LOCAL_RANK MAX_JOBS "
    "MOONCAKE_PREFERRED_SEGMENT MOONCAKE_REQUESTER_LOCAL_HOSTNAME NO_COLOR NVCC_THREADS S3_ACCESS_KEY_ID "
    "S3_ENDPOINT_URL S3_SECRET_ACCESS_KEY VERBOSE"
)
"""vLLM's variables without its prefix: all that vLLM 0.32 and 0.33 have. A model in S3 is in doubt anyway."""

_LEFT_OUT: Final = frozenset().union(*(one.names for one in (*HARMLESS, *ELSEWHERE)))

_OF_A_SERVICE: Final = re.compile(
    r"VLLM_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Kubernetes tells containers of each service: one whose name begins with "vllm" has variables of this prefix."""


def told_by(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Name and value of each variable that is part of the identity, by name."""
    return sorted((name, value) for name, value in environ.items() if is_part(name))


def is_part(name: str) -> bool:
    """Whether a variable is part of the identity: all of vLLM's are that nobody has judged otherwise."""
    return name.startswith(PREFIX) and name not in _LEFT_OUT and not _OF_A_SERVICE.fullmatch(name)
