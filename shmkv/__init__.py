"""KV caches in named shared memory, handed from prompt to decoder processes of one Linux host.

The names and answers are those of the `llm_datadist` Python API, so code written for it runs with one changed import:

    from shmkv import *

or, with no line of it changed, under `shmkv run` or after `install_as_llm_datadist()`.
"""
from __future__ import annotations

import logging

try:
    import shmkv._layout  # noqa: F401
except ModuleNotFoundError as error:        # not every ImportError: a second interpreter of a process has another reason
    raise ImportError("this is the source tree of shmkv, not built for this Python: run elsewhere what was installed by pip, or "
                      "build it here by `make demo` or `pip install -e .`") from error

from shmkv.cache import Cache
from shmkv.cache_manager import CacheManager
from shmkv.cache_task import CacheTask
from shmkv.cache_view import CacheView
from shmkv.cluster_info import LLMClusterInfo
from shmkv.datadist import LLMDataDist
from shmkv.errors import LLMException, LLMNoneError, LLMParamError, LLMStatusCode, Status
from shmkv.heads import HeadSlice
from shmkv.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from shmkv.kv_cache import KvCache
from shmkv.kv_cache_manager import KvCacheManager
from shmkv.options import LLMConfig, LlmConfig
from shmkv.pull_arguments import LastPull, PullRequest
from shmkv.tensor import Tensor, TensorDesc
from shmkv.transfer_config import LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig
from shmkv.types import CacheDesc, DataType, LLMRole, MemInfo, Memtype, Placement, RegisterMemStatus

__version__ = "0.1.0"

# A library does not print: whoever wants the log adds a handler to "shmkv" or to the root.
logging.getLogger("shmkv").addHandler(logging.NullHandler())

__all__ = [
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "CacheManager",
    "CacheTask",
    "CacheView",
    "DataType",
    "HeadSlice",
    "KvCache",
    "KvCacheManager",
    "LLMClusterInfo",
    "LLMConfig",
    "LLMDataDist",
    "LLMException",
    "LLMNoneError",
    "LLMParamError",
    "LLMRole",
    "LLMStatusCode",
    "LastPull",
    "LayerSynchronizer",
    "LlmConfig",
    "MemInfo",
    "Memtype",
    "Placement",
    "PullRequest",
    "RegisterMemStatus",
    "Status",
    "Tensor",
    "TensorDesc",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
]


def get_include() -> str:
    """Folder with the .pxd and .h files, for extensions that cimport shmkv."""
    from pathlib import Path

    return str(Path(__file__).parent)


def install_as_llm_datadist(*, stub_npu: bool = False) -> None:
    """From now on `import llm_datadist` and `import llm_datadist_v1` give this library, in this process alone. Twice is no error.

    Processes of multiprocessing by spawn or forkserver import the main module again: call this at its top, before the imports of
    llm_datadist and not under ``if __name__ == "__main__"``. `stub_npu`: see docs/llm_datadist.md.

    Raises:
        LLMException: an llm_datadist was imported before, whose objects would not be those of this library.
    """
    from shmkv.llm_datadist import install

    install(stub_npu=stub_npu)
