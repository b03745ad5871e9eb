"""The bytes of a cache of this process, as the twin in reference.py sees them, whatever its dtype.

They are reached through the addresses of its tensors, which the contract promises to be valid here.
"""
from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
from reference import Bytes, Geometry, Tensors, geometry

from shmkv import Cache

if TYPE_CHECKING:
    from shmkv.cache_handle import CacheHandle


def geometry_of(cache: CacheHandle) -> Geometry:
    """Geometry of a living cache whose tensors are alike, from its own descriptor."""
    assert cache.cache_desc.is_uniform
    return geometries_of(cache)[0]._replace(num_tensors=cache.cache_desc.num_tensors)


def geometries_of(cache: CacheHandle) -> list[Geometry]:
    """Geometry of each tensor as a cache of its own, from its shape alone."""
    desc, made = cache.cache_desc, []
    for place in range(desc.num_tensors):
        shape = desc.tensor_shape(place)
        itemsize = desc.tensor_size(place) // int(np.prod(shape, dtype=int))
        made.append(geometry(1, shape, itemsize, desc.batch_dim))
    return made


def _tensors(cache: CacheHandle) -> list[Bytes]:
    addresses = cache.tensor_addrs if isinstance(cache, Cache) else cache.per_device_tensor_addrs[0]
    return [np.ctypeslib.as_array((ctypes.c_ubyte * (shape.stride * shape.rows)).from_address(address)).reshape(shape[1:])
            for address, shape in zip(addresses, geometries_of(cache), strict=True)]


def read(cache: CacheHandle) -> Bytes:
    """A copy of all bytes of a cache whose tensors are alike, shape (num_tensors, outer, rows, inner)."""
    return np.stack(read_tensors(cache))


def read_tensors(cache: CacheHandle) -> list[Bytes]:
    """A copy of the bytes of each tensor, shape (outer, rows, inner)."""
    return [tensor.copy() for tensor in _tensors(cache)]


def write(cache: CacheHandle, content: Tensors) -> None:
    """Overwrite all bytes with ``content``: of each tensor (outer, rows, inner)."""
    for tensor, wanted in zip(_tensors(cache), content, strict=True):
        tensor[...] = wanted
