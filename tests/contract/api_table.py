"""The contract's names, parameters, defaults and numbers, as data: what test_api.py walks through.

A signature is what stands between the parentheses of the call. Behind ``*`` are the options that the contract takes as keywords;
what this library adds has to be behind it, too, and to have a default.
"""
from __future__ import annotations

U64MAX = 2**64 - 1
_STATUS = 0x5010B000

# Section 1: what `from llm_datadist import *` gives, and the two names that the contract adds.
NAMES = {
    "LLMClusterInfo", "LLMStatusCode", "LLMException", "LLMRole", "LlmConfig", "LLMConfig", "TensorDesc", "Tensor", "DataType",
    "Status", "KvCacheManager", "CacheDesc", "CacheKey", "CacheKeyByIdAndIndex", "KvCache", "BlocksCacheKey", "LLMDataDist",
    "Placement", "RegisterMemStatus", "LayerSynchronizer", "TransferConfig", "CacheTask", "TransferWithCacheKeyConfig", "Memtype",
    "MemInfo", "Cache", "CacheManager", "LLMParamError",
}

# Sections 4 to 8.
CALLS: dict[str, dict[str, str]] = {
    "LLMException": {"": "*args, status_code=LLMStatusCode.LLM_FAILED"},
    "Status": {"": "status", "is_ok": ""},
    "CacheDesc": {
        "": "num_tensors, shape, data_type, placement=Placement.DEVICE, batch_dim_index=0, seq_len_dim_index=-1, "
            "kv_tensor_format=None",
        "update_dim": "dim_index, dim_value",
    },
    "CacheKey": {"": "*args, **kwargs"},
    "BlocksCacheKey": {"": "*args, **kwargs"},
    "CacheKeyByIdAndIndex": {"": "cluster_id, cache_id, batch_index=0"},
    "KvCache": {"create_cpu_cache": "cache_desc, addrs"},
    "Cache": {"create_cpu_cache": "cache_desc, addrs"},
    "MemInfo": {"": "mem_type, addr, size"},
    "TensorDesc": {"": "dtype, shape"},
    "Tensor": {"": "data, tensor_desc=None", "numpy": "copy=False"},
    "TransferConfig": {"": "dst_cluster_id, dst_addrs, src_layer_range=None, src_batch_index=0"},
    "TransferWithCacheKeyConfig": {"": "cache_key, src_layer_range=None, dst_layer_range=None, src_batch_index=0"},
    "LayerSynchronizer": {"synchronize_layer": "layer_index, timeout_in_millis"},
    "CacheTask": {"synchronize": "timeout_in_millis=None", "get_results": "timeout_in_millis=None"},
    "LLMClusterInfo": {"": "", "append_local_ip_info": "ip, port", "append_remote_ip_info": "ip, port"},
    "LLMConfig": {"": "", "generate_options": "", "gen_options": ""},
    "LLMDataDist": {
        "": "role, cluster_id",
        "init": "options",
        "finalize": "",
        "link_clusters": "clusters, timeout=3000",
        "unlink_clusters": "clusters, timeout=3000, force=False",
        "check_link_status": "remote_cluster_id",
        "switch_role": "role, switch_options=None",
        "link": "comm_name, cluster_rank_info, rank_table",
        "unlink": "comm_id",
        "query_register_mem_status": "comm_id",
    },
    "KvCacheManager": {
        "is_initialized": "",
        "allocate_cache": "cache_desc, cache_keys=()",
        "allocate_blocks_cache": "cache_desc, blocks_cache_key=None",
        "deallocate_cache": "cache",
        "remove_cache_key": "cache_key",
        "pull_cache": "cache_key, kv_cache, batch_index=0, size=-1, *, src_layer_range=None, dst_layer_range=None, "
                      "src_cache_offset=None, dst_cache_offset=None, tensor_num_per_layer=2",
        "pull_blocks": "prompt_cache_key, decoder_kv_cache, prompt_blocks, decoder_blocks, *, src_layer_range=None, "
                       "dst_layer_range=None, tensor_num_per_layer=2",
        "copy_cache": "dst, src, dst_batch_index=0, src_batch_index=0, offset=0, size=-1, req_id=None",
        "copy_blocks": "cache, copy_block_info",
        "swap_blocks": "src, dst, src_to_dst",
        "get_cache_tensors": "cache, tensor_index=0",
        "transfer_cache_async": "src_cache, layer_synchronizer, transfer_configs, src_block_indices=None, dst_block_indices=None, "
                                "dst_block_memory_size=None",
        "check_cache_key": "cache_key",
    },
    "CacheManager": {
        "allocate_cache": "cache_desc, cache_keys=()",
        "allocate_blocks_cache": "cache_desc, blocks_cache_key=None",
        "deallocate_cache": "cache",
        "deallocate_blocks_cache": "cache",
        "register_cache": "cache_desc, addrs, cache_keys=(), remote_accessible=None",
        "register_blocks_cache": "cache_desc, addrs, blocks_cache_key=None, remote_accessible=None",
        "unregister_cache": "cache_id",
        "remove_cache_key": "cache_key",
        "pull_cache": "cache_key, cache, batch_index=0, size=-1, *, src_layer_range=None, dst_layer_range=None, "
                      "src_cache_offset=None, dst_cache_offset=None, tensor_num_per_layer=2",
        "pull_blocks": "src_cache_key, dst_cache, src_blocks=(), dst_blocks=(), *, src_layer_range=None, dst_layer_range=None, "
                       "tensor_num_per_layer=2",
        "push_cache": "dst_cache_key, src_cache, src_batch_index=0, src_layer_range=None, dst_layer_range=None, size=-1, "
                      "tensor_num_per_layer=2",
        "push_blocks": "dst_cache_key, src_cache, src_blocks=(), dst_blocks=(), src_layer_range=None, dst_layer_range=None, "
                       "tensor_num_per_layer=2",
        "copy_cache": "dst, src, dst_batch_index=0, src_batch_index=0, offset=0, size=-1, req_id=None",
        "copy_blocks": "cache, copy_block_info",
        "swap_blocks": "src_cache, dst_cache, src_to_dst",
        "transfer_cache_async": "src_cache, layer_synchronizer, transfer_configs, src_block_indices=None, dst_block_indices=None, "
                                "dst_block_memory_size=None",
        "remap_registered_memory": "mem_infos",
        "set_is_call_linked": "",
        "check_cache_key": "cache_key",
    },
}

# What is called without an instance.
WITHOUT_INSTANCE = {"KvCache.create_cpu_cache", "Cache.create_cpu_cache", "KvCacheManager.check_cache_key",
                    "CacheManager.check_cache_key"}

# Read-only properties; those with a setter are marked by "=".
PROPERTIES: dict[str, str] = {
    "LLMException": "status_code",
    "Status": "status_code",
    "CacheDesc": "num_tensors shape data_type placement batch_dim batch_size seq_len_dim_index size kv_tensor_format",
    "CacheKey": "prompt_cluster_id cluster_id req_id prefix_id model_id",
    "BlocksCacheKey": "prompt_cluster_id cluster_id model_id",
    "CacheKeyByIdAndIndex": "cluster_id cache_id batch_index",
    "KvCache": "cache_id cache_desc per_device_tensor_addrs",
    "Cache": "cache_id cache_desc tensor_addrs is_blocks_cache",
    "TensorDesc": "dtype shape",
    "TransferConfig": "dst_cluster_id= dst_addrs= src_layer_range= src_batch_index= dst_layer_range",
    "TransferWithCacheKeyConfig": "cache_key= src_layer_range= dst_layer_range= src_batch_index= dst_cluster_id",
    "LLMClusterInfo": "remote_cluster_id= remote_role_type= local_ip_info_list remote_ip_info_list",
    "LLMConfig": "device_id= listen_ip_info= sync_kv_timeout= enable_switch_role= ge_options= mem_utilization= buf_pool_cfg= "
                 "cluster_info= output_max_size= deploy_res_path= enable_cache_manager= enable_remote_cache_accessible= "
                 "mem_pool_cfg= host_mem_pool_cfg= local_comm_res= rdma_traffic_class= rdma_service_level= link_total_time= "
                 "link_retry_count= transfer_backend= global_resource_config= options",
    "LLMDataDist": "cluster_id kv_cache_manager cache_manager",
}

# Sections 2.4 and 3.
MEMBERS: dict[str, dict[str, int]] = {
    "LLMStatusCode": {
        "LLM_SUCCESS": 0, "LLM_FAILED": 0xFFFFFFFF, "LLM_WAIT_PROCESS_TIMEOUT": _STATUS + 1, "LLM_KV_CACHE_NOT_EXIST": _STATUS + 2,
        "LLM_REPEAT_REQUEST": _STATUS + 3, "LLM_REQUEST_ALREADY_COMPLETED": _STATUS + 4, "LLM_PARAM_INVALID": _STATUS + 5,
        "LLM_ENGINE_FINALIZED": _STATUS + 6, "LLM_NOT_YET_LINK": _STATUS + 7, "LLM_ALREADY_LINK": _STATUS + 8,
        "LLM_LINK_FAILED": _STATUS + 9, "LLM_UNLINK_FAILED": _STATUS + 10, "LLM_NOTIFY_PROMPT_UNLINK_FAILED": _STATUS + 11,
        "LLM_CLUSTER_NUM_EXCEED_LIMIT": _STATUS + 12, "LLM_PROCESSING_LINK": _STATUS + 13,
        "LLM_DEVICE_OUT_OF_MEMORY": _STATUS + 14, "LLM_PREFIX_ALREADY_EXIST": _STATUS + 15, "LLM_PREFIX_NOT_EXIST": _STATUS + 16,
        "LLM_SEQ_LENOVERLIMIT": _STATUS + 17, "LLM_NO_FREE_BLOCK": _STATUS + 18, "LLM_BLOCKS_OUT_OF_MEMORY": _STATUS + 19,
        "LLM_EXIST_LINK": _STATUS + 24, "LLM_FEATURE_NOT_ENABLED": _STATUS + 25, "LLM_TIMEOUT": _STATUS + 26,
        "LLM_LINK_BUSY": _STATUS + 27, "LLM_OUT_OF_MEMORY": _STATUS + 28, "LLM_DEVICE_MEM_ERROR": 507053,
        "LLM_SUSPECT_REMOTE_ERROR": 507057, "LLM_UNKNOWN_ERROR": -1,
    },
    "LLMRole": {"PROMPT": 1, "DECODER": 2, "MIX": 3},
    "Placement": {"HOST": 0, "DEVICE": 1},
    "Memtype": {"MEM_TYPE_DEVICE": 0, "MEM_TYPE_HOST": 1},
    "RegisterMemStatus": {"OK": 0, "PREPARING": 1, "FAILED": 2},
    "DataType": {
        "DT_FLOAT": 0, "DT_FLOAT16": 1, "DT_INT8": 2, "DT_INT32": 3, "DT_UINT8": 4, "DT_INT16": 6, "DT_UINT16": 7, "DT_UINT32": 8,
        "DT_INT64": 9, "DT_UINT64": 10, "DT_DOUBLE": 11, "DT_BOOL": 12, "DT_STRING": 13, "DT_BF16": 27,
    },
}
MORE_MEMBERS = {"DataType": {"DT_FLOAT8_E5M2": 35, "DT_FLOAT8_E4M3FN": 36}}        # of this library

# The ranges of the keyword-only constructors, which have no signature to compare: all of these are one key.
KEYS: dict[str, list[tuple[tuple[int, ...], dict[str, int]]]] = {
    "CacheKey": [((1, 2, 3, U64MAX), {}), ((1, 2, 3), {}), ((1,), {"req_id": 2, "model_id": 3}),
                 ((), {"cluster_id": 1, "req_id": 2, "model_id": 3, "prefix_id": U64MAX}),
                 ((), {"prompt_cluster_id": 1, "req_id": 2, "model_id": 3})],
    "BlocksCacheKey": [((1, 3), {}), ((1,), {"model_id": 3}), ((), {"cluster_id": 1, "model_id": 3}),
                       ((), {"prompt_cluster_id": 1, "model_id": 3})],
}
DEFAULTS = {"CacheKey": ((1, 2), {"model_id": 0, "prefix_id": U64MAX}), "BlocksCacheKey": ((1,), {"model_id": 0})}
