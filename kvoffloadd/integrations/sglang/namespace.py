"""The namespace of an engine's pages: all that their bytes depend on, and SGLang's names of pages do not tell.

Pure: everything is in the arguments. Each rank works it out by itself, so nothing may be in it that ranks do not all
know alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvoffloadd.client import NamespaceSpec
from kvoffloadd.integrations.common.keys import KEY_BYTES
from kvoffloadd.integrations.common.naming import digest_of, files_of, fitting
from kvoffloadd.integrations.sglang.pools import STATES, Pools

MODEL = (
    "load_format",
    "model_loader_extra_config",
    "context_length",
    "model_impl",
    "json_model_override_args",
    "dtype",
    "quantization",
    "quantization_param_path",
    "kv_cache_dtype",
    "modelopt_quant",
    "rl_quant_profile",
    "custom_weight_loader",
    "decrypted_config_file",
    "qsa_indexer_dtype",
)
KERNELS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
DRAFT = ("speculative_algorithm", "speculative_draft_model_path", "speculative_draft_model_revision")
"""SGLang's server arguments that decide the bytes of a page, whatever its pools look like."""


def namespace_of(arguments: Mapping[str, Any], pools: Pools, tp_size: int, release: str) -> NamespaceSpec:
    """`arguments`: SGLang's, as resolved: `model_path`, `revision`, `device`, and those named above.

    cache_salt, LoRA and the like are in SGLang's names of pages, and so in the keys.
    """
    model, draft = str(arguments["model_path"]), arguments["speculative_draft_model_path"]
    said = [(name, repr(arguments[name])) for name in (*MODEL, *KERNELS, *DRAFT) if arguments[name]]
    if draft:
        said.append(("draft", files_of(str(draft))))
    # Of states a prefix needs the last one, and the daemon is told so: groups of two kinds can't share a namespace.
    shapes = tuple((*shape, "the last") if shape[0] == STATES else shape for shape in pools.shapes)
    return NamespaceSpec(
        model=fitting(model),
        revision=fitting(str(arguments["revision"] or "") + files_of(model)),
        dtype=fitting(f"{arguments['dtype']} {arguments['kv_cache_dtype']}"),
        layout=f"sglang {release} {arguments['device']} {digest_of(shapes)}",
        parallel=f"tp{tp_size}",
        salt=digest_of(said),
        key_bytes=KEY_BYTES,
    )
