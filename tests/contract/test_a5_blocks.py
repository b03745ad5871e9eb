"""Contract, appendix A5, items 4, 5, 7 and 8: blocks pulled, copied, and moved between private and shared memory."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cache_bytes
import numpy as np
import pytest
from own_blocks import OWN, ROW_KEY, OwnBlocks
from reference import noise

from shmkv import BlocksCacheKey, CacheDesc, CacheKey, DataType, KvCache, LLMException, LLMParamError, LLMRole, Placement

pytestmark = pytest.mark.timeout(120)
Here = Callable[..., Any]
PER_LAYER: list[tuple[Any, type[Exception] | None]] = [
    (2, None), (-1, ValueError), (0, LLMException), (1.0, TypeError), ("x", TypeError)]


@pytest.mark.parametrize(("per_layer", "error"), PER_LAYER, ids=str)
def test_a5_4_tensors_a_layer_of_pull_blocks(here: Here, per_layer: Any, error: type[Exception] | None) -> None:
    dist = here("PROMPT", 1, enable_switch_role=True)
    manager, desc = dist.kv_cache_manager, CacheDesc(10, [3, 8], DataType.DT_FLOAT16)
    src, dst = manager.allocate_blocks_cache(desc, BlocksCacheKey(1)), manager.allocate_blocks_cache(desc)
    cache_bytes.write(src, noise(cache_bytes.geometry_of(src), 1))
    dist.switch_role(LLMRole.DECODER)
    how = {"src_layer_range": range(1), "dst_layer_range": range(1), "tensor_num_per_layer": per_layer}
    wanted = np.zeros_like(cache_bytes.read(dst))
    if error is None:
        manager.pull_blocks(BlocksCacheKey(1), dst, [2], [0], **how)
        wanted[:2, :, 0] = cache_bytes.read(src)[:2, :, 2]
    else:
        with pytest.raises(error):
            manager.pull_blocks(BlocksCacheKey(1), dst, [2], [0], **how)
    np.testing.assert_array_equal(cache_bytes.read(dst), wanted)


def test_a5_5_blocks_to_blocks(own: OwnBlocks) -> None:
    own.pull(prompt_blocks=[0], decoder_blocks=[0])
    np.testing.assert_array_equal(cache_bytes.read(own.dst)[:, :, 0], own.before[0][:, :, 0])
    assert (cache_bytes.read(own.dst)[:, :, 1:] == 0x5A).all()


def test_a5_5_contiguous_key_with_no_source_blocks(own: OwnBlocks) -> None:
    own.pull(prompt_cache_key=ROW_KEY, prompt_blocks=[], decoder_blocks=[0])
    np.testing.assert_array_equal(cache_bytes.read(own.dst)[:, 0, 0], own.before[1][:, 0, 0, :16])
    assert (cache_bytes.read(own.dst)[:, :, 1:] == 0x5A).all()


def test_a5_5_blocks_into_a_contiguous_cache(own: OwnBlocks) -> None:
    own.pull(decoder_kv_cache=own.into, prompt_blocks=[6, 2, 2], decoder_blocks=[], batch_index=1)
    after = cache_bytes.read(own.into)
    np.testing.assert_array_equal(after[:, 0, 1, :48], own.before[0][:, 0, [6, 2, 2]].reshape(4, 48))
    after[:, 0, 1, :48] = 0x5A
    assert (after == 0x5A).all()


def test_a5_7_texts_of_copy_blocks(own: OwnBlocks) -> None:
    with pytest.raises(TypeError, match="only support"):
        own.manager.copy_blocks(own.src, {0: "1"})
    with pytest.raises(TypeError, match="inner type only support"):
        own.manager.copy_blocks(own.src, {0: ["1"]})
    own.assert_untouched()


def test_a5_7_copy_blocks(own: OwnBlocks) -> None:
    own.manager.copy_blocks(own.src, {0: [1]})
    wanted = own.before[0].copy()
    wanted[:, :, 1] = wanted[:, :, 0]
    np.testing.assert_array_equal(cache_bytes.read(own.src), wanted)


SWAPPED = {3: 4, 0: 0, 1: 1, 2: 2, 5: 6, 6: 7, 7: 8, 9: 9}


def test_a5_8_swap_blocks_out_and_in(here: Here) -> None:
    """10 blocks on the one side, 20 on the other, whose addresses come from a third cache."""
    manager = here("PROMPT").kv_cache_manager
    block, tensors = 64 * 1024, 10
    device = manager.allocate_blocks_cache(CacheDesc(tensors, [10, block], DataType.DT_FLOAT16))
    behind = manager.allocate_blocks_cache(CacheDesc(tensors, [20, block], DataType.DT_FLOAT16))
    private = CacheDesc(tensors, [20, block], DataType.DT_FLOAT16, Placement.HOST)
    host = KvCache.create_cpu_cache(private, behind.per_device_tensor_addrs)
    for number in range(10):
        for tensor in device.tensors:
            tensor.numpy().view(np.uint16)[number] = 1000 + number
    manager.swap_blocks(device, host, SWAPPED)
    filled = behind.tensors[9].numpy().view(np.uint16)
    assert {number: int(filled[number, -1]) for number in range(20)} == {
        **dict.fromkeys(range(20), 0), **{dst: 1000 + src for src, dst in SWAPPED.items()}}
    for tensor in device.tensors:
        tensor.numpy()[...] = 0
    manager.swap_blocks(host, device, {dst: src for src, dst in SWAPPED.items()})
    back = device.tensors[0].numpy().view(np.uint16)
    assert [int(back[number, 0]) for number in range(10)] == [1000 + n if n in SWAPPED else 0 for n in range(10)]


def test_a5_8_swap_copies_and_does_not_exchange(here: Here) -> None:
    manager = here("PROMPT").kv_cache_manager
    device = manager.allocate_blocks_cache(CacheDesc(1, [2, 4], DataType.DT_INT8))
    array = np.full((2, 4), 7, np.int8)
    host = KvCache.create_cpu_cache(CacheDesc(1, [2, 4], DataType.DT_INT8, Placement.HOST), [int(array.ctypes.data)])
    manager.swap_blocks(host, device, {0: 1})
    assert (array == 7).all()
    assert device.tensors[0].numpy().tolist() == [[0] * 4, [7] * 4]


def test_a5_8_a_key_of_a_request_is_no_blocks_key(own: OwnBlocks) -> None:
    with pytest.raises(LLMParamError):
        own.pull(prompt_cache_key=CacheKey(OWN, 7))
    own.assert_untouched()
