"""Memory that there is not: the pools of cache-manager mode, which limit what caches of one placement may take, and what is said
when the system has no more."""
from __future__ import annotations

import errno

from shmkv import segment
from shmkv.cache_layout import CacheLayout
from shmkv.config import MemPool, Settings
from shmkv.errors import LLMException, LLMStatusCode
from shmkv.options import HOST_MEM_POOL, MEM_POOL
from shmkv.types import CacheDesc, Placement


class MemoryPool:
    """A limit of bytes; the memory itself is in segments as everywhere. A cache counts until its memory is free: with its last key
    and its last reader."""

    def __init__(self, option: str, limit: MemPool, full_status: LLMStatusCode) -> None:
        self._option = option
        self._limit = limit
        self._full_status = full_status

    @classmethod
    def by_placement(cls, settings: Settings) -> dict[Placement, MemoryPool]:
        """The pools that the options of init ask for; without one there is no limit here."""
        wanted = ((Placement.DEVICE, MEM_POOL, settings.mem_pool), (Placement.HOST, HOST_MEM_POOL, settings.host_mem_pool))
        return {placement: cls(option, limit, settings.out_of_memory_status) for placement, option, limit in wanted if limit}

    def check(self, desc: CacheDesc, used_nbytes: int) -> int:
        """Bytes that the tensors of a cache take, each rounded up to whole pages; LLM_OUT_OF_MEMORY if they are not left."""
        nbytes = sum(self._limit.rounded(desc.tensor_size(tensor)) for tensor in range(desc.num_tensors))
        left = self._limit.memory_size - used_nbytes
        if nbytes > left:
            raise LLMException(f"no memory for {desc!r}: {nbytes} bytes wanted in pages of {1 << self._limit.page_shift}, {left} "
                               f"of the {self._limit.memory_size} of {self._option} free", status_code=self._full_status)
        return nbytes


def no_memory_for(wanted: CacheLayout, error: BaseException, full_status: LLMStatusCode) -> LLMException:
    """The exception (not raised) for a cache whose memory or records could not be had."""
    desc, nbytes = wanted.desc, wanted.nbytes
    number = getattr(error, "errno", None)
    # posix_ipc says some things, as that there are too many open files, without a number.
    if isinstance(error, OSError) and number not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
        return LLMException(f"cannot allocate {desc!r}: {error}")
    free = segment.known_free_nbytes()
    hint = ""
    if number == errno.ENOMEM and free is not None and free >= nbytes:
        hint = f": {error}; see also vm.max_map_count"
    elif number == errno.ENOSPC:
        hint = "; a larger one by --shm-size (docker), an in-memory emptyDir (kubernetes) or mount -o remount,size="
    elif number is None:
        hint = f": {error}"
    return LLMException(f"no memory for {desc!r}: {nbytes} bytes wanted, {free} bytes free in {segment.SHM_DIR}{hint}",
                        status_code=full_status)
