"""vLLM's base classes are what the connector was written against."""
from __future__ import annotations

import pytest

from shmkv.integrations.vllm.contract import differences

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


@pytest.mark.filterwarnings("ignore")
def test_the_base_classes_are_as_they_were() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    from shmkv.integrations.vllm import ShmkvConnector

    assert differences(KVConnectorBase_V1, SupportsHMA) == []
    assert issubclass(ShmkvConnector, (KVConnectorBase_V1, SupportsHMA))
    assert ShmkvConnector.__abstractmethods__ == frozenset()
