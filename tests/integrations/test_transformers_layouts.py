"""What a model keeps for a token, as a value; and the header that carries it."""
from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from model_peers import need_models

from shmkv import LLMParamError

pytestmark = pytest.mark.llm        # to import the package of these modules is to import torch


@pytest.fixture
def kit() -> SimpleNamespace:
    """The two modules, and three kinds of layers."""
    need_models()
    from shmkv.integrations.transformers import header, layouts

    layer = layouts.LayerLayout
    return SimpleNamespace(
        Header=header.Header, HEADER_NBYTES=layouts.HEADER_NBYTES, Group=layouts.Group, ModelLayout=layouts.ModelLayout,
        EVEN=layer(layouts.FULL, 0, (2, 8), (2, 8), "float32"), LATENT=layer(layouts.FULL, 0, (1, 16), (1, 8), "bfloat16"),
        NEAR=layer(layouts.SLIDING, 6, (2, 8), (2, 8), "float32"))


def test_tensors_of_layers_that_are_alike_come_layer_by_layer(kit: Any) -> None:
    layout = kit.ModelLayout("m", (kit.EVEN, kit.NEAR, kit.EVEN))
    assert layout.places() == [(1, 2), (3, 4), (5, 6)]
    assert layout.groups() == [kit.Group(1, 7, 64)]
    assert layout.token_nbytes == 6 * 64
    desc = layout.describe(3, 10)
    assert [desc.tensor_shape(number) for number in range(7)] == [[3, kit.HEADER_NBYTES], *[[3, 10, 2, 8]] * 6]


def test_tensors_with_as_many_bytes_a_token_stand_together(kit: Any) -> None:
    layout = kit.ModelLayout("m", (kit.LATENT, kit.EVEN, kit.LATENT))
    assert layout.groups() == [kit.Group(1, 3, 32), kit.Group(3, 5, 16), kit.Group(5, 7, 64)]
    assert layout.places() == [(1, 3), (5, 6), (2, 4)]
    assert layout.token_nbytes == 2 * 32 + 2 * 16 + 2 * 64
    desc = layout.describe(1, 4)
    for number, (keys, values) in enumerate(layout.places()):
        assert desc.tensor_shape(keys) == [1, 4, *layout.layers[number].keys]
        assert desc.tensor_shape(values) == [1, 4, *layout.layers[number].values]
    assert str(desc.tensor_data_type(1)) == "DataType.DT_BF16"


def test_a_header_comes_back_as_it_was(kit: Any) -> None:
    header = kit.Header.new(kit.ModelLayout("m", (kit.LATENT, kit.EVEN, kit.NEAR, kit.EVEN)), 20, 7)
    packed = header.pack()
    assert len(packed) == kit.HEADER_NBYTES
    assert kit.Header.unpack(packed) == header
    assert kit.Header.new(*header[:3]).pack() != packed        # each filling of a row is told from the others


def test_a_model_of_hundreds_of_layers_fits_and_one_of_hundreds_of_kinds_is_refused(kit: Any) -> None:
    many = kit.ModelLayout("m", (kit.EVEN, kit.NEAR) * 200)
    assert kit.Header.unpack(kit.Header.new(many, 5, 5).pack()).layout == many
    kinds = kit.ModelLayout("m", tuple(kit.EVEN._replace(keys=(heads, 8)) for heads in range(1, 200)))
    with pytest.raises(LLMParamError, match="bytes of description, a row's header has room for 8192"):
        kit.Header.new(kinds, 5, 5).pack()


@pytest.mark.parametrize("change", [
    {"format": "shmkv.transformers 2"}, {"length": 0}, {"length": 21}, {"length": None}, {"kinds": 5}, {"kinds": [[1, 2]]},
    {"layers": [9]}, {"room": float("inf")}, {"layers": [[0]]},
    {"kinds": [["full attention", 0, [1], [1, 2], "float32"]]},
])
def test_a_header_that_is_none(kit: Any, change: dict[str, object]) -> None:
    values = json.loads(kit.Header.new(kit.ModelLayout("m", (kit.EVEN,)), 20, 7).pack().rstrip(b"\0"))
    with pytest.raises(LLMParamError, match="the row was not made by handoff"):
        kit.Header.unpack(json.dumps({**values, **change}).encode())
    del values[next(iter(change))]
    with pytest.raises(LLMParamError, match="the row was not made by handoff"):
        kit.Header.unpack(json.dumps(values).encode())


@pytest.mark.parametrize("raw", [b"", b"\0" * 8192, b"[1]", b"\xff" * 64, b"[" * 8192])
def test_bytes_that_are_no_header(kit: Any, raw: bytes) -> None:
    with pytest.raises(LLMParamError, match="the row was not made by handoff"):
        kit.Header.unpack(raw)


def test_differences_are_told_from_the_outside_in(kit: Any) -> None:
    one = kit.ModelLayout("a", (kit.EVEN, kit.NEAR))
    assert one.difference(kit.ModelLayout("a", (kit.EVEN, kit.NEAR))) is None
    assert one.difference(kit.ModelLayout("b", (kit.EVEN,))) == ("2 layers", "1 layers")
    assert one.difference(kit.ModelLayout("b", (kit.EVEN, kit.EVEN))) == (f"layer 1: {kit.NEAR}", f"layer 1: {kit.EVEN}")
    assert one.difference(kit.ModelLayout("b", (kit.EVEN, kit.NEAR))) == ("model a", "model b")
