"""Engines whose blocks cannot be moved are refused with a sentence that names what it is. With vLLM's own descriptions of caches,
and no engine."""
from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from shmkv import LLMParamError

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


def config(**changes: Any) -> Any:
    """As far as it is asked."""
    parallel = {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1,
                "tensor_parallel_size": 1}
    return SimpleNamespace(parallel_config=SimpleNamespace(**{**parallel, **changes}),
                           device_config=SimpleNamespace(device_type=changes.get("device", "cpu")))


def specs() -> dict[str, Any]:
    import torch
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec

    common: dict[str, Any] = {"block_size": 128, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    return {"full": FullAttentionSpec(**common), "window": SlidingWindowSpec(**common, sliding_window=256),
            "chunked": ChunkedLocalAttentionSpec(**common, attention_chunk_size=256),
            "mamba": MambaSpec(block_size=128, shapes=((2, 32),), dtypes=(torch.bfloat16,))}


def caches(*kinds: Any) -> Any:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    groups = [KVCacheGroupSpec([f"layers.{number}"], kind) for number, kind in enumerate(kinds)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def test_full_attention_and_windows_are_moved_alone_and_together() -> None:
    from shmkv.integrations.vllm.from_vllm import check_supported, layout_of

    kinds = specs()
    for groups in (("full",), ("window",), ("full", "window", "window")):
        check_supported(config(), caches(*(kinds[kind] for kind in groups)))
    windows = [layout_of(group).window for group in caches(kinds["full"], kinds["window"]).kv_cache_groups]
    assert windows == [0, 256]
    kept = replace(kinds["window"], extra_retained_tokens=3)
    assert layout_of(caches(kept).kv_cache_groups[0]).window == 259


@pytest.mark.parametrize(("groups", "said"), [
    (("full", "mamba"), r"KV cache group 1 of this model has MambaSpec \(1 layers, the first is 'layers\.1'\)"),
    (("chunked",), "KV cache group 0 of this model has ChunkedLocalAttentionSpec"),
    ((), "no KV cache"),
])
def test_a_kind_that_is_not_moved_is_named_with_its_group(groups: tuple[str, ...], said: str) -> None:
    from shmkv.integrations.vllm.from_vllm import check_supported

    kinds = specs()
    with pytest.raises(LLMParamError, match=said):
        check_supported(config(), caches(*(kinds[kind] for kind in groups)))


def test_groups_whose_blocks_have_other_sizes_are_refused() -> None:
    from shmkv.integrations.vllm.from_vllm import check_supported

    kinds = specs()
    with pytest.raises(LLMParamError, match=r"this model has \[128, 64\]: --disable-hybrid-kv-cache-manager"):
        check_supported(config(), caches(kinds["full"], replace(kinds["window"], block_size=64)))


@pytest.mark.parametrize(("changes", "said"), [
    ({"pipeline_parallel_size": 2}, "needs pipeline_parallel_size 1, got 2"),
    ({"decode_context_parallel_size": 2}, "needs decode_context_parallel_size 1, got 2"),
    ({"device": "cuda"}, "this engine's are on 'cuda'"),
])
def test_an_engine_that_is_built_otherwise_is_refused(changes: dict[str, Any], said: str) -> None:
    from shmkv.integrations.vllm.from_vllm import check_supported

    with pytest.raises(LLMParamError, match=said):
        check_supported(config(**changes), caches(specs()["full"]))


def test_tensors_that_are_no_blocks_in_one_piece_are_refused() -> None:
    import torch

    from shmkv.integrations.vllm.from_vllm import bytes_of

    tensor = torch.zeros(8, 4, 2)
    assert {name: array.shape for name, array in bytes_of({"a": tensor, "shares": tensor}, 8).items()} == {"a": (8, 32)}
    with pytest.raises(LLMParamError, match=r"layer 'a' is \(4, 8, 2\)"):
        bytes_of({"a": torch.zeros(4, 8, 2)}, 8)
    with pytest.raises(LLMParamError, match="each in one piece"):
        bytes_of({"a": torch.zeros(8, 2, 4).transpose(1, 2)}, 8)
