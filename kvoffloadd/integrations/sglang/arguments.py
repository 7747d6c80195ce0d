"""Judges SGLang's server arguments: does one decide the bytes of a page of a KV cache?

All of them count, known or not, except those that are named here with a reason. `tests/sglang/test_arguments.py` goes
through SGLang's own list, and fails for an argument that is not judged, and for a harmless one that is read by a module
that is not listed for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class HarmlessArguments:
    """Arguments that are left out, and the reason. `names`: fields of ServerArgs. `reason`: why their values decide no
    byte. `read_in`: beginnings of the names of modules below sglang/srt that read them, in addition to those that hold
    all arguments. Empty: pairs of real engines are the reason.
    """

    names: frozenset[str]
    reason: str
    read_in: tuple[str, ...]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _judged(reason: str, names: str, read_in: str = "") -> HarmlessArguments:
    return HarmlessArguments(_names(names), reason, tuple(read_in.split()))


HARMLESS: Final = (
    _judged(
        "Who may ask, in which form, and what answers look like. Pages are named by token ids, salt and adapter "
        "(mem_cache/utils.py, get_storage_hash_str), however tokens come in and go out.",
        """
        admin_api_key api_key asr_max_buffer_seconds asr_max_concurrent_sessions batch_notify_size chat_template
        completion_template constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt
        constrained_json_whitespace_pattern default_chat_template_kwargs detokenizer_worker_num
        disable_tokenizer_batch_decode dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout
        enable_cache_report enable_dynamic_batch_tokenizer enable_http2 enable_http_worker_reuseport
        enable_response_store enable_ssl_refresh enable_strict_thinking enable_tokenizer_batch_encode
        fastapi_root_path grammar_backend grpc_mode grpc_port grpc_response_timeout_secs grpc_worker_threads
        hf_chat_template_name host http2_initial_connection_window_size http2_max_concurrent_streams
        incremental_streaming_output port preferred_sampling_params reasoning_parser return_input_ids
        return_output_ids sampling_backend sampling_defaults served_model_name sidecar sidecar_args skip_server_warmup
        smg_grpc_mode ssl_ca_certs ssl_certfile ssl_keyfile ssl_keyfile_password stream_interval
        stream_response_default_include_usage tokenizer_worker_num tool_call_parser tool_server
        trust_request_chat_template warmups weight_version
        """,
        """
        entrypoints/ parser/ constrained/ rust_server/ observability/ checkpoint_engine/update.py
        configs/model_config.py disaggregation/common/conn.py disaggregation/decode_kvcache_offload_manager.py
        disaggregation/encoder/ distributed/bootstrap.py kv_canary/ layers/sampler.py
        managers/data_parallel_controller.py managers/detokenizer_manager.py managers/disagg_service.py
        managers/load_snapshot.py managers/positional_embeds_transport.py managers/scheduler.py
        managers/scheduler_components/output_streamer.py managers/scheduler_components/weight_updater.py
        managers/tokenizer mem_cache/hybrid_cache/hybrid_pool_assembler.py model_executor/mindspore_runner.py
        multimodal/ sampling/ utils/
        """,
    ),
    _judged(
        "What is logged, counted, traced and told to others.",
        """
        bucket_e2e_request_latency bucket_inter_token_latency bucket_time_to_first_token crash_dump_folder
        decode_log_interval enable_forward_pass_metrics enable_metrics enable_metrics_for_all_schedulers
        enable_mfu_metrics enable_request_time_stats_logging enable_trace export_metrics_to_file
        export_metrics_to_file_dir extra_metric_labels forward_pass_metrics_ipc_name forward_pass_metrics_worker_id
        gc_warning_threshold_secs generation_tokens_buckets kv_events_config load_publish_endpoint
        load_snapshot_publish_interval log_level log_level_http log_requests log_requests_format log_requests_level
        log_requests_target otlp_service_name otlp_traces_endpoint prefill_delayer_forward_passes_buckets
        prefill_delayer_wait_seconds_buckets prompt_tokens_buckets show_time_cost smg_http_sidecar_port stat_loggers
        tokenizer_metrics_allowed_custom_labels tokenizer_metrics_custom_labels_header trace_modules
        uvicorn_access_log_exclude_prefixes
        """,
        """
        observability/ entrypoints/ rust_server/ ray/ disaggregation/ managers/ mem_cache/base_prefix_cache.py
        mem_cache/radix_cache.py mem_cache/unified_cache/storage_attachment.py mem_cache/unified_radix_cache.py
        model_executor/model_runner.py utils/
        """,
    ),
    _judged(
        "Where and how processes run, and how they find each other. random_seed is for sampling "
        "(managers/tp_worker.py, set_random_seed); dummy weights have a seed of their own "
        "(model_loader/weight_utils.py).",
        """
        base_gpu_id custom_sigquit_handler disaggregation_bootstrap_port dist_init_addr dist_timeout
        encoder_bootstrap_port engine_info_bootstrap_port gated_launch_port gc_threshold gpu_id_step
        load_balance_method nccl_port numa_node random_seed sleep_on_idle soft_watchdog_timeout use_ray
        watchdog_timeout
        """,
        """
        entrypoints/ managers/ disaggregation/ distributed/bootstrap.py hardware_backend/mlx/tp_worker.py
        kernel_plugins/ layers/deep_gemm_wrapper/compile_utils.py mem_cache/storage/
        model_executor/mindspore_runner.py
        model_executor/model_runner_components/remote_instance_weight_transporter.py multimodal/processors/ ray/
        rust_server/ speculative/ utils/ weight_cache/daemon.py
        """,
    ),
    _judged(
        "Which requests run when.",
        """
        abort_on_priority_when_disabled default_priority_value disable_priority_preemption enable_prefill_delayer
        enable_priority_scheduling lora_drain_wait_threshold max_queued_requests min_free_slots_delay
        num_continuous_decode_steps pp_max_micro_batch_size prefill_decode_interval prefill_decode_interval_min_bs
        prefill_delayer_max_delay_ms prefill_delayer_max_delay_passes prefill_delayer_queue_min_ratio
        prefill_delayer_token_usage_low_watermark priority_scheduling_preemption_threshold retraction_policy
        schedule_conservativeness schedule_low_priority_values_first schedule_policy scheduler_recv_interval
        """,
        """
        managers/ disaggregation/decode.py dllm/mixin/scheduler.py mem_cache/kv_cache_builder.py observability/
        rust_server/config.py entrypoints/
        """,
    ),
    _judged(
        "How many pages a pool has; what a page looks like is in the namespace's layout.",
        """
        _swa_full_tokens_ratio_explicitly_set mamba_full_memory_ratio max_mamba_cache_size max_total_tokens
        swa_full_tokens_ratio swa_prefix_tails
        """,
        """
        mem_cache/kv_cache_configurator.py mem_cache/memory_pool.py mem_cache/unified_memory_pool.py
        model_executor/pool_configurator.py model_executor/model_runner_components/kv_pool_runtime.py
        hardware_backend/mlx/ debug_utils/schedule_simulator/ observability/ managers/
        """,
    ),
    _judged(
        "Where pages go when they leave the device's pools, and which are evicted first. Engines with the "
        "storage, in either mode, and with the linker load each other's pages (tests/sglang/test_linker.py, "
        "test_identity.py).",
        """
        _radix_eviction_policy_explicitly_set enable_hierarchical_cache enable_unified_cache_external_linker
        file_storage_path hicache_host_memory_fraction hicache_host_memory_mode hicache_io_backend hicache_mem_layout
        hicache_ratio hicache_size hicache_storage_backend hicache_storage_backend_extra_config
        hicache_storage_prefetch_policy hicache_storage_prefetch_retry_max_attempts
        hicache_storage_prefetch_retry_poll_interval hicache_write_policy radix_eviction_policy
        radix_eviction_policy_config unified_cache_external_linker_backend unified_cache_external_linker_config
        """,
        """
        mem_cache/ entrypoints/ managers/ observability/ rust_server/ beam_search/coordinator.py
        disaggregation/decode_kvcache_offload_manager.py distributed/device_communicators/mooncake_transfer_engine.py
        hardware_backend/npu/utils.py kernel_plugins/ model_executor/runner_utils/shared_read_event.py
        speculative/base_spec_worker.py speculative/dspark_components/dspark_worker_v2.py
        """,
    ),
    _judged(
        "Which tokens a draft proposes, and which of them the model accepts: accepted ones are computed by the "
        "model, and no pool of a draft is stored (hostpool.py and devicepool.py of this package refuse them).",
        """
        _speculative_draft_quantization_explicitly_set decrypted_draft_config_file enable_draft_weights_cpu_backup
        spec_trace_dir speculative_accept_threshold_acc speculative_accept_threshold_single
        speculative_draft_attention_backend speculative_draft_kv_cache_dtype speculative_draft_load_format
        speculative_draft_model_path speculative_draft_model_quantization speculative_draft_model_revision
        speculative_draft_sink_size speculative_draft_window_size speculative_dspark_confidence_sts_path
        speculative_dspark_sps_table_path speculative_ngram_capacity speculative_ngram_external_corpus_max_tokens
        speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget speculative_ngram_match_type
        speculative_ngram_max_bfs_breadth speculative_ngram_max_trie_depth speculative_ngram_min_bfs_breadth
        speculative_token_map speculative_use_rejection_sampling
        """,
        """
        speculative/ models/deepseek_nextn.py models/dflash.py models/glm4_moe_lite_nextn.py models/glm4_moe_nextn.py
        models/llama_eagle3.py models/qwen3_5_mtp.py models/qwen3_next_mtp.py configs/model_config.py managers/
        mem_cache/draft_kv_budget.py mem_cache/kv_cache_configurator.py model_executor/model_runner.py
        model_executor/model_runner_components/
        """,
    ),
    _judged(
        "Which files are loaded, and how fast: what is in them counts (see FILES).",
        """
        delete_ckpt_after_loading download_dir model_checksum revision weight_loader_disable_mmap
        weight_loader_drop_cache_after_load weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
        """,
        """
        model_loader/ configs/ disaggregation/encoder/ dllm/config.py entrypoints/ hardware_backend/mlx/tp_worker.py
        layers/engram.py managers/ model_executor/model_runner_components/ models/clip.py models/cosmos3.py
        models/grok.py multimodal/ parser/ rust_server/ utils/ weight_cache/
        """,
    ),
    _judged(
        "Which adapters are loaded when: what is in them is in the keys of their requests.",
        """
        enable_lora_overlap_loading lora_eviction_policy max_loaded_loras
        """,
        """
        lora/ managers/ model_executor/forward_batch_info.py
        """,
    ),
    _judged(
        "How many tokens are computed at once: the same pages, but for rounding, as with any other batch. Real "
        "engines that differ in them answer alike from each other's pages (tests/sglang/test_identity.py).",
        """
        chunked_prefill_size max_running_requests mem_fraction_static
        """,
    ),
)

NAMES_HARMLESS: Final = frozenset[str]().union(*(group.names for group in HARMLESS))

COUNTED: Final = _names(
    """
    allow_auto_truncate allowed_media_domains attention_backend attn_cp_size attn_dp_size aux_hidden_state_capture
    bf16_gemm_backend boundary_reduction c128_page_size checkpoint_engine_wait_weights_before_ready context_length
    cp_strategy cpu_offload_gb cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_bs_decode
    cuda_graph_bs_prefill cuda_graph_config cuda_graph_max_bs_decode cuda_graph_max_bs_prefill
    cuda_graph_max_seq_len_prefill cuda_graph_prefill_max_context custom_weight_loader dcp_comm_backend
    dcp_replicate_q_proj dcp_size debug_cuda_graph debug_tensor_dump_input_file debug_tensor_dump_layers
    debug_tensor_dump_output_folder decode_attention_backend decoupled_spec_bind_endpoint
    decoupled_spec_connect_endpoints decoupled_spec_rank decoupled_spec_role decrypted_config_file deepep_config
    deepep_dispatcher_output_dtype deepep_mode deepep_v2_mode device disable_aiter_allreduce_fusion_in_decode
    disable_aiter_allreduce_fusion_in_prefill disable_attn_tp_gather disable_chunked_prefix_cache disable_cuda_graph
    disable_cuda_graph_padding disable_custom_all_reduce disable_decode_cuda_graph disable_fast_image_processor
    disable_flashinfer_autotune disable_flashinfer_cutlass_moe_fp4_allgather disable_hybrid_swa_memory
    disable_outlines_disk_cache disable_overlap_schedule disable_prefill_cuda_graph disable_radix_cache
    disable_shared_experts_fusion disaggregation_decode_allocation_policy disaggregation_decode_enable_offload_kvcache
    disaggregation_decode_enable_radix_cache disaggregation_decode_extra_slots
    disaggregation_decode_host_receive_threshold disaggregation_decode_polling_interval
    disaggregation_decode_retraction_backup disaggregation_enable_kv_checksum disaggregation_ib_device
    disaggregation_mode disaggregation_transfer_backend dllm_algorithm dllm_algorithm_config dllm_fdfo dp_size
    dsa_decode_backend dsa_paged_mqa_logits_backend dsa_prefill_backend dsa_topk_backend dsa_triton_union
    dsv4_attn_backend dsv4_prefill_backend dtype dwdp_size elastic_ep_backend elastic_ep_initial_size
    elastic_ep_scale_timeout enable_adaptive_dispatch_to_encoder enable_aiter_allreduce_fusion enable_amd_monokernel
    enable_attn_tp_input_scattered enable_broadcast_mm_inputs_process enable_cp_decode_attn_tp
    enable_cp_tp_group_sharing enable_cudagraph_gc enable_custom_logit_processor enable_decoder_swa_bounded_replay
    enable_deepseek_v4_fp4_indexer enable_dense_mlp_attn_tp enable_deterministic_inference enable_dp_attention
    enable_dp_attention_local_control_broadcast enable_dp_lm_head enable_dsa_cache_layer_split
    enable_dsa_fused_indexer enable_dynamic_chunking enable_elastic_expert_backup enable_encoder_swa_bounded_replay
    enable_eplb enable_flashinfer_allreduce_fusion enable_flexkv enable_fp32_lm_head enable_fused_moe_sum_all_reduce
    enable_fused_qk_norm_rope enable_hisparse enable_int8_mamba_checkpoint enable_kv_cache_sharding
    enable_layernorm_sp enable_layerwise_nvtx_marker enable_lean_attention enable_linear_replayssm
    enable_linear_replayssm_spec enable_linker_mla_dedup enable_lmcache enable_lora
    enable_mamba_cache_stochastic_rounding enable_megamoe_for_layernorm_sp enable_memory_saver enable_mis
    enable_mixed_chunk enable_mm_global_cache enable_mscclpp enable_multi_layer_eagle enable_multimodal
    enable_nccl_nvls enable_nvidia_megakernel enable_p2p_check enable_page_major_kv_layout enable_paged_experts
    enable_pd_role_switch enable_pdmux enable_precise_embedding_interpolation enable_prefill_cp enable_prefix_mm_cache
    enable_profile_cuda_graph enable_quant_communications enable_return_aux_hidden_states enable_return_hidden_states
    enable_return_indexer_topk enable_return_routed_experts enable_scattered_sconv enable_session_radix_cache
    enable_shared_experts_attn_tp enable_single_batch_overlap enable_streaming_session enable_symm_mem
    enable_tf32_matmul enable_torch_compile enable_torch_compile_debug_mode enable_torch_symm_mem
    enable_tp_lm_head_all_to_all enable_two_batch_overlap enable_unified_memory enable_w4a4_mxfp4_megamoe
    enable_waterfill enable_watermark enable_weights_cpu_backup encoder_only encoder_register_urls
    encoder_transfer_backend encoder_urls enforce_disable_flashinfer_allreduce_fusion enforce_shared_experts_fusion
    ep_dispatch_algorithm ep_join_mode ep_join_rank_offset ep_num_redundant_experts ep_size eplb_algorithm
    eplb_min_rebalancing_utilization_threshold eplb_rebalance_layers_per_chunk eplb_rebalance_num_iterations
    expert_balancedness_report_mode expert_distribution_recorder_buffer_size expert_distribution_recorder_mode
    experts_shared_outer_loras flashinfer_a2a_dispatch_type flashinfer_allreduce_fusion_backend
    flashinfer_autotune_skip_ops flashinfer_mla_disable_ragged flashinfer_mxfp4_moe_precision flexkv_config_file
    forward_hooks fp4_gemm_runner_backend fp8_gemm_runner_backend fuseep_mode hisparse_config image_processor_backend
    init_expert_location int8_mamba_ckpt_size is_embedding json_model_override_args kt_cpuinfer
    kt_max_deferred_experts_per_token kt_method kt_num_gpu_experts kt_threadpool_count kt_weight_path kv_cache_dtype
    kv_canary kv_canary_real_data kv_canary_sweep_interval language_model_only language_only limit_mm_data_per_request
    linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend
    linear_replayssm_cache_len lmcache_config_file load_format lora_backend lora_paths lora_strict_loading
    lora_target_modules lora_use_virtual_experts mamba_backend mamba_cache_philox_rounds mamba_max_states_per_path
    mamba_radix_cache_strategy mamba_ssm_dtype mamba_track_interval max_ep_size max_lora_chunk_size max_lora_rank
    max_loras_per_batch max_prefill_tokens media_url_max_file_size_mb mlx_enable_sampling mm_attention_backend
    mm_enable_dp_encoder mm_feature_transport mm_global_cache_backend mm_io_worker_num mm_preprocess_cache_size_mb
    mm_process_config mm_processor_worker_num model_config_parser model_impl model_loader_extra_config model_path
    modelexpress_config modelopt_checkpoint_restore_path modelopt_checkpoint_save_path modelopt_export_path
    modelopt_quant moe_a2a_backend moe_dense_tp_size moe_dp_size moe_runner_backend mooncake_ib_device
    msprobe_dump_config nnodes node_rank num_reserved_decode_tokens offload_group_size offload_mode
    offload_num_in_group offload_prefetch_step optimistic_prefill_attempts page_size paged_experts_num_resident
    pdmux_config_path ple_offload_backend ple_offload_dir ple_offload_embedding pp_async_batch_depth
    pp_size pre_warm_nccl prefill_attention_backend prefill_kv_cache_dequant_dtype
    prefill_max_requests prefill_only_disable_kv_cache qsa_indexer_dtype quantization quantization_param_path
    quantize_and_serve radix_cache_backend remote_instance_weight_loader_backend
    remote_instance_weight_loader_seed_instance_ip remote_instance_weight_loader_seed_instance_service_port
    remote_instance_weight_loader_send_weights_group_ports
    remote_instance_weight_loader_start_seed_via_transfer_engine return_aux_hidden_state_layer_ids
    return_hidden_states_mode rl_on_policy_target rl_quant_profile sampling_mask_max_tokens shared_experts_tp_size
    skip_tokenizer_init sm_group_num speculative_adaptive speculative_adaptive_config speculative_algorithm
    speculative_attention_mode speculative_boundary_reduction speculative_dflash_block_size
    speculative_domino_candidate_pool_size speculative_dsa_topk_backend
    speculative_dspark_align_verify_tokens_to_graph_tier speculative_dspark_block_size speculative_eagle_topk
    speculative_enable_w4a4_mxfp4_megamoe speculative_moe_a2a_backend speculative_moe_runner_backend
    speculative_num_draft_tokens speculative_num_steps speculative_use_block_verification startup_weight_load_mode
    strip_thinking_cache tbo_token_distribution_threshold tokenizer_backend tokenizer_mode tokenizer_path
    torch_compile_max_bs tp_size triton_attention_num_kv_splits triton_attention_reduce_in_fp32
    triton_attention_split_tile_size trust_mm_content_hashes trust_remote_code uno_lora_path uses_mamba_radix_cache
    watermark_config watermark_context_window watermark_default_enabled watermark_enforce_all watermark_key
    watermark_key_b watermark_max_probability watermark_mixing_probability weight_cache_mode weight_cache_socket
    weight_cache_timeout
    """
)
"""All others that this release of SGLang has. An argument that is in neither table counts, too."""

MODELS: Final = ("model_path", "tokenizer_path", "uno_lora_path")
"""Arguments that name a folder, a file, or a model of the hub: its contents count, not its name."""

FILES: Final = (
    *MODELS,
    "decrypted_config_file",
    "dllm_algorithm_config",
    "init_expert_location",
    "kt_weight_path",
    "modelopt_checkpoint_restore_path",
    "quantization_param_path",
    "rl_quant_profile",
)
"""Arguments that name a file or a folder if one of that name exists, as absolute paths in any other argument do."""

ADAPTERS: Final = "lora_paths"
"""Counts only as to whether there are any: with some, SGLang takes other kernels (models/deepseek_v2.py)."""

GRAPHS: Final = "cuda_graph_config"
SIZES: Final = frozenset(("bs", "max_bs"))
"""Keys of each phase in GRAPHS that do not count: SGLang derives them from memory and from the size of batches, and
pads a batch to the next of them (model_executor/runner/decode_cuda_graph_runner.py, _pad_to_bucket).
"""
