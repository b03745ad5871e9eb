"""vLLM over shmkv: a KV connector that is loaded by name, ``kv_connector_module_path="shmkv.integrations.vllm"``.

Only `connector.py` knows vLLM, and is imported when somebody asks for the connector. The other files take plain data and give plain
data: keys, plans, bytes of layers as numpy arrays.
"""
from __future__ import annotations

from typing import Any

__all__ = ["ShmkvConnector"]


def __getattr__(name: str) -> Any:
    if name != "ShmkvConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from shmkv.integrations.vllm.connector import ShmkvConnector
    except ImportError as error:
        from shmkv.integrations.vllm.contract import missing

        raise ImportError("; ".join(missing()) or str(error)) from error
    return ShmkvConnector
