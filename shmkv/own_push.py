"""Pushes to addresses in the own cluster: no link, no hazard; source and destination are counted in while they are used."""
from __future__ import annotations

from collections.abc import Sequence

from shmkv import _pull, _push
from shmkv._blocks import FROM_ROW, BlockLists
from shmkv._local import LocalCache
from shmkv.caches import Usable
from shmkv.checks import UINT32_MAX
from shmkv.cluster import Cluster
from shmkv.own_cache import OwnCache

Target = tuple[OwnCache, LocalCache]        # a cache, and the window in it as a tensor of its own


def push_own(cluster: Cluster, source: Usable, windows: Sequence[tuple[int, int]], count: int, *, first_tensor: int, row: int,
             lists: BlockLists | None, dst_rows: int) -> tuple[int, int]:
    """Copy tensors from `first_tensor` on to the first `count` of the `windows`, (address, bytes of a row), all of which have to be
    there: 0 or the number that a push over a link would give, and the address that it is about. `dst_rows`: how many blocks of the
    destination the numbers of `lists` reach, 1 without lists."""
    if (lists is None or lists.mode == FROM_ROW) and row >= source.desc.batch_size:
        return int(_push.ROW), windows[0][0]
    targets: list[Target] = []
    with cluster.lock:
        for address, nbytes in windows:
            found = _window(cluster, address, nbytes, dst_rows)
            if isinstance(found, int):
                return found, address
            targets.append(found)
        for own, _ in targets:
            own.local.count_in()
    try:
        for place, (_, target) in enumerate(targets[:count]):
            status = int(_pull.copy(source.local, target, (-1, 0, 0, row, 0, first_tensor + place, 1, 0, 1, 0),
                                    cluster.settings.sync_kv_timeout_ms, lists=lists))
            if status:
                return status, windows[place][0]
    finally:
        for own, _ in targets:
            own.local.leave()
    return 0, 0


def _window(cluster: Cluster, address: int, nbytes: int, rows: int) -> Target | int:
    """What is written from an address on, or why it cannot be."""
    found = _find(cluster, address)
    if found is None:
        return int(_push.ADDRESS)
    own, room = found
    if rows > min(room // nbytes, UINT32_MAX):
        return int(_push.ROOM)
    return own, LocalCache(own.local.memory, [(address - own.local.memory.base, nbytes * rows, 1, rows, nbytes)])


def _find(cluster: Cluster, address: int) -> tuple[OwnCache, int] | None:
    """The living cache in which an address lies, and how many bytes are left of the tensor from there on."""
    for own in cluster.caches:
        offset = address - own.local.memory.base
        if own.retired or not 0 <= offset < own.segment.nbytes:
            continue
        for tensor, begin in enumerate(own.offsets):
            if begin <= offset < begin + own.desc.tensor_size(tensor):
                return own, begin + own.desc.tensor_size(tensor) - offset
    return None
