"""Field case FR-041 between two processes: rows and offsets beyond 4 GiB. Test builds leave their segments without pages, so that
only the bytes that are looked at take memory; one test has them all."""
from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import builds
import pytest
from peer import SHM, Namespace, Peer, by_id
from reference import PARAM_INVALID, SUCCESS

pytestmark = pytest.mark.timeout(900)
GIB = 1 << 30
FOUR_GIB = 1 << 32
ROW = FOUR_GIB + 4096
SMALL_NBYTES = 64 << 20

PUT = """
view = agent.caches["kv"].tensors[TENSOR].numpy().reshape(-1)
for begin, content in PIECES:
    view[begin:begin + len(content)] = np.frombuffer(bytes(content), np.uint8).view(np.int8)
"""
GET = """
view = agent.caches["kv"].tensors[TENSOR].numpy().reshape(-1)
result = [view[begin:end].view(np.uint8).tolist() for begin, end in PIECES]
"""


def put(peer: Peer, pieces: dict[int, list[int]], tensor: int = 0) -> None:
    """Write bytes at places of a tensor."""
    peer.call("execute", code=f"TENSOR, PIECES = {tensor}, {list(pieces.items())!r}\n" + PUT)


def get(peer: Peer, *pieces: tuple[int, int], tensor: int = 0) -> Any:
    """The bytes from one place to another, of each pair."""
    return peer.call("execute", code=f"TENSOR, PIECES = {tensor}, {list(pieces)!r}\n" + GET)


@pytest.fixture(scope="module")
def crash_build() -> Path:
    return builds.build("crash")


@pytest.fixture(params=["memory", "pread"])
def sparse(namespace: Namespace, crash_build: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Peer, Peer]]:
    """A prompt and a decoder, linked, whose caches have no pages."""
    env = {**builds.environment("crash", crash_build), "SHMKV_TEST_SPARSE": "1"}
    p = namespace.start_cluster("PROMPT", 1, env)
    d = namespace.start_cluster("DECODER", 2, {**env, "SHMKV_COPY": request.param})
    assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
    yield p, d
    taken = sum(os.stat(SHM / name).st_blocks * 512 for name in namespace.segments())
    assert taken < SMALL_NBYTES, "only what was looked at has pages"


def allocate(p: Peer, d: Peer, *shape: int, batch_dim: int = 0, num_tensors: int = 1) -> None:
    for peer in (p, d):
        peer.call("allocate", name="kv", num_tensors=num_tensors, shape=shape, dtype="DT_INT8", batch_dim=batch_dim)


def test_fr_041_offsets_beyond_32_bits(sparse: tuple[Peer, Peer]) -> None:
    p, d = sparse
    allocate(p, d, 2, ROW)
    offsets = (FOUR_GIB - 8, FOUR_GIB, FOUR_GIB + 1000, ROW - 16)
    for place, (src, dst) in enumerate((src, dst) for src in offsets for dst in offsets):
        wanted = [(place + byte) % 251 + 1 for byte in range(16)]
        put(p, {ROW + src: wanted, ROW + src - FOUR_GIB + 16: [0xEE] * 16, src: [0xDD] * 16})
        # Around the window, and where a wrapped number would land: 4 GiB lower, and both in the other row.
        around = [(max(at - 16, 0), min(at + 32, 2 * ROW)) for at in (ROW + dst, ROW + dst - FOUR_GIB, dst, max(dst - FOUR_GIB, 0))]
        put(d, {begin: [0x5A] * (end - begin) for begin, end in around})
        assert d.outcome("pull", key=by_id(1, 1, 1), name="kv", batch_index=1, size=16, src_cache_offset=src,
                         dst_cache_offset=dst) == SUCCESS
        hit, *others = get(d, *around)
        assert hit == ([0x5A] * 16 + wanted + [0x5A] * 16)[:len(hit)], f"{src} -> {dst}"
        assert {byte for piece in others for byte in piece} == {0x5A}, f"{src} -> {dst}: bytes 4 GiB lower"


@pytest.mark.parametrize("how", [
    {"size": 17, "src_cache_offset": ROW - 16}, {"size": 17, "dst_cache_offset": ROW - 16}, {"dst_cache_offset": ROW},
    {"size": ROW + 1}, {"size": 2**63 - 1, "src_cache_offset": 2**63 - 1}, {"src_cache_offset": FOUR_GIB},
], ids=str)
def test_fr_041_one_byte_too_many(sparse: tuple[Peer, Peer], how: dict[str, int]) -> None:
    p, d = sparse
    allocate(p, d, 2, ROW)
    put(d, {ROW: [0x5A] * 64, 2 * ROW - 64: [0x5A] * 64})
    assert d.outcome("pull", key=by_id(1, 1, 1), name="kv", batch_index=1, **how) == PARAM_INVALID
    assert get(d, (ROW, ROW + 64), (2 * ROW - 64, 2 * ROW)) == [[0x5A] * 64] * 2


def test_fr_041_the_fifth_row_of_a_gib(sparse: tuple[Peer, Peer]) -> None:
    p, d = sparse
    allocate(p, d, 5, GIB)
    put(p, {4 * GIB: list(range(64)), 0: [0xEE] * 64, 5 * GIB - 64: list(range(100, 164)), GIB - 64: [0xEE] * 64})
    put(d, {row * GIB: [0x5A] * 64 for row in range(5)})
    assert d.outcome("pull", key=by_id(1, 1, 4), name="kv", batch_index=4, size=64) == SUCCESS
    assert d.outcome("pull", key=by_id(1, 1, 4), name="kv", batch_index=4, size=64, src_cache_offset=GIB - 64,
                     dst_cache_offset=GIB - 64) == SUCCESS
    assert get(d, (4 * GIB, 4 * GIB + 64), (5 * GIB - 64, 5 * GIB)) == [list(range(64)), list(range(100, 164))]
    assert get(d, *[(row * GIB, row * GIB + 64) for row in range(4)]) == [[0x5A] * 64] * 4
    assert get(d, (GIB - 64, GIB)) == [[0] * 64]


def test_fr_041_pieces_of_a_row_beyond_32_bits(sparse: tuple[Peer, Peer]) -> None:
    p, d = sparse
    inner = 3 * GIB
    allocate(p, d, 2, 2, inner, batch_dim=1, num_tensors=2)
    # Row 1 is the bytes from 3 to 6 GiB and those from 9 to 12: the window lies across the border of the two.
    for tensor in range(2):
        put(p, {2 * inner - 8: list(range(1, 9)), 3 * inner: list(range(9, 17)), 2 * inner: [0xEE] * 16}, tensor)
        put(d, {2 * inner - 16: [0x5A] * 32, 3 * inner - 16: [0x5A] * 48}, tensor)
    assert d.outcome("pull", key=by_id(1, 1, 1), name="kv", batch_index=1, size=16, src_cache_offset=inner - 8,
                     dst_cache_offset=inner - 4) == SUCCESS
    for tensor in range(2):
        assert get(d, (2 * inner - 16, 2 * inner + 16), (3 * inner - 16, 3 * inner + 32), tensor=tensor) == [
            [0x5A] * 12 + list(range(1, 5)) + [0x5A] * 16, [0x5A] * 16 + list(range(5, 17)) + [0x5A] * 20]


def test_fr_041_an_ordinary_build_reserves_every_page(namespace: Namespace) -> None:
    p = namespace.start_cluster("PROMPT", 1, {"SHMKV_TEST_SPARSE": "1"})
    p.call("allocate", name="kv", num_tensors=1, shape=[1, 8 << 20], dtype="DT_INT8")
    (segment,) = namespace.segments()
    assert os.stat(SHM / segment).st_blocks * 512 >= 8 << 20, "the switch is a test build's"


# -- every byte of it -----------------------------------------------------------------------------------------------------

FILL = """
numbers = agent.caches["kv"].tensors[0].numpy().reshape(-1).view(np.uint64)
step = 8 << 20
for begin in range(0, len(numbers), step):
    end = min(begin + step, len(numbers))
    numbers[begin:end] = np.arange(begin, end, dtype=np.uint64) * np.uint64(FACTOR) + np.uint64(7)
"""
COMPARE = """
numbers = agent.caches["kv"].tensors[0].numpy().reshape(-1).view(np.uint64)
step, result = 8 << 20, None
for begin in range(0, len(numbers), step):
    end = min(begin + step, len(numbers))
    wanted = np.arange(begin, end, dtype=np.uint64) * np.uint64(FACTOR) + np.uint64(7)
    wrong = np.flatnonzero(numbers[begin:end] != wanted)
    if len(wrong) and result is None:
        result = begin + int(wrong[0])
"""
FACTOR = f"FACTOR = {0x9E3779B97F4A7C15}\n"
WIDE = 5 * GIB


def _available_nbytes() -> int:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) << 10


@pytest.mark.soak
def test_fr_041_a_row_of_5_gib(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    if _available_nbytes() < 13 * GIB or os.statvfs(SHM).f_bavail * os.statvfs(SHM).f_frsize < 11 * GIB:
        pytest.skip("needs 13 GiB of memory, 11 of them in /dev/shm")
    monkeypatch.setattr("peer.WATCHDOG_S", 300.0)
    p = namespace.start_cluster("PROMPT", 1)
    d = namespace.start_cluster("DECODER", 2, sync_kv_timeout=200000)
    assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
    allocate(p, d, 1, WIDE)
    p.call("execute", code=FACTOR + FILL)
    d.call("pull", key=by_id(1, 1), name="kv")
    assert d.call("execute", code=FACTOR + COMPARE) is None, "the first number of the row that is another"
    put(d, {place - 16: [0x5A] * 48 for place in (FOUR_GIB - 8, FOUR_GIB + 8, 16)})
    d.call("pull", key=by_id(1, 1), name="kv", size=16, src_cache_offset=FOUR_GIB - 8, dst_cache_offset=FOUR_GIB - 8)
    assert get(d, (FOUR_GIB - 8, FOUR_GIB + 8)) == get(p, (FOUR_GIB - 8, FOUR_GIB + 8))
    assert get(d, (FOUR_GIB - 24, FOUR_GIB - 8), (FOUR_GIB + 8, FOUR_GIB + 24), (0, 48)) == [[0x5A] * 16, [0x5A] * 16, [0x5A] * 48]
