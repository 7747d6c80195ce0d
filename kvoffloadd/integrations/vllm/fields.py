"""Judges every field of vLLM's configuration: does it decide the bytes of a KV cache?

Deny by default: a field that is in no table here is part of an engine's identity, whatever it is. `PARTS` are those
that were judged to belong to it. The others are left out, each for a reason that can be checked: a line of vLLM's
source (0.32 and 0.33 alike, unless noted). docs/VLLM.md has the table of harmless ones for users.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

SECTIONS: Final = {
    "model_config": "model",
    "cache_config": "cache",
    "load_config": "load",
    "attention_config": "attention",
    "parallel_config": "parallel",
    "mamba_config": "mamba",
    "kernel_config": "kernel",
    "device_config": "device",
    "engram_config": "engram",
    "diffusion_config": "diffusion",
    "additional_config": "additional",
}
"""Fields of VllmConfig that are part of the identity, and the names of these sections here."""


@dataclass(frozen=True, slots=True)
class HarmlessField:
    """Fields that are left out, and the reason. `fields`: of a section, or of VllmConfig itself where `section` is
    "engine".
    """

    section: str
    fields: frozenset[str]
    reason: str


def _names(fields: str) -> frozenset[str]:
    return frozenset(fields.split())


def _left_out(section: str, fields: str, reason: str) -> HarmlessField:
    return HarmlessField(section, _names(fields), reason)


HARMLESS: Final = (
    _left_out(
        "engine",
        "scheduler_config",
        "decides how many tokens a step computes, and of which requests: SchedulerConfig.compute_hash has batch sizes "
        "alone",
    ),
    _left_out(
        "engine",
        "compilation_config optimization_level performance_mode",
        "how the model's own graph is compiled and captured (vllm/compilation): rounding may differ, as in batches",
    ),
    _left_out(
        "engine",
        "offload_config",
        "where weights lie (OffloadConfig: UVA and prefetch): the same ones are read",
    ),
    _left_out(
        "engine",
        "structured_outputs_config reasoning_config watermark_config",
        "sampling of answers (v1/structured_output, v1/sample): generated tokens are in the block hashes",
    ),
    _left_out(
        "engine",
        "observability_config logging_config profiler_config aux_output_config watchdog_config shutdown_timeout "
        "instance_id",
        "what is reported, and how an engine ends: read by metrics, logs and profilers",
    ),
    _left_out(
        "engine",
        "kv_events_config ec_transfer_config ec_manager_config weight_transfer_config",
        "transports (distributed/): hashes of media, or the uuids that requests give them, are in the block hashes, "
        "and weights that were transferred need a reset of the connector",
    ),
    _left_out(
        "model",
        "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init renderer_num_workers",
        "makes token ids of texts (renderers/): the ids are in the block hashes (hash_block_tokens)",
    ),
    _left_out(
        "model",
        "seed",
        "set_random_seed (v1/worker) serves sampling; dummy weights have their own seed (initialize_dummy_weights)",
    ),
    _left_out(
        "model",
        "return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay logits_processors",
        "sampling of answers (v1/sample): generated tokens are in the block hashes",
    ),
    _left_out(
        "model",
        "enforce_eager disable_cascade_attn allow_deprecated_quantization",
        "how the same graph is run: vLLM leaves enforce_eager out of ModelConfig.compute_hash, cascade attention is "
        "gone, and the third lets vLLM warn or refuse",
    ),
    _left_out(
        "model",
        "allowed_local_media_path allowed_media_domains served_model_name hf_token io_processor_plugin "
        "enable_prompt_embeds",
        "who may ask for what: embeddings of prompts are in the block hashes (_gen_prompt_embeds_extra_hash_keys)",
    ),
    _left_out(
        "model",
        "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph "
        "enable_nccl_comm_suspend enable_cumem_allocator",
        "how memory is given back (device_allocator/): the KV cache is reset with each sleep",
    ),
    _left_out("model", "spec_target_max_model_len", "how long a draft may be (SpeculativeConfig)"),
    _left_out(
        "multimodal",
        "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_tensor_ipc "
        "mm_ipc_gpu_memory_gb skip_mm_profiling mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin",
        "caches and transport of processed media (multimodal/cache.py), and where scales are saved to",
    ),
    _left_out(
        "multimodal",
        "allow_missing_mm_embeddings",
        "which requests are refused: VllmConfig.__post_init__ makes it of the roles of connectors",
    ),
    _left_out(
        "multimodal",
        "interleave_mm_strings",
        "where placeholders stand in a text (entrypoints/chat_utils.py): its token ids are in the block hashes",
    ),
    _left_out(
        "cache",
        "gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks kv_cache_memory_bytes "
        "kv_cache_size_tokens kv_cache_max_concurrency effective_attention_block_size simple_cpu_offload_num_blocks "
        "kv_offloading_size kv_offloading_backend",
        "how many blocks there are (determine_available_memory), and vLLM's own offloading",
    ),
    _left_out(
        "cache",
        "enable_prefix_caching prefix_cache_retention_interval enable_mamba_shared_prefix_checkpoint",
        "which blocks are kept (v1/core/single_type_kv_cache_manager.py), not what is in them",
    ),
    _left_out("cache", "user_specified_block_size _block_size_resolved", "whether a default was taken"),
    _left_out(
        "load",
        "download_dir safetensors_prefetch_num_threads safetensors_prefetch_block_size device use_tqdm_on_load "
        "pt_load_map_location",
        "how files are read (model_loader/weight_utils.py): what is in them is named",
    ),
    _left_out(
        "parallel",
        "rank node_rank nnodes master_addr master_port data_parallel_rank data_parallel_rank_local "
        "data_parallel_index data_parallel_master_ip data_parallel_master_port data_parallel_rpc_port "
        "data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb data_parallel_size_local "
        "_data_parallel_master_port_list _coord_store_port _api_process_count _api_process_rank",
        "which process this is, and where it listens: vLLM leaves them out of ParallelConfig.compute_hash",
    ),
    _left_out(
        "parallel",
        "data_parallel_size dp_sync_interval disable_nccl_for_dp_synchronization enable_elastic_ep "
        "elastic_ep_max_dp_size enable_fault_tolerance fault_tolerance_config",
        "replicas: KV heads are divided by tensor_parallel_size alone (ModelConfig.get_num_kv_heads)",
    ),
    _left_out(
        "parallel",
        "max_parallel_loading_workers ray_workers_use_nsight ray_runtime_env placement_group "
        "distributed_executor_backend numa_bind numa_bind_nodes numa_bind_cpus "
        "assigned_physical_gpu_ids distributed_timeout_seconds cpu_distributed_timeout_seconds "
        "enable_shm_tensor_arena enable_batch_sharded_sampling disable_custom_all_reduce",
        "how processes are started and talk: vLLM leaves them out of ParallelConfig.compute_hash, or they name "
        "timeouts, or how logits are sampled",
    ),
    _left_out(
        "kernel",
        "enable_flashinfer_autotune enable_rocm_segmented_attn_autotune enable_cutedsl_warmup enable_jit_warmup",
        "what is done before the first request (model_executor/warmup): the same kernels are chosen from",
    ),
    _left_out("device", "device", "deprecated; device_type is what vLLM has made of it"),
    _left_out(
        "lora",
        "max_loras max_cpu_loras specialize_active_lora default_mm_loras max_lora_cls_labels",
        "how many adapters there is room for (lora/worker_manager.py), and which one a request gets by default: that "
        "is in its block hashes",
    ),
    _left_out(
        "speculative",
        "target_model_config target_parallel_config",
        "the model that is drafted for (VllmConfig.model_config), which is named by itself",
    ),
    _left_out(
        "speculative",
        "enforce_eager prompt_lookup_max prompt_lookup_min suffix_decoding_max_tree_depth "
        "suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob "
        "rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length draft_sample_method "
        "num_speculative_tokens_per_batch_size tensor_parallel_size use_local_argmax_reduction xpress_topc "
        "fly_window_size fly_entropy_threshold fly_entropy_top_k",
        "which drafted tokens are taken (v1/sample/rejection_sampler.py), and drafts without a model",
    ),
)

ELSEWHERE: Final = (
    _left_out("engine", "quant_config", "made of model.quantization, model.quantization_config and the files"),
    _left_out("engine", "lora_config", "names the keys of requests with adapters (section lora)"),
    _left_out("engine", "speculative_config", "names the keys of the draft's groups (section speculative)"),
    _left_out(
        "engine",
        "kv_transfer_config",
        "parts and chunks are in the layout; so is the order of keys and states, which vLLM chooses by the connectors",
    ),
    _left_out(
        "model", "model model_weights revision hf_config_path generation_config", "what is in these files is named"
    ),
    _left_out("model", "dtype", "a field of the namespace"),
    _left_out(
        "model",
        "hf_config hf_text_config is_submodel_config word_embeddings_untied_by_checkpoint",
        "made of the files and of hf_overrides (ModelConfig.__post_init__)",
    ),
    _left_out("model", "multimodal_config", "section multimodal"),
    _left_out("model", "max_model_len", "named but for models that are known not to read it (ANY_LENGTH)"),
    _left_out(
        "cache",
        "block_size hash_block_size prefix_match_unit cache_hit_alignment_tokens kv_cache_layout",
        "in the layout: groups, tokens of blocks and hashes, and the KV cache layout",
    ),
    _left_out("cache", "prefix_caching_hash_algo", "in the salt"),
    _left_out(
        "parallel",
        "tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size "
        "world_size",
        "in `parallel`: the sizes, or the number of parts",
    ),
    _left_out("multimodal", "mm_encoder_fp8_scale_path", "what is in this file is named"),
    _left_out("load", "model_loader_extra_config", "named with the contents of files in it"),
    _left_out("speculative", "model revision", "what is in these files is named"),
    _left_out("speculative", "draft_model_config draft_parallel_config draft_load_config", "sections of their own"),
)
"""As HARMLESS: the identity covers these in another way."""

PARTS: Final[Mapping[str, frozenset[str]]] = {
    "engine": frozenset(SECTIONS),
    "model": _names(
        "runner convert trust_remote_code code_revision quantization quantization_config disable_sliding_window "
        "config_format hf_overrides model_class_overrides model_impl pooler_config override_generation_config"
    ),
    "multimodal": _names(
        "language_model_only limit_per_prompt enable_mm_embeds media_io_kwargs mm_processor_kwargs "
        "mm_device_do_normalize mm_hasher_algorithm mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend "
        "mm_encoder_attn_dtype video_pruning_rate video_pruning_method"
    ),
    "cache": _names(
        "cache_dtype is_attention_free sliding_window kv_cache_dtype_skip_layers mamba_page_size_padded "
        "skip_page_size_padded mamba_block_size mamba_cache_dtype mamba_ssm_cache_dtype mamba_cache_mode "
        "replayssm_buffer_len use_replayssm use_kda_recoverssm kv_sharing_fast_prefill swa_bounded_replay"
    ),
    "load": _names("load_format ignore_patterns safetensors_load_strategy"),
    "attention": _names(
        "backend minimax_m3_msa_decode_backend backend_per_kind flash_attn_version "
        "flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph "
        "use_trtllm_attention disable_flashinfer_q_quantization mla_prefill_backend "
        "use_prefill_query_quantization trtllm_ragged_backend indexer_kv_dtype indexer_sparse_logits "
        "indexer_tp_shard_min_rows minimax_m3_indexer_cp hisparse_config use_non_causal sparse_mla_force_mqa "
        "sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n flex_attn_q_block_size "
        "flex_attn_kv_block_size"
    ),
    "parallel": _names(
        "is_moe_model enable_hc_sp enable_expert_parallel enable_ep_weight_filter enable_eplb eplb_config "
        "expert_placement_strategy all2all_backend enable_dbo ubatch_size dbo_decode_token_threshold "
        "dbo_prefill_token_threshold worker_cls worker_extension_cls dcp_kv_cache_interleave_size "
        "dcp_comm_backend dcp_q_replicate "
        "cp_kv_cache_interleave_size _allow_auto_resolve_cp_interleave_size"
    ),
    "mamba": _names("backend enable_stochastic_rounding stochastic_rounding_philox_rounds ssu_algorithm"),
    "kernel": _names(
        "ir_op_priority moe_backend sparse_indexer_topk_backend linear_backend linear_backend_per_quant monokernel"
    ),
    "device": _names("device_type"),
    "lora": _names(
        "max_lora_rank fully_sharded_loras lora_dtype target_modules enable_tower_connector_lora "
        "enable_mixed_moe_lora_format enable_moe_shared_loras"
    ),
    "speculative": _names(
        "num_speculative_tokens method draft_tensor_parallel_size quantization moe_backend attention_backend "
        "kv_cache_dtype max_model_len code_revision index_share_for_mtp_iteration "
        "disable_padded_drafter_batch disable_eagle_block_drop disable_lookahead_block_hashes "
        "draft_lm_head_quantization use_heterogeneous_vocab parallel_drafting enable_adaptive_verification "
        "dspark_draft_topk"
    ),
}
"""Section -> fields that were judged to belong to the identity."""

ANY_LENGTH: Final = _names(
    "gemma2 gemma3_text glm4 glm4_moe gpt_oss granite lfm2 llama mistral mixtral olmo2 olmo3 phi3 qwen2 qwen2_moe "
    "qwen3 qwen3_moe qwen3_next seed_oss smollm3"
)
"""`model_type` of models with classes in vLLM that do not read `max_model_len`. By it Llama 4 decides how queries are
scaled, and others how keys are rotated, or how far relative positions reach.
"""

_LEFT_OUT: Final[Mapping[str, frozenset[str]]] = {
    section: frozenset().union(*(entry.fields for entry in (*HARMLESS, *ELSEWHERE) if entry.section == section))
    for section in {entry.section for entry in (*HARMLESS, *ELSEWHERE)}
}


def is_part(section: str, field: str) -> bool:
    """Returns whether a field is part of the identity: each is unless it was judged otherwise."""
    return field not in _LEFT_OUT.get(section, ())


def is_judged(section: str, field: str) -> bool:
    """Returns whether a field was judged."""
    return field in PARTS.get(section, ()) or not is_part(section, field)
