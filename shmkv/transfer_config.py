"""What to push where: a config for each destination, and the interface that says when a layer is ready."""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from shmkv.checks import (
    check_layer_range,
    check_list_uint64,
    check_optional_layer_range,
    check_type,
    check_uint32,
    check_uint64,
    shown,
)
from shmkv.errors import LLMParamError
from shmkv.keys import BlocksCacheKey, CacheKeyByIdAndIndex


class LayerSynchronizer(ABC):
    """Tells a transfer when the tensors of a layer are computed. Subclass it."""

    @abstractmethod
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """Block until layer `layer_index` is computed; False if it failed. The timeout is always None."""


class TransferConfig:
    """Destination given by addresses in the address space of the other cluster's process.

    Args:
        dst_cluster_id: uint64.
        dst_addrs: list or tuple of uint64, one address for each tensor of the layers sent.
        src_layer_range: layers to send; None means all.
        src_batch_index: uint32, source row.

    Raises:
        TypeError: wrong type of an argument, also in a setter.
        LLMParamError: value out of range, also in a setter.
    """

    def __init__(
        self,
        dst_cluster_id: int,
        dst_addrs: Sequence[int],
        src_layer_range: range | None = None,
        src_batch_index: int = 0,
    ) -> None:
        self.dst_cluster_id = dst_cluster_id
        self.dst_addrs = dst_addrs
        self.src_layer_range = src_layer_range
        self.src_batch_index = src_batch_index

    @property
    def dst_cluster_id(self) -> int:
        """Cluster to send to."""
        return self._dst_cluster_id

    @dst_cluster_id.setter
    def dst_cluster_id(self, dst_cluster_id: int) -> None:
        self._dst_cluster_id = check_uint64("dst_cluster_id", dst_cluster_id)

    @property
    def dst_addrs(self) -> Sequence[int]:
        """Destination addresses, in the order of the tensors."""
        return self._dst_addrs

    @dst_addrs.setter
    def dst_addrs(self, dst_addrs: Sequence[int]) -> None:
        self._dst_addrs = check_list_uint64("dst_addrs", dst_addrs)

    @property
    def src_layer_range(self) -> range | None:
        """Layers to send, None for all."""
        return self._src_layer_range

    @src_layer_range.setter
    def src_layer_range(self, src_layer_range: range | None) -> None:
        self._src_layer_range = check_optional_layer_range("src_layer_range", src_layer_range)

    @property
    def dst_layer_range(self) -> None:
        """Always None: the addresses say where the layers go."""
        return

    @property
    def src_batch_index(self) -> int:
        """Source row."""
        return self._src_batch_index

    @src_batch_index.setter
    def src_batch_index(self, src_batch_index: int) -> None:
        self._src_batch_index = check_uint32("src_batch_index", src_batch_index)

    def __repr__(self) -> str:
        return (
            f"TransferConfig(dst_cluster_id={self._dst_cluster_id}, dst_addrs={self._dst_addrs}, "
            f"src_layer_range={self._src_layer_range}, src_batch_index={self._src_batch_index})"
        )


class TransferWithCacheKeyConfig:
    """Destination given by a key.

    Args:
        cache_key: BlocksCacheKey or CacheKeyByIdAndIndex of the destination.
        src_layer_range, dst_layer_range: layers to send and where they go; both required, equally long.
        src_batch_index: uint32, source row; 0 with a BlocksCacheKey.

    Setters repeat the check of their own value and let None pass for a range. Ranges that are replaced one
    after the other may differ in length in between, so `check_consistent` looks at them together, at use.

    Raises:
        TypeError: wrong type of an argument.
        LLMParamError: value out of range or values that do not fit together.
    """

    def __init__(
        self,
        cache_key: BlocksCacheKey | CacheKeyByIdAndIndex,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        src_batch_index: int = 0,
    ) -> None:
        self.cache_key = cache_key
        self._src_layer_range: range | None = check_layer_range("src_layer_range", src_layer_range)
        self._dst_layer_range: range | None = check_layer_range("dst_layer_range", dst_layer_range)
        self._src_batch_index = check_uint32("src_batch_index", src_batch_index)
        self.check_consistent()

    @property
    def cache_key(self) -> BlocksCacheKey | CacheKeyByIdAndIndex:
        """Key of the destination."""
        return self._cache_key

    @cache_key.setter
    def cache_key(self, cache_key: BlocksCacheKey | CacheKeyByIdAndIndex) -> None:
        check_type("cache_key", cache_key, BlocksCacheKey, CacheKeyByIdAndIndex)
        self._cache_key = cache_key

    @property
    def dst_cluster_id(self) -> int:
        """Cluster to send to: the one in the key."""
        return self._cache_key.cluster_id

    @property
    def src_layer_range(self) -> range | None:
        """Layers to send."""
        return self._src_layer_range

    @src_layer_range.setter
    def src_layer_range(self, src_layer_range: range | None) -> None:
        self._src_layer_range = check_optional_layer_range("src_layer_range", src_layer_range)

    @property
    def dst_layer_range(self) -> range | None:
        """Layers they become."""
        return self._dst_layer_range

    @dst_layer_range.setter
    def dst_layer_range(self, dst_layer_range: range | None) -> None:
        self._dst_layer_range = check_optional_layer_range("dst_layer_range", dst_layer_range)

    @property
    def src_batch_index(self) -> int:
        """Source row."""
        return self._src_batch_index

    @src_batch_index.setter
    def src_batch_index(self, src_batch_index: int) -> None:
        index = check_uint32("src_batch_index", src_batch_index)
        self._check_row(index)
        self._src_batch_index = index

    def _check_row(self, index: int) -> None:
        if index and isinstance(self._cache_key, BlocksCacheKey):
            raise LLMParamError(f"argument 'src_batch_index' must be 0 with a BlocksCacheKey, got {index}")

    def check_consistent(self) -> None:
        """Raise LLMParamError unless key, row and ranges fit together; TypeError if a range is None."""
        src = check_layer_range("src_layer_range", self._src_layer_range)
        dst = check_layer_range("dst_layer_range", self._dst_layer_range)
        if src.stop - src.start != dst.stop - dst.start:
            raise LLMParamError(
                "'src_layer_range' and 'dst_layer_range' must be equally long, "
                f"got {shown(src)} and {shown(dst)}"
            )
        self._check_row(self._src_batch_index)

    def __repr__(self) -> str:
        return (
            f"TransferWithCacheKeyConfig(cache_key={self._cache_key}, "
            f"src_layer_range={self._src_layer_range}, dst_layer_range={self._dst_layer_range}, "
            f"src_batch_index={self._src_batch_index})"
        )
