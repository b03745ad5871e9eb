"""Rows that are read where they are: out of a peer's cache by a lease, out of an own one by a count. Numbers of the core become
exceptions here, as in `transfer.py`.
"""
from __future__ import annotations

import errno
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple, Protocol, cast

from shmkv import _link, _lookup, _plan, _pull
from shmkv._lend import ForkedRegion, fork_segment
from shmkv._mapping import Region
from shmkv.cluster import Cluster
from shmkv.data_type import DataType
from shmkv.errors import LLMException, LLMParamError, LLMStatusCode
from shmkv.keys import CacheKey, KeyWords
from shmkv.link import Links
from shmkv.own_cache import OwnCache
from shmkv.own_pull import find_own
from shmkv.pull_failure import PullKey, Select, pull_failure
from shmkv.segment import SHM_DIR


class LentTensor(NamedTuple):
    """One tensor in `region`: row b is `outer` pieces of `inner` bytes, piece p at ``offset + (p * rows + b) * inner``."""

    offset: int
    nbytes: int
    outer: int
    rows: int
    inner: int
    dtype: int

    @property
    def row_nbytes(self) -> int:
        return self.outer * self.inner

    @property
    def kind(self) -> DataType:
        """The recorded element type, whole numbers of which make a piece. LLMParamError if there is no such."""
        return kind_of(self.inner, self.dtype)


def kind_of(inner: int, dtype: int) -> DataType:
    """The element type with number `dtype`, whole ones of which make `inner` bytes. LLMParamError if there is no such."""
    kind = DataType.numbered(dtype)
    if kind is None:
        raise LLMParamError(f"the tensor's element type is number {dtype}, which this version does not know: give a cache_desc")
    if inner % kind.nbytes:
        raise LLMParamError(f"pieces of {inner} bytes are no whole elements of {kind}: give a cache_desc")
    return kind


class Lender(Protocol):
    """What a row was lent by; the memory is the row's until `close`, or until this object goes."""

    @property
    def region(self) -> Region | None: ...
    @property
    def tensors(self) -> list[tuple[int, int, int, int, int, int]]: ...
    @property
    def row(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def are_alike(self) -> bool: ...
    def tensor(self, place: int) -> tuple[int, int, int, int, int, int]: ...
    @property
    def is_open(self) -> bool: ...
    def close(self) -> None: ...


def region_of(loan: Lender) -> Region:
    """The mapping that a row lies in; LLM_KV_CACHE_NOT_EXIST once it was given back."""
    region = loan.region            # once: another thread may give it back
    if region is None or not loan.is_open:
        raise _closed()
    return region


def lent_tensor(loan: Lender, place: int) -> LentTensor:
    """A selected tensor; `place` is below their number. LLM_KV_CACHE_NOT_EXIST once the row was given back."""
    try:
        return LentTensor(*loan.tensor(place))
    except IndexError as gone:
        raise _closed() from gone


def _closed() -> LLMException:
    return LLMException("the view is closed", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)


class OwnLoan:
    """A row of an own cache: counted in, so that it is not freed."""

    def __init__(self, cache: OwnCache, row: int, first: int, count: int) -> None:
        self.region: Region | None = cache.segment.region
        self.row = row
        tensors = cache.layout.tensors.describe()
        self.tensors = tensors[first:first + count if count >= 0 else None]
        self.count = len(self.tensors)
        self.are_alike = len({numbers[2:] for numbers in self.tensors}) == 1
        self.path = f"{SHM_DIR}/{cache.segment.name}"
        self._counted = [cache.local]

    def tensor(self, place: int) -> tuple[int, int, int, int, int, int]:
        """One of `tensors`."""
        return self.tensors[place]

    @property
    def is_open(self) -> bool:
        """Is the row still counted in?"""
        return bool(self._counted)

    def close(self) -> None:
        """Give it back; twice is no error, nor on two threads at once."""
        self.region = None
        with suppress(IndexError):
            self._counted.pop().leave()

    def __del__(self) -> None:
        self.close()


def lend(cluster: Cluster, links: Links, key: PullKey, select: Select, consumes: bool) -> Lender:
    """Lend the row that a key names. Of `select`, which is that of `transfer.pull`, only the source's part counts. Raises as a pull
    does, and LLM_LINK_BUSY when this process has as many leases of the link as it may have."""
    handle = links.handle(key.cluster_id)
    loan: Lender | None = None
    if handle is not None:
        settings = cluster.settings
        status, loan = _pull.lend(handle, key.packed, select, consumes, settings.sync_kv_timeout_ms, settings.max_leases)
    elif key.cluster_id == cluster.cluster_id:
        status, loan = _lend_own(cluster, key, select, consumes)
    else:
        status = _link.ENDED
    if status == _link.ENDED:
        cluster.check_usable()
    if status:
        raise pull_failure(status, cluster, links, key, None, select)
    return cast(Lender, loan)


def _lend_own(cluster: Cluster, key: PullKey, select: Select, consumes: bool) -> tuple[int, OwnLoan | None]:
    first, count = select[5:7]
    with cluster.lock:
        found = find_own(cluster.caches, key)
        if isinstance(found, int):
            return found, None
        source, row, word = found
        if not cluster.caches.sources.is_published(source, row, first, count):
            return int(_lookup.UNPUBLISHED), None
        status = _fault(source, select)
        if status == 0:
            source.local.count_in()
            loan = OwnLoan(source, row, first, count)
            status = cluster.caches.sources.finish(source, row, word, by_key=isinstance(key, CacheKey), consumes=consumes,
                                                   first=first, count=count)
    return (0, loan) if status == 0 else (status, None)


def _fault(source: OwnCache, select: Select) -> int:
    """Why the selection is not one of an own cache, as the core says it of a peer's."""
    size, offset, (first, count), tensors = select[0], select[1], select[5:7], source.desc.num_tensors
    if select[9] and tensors % select[9]:
        return int(_plan.DIVISOR)
    wanted = tensors if count < 0 else count
    if wanted == 0 or first + wanted > tensors:
        return int(_plan.SRC_RANGE)
    for row_nbytes in source.layout.row_nbytes[first:first + wanted]:
        if offset >= row_nbytes or size > row_nbytes - offset:
            return int(_plan.SRC_WINDOW)
    return 0


def fork(cluster: Cluster, links: Links, key: PullKey, loan: Lender) -> ForkedRegion:
    """The segment of a loan, mapped privately; the loan lasts as long as what is returned."""
    handle = links.handle(key.cluster_id)
    path = loan.path if isinstance(loan, OwnLoan) else None if handle is None else handle.segment_path(getattr(loan, "serial", 0))
    if path is None:
        raise LLMException(f"fork of {key!r}: the link was removed meanwhile", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
    try:
        return fork_segment(loan, path, region_of(loan).nbytes)
    except OSError as error:
        known = {errno.ENOENT: LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, errno.ENOMEM: cluster.settings.out_of_memory_status}
        code = known.get(error.errno or 0, LLMStatusCode.LLM_FAILED)
        raise LLMException(f"fork of {key!r}: {error} ({code.name})", status_code=code) from error


def contains(cluster: Cluster, links: Links, key: CacheKey) -> bool:
    """Would a pull find this key now? Takes no lock."""
    handle = links.handle(key.cluster_id)
    if handle is None and key.cluster_id == cluster.cluster_id:
        return _has_itself(cluster, key.words)
    links.check(key.cluster_id)
    return handle is not None and bool(_lookup.is_published(handle.directory, key.words))


def holder(cluster: Cluster, links: Links, words: KeyWords, cluster_ids: Iterable[int]) -> int | None:
    """The first of these clusters where a pull would find a key now. Those that are gone, or not linked to, have nothing. Takes no
    lock of a peer."""
    for cluster_id in cluster_ids:
        handle = links.handle(cluster_id)
        if handle is None:
            if cluster_id == cluster.cluster_id and _has_itself(cluster, words):
                return cluster_id
        elif _lookup.is_published(handle.directory, words) and _is_usable(links, cluster_id):
            return cluster_id
    return None


def _has_itself(cluster: Cluster, words: KeyWords) -> bool:
    with cluster.lock:
        found = cluster.caches.sources.by_key(words)
        return not isinstance(found, int) and cluster.caches.sources.is_published(found[0], found[1], 0, -1)


def _is_usable(links: Links, cluster_id: int) -> bool:
    try:
        links.check(cluster_id)
    except LLMException:
        return False
    return True
