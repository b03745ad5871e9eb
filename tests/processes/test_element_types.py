"""Views and bytes of each kind of tensor between two processes: all patterns of 8-bit floats, packed rows, shapes that differ."""
from __future__ import annotations

import numpy as np
import pytest
from model_shapes import MODELS, Model, Sides
from peer import StartPeer, by_id

pytestmark = pytest.mark.timeout(120)

@pytest.fixture
def sides(prompt: StartPeer, decoder: StartPeer) -> Sides:
    return Sides(prompt(1), decoder(2))


FILL_PATTERNS = """
import ml_dtypes
kind = getattr(ml_dtypes, DTYPE, None)
for number, view in enumerate(agent.caches["kv"].tensors):
    array = view.numpy()
    assert array.dtype == (kind or array.dtype)
    patterns = np.arange(256, dtype=np.uint8) + np.uint8(number)
    array[...] = patterns.view(array.dtype)
"""
READ_PATTERNS = """
cache = agent.caches["kv"]
tensor = agent.dist.kv_cache_manager.get_cache_tensors(cache, 1)[0]
array = tensor.numpy()
result = [str(tensor.tensor_desc.dtype), str(array.dtype), array[1].view(np.uint8).tolist(),
          cache.tensors[0].numpy()[1].view(np.uint8).tolist(), array[1].astype(np.float32)[:4].tolist()]
"""


@pytest.mark.parametrize(("dtype", "numpy", "first"), [
    ("DT_FLOAT8_E4M3FN", "float8_e4m3fn", [2.0**-9, 2.0**-8, 3 * 2.0**-9, 2.0**-7]),
    ("DT_FLOAT8_E5M2", "float8_e5m2", [2.0**-16, 2.0**-15, 3 * 2.0**-16, 2.0**-14]),
    ("DT_INT8", "", [1, 2, 3, 4]), ("DT_UINT8", "", [1, 2, 3, 4]),
])
def test_all_256_patterns_of_a_byte_arrive(sides: Sides, dtype: str, numpy: str, first: list[float]) -> None:
    kind = Model((((2, 256), dtype),) * 2)
    cache_id = kind.allocate(sides.p, "kv")
    sides.p.call("execute", code=f"DTYPE = {numpy!r}\n" + FILL_PATTERNS)
    kind.allocate(sides.d, "kv")
    sides.d.call("pull", key=by_id(1, cache_id), name="kv", batch_index=1)
    patterns = list(range(256))
    wanted = [f"DataType.{dtype}", numpy or dtype[3:].lower(), [*patterns[1:], 0], patterns, first]
    assert sides.d.call("execute", code=READ_PATTERNS) == wanted


PACK = """
values = np.random.default_rng(4).integers(-8, 8, size=(2, 6, 32))
low, high = (values[..., half::2].astype(np.uint8) & 15 for half in (0, 1))
agent.caches["kv"].tensors[0].numpy()[...] = low | high << 4
"""
UNPACK = """
packed = agent.caches["kv"].tensors[0].numpy()[0]
halves = [(half.astype(np.int8) ^ 8) - 8 for half in (packed & 15, packed >> 4)]
result = np.stack(halves, axis=-1).reshape(6, 32).tolist()
"""


def test_packed_int4_rows_are_bytes(sides: Sides) -> None:
    kind = Model((((2, 6, 16), "DT_UINT8"),), per_layer=1)
    cache_id = kind.allocate(sides.p, "kv")
    sides.p.call("execute", code=PACK)
    kind.allocate(sides.d, "kv")
    sides.d.call("pull", key=by_id(1, cache_id, 1), name="kv")
    assert sides.d.call("execute", code=UNPACK) == np.random.default_rng(4).integers(-8, 8, size=(2, 6, 32))[1].tolist()


VIEWS = """
import ctypes
cache, manager = agent.caches["kv"], agent.dist.kv_cache_manager
result = [[list(view.shape), str(view.dtype), view.nbytes, view.data_ptr == address, view.data_ptr % 64,
           manager.get_cache_tensors(cache, place)[0].tensor_desc.shape == list(view.shape)]
          for place, (view, address) in enumerate(zip(cache.tensors, cache.per_device_tensor_addrs[0], strict=True))]
"""


def test_views_have_the_shape_and_type_of_their_tensor(prompt: StartPeer) -> None:
    p, kind = prompt(1), MODELS["linear and full"]
    kind.allocate(p, "kv")
    seen = p.call("execute", code=VIEWS)
    assert seen == [[list(shape), f"DataType.{dtype}", where.stride * where.rows, True, 0, True]
                    for (shape, dtype), where in zip(kind.tensors, kind.geometries, strict=True)]
