"""The arguments of `transfer_cache_async`, checked in the order of the contract; nothing is touched here."""
from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from shmkv._blocks import FROM_ROW, TO_BLOCKS, BlockLists
from shmkv._push import Addresses
from shmkv.block_arguments import check_numbers, last_of_each
from shmkv.cache import check_cache
from shmkv.cache_handle import CacheHandle
from shmkv.checks import check_list_uint64, check_sequence, check_uint64, wrong_type
from shmkv.errors import LLMParamError
from shmkv.kv_cache import check_kv_cache
from shmkv.pull_arguments import check_device
from shmkv.push import TENSORS_A_LAYER, AnyDestination, BlockMove, Destination, KeyDestination
from shmkv.transfer_config import LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig

Blocks = Sequence[int] | None
AnyConfig = TransferConfig | TransferWithCacheKeyConfig


class TransferRequest:
    """The arguments of one `transfer_cache_async`, as they were when the call was made."""

    __slots__ = ("blocks", "destinations")
    CONFIG: ClassVar[type[AnyConfig]] = TransferConfig
    MAY_CUT: ClassVar[bool] = False         # may a row be cut into blocks?

    def __init__(self, src_cache: CacheHandle, layer_synchronizer: LayerSynchronizer, transfer_configs: Sequence[AnyConfig],
                 src_blocks: Blocks, dst_blocks: Blocks, dst_block_nbytes: int | None) -> None:
        self._check_source(src_cache)
        for name, blocks in (("src_block_indices", src_blocks), ("dst_block_indices", dst_blocks)):
            if blocks is not None:
                check_list_uint64(name, blocks)
        if dst_block_nbytes is not None:
            check_uint64("dst_block_memory_size", dst_block_nbytes)
        is_cut = self.MAY_CUT and bool(dst_blocks and dst_block_nbytes) and not src_blocks
        if not is_cut:
            check_blocks(src_blocks, dst_blocks)
        check_synchronizer(layer_synchronizer)
        check_sequence("transfer_configs", transfer_configs, self.CONFIG)
        if dst_block_nbytes and not dst_blocks:
            raise LLMParamError(f"argument 'dst_block_memory_size' is for 'dst_block_indices', which are not given; got "
                                f"{dst_block_nbytes}")
        check_device("src_cache", src_cache)
        layers, remainder = divmod(src_cache.cache_desc.num_tensors, TENSORS_A_LAYER)
        if remainder:
            raise LLMParamError(f"argument 'src_cache' must have an even number of tensors, got {src_cache.cache_desc.num_tensors}")
        self.destinations = [check_config(place, config, layers, is_blocks=bool(src_blocks))
                             for place, config in enumerate(transfer_configs)]
        self.blocks = None if not dst_blocks else block_move(src_blocks, dst_blocks, dst_block_nbytes or 0)

    def _check_source(self, cache: object) -> None:
        check_kv_cache("src_cache", cache)


class CacheTransfer(TransferRequest):
    """The arguments of one call of `CacheManager`."""

    __slots__ = ()
    MAY_CUT = True

    def _check_source(self, cache: object) -> None:
        check_cache("src_cache", cache)


class KeyTransfer(CacheTransfer):
    """The same where memory is remote-accessible: destinations are named by keys."""

    __slots__ = ()
    CONFIG = TransferWithCacheKeyConfig


def check_synchronizer(synchronizer: object) -> None:
    """TypeError unless it is a LayerSynchronizer."""
    if not isinstance(synchronizer, LayerSynchronizer):
        raise wrong_type("layer_synchronizer", synchronizer, LayerSynchronizer)


def check_blocks(src: Blocks, dst: Blocks) -> None:
    """LLMParamError unless both lists are given, not empty and equally long, or neither is given."""
    if src is not None and not dst and (src or dst is None):
        raise LLMParamError("transfer from blocks to cache is not supported: 'src_block_indices' needs 'dst_block_indices'")
    if src is not None and dst is not None and len(src) != len(dst):
        raise LLMParamError(f"arguments 'src_block_indices' and 'dst_block_indices' must have the same number of blocks, got "
                            f"{len(src)} and {len(dst)}")
    if dst is not None and not src:
        raise LLMParamError(f"argument 'dst_block_indices' needs 'src_block_indices', both with blocks; got {len(dst)} and none")


def check_config(place: int, config: AnyConfig, layers: int, *, is_blocks: bool) -> AnyDestination:
    """The destination that a config names. LLMParamError unless its layers are the source's, with two addresses each."""
    name = f"transfer_configs[{place}]"
    if isinstance(config, TransferWithCacheKeyConfig):
        config.check_consistent()
    chosen = range(layers) if config.src_layer_range is None else config.src_layer_range
    if chosen.stop > layers:
        raise LLMParamError(f"argument '{name}' must have a src_layer_range within the {layers} layers of src_cache, got {chosen}")
    if isinstance(config, TransferWithCacheKeyConfig):
        assert config.dst_layer_range is not None
        return KeyDestination(config.cache_key, chosen, config.dst_layer_range.start, config.src_batch_index)
    if len(config.dst_addrs) != TENSORS_A_LAYER * len(chosen):
        raise LLMParamError(f"argument '{name}' must have {TENSORS_A_LAYER * len(chosen)} dst_addrs for {len(chosen)} layers, got "
                            f"{len(config.dst_addrs)}")
    if is_blocks and config.src_batch_index:
        raise LLMParamError(f"argument '{name}' must have src_batch_index 0 with src_block_indices, got {config.src_batch_index}")
    return Destination(config.dst_cluster_id, Addresses(config.dst_addrs), chosen, config.src_batch_index)


def block_move(src: Blocks, dst: Sequence[int], nbytes: int) -> BlockMove:
    """Lists of blocks for the core; of equal destinations the last one counts. Without those of the source, chunk i of a row goes
    to the i-th place."""
    sources, targets, others = last_of_each(check_numbers("src_block_indices", src) if src else list(range(len(dst))),
                                            check_numbers("dst_block_indices", dst))
    return BlockMove(BlockLists(sources, targets, TO_BLOCKS if src else FROM_ROW, others), max(targets) + 1, nbytes)
