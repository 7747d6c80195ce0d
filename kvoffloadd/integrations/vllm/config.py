"""What an engine's configuration means here: its namespace, who may share what with it, and what users set.

Pure: everything is in the arguments. The scheduler and each rank work the namespace out by themselves, so nothing may
be in it that they do not all know alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvoffloadd.client import NamespaceSpec
from kvoffloadd.integrations.common.keys import KEY_BYTES
from kvoffloadd.integrations.common.naming import digest_of, files_of, fitting
from kvoffloadd.integrations.common.options import DEFAULT_SOCKET, seconds_of, socket_of
from kvoffloadd.integrations.vllm.parts import by_heads, share

IDENTITY = "kvoffloadd_identity"
"""Key of extra_config under which `KVOffloaddConnector` says what vLLM's OffloadingConfig leaves out."""

STATES = "kvoffloadd_states"
"""Key of extra_config under which it says which groups keep a state: the indices of those of which a block holds what
the model remembers at its end, and blocks in the middle of a request hold nothing.
"""

REACHES = "kvoffloadd_reaches"
"""Key of extra_config under which it says which groups have windows or states: the index of each -> how many tokens
before its end a prefix needs of it. Of the others it needs all.
"""

DRAFTS = "kvoffloadd_drafts"
"""Key of extra_config under which it says which groups have layers of a draft model: their indices."""

_CANONICAL_FORMAT = 1  # how parts are cut out of vLLM's canonical pages
_RANDOM_SEED_HASHES = ("xxhash", "xxhash_cbor")

_WHERE = "kv_connector_extra_config"


@dataclass(frozen=True, slots=True)
class Options:
    """What users set in `kv_connector_extra_config`; times in seconds.

    `socket`: where the daemon listens. `timeout_s`: for how long the answer to a lookup is waited for, before it counts
    as a miss. `wait_s`: for how long a request waits for keys on their way from disk, or being stored by others.
    `job_deadline_s`: when the daemon gives a load or a store up.
    """

    socket: str = DEFAULT_SOCKET
    timeout_s: float = 1.0
    wait_s: float = 10.0
    job_deadline_s: float = 60.0

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> Options:
        """Raises UsageError, naming the key, for a value that can't be."""
        standard = cls()
        return cls(
            socket=socket_of(extra_config, _WHERE),
            timeout_s=seconds_of(extra_config, "timeout_s", standard.timeout_s, _WHERE),
            wait_s=seconds_of(extra_config, "wait_s", standard.wait_s, _WHERE),
            job_deadline_s=seconds_of(extra_config, "job_deadline_s", standard.job_deadline_s, _WHERE),
        )


def namespace_of(config: Any, platform: str, release: str, seed: str | None) -> NamespaceSpec:
    """`config`: vLLM's OffloadingConfig. `platform`: of the engine's device. `release`: of vLLM.

    `seed`: PYTHONHASHSEED, None if it is not set. cache_salt and LoRA are in vLLM's block hashes, and so in the keys.
    Raises UsageError as `share` does.
    """
    identity: Mapping[str, Any] = config.extra_config.get(IDENTITY, {})
    revision = str(identity.get("revision") or config.extra_config.get("revision") or "")
    return NamespaceSpec(
        model=fitting(str(config.model.name)),
        revision=fitting(revision + files_of(str(config.model.name))),
        dtype=fitting(f"{config.model.dtype} {identity.get('dtype', '')}".strip()),
        layout=_layout(config, platform, release),
        parallel=_parallel(config),
        salt=fitting(_salt(config, identity, seed)),
        key_bytes=KEY_BYTES,
    )


def identity_of(vllm_config: Any) -> dict[str, str]:
    """What OffloadingConfig leaves out of a VllmConfig and the bytes of a KV cache depend on."""
    model = vllm_config.model_config
    multimodal = getattr(model, "multimodal_config", None)
    said = {
        "quantization": model.quantization,
        # A function has no name that another process would know: such an engine shares with nobody.
        "overrides": model.hf_overrides
        if isinstance(model.hf_overrides, dict)
        else f"engine {vllm_config.kv_transfer_config.engine_id}",
        "config": model.hf_config_path,
        "dummy": str(vllm_config.load_config.load_format) == "dummy",
        "positions": _long_positions(model),
        "processor": getattr(multimodal, "mm_processor_kwargs", None),
    }
    return {
        "revision": str(model.revision or ""),
        "dtype": str(model.dtype).removeprefix("torch."),
        "model": digest_of(sorted((name, repr(value)) for name, value in said.items() if value)),
        "hash": str(vllm_config.cache_config.prefix_caching_hash_algo),
    }


def _long_positions(model: Any) -> int:
    """The length that decides how "longrope" models rotate all of their keys; of others, 0: it decides nothing."""
    config = model.hf_text_config
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    return int(model.max_model_len) if "longrope" in repr(rope) else 0


def unstable_hashes(config: Any, seed: str | None) -> bool:
    """Whether block hashes differ between runs of the engine, so that nothing hits after a restart."""
    return seed is None and _hash_of(config.extra_config.get(IDENTITY, {})) in _RANDOM_SEED_HASHES


def instance_of(engine_id: str) -> bytes:
    """16 bytes that a scheduler and its ranks share, and other engines do not."""
    return hashlib.blake2b(engine_id.encode(), digest_size=16, person=b"kvoffloadd").digest()


def _parallel(config: Any) -> str:
    """The sizes, where they decide what a part of a key is."""
    held, parallel = share(config), config.parallel
    if by_heads(config):
        return f"canonical v{_CANONICAL_FORMAT} in {held.parts} parts"
    sizes = (parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size, parallel.world_size)
    return "tp{} pp{} pcp{} dcp{} of {}".format(*sizes)


def _layout(config: Any, platform: str, release: str) -> str:
    # A pipeline rank knows its own layers alone: names and sizes would differ from rank to rank.
    alone = config.parallel.pp_size == 1
    block_bytes, replicated = config.worker_kv_bytes_per_block, config.replicated_layout
    if by_heads(config):
        held = share(config)
        block_bytes, replicated = block_bytes * held.parts // held.held, False
    groups = [(group.group_id, group.tokens_per_block, group.layer_names if alone else ()) for group in config.groups]
    said: tuple[Any, ...] = (
        groups,
        config.cache.tokens_per_hash,
        config.cache.blocks_per_chunk,
        block_bytes if alone else 0,
        replicated,
        config.canonical_layout,
        # From 0.33 on. Where the identity is not told, it may decide how all keys are rotated.
        0 if IDENTITY in config.extra_config else getattr(config.model, "max_model_len", 0),
    )
    if config.cache.blocks_per_chunk > 1 and config.extra_config.get(STATES):
        said += (("states", *config.extra_config[STATES]),)
    if config.extra_config.get(REACHES):
        said += (("reaches", *sorted(config.extra_config[REACHES].items())),)
        if config.extra_config.get(DRAFTS):
            said += (("drafts", *config.extra_config[DRAFTS]),)
    return f"vllm {release} {platform} {config.kv_cache_layout} {digest_of(said)}"


def _salt(config: Any, identity: Mapping[str, Any], seed: str | None) -> str:
    hashing = f"{_hash_of(identity)} seed {'default' if seed is None else seed}"
    extra = str(identity.get("model", ""))
    # Nobody else can know these keys, so nobody else may find them, either.
    own = f" engine {config.engine_id}" if unstable_hashes(config, seed) else ""
    return f"{hashing}{own} {extra}".rstrip()


def _hash_of(identity: Mapping[str, Any]) -> str:
    return str(identity.get("hash", ""))
