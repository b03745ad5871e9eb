"""Engines that the tests of a module share: each takes half a minute to start."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
from house import SHM, House

from shmkv.cli.gc import clean


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """All engines end, and nothing is left in /dev/shm but what killed ones could not remove; that goes by `gc`."""
    house = House(tmp_path_factory.mktemp("engines"))
    yield house
    statuses = [engine.close() for engine in house.engines]
    clean(house.namespace)
    assert [path.name for path in SHM.glob(f"{house.namespace}*")] == []
    assert set(statuses) <= {0, -9}
