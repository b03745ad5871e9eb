"""vLLM's base classes are what the connector was written against."""
from __future__ import annotations

import pytest

from shmkv.integrations.vllm.contract import differences

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


@pytest.mark.filterwarnings("ignore")
def test_the_base_classes_are_as_they_were() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    # First, and with nothing but what it compares: where vLLM has moved a name the connector's own import says only that.
    assert differences(base.KVConnectorBase_V1, getattr(base, "SupportsHMA", object)) == []

    from shmkv.integrations.vllm import ShmkvConnector

    assert issubclass(ShmkvConnector, (base.KVConnectorBase_V1, base.SupportsHMA))
    assert ShmkvConnector.__abstractmethods__ == frozenset()
