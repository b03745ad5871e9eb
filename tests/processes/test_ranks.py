"""Tensor-parallel ranks, each a process of its own: own halves, slices of all heads, all heads out of halves, rows for slices.

A row is (layers, tokens, heads, dim) or (layers, heads, tokens, dim); what a rank holds afterwards is compared with numpy's slice.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from peer import Namespace, Peer, StartPeer, heads, prefix, req
from reference import NOT_EXIST, PARAM_INVALID, SUCCESS

pytestmark = pytest.mark.timeout(120)
LAYERS, TOKENS, HEADS, DIM, RANKS = 3, 5, 8, 4, 2
EACH = HEADS // RANKS
ORDERS = {"tokens, heads": 2, "heads, tokens": 1}       # where a row counts its heads
PROMPTS, DECODERS = (11, 12), (21, 22)
TENSORS = 2


def row(heads_dim: int, count: int) -> list[int]:
    """Dims of a row with so many heads."""
    return [LAYERS, TOKENS, count, DIM] if heads_dim == 2 else [LAYERS, count, TOKENS, DIM]


def half(rank: int) -> range:
    """The heads of a rank."""
    return range(rank * EACH, (rank + 1) * EACH)


def elements(peer: Peer, name: str, dims: list[int], place: int = 0) -> Any:
    """Row `place` of a cache of that peer whose batch comes first, as (tensors, *dims) of 16-bit numbers."""
    content = peer.read(name)
    return np.ascontiguousarray(content[:, 0, place]).view(np.uint16).reshape(len(content), *dims)


def sliced(whole: Any, heads_dim: int, rank: int) -> Any:
    """A rank's heads of (tensors, *dims)."""
    return np.take(whole, half(rank), axis=1 + heads_dim)


def allocate(peer: Peer, name: str, shape: list[int], *, seed: int | None = None, **how: Any) -> None:
    """With noise in it, or 0x5A."""
    peer.call("allocate", name=name, num_tensors=TENSORS, shape=shape, **how)
    peer.call("canary", name=name) if seed is None else peer.call("noise", name=name, seed=seed)


def at_once(pulls: Iterable[tuple[Peer, dict[str, Any]]]) -> list[str]:
    """All pulls are on their way before the first one is answered."""
    sent = []
    for peer, arguments in pulls:
        peer.send("pull", **arguments)
        sent.append(peer)
    return [peer.receive().outcome for peer in sent]


@pytest.fixture(params=list(ORDERS.values()), ids=list(ORDERS))
def heads_dim(request: pytest.FixtureRequest) -> int:
    """Dim of a row that counts its heads."""
    return int(request.param)


def test_each_decoder_rank_pulls_its_own_half(prompt: StartPeer, decoder: StartPeer, heads_dim: int) -> None:
    """Two ranks on both sides, ordinary keys: the same request id at each prompt."""
    dims = row(heads_dim, EACH)
    ps, ds = [prompt(each) for each in PROMPTS], [decoder(each, link=PROMPTS) for each in DECODERS]
    for rank, p in enumerate(ps):
        allocate(p, "kv", [2, *dims], seed=rank, keys=[req(PROMPTS[rank], 7), req(PROMPTS[rank], 8)])
    for d in ds:
        allocate(d, "kv", [2, *dims])
    for request, place in ((7, 1), (8, 0)):
        assert at_once((d, {"key": req(PROMPTS[rank], request), "name": "kv", "batch_index": place})
                       for rank, d in enumerate(ds)) == [SUCCESS] * 2
    for rank, (p, d) in enumerate(zip(ps, ds, strict=True)):
        for source, place in ((0, 1), (1, 0)):
            np.testing.assert_array_equal(elements(d, "kv", dims, place), elements(p, "kv", dims, source), err_msg=f"rank {rank}")
        assert d.outcome("pull", key=req(PROMPTS[rank], 7), name="kv") == NOT_EXIST, "each rank's key was consumed"


def test_decoder_ranks_slice_one_key(namespace: Namespace, prompt: StartPeer, decoder: StartPeer, heads_dim: int) -> None:
    """One prompt has all heads: both ranks pull their half of a prefix key and of a request key, which stay until removed."""
    p = prompt(1, env={"SHMKV_RECYCLE_BYTES": "0"})
    ds = [decoder(each) for each in DECODERS]
    whole, own = row(heads_dim, HEADS), row(heads_dim, EACH)
    allocate(p, "kv", [2, *whole], seed=5, keys=[prefix(1, 3), req(1, 7)])
    for d in ds:
        allocate(d, "kv", [2, *own])
    for place, key in enumerate((prefix(1, 3), req(1, 7))):
        for _ in range(2):
            said = at_once((d, {"key": key, "name": "kv", "batch_index": place, "heads": heads(1 + heads_dim, HEADS, half(rank))})
                           for rank, d in enumerate(ds))
            assert said == [SUCCESS] * 2, "the key stays for the other rank"
        for rank, d in enumerate(ds):
            np.testing.assert_array_equal(elements(d, "kv", own, place), sliced(elements(p, "kv", whole, place), heads_dim, rank))
    before = namespace.segments()
    p.call("deallocate", name="kv")
    for key in (prefix(1, 3), req(1, 7)):
        p.call("remove_key", key=key)
        said = at_once((d, {"key": key, "name": "kv", "heads": heads(1 + heads_dim, HEADS, half(0))}) for d in ds)
        assert said == [NOT_EXIST] * 2
    assert len(before - namespace.segments()) == 1, "nothing keeps the memory"


def test_decoder_with_all_heads_puts_halves_together(prompt: StartPeer, decoder: StartPeer, heads_dim: int) -> None:
    ps, d = [prompt(each) for each in PROMPTS], decoder(2, link=PROMPTS)
    whole, own = row(heads_dim, HEADS), row(heads_dim, EACH)
    for rank, p in enumerate(ps):
        allocate(p, "kv", [1, *own], seed=rank, keys=[req(PROMPTS[rank], 7)])
    allocate(d, "kv", [2, *whole])
    d.call("pull", key=req(PROMPTS[1], 7), name="kv", batch_index=1, heads=heads(1 + heads_dim, EACH, None, half(1)))
    found = elements(d, "kv", whole, 1)
    np.testing.assert_array_equal(sliced(found, heads_dim, 1), elements(ps[1], "kv", own))
    assert (sliced(found, heads_dim, 0) == 0x5A5A).all(), "the other rank's heads are untouched"
    d.call("pull", key=req(PROMPTS[0], 7), name="kv", batch_index=1, heads=heads(1 + heads_dim, EACH, range(EACH), half(0)))
    together = np.concatenate([elements(p, "kv", own) for p in ps], axis=1 + heads_dim)
    np.testing.assert_array_equal(elements(d, "kv", whole, 1), together)
    assert (elements(d, "kv", whole, 0) == 0x5A5A).all()
    for rank, p in enumerate(ps):
        p.call("remove_key", key=req(PROMPTS[rank], 7))


def test_threads_of_a_decoder_fill_one_row_from_both_ranks(prompt: StartPeer, decoder: StartPeer, heads_dim: int) -> None:
    """Heads of one row lie between each other; each thread writes its own only."""
    ps, d = [prompt(each) for each in PROMPTS], decoder(2, link=PROMPTS)
    whole, own = row(heads_dim, HEADS), row(heads_dim, EACH)
    for rank, p in enumerate(ps):
        allocate(p, "kv", [1, *own], seed=rank, keys=[req(PROMPTS[rank], 7)])
    allocate(d, "kv", [1, *whole])
    pulls = [("pull", {"key": req(PROMPTS[rank], 7), "name": "kv", "heads": heads(1 + heads_dim, EACH, None, half(rank))})
             for rank in range(RANKS)]
    said = d.parallel([[each] * 50 for each in pulls])
    assert {answer.outcome for batch in said for answer in batch} == {SUCCESS}
    together = np.concatenate([elements(p, "kv", own) for p in ps], axis=1 + heads_dim)
    np.testing.assert_array_equal(elements(d, "kv", whole), together)


def test_other_numbers_of_ranks_on_both_sides(prompt: StartPeer, decoder: StartPeer, heads_dim: int) -> None:
    """2 prompt ranks, 4 decoder ranks: rank r takes heads 2r and 2r + 1, the one half or the other of its prompt's."""
    ps = [prompt(each) for each in PROMPTS]
    ds = [decoder(20 + rank, link=(PROMPTS[rank // 2],)) for rank in range(4)]
    own, quarter = row(heads_dim, EACH), row(heads_dim, 2)
    for rank, p in enumerate(ps):
        allocate(p, "kv", [1, *own], seed=rank, keys=[req(PROMPTS[rank], 7)])
    for d in ds:
        allocate(d, "kv", [1, *quarter])
    assert at_once((d, {"key": req(PROMPTS[rank // 2], 7), "name": "kv",
                        "heads": heads(1 + heads_dim, EACH, range(2 * (rank % 2), 2 * (rank % 2) + 2))})
                   for rank, d in enumerate(ds)) == [SUCCESS] * 4
    for rank, d in enumerate(ds):
        taken = np.take(elements(ps[rank // 2], "kv", own), range(2 * (rank % 2), 2 * (rank % 2) + 2), axis=1 + heads_dim)
        np.testing.assert_array_equal(elements(d, "kv", quarter), taken, err_msg=f"rank {rank}")


# -- rows instead of slices: the batch dimension counts the ranks ---------------------------------------------------------

def by_ranks(heads_dim: int) -> tuple[list[int], int]:
    """Dims with the heads as (ranks, heads of a rank), and where the ranks stand."""
    return ([LAYERS, TOKENS, RANKS, EACH, DIM], 2) if heads_dim == 2 else ([LAYERS, RANKS, EACH, TOKENS, DIM], 1)


def all_heads(peer: Peer, name: str, heads_dim: int) -> Any:
    """(tensors, *dims) with all heads of a cache whose rows are ranks, by its own tensors."""
    shape, _ = by_ranks(heads_dim)
    listed = peer.call("execute", code=f"result = [tensor.numpy().view(np.uint16).reshape(-1).tolist() "
                                       f"for tensor in agent.caches[{name!r}].tensors]")
    assert len(listed[0]) == int(np.prod(shape))
    return np.array(listed, np.uint16).reshape(TENSORS, *row(heads_dim, HEADS))


def test_rows_of_all_heads_are_the_halves(prompt: StartPeer, decoder: StartPeer, heads_dim: int) -> None:
    """Ordinary keys and pulls: each rank's row has a key of its own, which is consumed."""
    p, ds = prompt(1), [decoder(each) for each in DECODERS]
    shape, batch_dim = by_ranks(heads_dim)
    own = row(heads_dim, EACH)
    allocate(p, "kv", shape, seed=3, batch_dim=batch_dim, keys=[req(1, 7, rank) for rank in range(RANKS)])
    for d in ds:
        allocate(d, "kv", [2, *own])
    pulls = [(d, {"key": req(1, 7, rank), "name": "kv", "batch_index": 1}) for rank, d in enumerate(ds)]
    assert [at_once(pulls), at_once(pulls)] == [[SUCCESS] * 2, [NOT_EXIST] * 2]
    whole = all_heads(p, "kv", heads_dim)
    for rank, d in enumerate(ds):
        np.testing.assert_array_equal(elements(d, "kv", own, 1), sliced(whole, heads_dim, rank), err_msg=f"rank {rank}")
        assert (elements(d, "kv", own, 0) == 0x5A5A).all()


def test_halves_are_rows_of_all_heads(prompt: StartPeer, decoder: StartPeer, heads_dim: int) -> None:
    ps, d = [prompt(each) for each in PROMPTS], decoder(2, link=PROMPTS)
    shape, batch_dim = by_ranks(heads_dim)
    own = row(heads_dim, EACH)
    for rank, p in enumerate(ps):
        allocate(p, "kv", [1, *own], seed=rank, keys=[req(PROMPTS[rank], 7)])
    allocate(d, "kv", shape, batch_dim=batch_dim)
    for rank in (1, 0):
        d.call("pull", key=req(PROMPTS[rank], 7), name="kv", batch_index=rank)
    together = np.concatenate([elements(p, "kv", own) for p in ps], axis=1 + heads_dim)
    np.testing.assert_array_equal(all_heads(d, "kv", heads_dim), together)


# -- what goes wrong --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("wrong", [(HEADS + 1, half(1)), (EACH, half(0)), (2 * HEADS, half(1)), (HEADS, range(EACH - 1)),
                                   (HEADS, range(EACH + 1)), (EACH, half(1))], ids=str)
def test_wrong_numbers_of_heads_move_nothing(prompt: StartPeer, decoder: StartPeer, heads_dim: int,
                                             wrong: tuple[int, range]) -> None:
    p, d = prompt(1), decoder(2)
    allocate(p, "kv", [1, *row(heads_dim, HEADS)], seed=1, keys=[req(1, 7)])
    allocate(d, "kv", [1, *row(heads_dim, EACH)])
    answer = d.attempt("pull", key=req(1, 7), name="kv", heads=heads(1 + heads_dim, *wrong))
    assert (answer.outcome, "ValueError" in answer.kinds) == (PARAM_INVALID, True)
    assert (d.read("kv") == 0x5A).all()
    d.call("pull", key=req(1, 7), name="kv", heads=heads(1 + heads_dim, HEADS, half(1)))


def test_fr_056_fewer_heads_than_ranks(prompt: StartPeer, decoder: StartPeer, heads_dim: int) -> None:
    """2 heads for 4 ranks: 2 // 4 heads are refused, and a head that two ranks share is pulled by both."""
    p, ds = prompt(1), [decoder(20 + rank) for rank in range(4)]
    two, one = row(heads_dim, 2), row(heads_dim, 1)
    allocate(p, "kv", [1, *two], seed=1, keys=[req(1, 7)])
    for d in ds:
        allocate(d, "kv", [1, *one])
        answer = d.attempt("execute", code="agent.dist.kv_cache_manager.pull_cache(shmkv.CacheKey(1, 7), agent.caches['kv'], "
                                           f"heads=shmkv.HeadSlice({1 + heads_dim}, 2, range(0, 2 // 4)))")
        assert (answer.outcome, "ValueError" in answer.kinds) == (PARAM_INVALID, True), "no head is an argument error"
        assert (d.read("kv") == 0x5A).all()
    said = at_once((d, {"key": req(1, 7), "name": "kv", "heads": heads(1 + heads_dim, 2, range(rank // 2, rank // 2 + 1))})
                   for rank, d in enumerate(ds))
    assert said == [SUCCESS] * 4
    for rank, d in enumerate(ds):
        shared = np.take(elements(p, "kv", two), [rank // 2], axis=1 + heads_dim)
        np.testing.assert_array_equal(elements(d, "kv", one), shared, err_msg=f"rank {rank}")


def test_fr_045_rank_that_is_missing_fails_alone(prompt: StartPeer, decoder: StartPeer, heads_dim: int) -> None:
    """One prompt rank dies: its half fails with a status, the other half and the rank that comes back are right."""
    ps, d = [prompt(each) for each in PROMPTS], decoder(2, link=PROMPTS)
    whole, own = row(heads_dim, HEADS), row(heads_dim, EACH)
    for rank, p in enumerate(ps):
        allocate(p, "kv", [1, *own], seed=rank, keys=[req(PROMPTS[rank], 7)])
    allocate(d, "kv", [1, *whole])
    ps[1].kill()
    slices = [{"key": req(PROMPTS[rank], 7), "name": "kv", "heads": heads(1 + heads_dim, EACH, None, half(rank))}
              for rank in range(RANKS)]
    assert [d.outcome("pull", **each) for each in slices] == [SUCCESS, "LLM_WAIT_PROCESS_TIMEOUT"]
    found = elements(d, "kv", whole)
    np.testing.assert_array_equal(sliced(found, heads_dim, 0), elements(ps[0], "kv", own))
    assert (sliced(found, heads_dim, 1) == 0x5A5A).all()
    d.call("unlink", ids=[PROMPTS[1]], force=True)
    again = prompt(PROMPTS[1])
    allocate(again, "kv", [1, *own], seed=9, keys=[req(PROMPTS[1], 7)])
    d.call("link", ids=[PROMPTS[1]])
    d.call("pull", **slices[1])
    together = np.concatenate([elements(p, "kv", own) for p in (ps[0], again)], axis=1 + heads_dim)
    np.testing.assert_array_equal(elements(d, "kv", whole), together)
