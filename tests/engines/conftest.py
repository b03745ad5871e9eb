"""Engines that the tests of a module share: each takes half a minute to start."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
from house import SHM, House

from shmkv.cli.gc import clean


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """All engines end well, but those that a test killed, and leave nothing in /dev/shm. What is left where one was killed goes
    by `gc`."""
    house = House(tmp_path_factory.mktemp("engines"))
    yield house
    ends = [(engine.close(), engine.good_status) for engine in house.engines]
    if any(engine.is_killed for engine in house.engines):
        clean(house.namespace)
    left = sorted(path.name for path in SHM.glob(f"{house.namespace}*"))
    for name in left:
        (SHM / name).unlink()
    assert left == []
    assert [status for status, _ in ends] == [good for _, good in ends]
