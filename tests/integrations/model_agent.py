"""What another process of a test does with models: one function a command, called through the agent's `execute`.

Caches are called by names that the test chose, models by their family and what is changed of it.
"""
from __future__ import annotations

import hashlib
import os
import signal
from typing import Any

import tiny_models
import torch

from shmkv.integrations import transformers as integration
from shmkv.integrations.transformers import exchange

caches: dict[str, Any] = {}
headers: dict[str, Any] = {}


def _model(spec: dict[str, Any]) -> Any:
    return tiny_models.kept(**spec)


def _forward(model: Any, cache: Any, rows: list[list[int]], **options: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.tensor(rows), **{integration.cache_argument(model): cache}, **options).logits


def load(agent: Any, model: dict[str, Any]) -> str:
    """Make a model before it is needed."""
    return str(integration.layout_of(_model(model)).model)


def new_cache(agent: Any, cache: str, model: dict[str, Any], tokens: int, rows: int = 1) -> None:
    caches[cache] = integration.ShmCache(_model(model), agent.dist.kv_cache_manager, tokens, rows)


def feed(agent: Any, cache: str, model: dict[str, Any], ids: list[int]) -> int:
    """Append tokens to a cache of one row; what the model says next."""
    return int(_forward(_model(model), caches[cache], [ids])[0, -1].argmax())


def feed_rows(agent: Any, cache: str, model: dict[str, Any], rows: list[list[int]]) -> list[int]:
    """The same for a cache of several rows, all fed as many tokens."""
    return list(_forward(_model(model), caches[cache], rows)[:, -1].argmax(-1).tolist())


def feed_and_die(agent: Any, cache: str, model: dict[str, Any], ids: list[int], layer: int) -> None:
    """The same, killed when the forward comes to a layer."""
    _model(model).model.layers[layer].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    feed(agent, cache, model, ids)


def greedy(agent: Any, cache: str, model: dict[str, Any], first: int, steps: int) -> list[int]:
    """`first` and `steps` tokens behind it."""
    tokens = [first]
    for _ in range(steps):
        tokens.append(feed(agent, cache, model, [tokens[-1]]))
    return tokens


def generate(agent: Any, cache: str, model: dict[str, Any], ids: list[int], steps: int) -> list[int]:
    """What transformers' own generate says behind `ids`, all but the last of which the cache may hold already."""
    return _generate(_model(model), ids, steps, caches[cache])


def alone(agent: Any, model: dict[str, Any], ids: list[int], steps: int) -> list[int]:
    """What one process says that does everything, with a cache of transformers' own."""
    return _generate(_model(model), ids, steps, None)


def _generate(model: Any, ids: list[int], steps: int, cache: Any) -> list[int]:
    told = {} if cache is None else {integration.cache_argument(model): cache}
    tokens = torch.tensor([ids])
    said = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=steps, pad_token_id=0,
                          **told)
    return list(said[0, len(ids):].tolist())


def handoff(agent: Any, cache: str, key: list[Any], **how: Any) -> int:
    return integration.handoff(caches[cache], _key(key), **how)


def receive(agent: Any, cache: str, key: list[Any], model: dict[str, Any], **how: Any) -> list[int]:
    caches[cache] = integration.receive(_key(key), _model(model), agent.dist.kv_cache_manager, **how)
    return list(caches[cache].lengths)


def receive_fork(agent: Any, cache: str, key: list[Any], model: dict[str, Any], **how: Any) -> list[int]:
    caches[cache] = integration.receive_fork(_key(key), _model(model), agent.dist.kv_cache_manager, **how)
    return list(caches[cache].lengths)


def receive_into(agent: Any, cache: str, key: list[Any], **how: Any) -> int:
    return integration.receive_into(_key(key), caches[cache], **how)


def look(agent: Any, header: str, key: list[Any], model: dict[str, Any]) -> int:
    """The first half of a receive: its header, kept for `bring`."""
    headers[header] = exchange.read_header(_key(key), agent.dist.kv_cache_manager, integration.layout_of(_model(model)))
    return headers[header].length


def bring(agent: Any, header: str, cache: str, key: list[Any]) -> None:
    """The second half."""
    exchange._bring(_key(key), caches[cache], 0, 0, headers[header])


def set_lengths(agent: Any, cache: str, lengths: list[int]) -> None:
    caches[cache].set_lengths(lengths)


def lengths(agent: Any, cache: str) -> list[int]:
    return list(caches[cache].lengths)


def resume(agent: Any, cache: str) -> None:
    caches[cache].resume()


def close(agent: Any, cache: str) -> None:
    caches.pop(cache).close()


def digest(agent: Any, cache: str, row: int = 0, first: int = 0, stop: int | None = None) -> str:
    """Of the bytes of tokens of a row, in all layers."""
    found = hashlib.sha256()
    for layer in caches[cache].layers:
        end = layer.filled[row] if stop is None else stop
        for tensor in (layer.keys, layer.values):
            found.update(tensor[row, first:end].contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _key(key: list[Any]) -> Any:
    import agent

    return agent.make_key(key)
