"""torch and rows that are read where they lie: DLPack refuses a view, a copy and a fork give tensors, and a fork is private."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from peer import Peer, StartPeer, prefix
from reference import Bytes

from shmkv import CacheDesc, CacheKey, DataType

pytestmark = [pytest.mark.llm, pytest.mark.timeout(300)]
NEEDED = "needs torch: make test-llm installs it"
U64MAX = 2**64 - 1
NUMBER, TENSORS, SHAPE = 3, 4, (1, 6, 2, 8)
KEY = CacheKey(1, U64MAX, 0, NUMBER)
DTYPES = {"float16": "DT_FLOAT16", "bfloat16": "DT_BF16", "int8": "DT_INT8"}


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason=NEEDED)


@pytest.fixture
def manager(here: Callable[..., Any], prompt: StartPeer) -> tuple[Any, Peer]:
    """A decoder here, linked to a prompt that is another process."""
    from agent import cluster_info

    peer, dist = prompt(), here("DECODER", 2)
    dist.link_clusters([cluster_info(1)], 20_000)
    return dist.kv_cache_manager, peer


def filled(peer: Peer, dtype: str) -> Bytes:
    """The bytes of the prompt's only row, which is random and published."""
    peer.call("allocate", name="p", num_tensors=TENSORS, shape=SHAPE, dtype=dtype, keys=(prefix(1, NUMBER),))
    peer.call("noise", name="p", seed=NUMBER)
    return peer.read("p")


def bits(torch: Any, tensor: Any) -> Any:
    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1)


@pytest.mark.parametrize("name", DTYPES)
def test_a_view_is_refused_and_a_copy_of_it_is_a_tensor(torch: Any, manager: tuple[Any, Peer], name: str) -> None:
    calls, peer = manager
    content = filled(peer, DTYPES[name])
    with calls.view_cache(KEY, cache_desc=CacheDesc(TENSORS, list(SHAPE), DataType[DTYPES[name]])) as view:
        for number, tensor in enumerate(view.tensors):
            with pytest.raises(BufferError, match="a read-only view is exported with copy=True only"):
                torch.from_dlpack(tensor)
            copied = torch.from_dlpack(tensor, copy=True)
            assert (copied.dtype, tuple(copied.shape)) == (getattr(torch, name), SHAPE[1:])
            assert copied.data_ptr() != tensor.data_ptr
            assert np.array_equal(bits(torch, copied), content[number].reshape(-1))
            copied.zero_()
    assert np.array_equal(peer.read("p"), content)


@pytest.mark.parametrize("name", DTYPES)
def test_torch_writes_into_a_fork_and_the_prompt_s_bytes_stay(torch: Any, manager: tuple[Any, Peer], name: str) -> None:
    calls, peer = manager
    content = filled(peer, DTYPES[name])
    desc = CacheDesc(TENSORS, list(SHAPE), DataType[DTYPES[name]])
    written, other = calls.fork_cache(KEY, desc), calls.fork_cache(KEY, desc)
    for number, view in enumerate(written.tensors):
        tensor = torch.from_dlpack(view)
        assert tensor.data_ptr() == view.data_ptr
        assert np.array_equal(bits(torch, tensor), content[number].reshape(-1))
        tensor[:, 2:4] = 1
        assert view.numpy()[0, 2:4].astype("f4").min() == view.numpy()[0, 2:4].astype("f4").max() == 1
    assert np.array_equal(peer.read("p"), content)
    for number, view in enumerate(other.tensors):
        assert np.array_equal(bits(torch, torch.from_dlpack(view)), content[number].reshape(-1))
    tensor = view = None
    for fork in (written, other):
        calls.deallocate_cache(fork)
