"""CacheView: read-only arrays on the memory of the cluster that filled it, without a copy."""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import overload

from shmkv._mapping import Region
from shmkv._view import TensorView
from shmkv.checks import Uncopyable
from shmkv.data_type import DataType
from shmkv.errors import LLMParamError
from shmkv.kv_cache import row_shape, view_of
from shmkv.lending import Lender, LentTensor, kind_of, lent_tensor, region_of
from shmkv.types import CacheDesc


class CacheView(Uncopyable):
    """A row that is lent; made by `KvCacheManager.view_cache`. Close it (or leave its ``with`` block) as soon as it was read: its
    memory is kept until then.

    `tensors` has one read-only TensorView a selected tensor, each made when it is first asked for: ``numpy()``, the buffer
    protocol, and DLPack with ``copy=True``. An array that outlives the view stays readable, but its bytes may become another
    cache's.
    """

    def __init__(self, loan: Lender, window: tuple[int, int], desc: CacheDesc | None, first_tensor: int,
                 closed: Callable[[], object] = bool) -> None:
        self._loan = loan
        self._closed = closed           # told after each close
        self._is_closed = False         # by this object: in a forked child the loan is the parent's, and stays open
        self._window = window           # offset, size (-1: the rest of the row)
        self._desc = desc
        self._first = first_tensor
        self._made: dict[int, TensorView] | None = None     # by place; None before the first look and once it is closed
        # What does not fit is said now, not at the first look. Of tensors that are alike one is enough.
        if not loan.are_alike or (desc is not None and not desc.is_uniform):
            for place in range(loan.count):
                self._shape_of(place, lent_tensor(loan, place))
        elif desc is None:
            _, _, outer, _, inner, dtype = loan.tensor(0)
            _check_whole(first_tensor, outer, inner, window)
            _elements(outer, inner, dtype, *window)
        else:
            self._shape_of(loan.count - 1, lent_tensor(loan, 0))

    @property
    def is_open(self) -> bool:
        """Is the memory still kept?"""
        return not self._is_closed and self._loan.is_open

    @property
    def num_tensors(self) -> int:
        """Number of selected tensors."""
        return self._loan.count

    @property
    def nbytes(self) -> int:
        """Bytes that can be looked at, of all tensors together; 0 once it is closed."""
        return 0 if self._is_closed else sum(_window_of(LentTensor(*each), self._window)[1] for each in self._loan.tensors)

    @property
    def tensors(self) -> ViewTensors:
        """The arrays. LLMException LLM_KV_CACHE_NOT_EXIST once the view is closed."""
        region_of(self._loan)
        return ViewTensors(self)

    def _tensor(self, place: int) -> TensorView:
        """The array of a selected tensor, always the same one. LLM_KV_CACHE_NOT_EXIST once the view is closed."""
        region, made = region_of(self._loan), self._made
        if made is None:
            made = self._made = {}
        found = made.get(place)
        if found is None:       # another thread may have made it meanwhile
            found = made.setdefault(place, self._view(region, place, lent_tensor(self._loan, place)))
        return found

    def _view(self, region: Region, place: int, tensor: LentTensor) -> TensorView:
        shape, kind = self._shape_of(place, tensor)
        offset = tensor.offset + self._loan.row * tensor.inner + (self._window[0] if tensor.outer == 1 else 0)
        pitch = tensor.rows * tensor.inner if tensor.outer > 1 else 0
        return view_of(region, offset, shape, kind, readonly=True, pitch=pitch)

    def _shape_of(self, place: int, tensor: LentTensor) -> tuple[tuple[int, ...], DataType]:
        """Shape and element type of an array: the caller's, or one axis of the recorded type. LLMParamError for what has none."""
        _check_whole(self._first + place, tensor.outer, tensor.inner, self._window)
        if self._desc is None:
            return _elements(tensor.outer, tensor.inner, tensor.dtype, *self._window)
        return _described(self._desc, self._first + place, tensor, self._window)

    def close(self) -> None:
        """Let the owner have its memory back. Twice is no error."""
        self._is_closed = True
        self._made = None
        self._loan.close()
        self._closed()

    def __enter__(self) -> CacheView:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()

    def __len__(self) -> int:
        return self._loan.count

    def __repr__(self) -> str:
        return f"CacheView({self.num_tensors} tensors, {self.nbytes} bytes, {'open' if self.is_open else 'closed'})"


class ViewTensors(Sequence[TensorView]):
    """The arrays of a CacheView, in order, each made when it is first asked for. Keeps the view, and raises
    LLM_KV_CACHE_NOT_EXIST as soon as that is closed."""

    __slots__ = ("_view",)

    def __init__(self, view: CacheView) -> None:
        self._view = view       # which does not keep this object: a view that is dropped is closed at once

    def __len__(self) -> int:
        return self._view.num_tensors

    @overload
    def __getitem__(self, place: int) -> TensorView: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[TensorView, ...]: ...

    def __getitem__(self, place: int | slice) -> TensorView | tuple[TensorView, ...]:
        chosen = range(len(self))[place]        # its rules for negative places, and its errors
        return self._view._tensor(chosen) if isinstance(chosen, int) else tuple(map(self._view._tensor, chosen))

    def __repr__(self) -> str:
        return f"ViewTensors({len(self)} of {self._view!r})"


def _window_of(tensor: LentTensor, window: tuple[int, int]) -> tuple[int, int]:
    """(offset, bytes) within the row."""
    offset, size = window
    return offset, tensor.row_nbytes - offset if size < 0 else size


def _check_whole(number: int, outer: int, inner: int, window: tuple[int, int]) -> None:
    """LLMParamError for a part of a row whose pieces lie apart; `number` is the tensor's."""
    if outer > 1 and window != (0, -1) and window != (0, outer * inner):
        raise LLMParamError(f"tensor {number} has rows in {outer} pieces: only whole rows can be viewed")


@functools.lru_cache(maxsize=1024)      # rows of a few forms are looked at again and again, and this takes as long as the loan
def _elements(outer: int, inner: int, dtype: int, offset: int, size: int) -> tuple[tuple[int, ...], DataType]:
    """One axis of the recorded element type, or two where a row lies in `outer` pieces of `inner` bytes. LLMParamError if it is not
    made of whole ones."""
    nbytes = outer * inner - offset if size < 0 else size
    kind = kind_of(inner, dtype)
    if offset % kind.nbytes or nbytes % kind.nbytes:
        raise LLMParamError(f"{nbytes} bytes at {offset} are no whole elements of {kind}: give a cache_desc")
    if outer > 1:
        return (outer, inner // kind.nbytes), kind
    return (nbytes // kind.nbytes,), kind


def _described(desc: CacheDesc, number: int, tensor: LentTensor, window: tuple[int, int]) -> tuple[tuple[int, ...], DataType]:
    """What the caller's description says of tensor `number`. LLMParamError if it has another number of bytes."""
    _, nbytes = _window_of(tensor, window)
    if number >= desc.num_tensors:
        raise LLMParamError(f"argument 'cache_desc' has {desc.num_tensors} tensors, tensor {number} is viewed")
    geometry = desc.tensor_row_geometry(number)
    if geometry.row_nbytes != nbytes or (tensor.outer > 1 and geometry.outer != tensor.outer):
        raise LLMParamError(f"argument 'cache_desc' has rows of {geometry.row_nbytes} bytes for tensor {number}, viewed are "
                            f"{nbytes} bytes of rows of {tensor.outer} x {tensor.inner}")
    return row_shape(desc, number, tensor.outer), desc.tensor_data_type(number)
