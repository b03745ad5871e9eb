"""Bytes really move as the numpy twin says, through every loop, and nothing beside them changes."""
from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import memory
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pull_cases import Case, random_case
from reference import Geometry, Pull, Refused, expected_pull, noise, pull_bytes

from shmkv import _copy, _pull
from shmkv._local import LocalCache

LEAD = 67
CANARY = 0x5A
KERNELS = _copy.supported_kernels()
THRESHOLDS = pytest.mark.parametrize("threshold", [0, 1 << 62], ids=["streaming", "ordinary"])


def every_loop(test: Any) -> Any:
    """With each loop of this processor, streaming from the first byte on and not at all."""
    return THRESHOLDS(pytest.mark.parametrize("kernel", KERNELS)(test))


@pytest.fixture(autouse=True)
def default_loops() -> Iterator[None]:
    yield
    _copy.configure()


class Memory:
    """A cache in one region: `LEAD` canary bytes before, between and after its tensors."""

    def __init__(self, content: Any) -> None:
        self.tensors, outer, rows, inner = content.shape
        self.pitch = outer * rows * inner + LEAD
        self.region = memory.anonymous(LEAD + self.pitch * self.tensors)
        self.bytes = memory.content(self.region)
        self.bytes[:] = CANARY
        self.shape = content.shape
        self.view[...] = content.reshape(self.tensors, -1)
        self.cache = LocalCache(self.region, [
            (LEAD + i * self.pitch, self.pitch - LEAD, outer, rows, inner) for i in range(self.tensors)])

    @property
    def view(self) -> Any:
        return self.bytes[LEAD:].reshape(self.tensors, self.pitch)[:, :self.pitch - LEAD]

    @property
    def content(self) -> Any:
        return self.view.reshape(self.shape)

    def canaries_live(self) -> bool:
        between = self.bytes[LEAD:].reshape(self.tensors, self.pitch)[:, self.pitch - LEAD:]
        return bool((self.bytes[:LEAD] == CANARY).all() and (between == CANARY).all())


def selection(pull: Pull) -> tuple[int, ...]:
    """The numbers of the core for a pull's arguments."""
    per_layer = pull.tensor_num_per_layer

    def tensors(layers: range | None) -> tuple[int, int]:
        return (0, -1) if layers is None else (layers.start * per_layer, len(layers) * per_layer)

    (src_first, src_count), (dst_first, dst_count) = tensors(pull.src_layer_range), tensors(pull.dst_layer_range)
    return memory.select(size=pull.size, src_offset=pull.src_cache_offset or 0, dst_offset=pull.dst_cache_offset or 0,
                         src_row=pull.src_row, dst_row=pull.batch_index, src_first=src_first, src_count=src_count,
                         dst_first=dst_first, dst_count=dst_count)


def breaks_a_layer_rule(case: Case) -> bool:
    """Rules on whole layers are looked at before the core is called."""
    per_layer = case.pull.tensor_num_per_layer
    return per_layer > case.dst.num_tensors or case.dst.num_tensors % per_layer > 0 or case.src.num_tensors % per_layer > 0


def check_against_the_twin(case: Case, seed: int) -> bool:
    """Were bytes moved?"""
    moved = False
    src, before = noise(case.src.geometry, seed), noise(case.dst.geometry, seed + 1)
    source, target = Memory(src), Memory(before)
    _, wanted = expected_pull(src, before, case.pull)
    if case.pull.src_row < case.src.geometry.rows:
        status = _pull.copy(source.cache, target.cache, selection(case.pull), 20000)
        moved = status == 0
        try:
            pull_bytes(src, before, case.pull)
            assert moved
        except Refused:
            wanted = before
            if moved:
                assert breaks_a_layer_rule(case)
                wanted = target.content
    np.testing.assert_array_equal(target.content, wanted)
    np.testing.assert_array_equal(source.content, src)
    assert target.canaries_live()
    return moved


@every_loop
@settings(max_examples=600, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_copies_are_those_of_the_twin(kernel: str, threshold: int, seed: int) -> None:
    _copy.configure(kernel, threshold)
    streamed = _copy.streamed()
    moved = check_against_the_twin(random_case(random.Random(seed).randint), seed)
    assert (_copy.streamed() > streamed) == (moved and threshold == 0)


@every_loop
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_copies_drawn_number_by_number(kernel: str, threshold: int, data: st.DataObject) -> None:
    _copy.configure(kernel, threshold)
    check_against_the_twin(random_case(lambda low, high: data.draw(st.integers(low, high))), seed=5)


@st.composite
def overlaps(draw: st.DrawFn) -> tuple[Geometry, tuple[int, ...]]:
    """Windows of one row of one cache, tensors shifted against each other or not."""
    small = st.integers(1, 4)
    shape = Geometry(draw(st.integers(1, 6)), draw(small), draw(small), draw(st.integers(1, 40)))
    count, length = draw(st.integers(1, shape.num_tensors)), draw(st.integers(1, shape.stride))
    row, offset = draw(st.integers(0, shape.rows - 1)), st.integers(0, shape.stride - length)
    first = st.integers(0, shape.num_tensors - count)
    return shape, memory.select(size=length, src_offset=draw(offset), dst_offset=draw(offset), src_row=row, dst_row=row,
                                src_first=draw(first), src_count=count, dst_first=draw(first), dst_count=count)


def through_a_temporary(before: Any, want: tuple[int, ...]) -> Any:
    size, src_offset, dst_offset, src_row, dst_row, src_first, count, dst_first = want[:8]
    after = before.copy()
    for i in range(count):
        row = after[dst_first + i, :, dst_row, :].reshape(-1)
        row[dst_offset:dst_offset + size] = \
            before[src_first + i, :, src_row, :].reshape(-1)[src_offset:src_offset + size]
        after[dst_first + i, :, dst_row, :] = row.reshape(after.shape[1], after.shape[3])
    return after


@every_loop
@settings(max_examples=600, deadline=None)
@given(case=overlaps(), seed=st.integers(0, 2**32))
def test_overlapping_copies_go_as_if_through_a_temporary(kernel: str, threshold: int, case: tuple[Geometry, tuple[int, ...]],
                                                         seed: int) -> None:
    _copy.configure(kernel, threshold)
    shape, want = case
    before = noise(shape, seed)
    both = Memory(before)
    assert _pull.copy(both.cache, both.cache, want, 20000) == 0
    np.testing.assert_array_equal(both.content, through_a_temporary(before, want))
    assert both.canaries_live()


@every_loop
def test_every_loop_moves_every_length(kernel: str, threshold: int) -> None:
    _copy.configure(kernel, threshold)
    for length in (1, 2, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257, 1000, 4095, 4096, 4097, 70001):
        for lead in (0, 1, 16, 31):
            shape = Geometry(2, 1, 1, length + lead)
            src, before = noise(shape, length), noise(shape, length + 1)
            source, target = Memory(src), Memory(before)
            want = memory.select(size=length, src_offset=lead, dst_offset=lead // 2)
            assert _pull.copy(source.cache, target.cache, want, 20000) == 0
            expected = before.copy()
            expected[:, :, :, lead // 2:lead // 2 + length] = src[:, :, :, lead:]
            assert (target.content == expected).all(), (length, lead)
            assert target.canaries_live()


@pytest.mark.parametrize("kernel", ["auto", *KERNELS])
def test_copies_of_several_chunks_arrive_whole(kernel: str) -> None:
    _copy.configure(kernel)
    shape = Geometry(3, 2, 2, (1 << 20) + 12)
    src = noise(shape, 3)
    source, target = Memory(src), Memory(np.zeros(tuple(shape), np.uint8))
    assert _pull.copy(source.cache, target.cache, memory.select(src_row=1), 20000) == 0
    assert (target.content[:, :, 0] == src[:, :, 1]).all()
    assert not target.content[:, :, 1].any()


def big_case(seed: int) -> tuple[Geometry, Geometry, tuple[int, ...]]:
    """A selection of 8 to 24 MiB between layouts that have nothing in common but room for it."""
    draw = random.Random(seed).randint
    count = draw(1, 40)
    length = draw(8 << 20, 24 << 20) // count
    src_outer, dst_outer = draw(1, 50), draw(1, 3000)
    src = Geometry(count + draw(0, 1), src_outer, draw(1, 2), length // src_outer + draw(1, 100))
    dst = Geometry(count + draw(0, 1), dst_outer, draw(1, 2), length // dst_outer + draw(1, 100))
    return src, dst, memory.select(
        size=length, src_offset=draw(0, src.stride - length), dst_offset=draw(0, dst.stride - length),
        src_row=draw(0, src.rows - 1), dst_row=draw(0, dst.rows - 1), src_first=draw(0, src.num_tensors - count),
        src_count=count, dst_first=draw(0, dst.num_tensors - count), dst_count=count)


def rows(content: Any, row: int, first: int, count: int) -> Any:
    return content[first:first + count, :, row, :].reshape(count, -1)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("seed", range(6))
def test_big_copies_are_shared_out_whole(seed: int, threads: int) -> None:
    _copy.configure(threads=threads)
    src, dst, want = big_case(seed)
    size, src_offset, dst_offset, src_row, dst_row, src_first, count, dst_first = want[:8]
    before = noise(dst, seed + 1)
    source, target = Memory(noise(src, seed)), Memory(before)
    assert _pull.copy(source.cache, target.cache, want, 20000) == 0
    found = rows(target.content, dst_row, dst_first, count)
    moved = rows(source.content, src_row, src_first, count)[:, src_offset:src_offset + size]
    assert np.array_equal(found[:, dst_offset:dst_offset + size], moved)
    found[:, dst_offset:dst_offset + size] = rows(before, dst_row, dst_first, count)[:, dst_offset:dst_offset + size]
    rest = target.content.copy()
    rest[dst_first:dst_first + count, :, dst_row, :] = found.reshape(count, dst.outer, dst.inner)
    assert np.array_equal(rest, before)
    assert target.canaries_live()


def test_big_copies_of_several_threads_at_once() -> None:
    _copy.configure(threads=3)
    shape = Geometry(2, 1, 1, 6 << 20)
    pairs = [(Memory(noise(shape, seed)), Memory(np.zeros(tuple(shape), np.uint8))) for seed in range(3)]
    answers: list[int] = []

    def work(source: Memory, target: Memory) -> None:
        for _ in range(5):
            target.content[...] = 0
            answers.append(_pull.copy(source.cache, target.cache, memory.select(), 20000))
            answers.append(0 if np.array_equal(source.content, target.content) else 1)

    threads = [threading.Thread(target=work, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [0] * 30


def test_overlap_of_several_chunks_goes_through_a_temporary() -> None:
    shape = Geometry(2, 1, 1, 9 << 20)
    before = noise(shape, 4)
    both = Memory(before)
    want = memory.select(size=(9 << 20) - 4096, dst_offset=4096)
    assert _pull.copy(both.cache, both.cache, want, 20000) == 0
    assert (both.content[..., 4096:] == before[..., :-4096]).all()
    assert (both.content[..., :4096] == before[..., :4096]).all()


def test_loops_of_this_processor() -> None:
    assert KERNELS
    assert {"c", "memcpy"} <= set(KERNELS)
    assert len(set(KERNELS)) == len(KERNELS)


def test_configure_names_what_it_accepts() -> None:
    with pytest.raises(ValueError, match=r"kernel 'fast' is not one of auto, .*memcpy"):
        _copy.configure("fast")
    for threshold in (-1, 1 << 63):
        with pytest.raises(ValueError, match="streaming threshold must be 0 to"):
            _copy.configure("auto", threshold)
    for threads in (0, 257):
        with pytest.raises(ValueError, match=f"copy threads must be 1 to 256, not {threads}"):
            _copy.configure(threads=threads)
    _copy.configure("memcpy", 77, 3)
    chosen = _copy.current()
    assert (chosen["kernel"], chosen["nt_threshold"], chosen["threads"]) == ("memcpy", 77, 3)
    _copy.configure()
    assert _copy.current()["nt_threshold"] == _copy.DEFAULT_NT_THRESHOLD


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kernel", ["", *KERNELS])
def test_run_list_carries_its_runs_out(kernel: str, streaming: bool) -> None:
    source, target = memory.anonymous(4096), memory.anonymous(4096)
    memory.content(source)[:] = np.arange(4096) % 251
    runs = [(0, 100, 64), (1000, 0, 7), (64, 2000, 1024)]
    _copy.RunList(runs, source.base, target.base, kernel=kernel, streaming=streaming).copy()
    expected = np.zeros(4096, np.uint8)
    for src, dst, nbytes in runs:
        expected[dst:dst + nbytes] = memory.content(source, src, nbytes)
    np.testing.assert_array_equal(memory.content(target), expected)


def test_run_list_of_an_unknown_loop_is_refused() -> None:
    with pytest.raises(ValueError, match="kernel 'fast'"):
        _copy.RunList([], 0, 0, kernel="fast")
