"""What a model keeps for a token, found by letting it keep one.

Configurations of models name their shapes in many ways, and what is cached need not be what they name: a model with latent
attention keeps latents. So one token goes through the model, into a cache of transformers' own, and the shapes are read there.
"""
from __future__ import annotations

import hashlib
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from shmkv.data_type import DataType
from shmkv.errors import LLMParamError
from shmkv.integrations.transformers.forward import cache_argument
from shmkv.integrations.transformers.layouts import FULL, SLIDING, LayerLayout, ModelLayout

SAMPLED = 16        # elements of each tensor of weights that tell one model from another

_known: WeakKeyDictionary[Any, ModelLayout] = WeakKeyDictionary()


def layout_of(model: Any, model_id: str | None = None) -> ModelLayout:
    """The layers of `model`; found by a forward of one token at the first call for that model.

    `model_id` is what tells it from others. Without one it is the model's type and a sum over samples of all its weights, which
    two processes have in common when they loaded the same model in the same element type.

    Raises:
        LLMParamError: a layer whose states are not keys and values alone, named; a model that is not on the CPU, or has an encoder.
    """
    layout = _known.get(model)
    if layout is None:
        layout = _known[model] = ModelLayout(_fingerprint(model), _probe(model))
    return layout if model_id is None else layout._replace(model=model_id)


def _probe(model: Any) -> tuple[LayerLayout, ...]:
    name = type(model).__name__
    if model.device.type != "cpu":
        raise LLMParamError(f"{name} is on {model.device}: keys and values in shared memory need a model on the CPU")
    if getattr(model.config, "is_encoder_decoder", False):
        raise LLMParamError(f"{name} has an encoder, whose states are not handed over: only models with a decoder alone")
    cache = DynamicCache(config=model.config)
    layers = _keeping(cache.layers)
    for number, layer in enumerate(layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise LLMParamError(f"layer {number} of {name} is kept by a {type(layer).__name__}: only full and sliding attention "
                                "can be handed over")
    arguments = {"input_ids": torch.zeros((1, 1), dtype=torch.int64), "use_cache": True, cache_argument(model): cache}
    with torch.no_grad():
        model(**arguments)
    return tuple(_layer(name, number, layer) for number, layer in enumerate(layers))


def _keeping(layers: list[Any]) -> list[Any]:
    """Those that keep something: the last ones of a model may use the keys and values of others, for which later releases of
    transformers (5.24) have a placeholder, and earlier ones (5.19) nothing."""
    count = len(layers)
    while count and type(layers[count - 1]).__name__ == "DummyLayer":
        count -= 1
    return layers[:count]


def _layer(name: str, number: int, layer: Any) -> LayerLayout:
    keys, values = layer.keys, layer.values
    found = [None if tensor is None else (tuple(tensor.shape), str(tensor.dtype)) for tensor in (keys, values)]
    if keys is None or values is None or any(tensor.dim() != 4 or tensor.shape[2] != 1 for tensor in (keys, values)) \
            or keys.dtype != values.dtype:
        raise LLMParamError(f"layer {number} of {name} keeps {found[0]} and {found[1]} for one token, expected keys and values of "
                            "[1, heads, 1, dim] and of one element type")
    dtype = str(keys.dtype).removeprefix("torch.")
    DataType.named(dtype)       # LLMParamError for what has no name here
    is_sliding = type(layer) is DynamicSlidingWindowLayer
    return LayerLayout(SLIDING if is_sliding else FULL, int(layer.sliding_window) if is_sliding else 0,
                       (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3]), dtype)


def _fingerprint(model: Any) -> str:
    """The model's type and a sum over its parameters and buffers: names, shapes, element types, a few elements of each."""
    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        if tensor.numel() and tensor.device.type == "cpu":
            flat = tensor.detach().reshape(-1)
            step = max(1, flat.numel() // SAMPLED)
            digest.update(flat[::step][:SAMPLED].contiguous().view(torch.uint8).numpy().tobytes())
    return f"{model.config.model_type}-{digest.hexdigest()[:16]}"
