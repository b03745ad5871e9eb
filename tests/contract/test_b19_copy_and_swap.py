"""Contract, appendix B19 and sections 7.6, 7.7: copy_blocks and swap_blocks. What is refused moves nothing."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cache_bytes
import numpy as np
import pytest
from block_cases import copy_block_info
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from own_blocks import KEY, OwnBlocks
from reference import copied_blocks, geometry, noise, swapped_blocks

from shmkv import CacheDesc, DataType, KvCache, LLMException, LLMParamError, LLMStatusCode, Placement

pytestmark = pytest.mark.timeout(120)
Here = Callable[..., Any]
MANY = settings(max_examples=500, deadline=None, database=None, suppress_health_check=list(HealthCheck))
LEAD = 64
SHAPE, TENSORS = [8, 16], 4


class Host:
    """A cache in own memory: one array, `LEAD` bytes between tensors, which nobody may touch."""

    def __init__(self, shape: list[int], num_tensors: int = TENSORS, batch_dim: int = 0) -> None:
        self.geometry = geometry(num_tensors, shape, 1, batch_dim)
        each = int(np.prod(shape))
        self.memory = np.full((num_tensors, each + LEAD), 0x5A, np.uint8)
        self.tensors = self.memory[:, :each]
        desc = CacheDesc(num_tensors, shape, DataType.DT_INT8, Placement.HOST, batch_dim)
        self.cache = KvCache.create_cpu_cache(desc, [int(row.ctypes.data) for row in self.memory])

    @property
    def bytes(self) -> Any:
        return self.tensors.reshape(self.geometry)

    def fill(self, content: Any) -> None:
        self.tensors[...] = content.reshape(self.tensors.shape)

    def assert_gaps_untouched(self) -> None:
        assert (self.memory[:, self.tensors.shape[1]:] == 0x5A).all()


@pytest.fixture
def manager(here: Here) -> Any:
    return here("PROMPT").kv_cache_manager


@pytest.fixture
def cache(manager: Any) -> KvCache:
    """A blocks cache with noise in it."""
    made: KvCache = manager.allocate_blocks_cache(CacheDesc(TENSORS, SHAPE, DataType.DT_INT8))
    cache_bytes.write(made, noise(cache_bytes.geometry_of(made), 1))
    return made


# -- copy_blocks --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("info", [
    {0: [1], 1: [2]}, {1: [2], 0: [1]}, {0: [1, 2, 3]}, {0: [0]}, {0: [7], 7: [0]}, {3: [4], 4: [3]}, {0: [1, 0], 1: [0]},
    {0: [5, 5], 1: [5]}, {1: [2], 2: [3], 3: [4], 4: [5]}, {True: [False]}, {2: [3, 2, 4]},
], ids=str)
def test_b19_each_copy_sees_the_earlier_ones(manager: Any, cache: KvCache, info: dict[int, list[int]]) -> None:
    before = cache_bytes.read(cache)
    manager.copy_blocks(cache, info)
    np.testing.assert_array_equal(cache_bytes.read(cache), copied_blocks(before, info))


def test_b19_a_chain_hands_the_first_block_on(manager: Any, cache: KvCache) -> None:
    before = cache_bytes.read(cache)
    manager.copy_blocks(cache, {0: [1], 1: [2]})
    after = cache_bytes.read(cache)
    for block in (1, 2):
        np.testing.assert_array_equal(after[:, :, block], before[:, :, 0])
    np.testing.assert_array_equal(after[:, :, 3:], before[:, :, 3:])


@pytest.mark.parametrize("info", [{}, {0: []}, {0: [], 3: []}], ids=str)
def test_b19_nothing_to_copy(manager: Any, cache: KvCache, info: dict[int, list[int]]) -> None:
    before = cache_bytes.read(cache)
    manager.copy_blocks(cache, info)
    np.testing.assert_array_equal(cache_bytes.read(cache), before)


@pytest.mark.parametrize("batch_dim", [0, 1, 2])
def test_b19_random_copies_within_a_cache_of_any_layout(manager: Any, batch_dim: int) -> None:
    shape = [[9, 3, 5], [3, 9, 5], [3, 5, 9]][batch_dim]
    cache = manager.allocate_cache(CacheDesc(3, shape, DataType.DT_INT8, batch_dim_index=batch_dim))
    before = noise(cache_bytes.geometry_of(cache), 5)

    @MANY
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        info = copy_block_info(lambda low, high: data.draw(st.integers(low, high)), 9)
        cache_bytes.write(cache, before)
        manager.copy_blocks(cache, info)
        np.testing.assert_array_equal(cache_bytes.read(cache), copied_blocks(before, info))

    check()


@pytest.mark.parametrize("info", [None, [0, 1], "x", {0: "1"}, {0: (1,)}, {0: 1}, {0: None}, {"0": [1]}, {0.0: [1]}, {None: [1]},
                                  {np.int64(0): [1]}], ids=repr)
def test_b19_copy_block_info_is_a_dict_of_lists(manager: Any, cache: KvCache, info: Any) -> None:
    before = cache_bytes.read(cache)
    with pytest.raises(TypeError, match="only support"):
        manager.copy_blocks(cache, info)
    np.testing.assert_array_equal(cache_bytes.read(cache), before)


@pytest.mark.parametrize("value", ["1", 1.0, None, [1], np.int64(1)], ids=repr)
def test_b19_elements_are_int(manager: Any, cache: KvCache, value: Any) -> None:
    before = cache_bytes.read(cache)
    with pytest.raises(TypeError, match="inner type only support"):
        manager.copy_blocks(cache, {0: [1], 2: [3, value]})
    np.testing.assert_array_equal(cache_bytes.read(cache), before)


@pytest.mark.parametrize("value", [-1, 8, 2**32 - 1, 2**32, 2**32 + 1, 2**64 - 1, 2**64])
def test_b19_all_indices_are_looked_at_before_the_first_copy(manager: Any, cache: KvCache, value: int) -> None:
    before = cache_bytes.read(cache)
    for info in ({0: [1], 2: [value]}, {0: [1], value: [2]}, {value: [value]}):
        with pytest.raises(LLMParamError):
            manager.copy_blocks(cache, info)
    np.testing.assert_array_equal(cache_bytes.read(cache), before)


def test_b19_source_without_destinations_is_looked_at(manager: Any, cache: KvCache) -> None:
    for value in (-1, 2**64, 8):
        with pytest.raises(LLMParamError):
            manager.copy_blocks(cache, {value: []})


@pytest.mark.parametrize("call", [
    lambda manager, cache, host: manager.copy_blocks(None, {0: [1]}), lambda manager, cache, host: manager.copy_blocks(cache, None),
    lambda manager, cache, host: manager.swap_blocks(None, host, {0: 1}),
    lambda manager, cache, host: manager.swap_blocks(cache, None, {}),
    lambda manager, cache, host: manager.swap_blocks(cache, host, None),
], ids=["cache", "copy_block_info", "src", "dst", "src_to_dst"])
def test_b19_none_for_a_required_argument(manager: Any, cache: KvCache, call: Callable[..., None]) -> None:
    """One class for those who expect either."""
    before, host = cache_bytes.read(cache), Host(SHAPE)
    with pytest.raises(TypeError) as refusal:
        call(manager, cache, host.cache)
    assert isinstance(refusal.value, AttributeError)
    assert "None" in str(refusal.value)
    np.testing.assert_array_equal(cache_bytes.read(cache), before)
    assert (host.memory == 0x5A).all()


def test_b19_copy_blocks_within_host_memory_or_nothing(manager: Any) -> None:
    for nothing in (None, "cache"):
        with pytest.raises(TypeError):
            manager.copy_blocks(nothing, {0: [1]})
    host = Host(SHAPE)
    with pytest.raises(LLMParamError):
        manager.copy_blocks(host.cache, {0: [1]})
    assert (host.memory == 0x5A).all()


def test_b19_checks_of_copy_blocks_come_in_order(manager: Any, cache: KvCache) -> None:
    """Types, then numbers, then whether the cache is there."""
    manager.deallocate_cache(cache)
    with pytest.raises(TypeError):
        manager.copy_blocks(cache, {0: [-1, "1"]})
    with pytest.raises(LLMParamError):
        manager.copy_blocks(cache, {0: [-1]})
    for info in ({0: [1]}, {0: [99]}, {}):
        with pytest.raises(LLMException) as refusal:
            manager.copy_blocks(cache, info)
        assert refusal.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def test_b19_copied_blocks_are_pulled_as_they_are(own: OwnBlocks) -> None:
    """A decoder copies as well as a prompt, and keys stay."""
    own.manager.copy_blocks(own.src, {0: [1], 1: [2]})
    own.pull(prompt_blocks=[2], decoder_blocks=[0])
    np.testing.assert_array_equal(cache_bytes.read(own.dst)[:, :, 0], own.before[0][:, :, 0])
    own.pull(prompt_cache_key=KEY)


# -- swap_blocks --------------------------------------------------------------------------------------------------------

@pytest.fixture
def host() -> Iterator[Host]:
    """Own memory with more blocks of the same bytes."""
    made = Host([11, 16])
    made.fill(noise(made.geometry, 2))
    yield made
    made.assert_gaps_untouched()


MAPS: list[dict[int, int]] = [{0: 0}, {3: 4, 0: 0, 1: 1}, {0: 1, 1: 0}, {5: 7, 6: 7}, {7: 0, 0: 7, 3: 3}, {True: False}, {}]


@pytest.mark.parametrize("src_to_dst", MAPS, ids=str)
def test_b19_swap_copies_out_and_in(manager: Any, cache: KvCache, host: Host, src_to_dst: dict[int, int]) -> None:
    device, own = cache_bytes.read(cache), host.bytes.copy()
    manager.swap_blocks(cache, host.cache, src_to_dst)
    np.testing.assert_array_equal(host.bytes, swapped_blocks(device, own, src_to_dst))
    np.testing.assert_array_equal(cache_bytes.read(cache), device)
    cache_bytes.write(cache, device)
    own = host.bytes.copy()
    manager.swap_blocks(host.cache, cache, src_to_dst)
    np.testing.assert_array_equal(cache_bytes.read(cache), swapped_blocks(own, device, src_to_dst))
    np.testing.assert_array_equal(host.bytes, own)


@pytest.mark.parametrize("batch_dim", [0, 1])
def test_b19_swap_between_layouts(manager: Any, batch_dim: int) -> None:
    """Blocks in pieces on one side; a block is the same bytes in the same order."""
    cache = manager.allocate_blocks_cache(CacheDesc(2, [5, 12], DataType.DT_INT8))
    cache_bytes.write(cache, noise(cache_bytes.geometry_of(cache), 4))
    host = Host([[6, 3, 4], [3, 6, 4]][batch_dim], 2, batch_dim)
    manager.swap_blocks(cache, host.cache, {4: 1, 0: 5})
    for src, dst in ((4, 1), (0, 5)):
        np.testing.assert_array_equal(host.bytes[:, :, dst].reshape(2, 12), cache_bytes.read(cache)[:, 0, src])
    assert (np.delete(host.bytes, [1, 5], axis=2) == 0x5A).all()
    host.assert_gaps_untouched()


@pytest.mark.parametrize("layout", [([9, 12], 0), ([9, 4, 3], 0), ([4, 9, 3], 1), ([4, 3, 9], 2)], ids=str)
def test_b19_random_swaps_do_what_the_twin_does(manager: Any, layout: tuple[list[int], int]) -> None:
    shape, batch_dim = layout
    device = manager.allocate_cache(CacheDesc(3, shape, DataType.DT_INT8, batch_dim_index=batch_dim))
    host = Host([7, 12], 3)
    forms = cache_bytes.geometry_of(device), host.geometry
    shared, private = noise(forms[0], 6), noise(forms[1], 7)
    outward = st.dictionaries(st.integers(0, 8), st.integers(0, 6), max_size=9)

    def as_blocks(content: Any) -> Any:
        """Bytes of a cache with each block in one piece."""
        tensors, outer, rows, inner = content.shape
        return content.transpose(0, 2, 1, 3).reshape(tensors, 1, rows, outer * inner)

    @MANY
    @given(src_to_dst=outward)
    def check(src_to_dst: dict[int, int]) -> None:
        cache_bytes.write(device, shared)
        host.fill(private)
        manager.swap_blocks(device, host.cache, src_to_dst)
        np.testing.assert_array_equal(host.bytes, swapped_blocks(as_blocks(shared), private, src_to_dst))
        host.fill(private)
        back = {dst: src for src, dst in src_to_dst.items()}
        manager.swap_blocks(host.cache, device, back)
        np.testing.assert_array_equal(as_blocks(cache_bytes.read(device)), swapped_blocks(private, as_blocks(shared), back))
        host.assert_gaps_untouched()

    check()


def test_b19_addresses_of_a_host_cache_come_in_any_order(manager: Any, cache: KvCache) -> None:
    arrays = [np.full((8, 16), 0x5A, np.uint8) for _ in range(TENSORS)]
    addresses = sorted((int(array.ctypes.data) for array in arrays), reverse=True)
    host = KvCache.create_cpu_cache(CacheDesc(TENSORS, SHAPE, DataType.DT_INT8, Placement.HOST), addresses)
    manager.swap_blocks(cache, host, {2: 6})
    by_address = {int(array.ctypes.data): array for array in arrays}
    for address, tensor in zip(addresses, cache_bytes.read(cache), strict=True):
        np.testing.assert_array_equal(by_address[address][6], tensor[0, 2])
        assert (np.delete(by_address[address], 6, axis=0) == 0x5A).all()


def test_b19_swap_within_the_same_memory_is_as_if_through_a_temporary(manager: Any, cache: KvCache) -> None:
    host = KvCache.create_cpu_cache(CacheDesc(TENSORS, SHAPE, DataType.DT_INT8, Placement.HOST), cache.per_device_tensor_addrs)
    before = cache_bytes.read(cache)
    src_to_dst = {0: 1, 1: 2, 2: 0, 5: 4, 4: 5}
    manager.swap_blocks(cache, host, src_to_dst)
    np.testing.assert_array_equal(cache_bytes.read(cache), swapped_blocks(before, before, src_to_dst))


def _refuses_swap(manager: Any, error: type[Exception], src: KvCache, dst: KvCache, src_to_dst: Any) -> None:
    with pytest.raises(error):
        manager.swap_blocks(src, dst, src_to_dst)


@pytest.mark.parametrize("src_to_dst", [None, [(0, 1)], "x", {0: "1"}, {0: [1]}, {0: None}, {"0": 1}, {None: 1}, {0: 1.0},
                                        {np.int64(0): 1}, {0: np.int64(1)}], ids=repr)
def test_b19_map_of_swap_is_a_dict_of_int(manager: Any, cache: KvCache, host: Host, src_to_dst: Any) -> None:
    before = cache_bytes.read(cache), host.bytes.copy()
    _refuses_swap(manager, TypeError, cache, host.cache, src_to_dst)
    _refuses_swap(manager, TypeError, host.cache, cache, src_to_dst)
    np.testing.assert_array_equal(cache_bytes.read(cache), before[0])
    np.testing.assert_array_equal(host.bytes, before[1])


@pytest.mark.parametrize("value", [-1, 11, 2**32 - 1, 2**32, 2**32 + 1, 2**64 - 1, 2**64])
def test_b19_blocks_of_swap_out_of_range(manager: Any, cache: KvCache, host: Host, value: int) -> None:
    before = cache_bytes.read(cache), host.bytes.copy()
    for src_to_dst in ({0: 1, value: 2}, {0: 1, 2: value}):
        _refuses_swap(manager, LLMParamError, cache, host.cache, src_to_dst)
        _refuses_swap(manager, LLMParamError, host.cache, cache, src_to_dst)
    _refuses_swap(manager, LLMParamError, cache, host.cache, {8: 0, 1: 0})
    _refuses_swap(manager, LLMParamError, host.cache, cache, {0: 8, 1: 8})
    np.testing.assert_array_equal(cache_bytes.read(cache), before[0])
    np.testing.assert_array_equal(host.bytes, before[1])


@pytest.mark.parametrize("other", [lambda: Host([8, 15]), lambda: Host([8, 32]), lambda: Host(SHAPE, 3), lambda: Host(SHAPE, 5),
                                   lambda: Host([128])], ids=["shorter", "longer", "3 tensors", "5 tensors", "1 byte"])
def test_b19_swap_wants_like_blocks_and_tensors(manager: Any, cache: KvCache, other: Callable[[], Host]) -> None:
    before, made = cache_bytes.read(cache), other()
    for src_to_dst in ({0: 1}, {}):
        _refuses_swap(manager, LLMParamError, cache, made.cache, src_to_dst)
        _refuses_swap(manager, LLMParamError, made.cache, cache, src_to_dst)
    np.testing.assert_array_equal(cache_bytes.read(cache), before)
    assert (made.memory == 0x5A).all()


def test_b19_swap_wants_one_host_and_one_device(manager: Any, cache: KvCache, host: Host) -> None:
    device, another = manager.allocate_blocks_cache(CacheDesc(TENSORS, SHAPE, DataType.DT_INT8)), Host([11, 16])
    before = host.bytes.copy()
    for one, other in ((cache, device), (cache, cache), (host.cache, another.cache), (host.cache, host.cache)):
        _refuses_swap(manager, LLMParamError, one, other, {0: 1})
    assert not cache_bytes.read(device).any()
    assert (another.memory == 0x5A).all()
    np.testing.assert_array_equal(host.bytes, before)


def test_b19_swap_of_what_is_no_cache(manager: Any, cache: KvCache, host: Host) -> None:
    before = host.bytes.copy()
    for nothing in (None, "cache", 1):
        _refuses_swap(manager, TypeError, nothing, host.cache, {0: 1})      # type: ignore[arg-type]
        _refuses_swap(manager, TypeError, cache, nothing, {0: 1})           # type: ignore[arg-type]
    np.testing.assert_array_equal(host.bytes, before)


def test_b19_swap_with_a_deallocated_cache(manager: Any, cache: KvCache, host: Host) -> None:
    before = host.bytes.copy()
    manager.deallocate_cache(cache)
    for src, dst in ((cache, host.cache), (host.cache, cache)):
        for src_to_dst in ({0: 1}, {}):
            with pytest.raises(LLMException) as refusal:
                manager.swap_blocks(src, dst, src_to_dst)
            assert refusal.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
        _refuses_swap(manager, LLMParamError, src, dst, {99: 0})
    np.testing.assert_array_equal(host.bytes, before)


@pytest.mark.parametrize("address", [0, -1, 2**64, 2**64 - 8, 2**63])
def test_b19_addresses_that_no_memory_has(manager: Any, cache: KvCache, address: int) -> None:
    """They are taken at first sight and refused when they are used."""
    before = cache_bytes.read(cache)
    host = KvCache.create_cpu_cache(CacheDesc(TENSORS, SHAPE, DataType.DT_INT8, Placement.HOST), [address] * TENSORS)
    _refuses_swap(manager, LLMParamError, cache, host, {0: 1})
    _refuses_swap(manager, LLMParamError, host, cache, {0: 1})
    np.testing.assert_array_equal(cache_bytes.read(cache), before)
