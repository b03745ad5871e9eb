"""Rules for the arguments of public calls: type first, then value; the checked value is returned.

Each check takes ``(name, value)`` and raises

* ``LLMNoneError`` for ``None``,
* ``TypeError`` (text: "only support") for another wrong type,
* ``LLMParamError`` for a value out of range.

Integers are instances of ``int``: ``bool`` passes, numpy integers do not, since accepting them would hide
overflows of fixed-width arithmetic; the message tells how to convert. Every message names the argument and
the value found.
This module knows nothing about caches, links or memory.
"""
from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import NoReturn, TypeVar, cast

from shmkv.errors import LLMNoneError, LLMParamError

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

UINT8_MAX = 2**8 - 1
UINT16_MAX = 2**16 - 1
UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120
_SHORT.maxlist = _SHORT.maxtuple = 8


def shown(value: object) -> str:
    """Return a short text of any value for use in a message; never raises for values that are merely huge."""
    try:
        return _SHORT.repr(value)
    except ValueError:
        # CPython refuses to print integers of several thousand digits, also inside a list.
        return f"<{type(value).__name__} too long to show>"


def _names(types: Sequence[type]) -> str:
    return " or ".join(kind.__name__ for kind in types)


def _advice(value: object, types: Sequence[type]) -> str:
    """Other integer types (numpy's) know __index__: say how to convert them."""
    return "; convert it with int(...)" if int in types and hasattr(value, "__index__") else ""


def wrong_type(name: str, value: object, *types: type) -> TypeError:
    """Return (not raise) the error for an argument of a wrong type: an LLMNoneError if it is None."""
    found = f"{shown(value)} of type {type(value).__name__}"
    text = f"argument '{name}' only support {_names(types)}, got {found}"
    return LLMNoneError(text) if value is None else TypeError(text + _advice(value, types))


def wrong_element(name: str, place: object, value: object, *types: type) -> TypeError:
    """Return (not raise) the error for an element, a key or a value of a wrong type inside an argument."""
    text = (
        f"argument '{name}' inner type only support {_names(types)}, "
        f"got {shown(value)} of type {type(value).__name__} at {shown(place)}"
    )
    return LLMNoneError(text) if value is None else TypeError(text + _advice(value, types))


def check_type(name: str, value: object, *types: type[T]) -> T:
    """Return `value` if it is an instance of one of `types`."""
    if isinstance(value, types):
        return value
    raise wrong_type(name, value, *types)


def check_not_none(name: str, value: T | None) -> T:
    """Return `value` if it is anything but None."""
    if value is None:
        raise LLMNoneError(f"argument '{name}' is required, got None")
    return value


def check_bool(name: str, value: object) -> bool:
    """Return `value` if it is True or False; 0 and 1 are a TypeError."""
    return check_type(name, value, bool)


def check_str(name: str, value: object) -> str:
    """Return `value` if it is a str."""
    return check_type(name, value, str)


def check_int(name: str, value: object) -> int:
    """Return `value` if it is an int of any size."""
    return check_type(name, value, int)


def check_int_between(name: str, value: object, low: int, high: int, kind: str = "int") -> int:
    """Return `value` if it is an int with ``low <= value <= high``; `kind` names the range in the message."""
    if not isinstance(value, int):
        raise wrong_type(name, value, int)
    if low <= value <= high:
        return value
    raise LLMParamError(f"argument '{name}' must be {kind} from {low} to {high}, got {shown(value)}")


def check_uint8(name: str, value: object) -> int:
    """Return `value` if it is an int from 0 to 2**8 - 1."""
    return check_int_between(name, value, 0, UINT8_MAX, "uint8")


def check_uint16(name: str, value: object) -> int:
    """Return `value` if it is an int from 0 to 2**16 - 1."""
    return check_int_between(name, value, 0, UINT16_MAX, "uint16")


def check_uint32(name: str, value: object) -> int:
    """Return `value` if it is an int from 0 to 2**32 - 1."""
    return check_int_between(name, value, 0, UINT32_MAX, "uint32")


def check_uint64(name: str, value: object) -> int:
    """Return `value` if it is an int from 0 to 2**64 - 1."""
    return check_int_between(name, value, 0, UINT64_MAX, "uint64")


def check_int32(name: str, value: object) -> int:
    """Return `value` if it is an int from -2**31 to 2**31 - 1."""
    return check_int_between(name, value, INT32_MIN, INT32_MAX, "int32")


def check_int64(name: str, value: object) -> int:
    """Return `value` if it is an int from -2**63 to 2**63 - 1."""
    return check_int_between(name, value, INT64_MIN, INT64_MAX, "int64")


def check_positive(name: str, value: int) -> int:
    """Return `value` if it is above zero; its type has been checked already."""
    if value > 0:
        return value
    raise LLMParamError(f"argument '{name}' must be greater than 0, got {shown(value)}")


def check_sequence(
    name: str, value: object, *inner: type[T], containers: tuple[type, ...] = (list, tuple)
) -> Sequence[T]:
    """Return `value` if it is one of `containers` and all its elements are instances of `inner`."""
    if not isinstance(value, containers):
        raise wrong_type(name, value, *containers)
    for place, element in enumerate(cast(Sequence[object], value)):
        if not isinstance(element, inner):
            raise wrong_element(name, place, element, *inner)
    return cast(Sequence[T], value)


def _check_int_list(
    name: str, value: object, low: int, high: int, kind: str, containers: tuple[type, ...]
) -> Sequence[int]:
    elements = check_sequence(name, value, int, containers=containers)
    for place, element in enumerate(elements):
        if not low <= element <= high:
            check_int_between(f"{name}[{place}]", element, low, high, kind)
    return elements


def check_list_int32(
    name: str, value: object, *, containers: tuple[type, ...] = (list, tuple)
) -> Sequence[int]:
    """Return `value` if it is a list or tuple of int32."""
    return _check_int_list(name, value, INT32_MIN, INT32_MAX, "int32", containers)


def check_list_int64(
    name: str, value: object, *, containers: tuple[type, ...] = (list, tuple)
) -> Sequence[int]:
    """Return `value` if it is a list or tuple of int64."""
    return _check_int_list(name, value, INT64_MIN, INT64_MAX, "int64", containers)


def check_list_uint64(
    name: str, value: object, *, containers: tuple[type, ...] = (list, tuple)
) -> Sequence[int]:
    """Return `value` if it is a list or tuple of uint64."""
    return _check_int_list(name, value, 0, UINT64_MAX, "uint64", containers)


def check_dict(name: str, value: object, key_type: type[K], value_type: type[V]) -> dict[K, V]:
    """Return `value` if it is a dict whose keys and values all have the wanted types."""
    mapping = cast("dict[object, object]", check_type(name, value, dict))
    for key, entry in mapping.items():
        if not isinstance(key, key_type):
            raise wrong_element(name, key, key, key_type)
        if not isinstance(entry, value_type):
            raise wrong_element(name, key, entry, value_type)
    return cast("dict[K, V]", mapping)


def check_layer_range(name: str, value: object, *, below: int | None = None) -> range:
    """Return `value` if it is a range with step 1 and ``0 <= start < stop``, and stop < below if given."""
    layers = check_type(name, value, range)
    if layers.step != 1:
        raise LLMParamError(f"argument '{name}' must have step 1, got {shown(layers)}")
    if not 0 <= layers.start < layers.stop:
        raise LLMParamError(f"argument '{name}' must satisfy 0 <= start < stop, got {shown(layers)}")
    if below is not None and layers.stop >= below:
        raise LLMParamError(f"argument '{name}' must stay below {below}, got {shown(layers)}")
    return layers


def check_optional_layer_range(name: str, value: object, *, below: int | None = None) -> range | None:
    """As check_layer_range, but None passes: it stands for all layers."""
    return None if value is None else check_layer_range(name, value, below=below)


def check_optional_offset(name: str, value: object) -> int | None:
    """Return `value` if it is None or an offset in bytes: an int from 0 to 2**63 - 1."""
    return None if value is None else check_int_between(name, value, 0, INT64_MAX, "offset in bytes")


def check_copy_size(name: str, value: object) -> int:
    """Return `value` if it is a number of bytes to copy: int64, above zero, or -1 for the rest of the row."""
    size = check_int64(name, value)
    if size == -1 or size > 0:
        return size
    raise LLMParamError(f"argument '{name}' must be -1 or greater than 0, got {size}")


def layer_range_to_tensor_indices(layers: range, tensor_num_per_layer: int = 2) -> list[int]:
    """Return the indices of the tensors that belong to `layers`, in order: ``start * n`` to ``stop * n - 1``.

    The list is as long as the answer is: compare the range with the number of tensors at hand first.
    """
    check_layer_range("layers", layers)
    check_positive("tensor_num_per_layer", check_uint32("tensor_num_per_layer", tensor_num_per_layer))
    return list(range(layers.start * tensor_num_per_layer, layers.stop * tensor_num_per_layer))


class Uncopyable:
    """Something that stands for a resource: a copy would give it back twice."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled")


class ApiObject(Uncopyable):
    """A resource with llm_datadist's calls, of which `llm_datadist.install` makes one say where they are listed."""


def not_offered(owner: str, name: str) -> str:
    """The text of an AttributeError for something of llm_datadist that is not here."""
    return f"{owner} has no attribute '{name}'; what of llm_datadist is offered: docs/llm_datadist.md of shmkv"
