"""What this connector was written against: versions of vLLM, names that it imports, and the calls of the base class with the names
of their parameters.

vLLM says of that class that it may change. `differences` compares it with what is here, so that a newer vLLM fails in a test with a
sentence, and not in an engine with wrong tokens. Knows no vLLM: classes, versions and names are given.
"""
from __future__ import annotations

import importlib
import inspect
import re

FIRST, BEYOND = (0, 32), (0, 33)
TESTED_VERSIONS = f"vllm >= {FIRST[0]}.{FIRST[1]}, < {BEYOND[0]}.{BEYOND[1]}"
Calls = dict[str, tuple[str, ...]]

# Calls that a connector must have.
ABSTRACT: Calls = {
    "start_load_kv": ("forward_context", "kwargs"),
    "wait_for_layer_load": ("layer_name",),
    "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata", "kwargs"),
    "wait_for_save": (),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    "build_connector_meta": ("scheduler_output",),
}
# Calls that it may have, and this one has.
OPTIONAL: Calls = {
    "__init__": ("vllm_config", "role", "kv_cache_config"),
    "register_kv_caches": ("kv_caches",),
    "handle_preemptions": ("kv_connector_metadata",),
    "get_finished": ("finished_req_ids",),
    "get_transfer_results": ("finished_req_ids",),
    "get_block_ids_with_load_errors": (),
    "request_finished": ("request", "block_ids"),
    "get_kv_connector_stats": (),
    "build_kv_connector_stats": ("data",),
    "build_prom_metrics": ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    "requires_piecewise_for_cudagraph": ("extra_config",),
    "reset_cache": (),
    "shutdown": (),
}
# The abstract calls of the second base class, of connectors for models with several KV cache groups.
HYBRID: Calls = {"request_finished_all_groups": ("request", "block_ids")}
# What is imported while the connector is, and so has to be where it was.
NAMES: dict[str, tuple[str, ...]] = {
    "vllm.distributed.kv_transfer.kv_connector.v1.base": (
        "KVConnectorBase_V1", "KVConnectorMetadata", "KVConnectorRole", "KVConnectorTransferResults", "SupportsHMA"),
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": ("KVConnectorPromMetrics", "KVConnectorStats"),
    "vllm.v1.metrics.cache_hit_source": ("CacheHitSource",),
}


def missing(names: dict[str, tuple[str, ...]] = NAMES) -> list[str]:
    """Which of these a module does not have, or cannot be imported from, one sentence each; [] if all are there."""
    found: list[str] = []
    for module, wanted in names.items():
        try:
            there = importlib.import_module(module)
        except ImportError as error:
            found.append(f"{module} cannot be imported: {error}")
            continue
        found += [f"{module} has no {name} any more" for name in wanted if not hasattr(there, name)]
    return [f"{sentence} (written for {TESTED_VERSIONS})" for sentence in found]


def untested(version: str) -> str | None:
    """A sentence about a version that this connector was not tested with; None for one that it was."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and FIRST <= (int(numbers[1]), int(numbers[2])) < BEYOND:
        return None
    return (f"ShmkvConnector was tested with {TESTED_VERSIONS}, and this is {version}: "
            "compare tokens with and without it before you rely on it")


def differences(base: type, hybrid: type) -> list[str]:
    """What is otherwise in the base classes (KVConnectorBase_V1, SupportsHMA), one sentence each; [] if nothing is."""
    found = [*_differences(base, ABSTRACT, OPTIONAL), *_differences(hybrid, HYBRID, {})]
    return [f"{sentence} (written for {TESTED_VERSIONS})" for sentence in found]


def _differences(base: type, must: Calls, may: Calls) -> list[str]:
    found: list[str] = []
    abstract = set(getattr(base, "__abstractmethods__", ()))
    found += [f"{name} is abstract now and ShmkvConnector was written without it" for name in sorted(abstract - must.keys())]
    found += [f"{name} is not abstract any more: does vLLM still call it?" for name in sorted(must.keys() - abstract)]
    for name, expected in {**must, **may}.items():
        call = getattr(base, name, None)
        if call is None:
            found.append(f"{name} is gone: vLLM does not call it any more")
            continue
        names = tuple(name for name in inspect.signature(call).parameters if name != "self")
        if names != expected:
            found.append(f"{name} takes ({', '.join(names)}), ShmkvConnector was written for ({', '.join(expected)})")
    return found
