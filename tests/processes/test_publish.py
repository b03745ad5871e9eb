"""Rows are pullable when they are published, keys come and go at run time: seen from another process."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from peer import Peer, StartPeer, by_id, req
from reference import NOT_EXIST, PARAM_INVALID, SUCCESS, geometry, pattern

pytestmark = pytest.mark.timeout(120)
SHAPE: dict[str, Any] = {"num_tensors": 4, "shape": [2, 32], "dtype": "DT_INT8"}
SOURCE = pattern(geometry(4, [2, 32], 1), 1)


@pytest.fixture
def pair(prompt: StartPeer, decoder: StartPeer) -> tuple[Peer, Peer]:
    p, d = prompt(1), decoder(2)
    p.call("allocate", name="kv", keys=[req(1, 1), req(1, 2)], publish=False, **SHAPE)
    p.call("fill", name="kv", generation=1)
    d.call("allocate", name="kv", **SHAPE)
    d.call("canary", name="kv")
    return p, d


def pull(d: Peer, key: list[Any], **how: Any) -> str:
    return d.outcome("pull", key=key, name="kv", **how)


def test_nothing_is_pulled_before_it_is_published(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    assert [pull(d, req(1, 1)), pull(d, by_id(1, 1, 1))] == [NOT_EXIST] * 2
    assert "not published" in d.attempt("pull", key=req(1, 1), name="kv").text
    assert (d.read("kv") == 0x5A).all()
    p.call("publish", name="kv", rows=[1])
    assert [pull(d, req(1, 1)), pull(d, req(1, 2), batch_index=1)] == [NOT_EXIST, SUCCESS]
    np.testing.assert_array_equal(d.read("kv")[:, :, 1], SOURCE[:, :, 1])
    p.call("publish", name="kv")
    assert pull(d, req(1, 1)) == SUCCESS
    np.testing.assert_array_equal(d.read("kv"), SOURCE)


def test_layers_are_published_one_by_one(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    p.call("publish", name="kv", rows=[0], layers=1)
    first, second = {"src_layer_range": range(1), "dst_layer_range": range(1)}, {"src_layer_range": range(1, 2),
                                                                                "dst_layer_range": range(1, 2)}
    assert [pull(d, req(1, 1)), pull(d, req(1, 1), **second)] == [NOT_EXIST] * 2
    assert pull(d, req(1, 1), **first) == SUCCESS
    np.testing.assert_array_equal(d.read("kv")[:2, :, 0], SOURCE[:2, :, 0])
    p.call("publish", name="kv", rows=[0], layers=2)
    assert pull(d, req(1, 1), **second) == SUCCESS
    assert pull(d, req(1, 1)) == NOT_EXIST, "both halves together consumed it"


def test_progress_is_set_and_not_raised(pair: tuple[Peer, Peer]) -> None:
    """`layers` may be less than before, 0 takes the row back. Who pulled a layer keeps that it did."""
    p, d = pair
    layers = [{"src_layer_range": range(each, each + 1), "dst_layer_range": range(each, each + 1)} for each in range(2)]
    p.call("publish", name="kv", layers=2)
    p.call("publish", name="kv", rows=[0], layers=1)
    p.call("publish", name="kv", rows=[0], layers=1)
    answer = d.attempt("pull", key=req(1, 1), name="kv")
    assert (answer.outcome, "not published" in answer.text) == (NOT_EXIST, True)
    assert [pull(d, req(1, 1), **how) for how in layers] == [SUCCESS, NOT_EXIST]
    assert pull(d, req(1, 2), batch_index=1) == SUCCESS, "the other row stays as far as it was"
    p.call("publish", name="kv", rows=[0], layers=0)
    assert [pull(d, key, **layers[0]) for key in (req(1, 1), by_id(1, 1))] == [NOT_EXIST] * 2, "taken back"
    p.call("publish", name="kv", rows=[0], layers=2)
    assert [pull(d, req(1, 1), **layers[1]), pull(d, req(1, 1))] == [SUCCESS, NOT_EXIST], "both layers were pulled"
    np.testing.assert_array_equal(d.read("kv"), SOURCE)


@pytest.mark.parametrize("how", [{"layers": 3}, {"rows": [2]}, {"tensor_num_per_layer": 0}, {"layers": -1}])
def test_publish_checks_its_arguments(pair: tuple[Peer, Peer], how: dict[str, Any]) -> None:
    p, d = pair
    assert p.outcome("publish", name="kv", **how) == PARAM_INVALID
    assert pull(d, req(1, 1)) == NOT_EXIST


def test_key_is_bound_at_run_time(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    p.call("publish", name="kv")
    assert pull(d, req(1, 7)) == NOT_EXIST
    p.call("bind", name="kv", keys=[(0, req(1, 7))])
    assert [pull(d, req(1, 7)), pull(d, req(1, 7)), pull(d, req(1, 1))] == [SUCCESS, NOT_EXIST, NOT_EXIST]
    np.testing.assert_array_equal(d.read("kv")[:, :, 0], SOURCE[:, :, 0])
    assert pull(d, req(1, 2)) == SUCCESS, "the other row kept its key"


def test_row_is_filled_again_under_another_key(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    p.call("publish", name="kv")
    p.call("unbind", name="kv", rows=[0, 1])
    assert [pull(d, req(1, 1)), pull(d, req(1, 2))] == [NOT_EXIST] * 2
    p.call("fill", name="kv", generation=2)
    p.call("bind", name="kv", keys=[(0, req(1, 2)), (1, req(1, 1))])
    again = pattern(geometry(4, [2, 32], 1), 2)
    assert [pull(d, req(1, 2)), pull(d, req(1, 1), batch_index=1)] == [SUCCESS] * 2
    np.testing.assert_array_equal(d.read("kv"), again)


def test_bound_key_is_refused_for_another_row(pair: tuple[Peer, Peer]) -> None:
    p, d = pair
    p.call("publish", name="kv")
    assert p.outcome("bind", name="kv", keys=[(1, req(1, 1))]) == PARAM_INVALID
    assert p.outcome("bind", name="kv", keys=[(2, req(1, 9))]) == PARAM_INVALID
    assert [pull(d, req(1, 1)), pull(d, req(1, 2))] == [SUCCESS] * 2


def test_unpublished_key_frees_its_memory_when_it_is_removed(pair: tuple[Peer, Peer], prompt: StartPeer) -> None:
    p, _ = pair
    code = "import os\nresult = sum(name.startswith(os.environ['SHMKV_NAMESPACE'] + '.c.') for name in os.listdir('/dev/shm'))"
    q = prompt(3, env={"SHMKV_RECYCLE_BYTES": "0"})
    before = q.call("execute", code=code)
    q.call("allocate", name="kv", keys=[req(3, 1)], publish=False, **SHAPE)
    q.call("deallocate", name="kv")
    assert q.call("execute", code=code) == before + 1, "the key keeps it"
    q.call("remove_key", key=req(3, 1))
    assert q.call("execute", code=code) == before
    assert p.call("collect") == 0


def test_nobody_gets_into_a_row_while_it_is_filled_again(pair: tuple[Peer, Peer]) -> None:
    """By cache id neither: between unbind and bind the row holds neither the old bytes nor the new."""
    p, d = pair
    p.call("publish", name="kv")
    assert pull(d, by_id(1, 1)) == SUCCESS
    p.call("unbind", name="kv", rows=[0])
    assert [pull(d, by_id(1, 1)), pull(d, by_id(1, 1, 1))] == [NOT_EXIST, SUCCESS]
    p.call("bind", name="kv", keys=[(0, req(1, 5))])
    assert pull(d, by_id(1, 1)) == SUCCESS, "bind says that it is filled"
