"""Derives from an engine's configuration its namespace, which engines share with it, and the users' options.

Pure: everything is in the arguments. The scheduler and each rank compute the namespace separately, so it may contain
nothing that they do not all know alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from kvoffloadd.client import NamespaceSpec
from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.common.keys import KEY_BYTES
from kvoffloadd.integrations.common.naming import digest_of, fitting
from kvoffloadd.integrations.common.options import EngineOptions, seconds_of
from kvoffloadd.integrations.vllm.identity import IDENTITY
from kvoffloadd.integrations.vllm.parts import by_heads, share

STATES = "kvoffloadd_states"
"""Key of extra_config that lists the groups that keep a state, by index: a block of such a group holds what the model
remembers at the block's end, and blocks in the middle of a request hold nothing. If there are any, a key is one block.
"""

REACHES = "kvoffloadd_reaches"
"""Key of extra_config that lists the groups with windows or states: the index of each -> how many tokens before its end
a prefix needs of it. Of the other groups it needs all.
"""

DRAFTS = "kvoffloadd_drafts"
"""Key of extra_config that lists the groups with layers of a draft model, by index."""

INSIDE = "kvoffloadd_inside"
"""Key of extra_config that is true inside a MultiConnector."""

POLICY = "recompute"
"""The value of vLLM's `kv_load_failure_policy` with which requests outlive the daemon."""

_RECOMPUTES = "recompute_failed_loads"
_IDENTITY_FORMAT = 3  # version of engines' names: names of earlier versions are not found again
_CANONICAL_FORMAT = 1  # version of how parts are cut out of vLLM's canonical pages
_RANDOM_SEED_HASHES = ("xxhash", "xxhash_cbor")

_WHERE = "kv_connector_extra_config"


@dataclass(frozen=True, slots=True)
class Options(EngineOptions):
    """The options that users set in `kv_connector_extra_config`. `wait_s`: how long a request waits for keys on their
    way from disk, or being stored by others.
    """

    wait_s: float = 10.0

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> Self:
        """Reads the options. Raises UsageError, naming the key, for an invalid value."""
        common = cls.read(extra_config, _WHERE)
        return replace(common, wait_s=seconds_of(extra_config, "wait_s", common.wait_s, _WHERE))


def recomputes(extra_config: Mapping[str, Any]) -> bool:
    """Returns whether requests are recomputed if their loads fail, which is the default. If not, vLLM's
    policy holds as it was given. Raises UsageError.
    """
    value = extra_config.get(_RECOMPUTES, True)
    if not isinstance(value, bool):
        raise UsageError(f"{_WHERE}: {_RECOMPUTES} must be true or false, not {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class Platform:
    """The parts of an engine's platform that decide bytes and are no options. `device`: its kind, with its instruction
    sets. `vllm`: its whole version. `convolutions`: in which order the states of convolutions lie ("SD" or "DS"), which
    vLLM decides by itself if other connectors need it; all sizes are equal.
    """

    device: str
    vllm: str
    convolutions: str


def namespace_of(config: Any, platform: Platform, seed: str | None) -> NamespaceSpec:
    """Returns the namespace. `config`: vLLM's OffloadingConfig. `seed`: PYTHONHASHSEED, None if it is not set.

    cache_salt and LoRA are in vLLM's block hashes, and so in the keys. Raises UsageError as `share` does.
    """
    identity: Mapping[str, Any] = config.extra_config[IDENTITY]
    revision = str(config.extra_config.get("revision") or "")
    return NamespaceSpec(
        model=fitting(str(identity["model"])),
        revision=fitting(revision + str(identity["weights"])),
        dtype=fitting(f"{config.model.dtype} {identity['dtype']}"),
        layout=fitting(_layout(config, platform)),
        parallel=_parallel(config),
        salt=fitting(_salt(config, identity, seed)),
        key_bytes=KEY_BYTES,
    )


def refuse_adapters(extra_config: Mapping[str, Any]) -> None:
    """Raises UsageError where requests can have adapters, and it is unknown which."""
    if extra_config[IDENTITY]["adapters"]:
        raise UsageError(
            "KVOffloaddSpec can't tell which LoRA adapter a request has, and would give it what an earlier state of "
            'the adapter has computed: use "kv_connector": "KVOffloaddConnector", or leave --enable-lora out'
        )


def unstable_hashes(config: Any, seed: str | None) -> bool:
    """Returns whether block hashes differ between runs of the engine, so that nothing hits after a restart."""
    return seed is None and config.extra_config[IDENTITY]["hash"] in _RANDOM_SEED_HASHES


def instance_of(engine_id: str) -> bytes:
    """Returns 16 bytes that a scheduler and its ranks share, and other engines do not."""
    return hashlib.blake2b(engine_id.encode(), digest_size=16, person=b"kvoffloadd").digest()


def _parallel(config: Any) -> str:
    """Describes the sizes, where they decide which bytes a part of a key has."""
    held, parallel = share(config), config.parallel
    if by_heads(config):
        return f"canonical v{_CANONICAL_FORMAT} in {held.parts} parts"
    sizes = (parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size, parallel.world_size)
    return "tp{} pp{} pcp{} dcp{} of {}".format(*sizes)


def _layout(config: Any, platform: Platform) -> str:
    # A pipeline rank knows its own layers alone: names and sizes would differ from rank to rank.
    alone = config.parallel.pp_size == 1
    block_bytes, replicated = config.worker_kv_bytes_per_block, config.replicated_layout
    if by_heads(config):
        held = share(config)
        block_bytes, replicated = block_bytes * held.parts // held.held, False
    groups = [(group.group_id, group.tokens_per_block, group.layer_names if alone else ()) for group in config.groups]
    facts: tuple[Any, ...] = (
        groups,
        config.cache.tokens_per_hash,
        config.cache.blocks_per_chunk,
        block_bytes if alone else 0,
        replicated,
        config.canonical_layout,
    )
    if config.extra_config.get(REACHES):
        facts += (("reaches", *sorted(config.extra_config[REACHES].items())),)
        if config.extra_config.get(DRAFTS):
            facts += (("drafts", *config.extra_config[DRAFTS]),)
    if config.extra_config.get(REACHES) != {}:  # it has states, or that is unknown
        facts += (("convolutions", platform.convolutions),)
    return f"vllm {platform.vllm} {platform.device} {config.kv_cache_layout} {digest_of(facts)}"


def _salt(config: Any, identity: Mapping[str, Any], seed: str | None) -> str:
    words = [f"identity v{_IDENTITY_FORMAT}", f"{identity['hash']} seed {'default' if seed is None else seed}"]
    if unstable_hashes(config, seed):
        words.append(f"engine {config.engine_id}")  # no other engine can know these keys, so none may find them
    if identity["doubt"]:
        words.append(f"alone {identity['token']} {config.engine_id}")  # replicas have one token
    return " ".join((*words, str(identity["fields"])))
