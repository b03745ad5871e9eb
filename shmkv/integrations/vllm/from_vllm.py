"""From vLLM's configuration, requests and tensors to plain values. Knows vLLM and torch, and no cluster; imports them where it
needs more of them than the objects that it is given."""
from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from shmkv.errors import LLMParamError
from shmkv.integrations.vllm.block_keys import Media, Prompt
from shmkv.integrations.vllm.identity import CacheIdentity, GroupLayout
from shmkv.integrations.vllm.layers import Bytes, Layers
from shmkv.integrations.vllm.plans import ScheduledRequest
from shmkv.integrations.vllm.weights import Adapters, weights_of

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

WINDOW = "SlidingWindowSpec"
# By name, for a class that derives from one of these may mean something else by its blocks.
MOVED = ("FullAttentionSpec", "MLAAttentionSpec", WINDOW)


def check_supported(config: VllmConfig, caches: KVCacheConfig) -> None:
    """LLMParamError for an engine whose blocks cannot be moved, naming what to change."""
    parallel = config.parallel_config
    found = {name: getattr(parallel, name, 1) for name in ("pipeline_parallel_size", "decode_context_parallel_size",
                                                           "prefill_context_parallel_size")}
    for name, size in found.items():
        if size != 1:
            raise LLMParamError(f"ShmkvConnector needs {name} 1, got {size}")
    if config.device_config.device_type != "cpu":
        raise LLMParamError("ShmkvConnector moves blocks in memory of the CPU, this engine's are on "
                            f"{config.device_config.device_type!r}")
    if not caches.kv_cache_groups:
        raise LLMParamError("ShmkvConnector moves blocks of attention, and this model has no KV cache")
    for number, group in enumerate(caches.kv_cache_groups):
        kind = type(group.kv_cache_spec).__name__
        if kind not in MOVED:
            raise LLMParamError(f"ShmkvConnector moves blocks of {', '.join(MOVED)}; KV cache group {number} of this model has "
                                f"{kind} ({len(group.layer_names)} layers, the first is {group.layer_names[0]!r})")
    sizes = [group.kv_cache_spec.block_size for group in caches.kv_cache_groups]
    if len(set(sizes)) != 1:
        raise LLMParamError(f"ShmkvConnector needs blocks of as many tokens in each KV cache group, this model has {sizes}: "
                            "--disable-hybrid-kv-cache-manager makes one group of them where vLLM can")


def spec_of(caches: KVCacheConfig) -> AttentionSpec:
    """What the blocks of the first group are."""
    spec: Any = caches.kv_cache_groups[0].kv_cache_spec
    return spec


def layout_of(group: KVCacheGroupSpec) -> GroupLayout:
    """What decides about the bytes of a group's blocks, and which of them a request needs."""
    spec: Any = group.kv_cache_spec
    window = spec.sliding_window + spec.extra_retained_tokens if type(spec).__name__ == WINDOW else 0
    return GroupLayout(window=window, cache_dtype=str(spec.dtype), block_nbytes=spec.page_size_bytes,
                       num_layers=len(group.layer_names), num_kv_heads=spec.num_kv_heads, head_size=spec.head_size)


def identity_of(config: VllmConfig, caches: KVCacheConfig) -> CacheIdentity:
    """The same in scheduler and worker, and in every engine that computes the same blocks."""
    import vllm

    model = config.model_config
    settings = json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str)
    return CacheIdentity(
        model=f"{model.model}@{model.revision}", model_digest=hashlib.sha256(settings.encode()).hexdigest()[:16],
        weights=f"{model.dtype}, quantization {model.quantization}", weight_files=weight_files_of(config),
        layout=str(caches.kv_cache_layout), attention=_attention(config, caches), engine=vllm.__version__,
        block_size=spec_of(caches).block_size,
        num_shards=config.parallel_config.tensor_parallel_size,
        groups=tuple(layout_of(group) for group in caches.kv_cache_groups))


def weight_files_of(config: VllmConfig) -> str:
    """Where the weights came from, and a digest of those files: of the model, and of the one that drafts for it, whose layers have
    blocks as well. Dummy weights come from no file."""
    load, draft = config.load_config, getattr(config.speculative_config, "draft_model_config", None)
    models = [config.model_config, *([] if draft is None else [draft])]
    if str(load.load_format) == "dummy":
        return f"dummy, seed {config.model_config.seed}"
    return f"{load.load_format}: " + ", ".join(
        weights_of(getattr(model, "model_weights", "") or model.model, model.revision, load.download_dir) for model in models)


def _attention(config: VllmConfig, caches: KVCacheConfig) -> str:
    """The instruction set that vLLM's attention packs a block for. The processor's own ones too, if vLLM does not tell."""
    spec = spec_of(caches)
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        return str(_get_attn_isa(config.model_config.dtype, spec.block_size, spec.head_size, config.cache_config.cache_dtype))
    except ImportError:
        import torch

        return f"unknown, {torch.backends.cpu.get_cpu_capability()}"


def prompt_of(request: Request, adapters: Adapters) -> Prompt | None:
    """What the blocks of a request depend on; None for a prompt that is not made of tokens, or an adapter that is no more
    what it was."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return None
    adapter = request.lora_request
    lora: tuple[str, ...] | None = None
    if adapter is not None:
        weights = adapters.weights_of(adapter.lora_path)
        if weights is None:
            return None
        lora = (adapter.lora_name, adapter.lora_path, weights)
    media = tuple(Media(str(each.identifier), each.mm_position.offset, each.mm_position.length)
                  for each in request.mm_features or ())
    return Prompt(request.prompt_token_ids, request.cache_salt, lora, media)


def reads_prefixes(request: Request) -> bool:
    """May the beginning of a prompt come from elsewhere? Not where something is asked of each of its tokens, such as their
    logprobs, which only a forward gives. vLLM's own cache is left out for such a request as well."""
    params = request.sampling_params
    asked = [getattr(params, name, None) for name in ("prompt_logprobs", "prompt_logprob_token_ids")]
    return not getattr(request, "skip_reading_prefix_cache", asked != [None, None])


def scheduled_of(output: SchedulerOutput) -> list[ScheduledRequest]:
    """The requests of a step, new ones and others."""
    counts = output.num_scheduled_tokens
    new = [ScheduledRequest(each.req_id, each.block_ids, True, each.num_computed_tokens, counts[each.req_id])
           for each in output.scheduled_new_reqs]
    others = output.scheduled_cached_reqs
    return new + [
        ScheduledRequest(req_id, block_ids or (), req_id in others.resumed_req_ids, computed, counts[req_id])
        for req_id, block_ids, computed in zip(others.req_ids, others.new_block_ids, others.num_computed_tokens, strict=True)]


def groups_of(tensors: dict[str, torch.Tensor], caches: KVCacheConfig) -> list[Layers]:
    """The tensors of each KV cache group. Groups lie over each other in memory: a block id belongs to one of them at a time."""
    return [Layers(bytes_of({name: tensors[name] for name in group.layer_names if name in tensors}, caches.num_blocks))
            for group in caches.kv_cache_groups]


def bytes_of(tensors: dict[str, torch.Tensor], num_blocks: int) -> dict[str, Bytes]:
    """The tensors of layers as [blocks, bytes of a block], the same memory. Layers that share a tensor are there once."""
    import torch

    layers: dict[str, Bytes] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.shape[0] != num_blocks or not tensor[0].is_contiguous():
            raise LLMParamError(f"the tensor of layer {name!r} is {tuple(tensor.shape)} with strides {tensor.stride()}: "
                                f"ShmkvConnector needs {num_blocks} blocks, each in one piece")
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            rows = torch.as_strided(tensor, (num_blocks, tensor[0].numel()), (tensor.stride(0), 1))
            layers[name] = rows.view(torch.uint8).numpy()
    return layers
