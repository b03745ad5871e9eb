"""How a model is given its cache: the argument has had two names."""
from __future__ import annotations

import inspect
from typing import Any


def cache_argument(model: Any) -> str:
    """What `model`'s forward, and so its `generate`, calls the cache: "cache" in newer versions of transformers, "past_key_values"
    in older ones. TypeError for a model that takes neither."""
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise TypeError(f"the forward of {type(model).__name__} takes neither cache nor past_key_values")
