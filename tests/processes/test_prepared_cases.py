"""Random pulls between two processes: whatever the plain pull answers and moves, a prepared one does, on its quick way as well."""
from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peer import Peer, StartPeer, by_id, req
from pull_cases import Case, Side, random_case
from pulled_each_way import DESTINATION
from reference import NOT_EXIST, PARAM_INVALID, SUCCESS, Bytes, Pull, canary, expected_pull, noise

pytestmark = pytest.mark.timeout(600)
COPIES = 4                      # of the source: a pull may use its key up, and there are so many steps
MOST_ROWS = 8                   # fewer have the caches of random cases
Command = tuple[str, dict[str, Any]]


def desc(side: Side) -> dict[str, Any]:
    return {"num_tensors": side.num_tensors, "shape": side.shape, "dtype": side.dtype, "batch_dim": side.batch_dim}


def fitting_source(case: Case) -> Side | None:
    """A source out of whose row 0 the case can be pulled, if there is any."""
    pull = case.pull
    layers = pull.dst_layer_range
    tensors = case.dst.num_tensors if layers is None else len(layers) * pull.tensor_num_per_layer
    if pull.src_layer_range is not None:
        tensors = max(pull.src_layer_range.stop * pull.tensor_num_per_layer, 1)
    source = Side(max(tensors, 1), [1, 8192], "DT_INT8", 0)
    said, _ = expected_pull(noise(source.geometry, 1), canary(case.dst.geometry), replace(pull, src_row=0))
    return source if said == SUCCESS else None


class Sides:
    """A prompt with equal sources for each step of a case, and a decoder with the destination."""

    def __init__(self, p: Peer, d: Peer) -> None:
        self.p, self.d = p, d

    def all_work(self, peer: Peer, commands: list[Command]) -> list[Any]:
        answers = peer.batch(commands)
        assert [answer.trace for answer in answers if answer.kinds] == []
        return [answer.value for answer in answers]

    def steps(self, case: Case, by_request: bool, warm: Side | None, seed: int) -> list[list[Any]]:
        """What `pull_each_way` says of the case."""
        rows, sources = case.src.geometry.rows, [f"source{number}" for number in range(COPIES)]
        keys = [[req(1, MOST_ROWS * number + row) for row in range(rows)] for number in range(COPIES)]
        allocate: list[Command] = [("allocate", {"name": name, "keys": keys[number], **desc(case.src)})
                                   for number, name in enumerate(sources)]
        ids = self.all_work(self.p, allocate + [("noise", {"name": name, "seed": seed}) for name in sources])
        warm_key = by_id(1, self.p.call("allocate", name="warm", **desc(warm))) if warm else None
        self.all_work(self.d, [("allocate", {"name": DESTINATION, **desc(case.dst)})])
        wanted = [req(1, MOST_ROWS * number + case.pull.src_row) if by_request else by_id(1, ids[number], case.pull.src_row)
                  for number in range(COPIES)]
        try:
            made: list[list[Any]] = self.d.call("execute", code="from pulled_each_way import pull_each_way\nresult = pull_each_way("
                                                f"agent, {wanted!r}, {warm_key!r}, {case.pull.options()!r})")
            return made
        finally:
            self.d.call("deallocate", name=DESTINATION)
            self.p.batch([("remove_key", {"key": key}) for bound in keys for key in bound])
            self.all_work(self.p, [("deallocate", {"name": name}) for name in [*sources, *(["warm"] if warm else [])]])


def content(step: list[Any], shape: tuple[int, ...]) -> Bytes:
    return np.frombuffer(base64.b64decode(step[3]), np.uint8).reshape(shape)


def with_missing_row(case: Case, missing: bool) -> Case:
    return replace(case, pull=replace(case.pull, src_row=case.src.geometry.rows)) if missing else case


@pytest.mark.parametrize("copy", ["memory", "pread"])
def test_prepared_pulls_answer_and_move_what_plain_ones_do(prompt: StartPeer, decoder: StartPeer, rounds: Callable[[int], int],
                                                           copy: str) -> None:
    sides = Sides(prompt(1), decoder(2, env={"SHMKV_COPY": copy}))
    seen: set[str] = set()

    @settings(max_examples=rounds(80), deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        def draw(low: int, high: int) -> int:
            return data.draw(st.integers(low, high))

        case = with_missing_row(random_case(draw), missing=draw(0, 9) == 0)
        warm, seed = fitting_source(case), draw(0, 99)
        steps = sides.steps(case, draw(0, 1) == 1, warm, seed)
        before = canary(case.dst.geometry)
        said, wanted = expected_pull(noise(case.src.geometry, seed), before, case.pull)
        for number, step in enumerate(steps):
            assert step[0] == said, (number, case)
            assert step[2] == steps[0][2], f"step {number} leaves another key: {case}"
            np.testing.assert_array_equal(content(step, tuple(before.shape)), wanted, err_msg=f"step {number} of {case}")
        # The first call of a prepared object finds the link; each after one that worked goes the quick way.
        assert all(quick for _, quick, _, _ in steps[2 if said == SUCCESS else 3:]), case
        seen.add(said)

    check()
    assert seen >= {SUCCESS, PARAM_INVALID}


def test_refusals_of_a_warm_object_by_hand(prompt: StartPeer, decoder: StartPeer) -> None:
    """The windows that fit only the source it was warm by, one by one."""
    sides = Sides(prompt(1), decoder(2))
    dst, small = Side(4, [2, 64], "DT_INT8", 0), Side(4, [3, 32], "DT_INT8", 0)
    for case, said in [
        (Case(small, dst, Pull()), PARAM_INVALID), (Case(small, dst, Pull(size=33)), PARAM_INVALID),
        (Case(small, dst, Pull(size=16, src_cache_offset=17)), PARAM_INVALID),
        (Case(small, dst, Pull(size=32, src_row=3)), NOT_EXIST), (Case(small, dst, Pull(size=32, src_row=2)), SUCCESS),
        (Case(replace(small, num_tensors=3), dst, Pull(size=8)), PARAM_INVALID),
        (Case(small, dst, Pull(size=8, src_layer_range=range(1, 3), dst_layer_range=range(2))), PARAM_INVALID),
        (Case(replace(small, num_tensors=5), dst, Pull(size=8, src_layer_range=range(1, 2), dst_layer_range=range(1),
                                                       tensor_num_per_layer=4)), PARAM_INVALID),
    ]:
        warm = fitting_source(case)
        assert warm is not None, case
        for by_request in (False, True):
            steps = sides.steps(case, by_request, warm, seed=3)
            assert [step[0] for step in steps] == [said] * 4, case
            assert steps[3][1], "the quick way"
            _, wanted = expected_pull(noise(case.src.geometry, 3), canary(dst.geometry), case.pull)
            for step in steps:
                np.testing.assert_array_equal(content(step, tuple(dst.geometry)), wanted)
