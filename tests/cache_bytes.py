"""The bytes of a cache of this process, as the twin in reference.py sees them, whatever its dtype.

They are reached through ``per_device_tensor_addrs``, which the contract promises to be valid addresses here.
"""
from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
from reference import Bytes, Geometry, geometry

if TYPE_CHECKING:
    from shmkv import KvCache


def geometry_of(cache: KvCache) -> Geometry:
    """Geometry of a living cache, from its own descriptor."""
    desc = cache.cache_desc
    itemsize = desc.size // int(np.prod(desc.shape, dtype=int))
    return geometry(desc.num_tensors, list(desc.shape), itemsize, desc.batch_dim)


def _tensors(cache: KvCache) -> list[Bytes]:
    shape = geometry_of(cache)
    each = shape.outer * shape.rows * shape.inner
    (addresses,) = cache.per_device_tensor_addrs
    assert len(addresses) == shape.num_tensors
    return [np.ctypeslib.as_array((ctypes.c_ubyte * each).from_address(address)).reshape(shape[1:])
            for address in addresses]


def read(cache: KvCache) -> Bytes:
    """A copy of all bytes, shape (num_tensors, outer, rows, inner)."""
    return np.stack([tensor.copy() for tensor in _tensors(cache)])


def write(cache: KvCache, content: Bytes) -> None:
    """Overwrite all bytes with ``content`` of shape (num_tensors, outer, rows, inner)."""
    for tensor, wanted in zip(_tensors(cache), content, strict=True):
        tensor[...] = wanted
