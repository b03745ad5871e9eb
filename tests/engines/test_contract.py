"""vLLM's base class is what the connector was written against."""
from __future__ import annotations

import pytest

from shmkv.integrations.vllm.contract import differences

pytestmark = pytest.mark.engines


@pytest.mark.filterwarnings("ignore")
def test_the_base_class_is_as_it_was() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from shmkv.integrations.vllm import ShmkvConnector

    assert differences(KVConnectorBase_V1) == []
    assert issubclass(ShmkvConnector, KVConnectorBase_V1)
    assert ShmkvConnector.__abstractmethods__ == frozenset()
