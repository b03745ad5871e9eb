"""Memory of the caller as destination of pulls and as either end of local copies: random layouts against numpy."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from caller_memory import DTYPES, KINDS, Memory, Spec, ask, assert_same, within
from peer import Peer, StartPeer, by_id
from reference import (
    PARAM_INVALID,
    SUCCESS,
    Bytes,
    Pull,
    Refused,
    copy_tensors,
    geometry,
    noise,
    pull_tensors,
)

pytestmark = pytest.mark.timeout(300)
Sides = tuple[Peer, Peer]
WAYS = ("pull_cache", "prepare_pull", "pull_many")


@pytest.fixture
def sides(prompt: StartPeer, decoder: StartPeer) -> Sides:
    return prompt(1), decoder(2)


@contextmanager
def source(p: Peer, shape: list[int], dtype: str, num_tensors: int, batch_dim: int, seed: int) -> Iterator[tuple[list[Any], Bytes]]:
    """A cache of P with random bytes: the key of its row 0, and the bytes."""
    cache_id = p.call("allocate", name="source", num_tensors=num_tensors, shape=shape, dtype=dtype, batch_dim=batch_dim)
    p.call("noise", name="source", seed=seed)
    itemsize = DTYPES[dtype].itemsize
    yield by_id(1, cache_id), noise(geometry(num_tensors, shape, itemsize, batch_dim), seed)
    p.call("deallocate", name="source")


@contextmanager
def registered(d: Peer, spec: Spec, name: str = "kv", **how: Any) -> Iterator[Memory]:
    """Memory of D, and its twin here, which the test keeps equal and compares by `assert_same`."""
    within(d, "register", name=name, spec=spec, **how)
    yield Memory(spec)
    within(d, "unregister", name=name)


def random_spec(rng: np.random.Generator, **fixed: Any) -> Spec:
    """Any layout that has these properties."""
    kind = fixed.get("kind", str(rng.choice(KINDS)))
    dims = int(rng.integers(2, 5))
    shape = [int(rng.integers(1, 7)) for _ in range(dims)]
    num_tensors = int(rng.integers(1, 4)) * (2 if kind in ("pairs", "interleaved") else 1)
    made = {"kind": kind, "num_tensors": num_tensors, "shape": shape, "dtype": str(rng.choice(list(DTYPES))),
            "batch_dim": int(rng.integers(0, min(dims, 3))), "pad": int(rng.integers(1, 9)), **fixed}
    return Spec(**made)


# -- pull_cache -----------------------------------------------------------------------------------------------------------

def random_pull(rng: np.random.Generator, spec: Spec, rows: int) -> Pull:
    """Mostly what fits: a window, a range of single tensors, or the whole row."""
    _, _, dst_rows, _ = spec.geometry
    stride, chosen = spec.geometry.stride, {"src_row": int(rng.integers(rows)), "batch_index": int(rng.integers(dst_rows))}
    if rng.integers(3):
        src, dst = (int(rng.integers(stride)) for _ in range(2))
        chosen |= {"src_cache_offset": src, "dst_cache_offset": dst}
        chosen["size"] = int(rng.integers(1, stride - max(src, dst) + 2)) if rng.integers(4) else -1
    if rng.integers(3) == 0:
        first = int(rng.integers(spec.num_tensors))
        chosen |= {"src_layer_range": range(first, first + 1), "dst_layer_range": range(spec.num_tensors - 1, spec.num_tensors),
                   "tensor_num_per_layer": 1}
    return Pull(**chosen)


def test_pulls_into_any_layout(sides: Sides, rng: np.random.Generator, rounds: Callable[[int], int]) -> None:
    p, d = sides
    answers = set()
    for number in range(rounds(60)):
        spec = random_spec(rng, kind=KINDS[number % len(KINDS)])
        src_batch = int(rng.integers(0, 2)) if spec.batch_dim < 2 else 0
        row = spec.geometry.stride // DTYPES[spec.dtype].itemsize
        shape = [3, row] if src_batch == 0 else [1, 3, row]
        with source(p, shape, spec.dtype, spec.num_tensors, src_batch, number) as (key, sent), registered(d, spec) as twin:
            for _ in range(5):
                how = random_pull(rng, spec, 3)
                answer = ask(d, "pull", key=[*key[:3], how.src_row], name="kv", how=str(rng.choice(WAYS)), **how.options())
                try:
                    twin.put(pull_tensors(sent, twin.tensors, how))
                    wanted = SUCCESS
                except Refused as refusal:
                    wanted = str(refusal)
                assert answer.outcome == wanted, f"{spec} {how}: {answer.text}"
                answers.add(wanted)
            assert_same(d, "kv", twin, f"{spec}")
    assert answers == {SUCCESS, PARAM_INVALID}


def test_some_of_the_heads(sides: Sides, rng: np.random.Generator, rounds: Callable[[int], int]) -> None:
    """(rows, tokens, heads, dim) and (rows, heads, tokens, dim); the rows' dim may be the second one."""
    p, d = sides
    for number in range(rounds(40)):
        heads, src_heads = int(rng.integers(1, 7)), int(rng.integers(1, 7))
        count = int(rng.integers(1, min(heads, src_heads) + 1))
        first = [int(rng.integers(0, all_ - count + 1)) for all_ in (src_heads, heads)]
        groups, each = int(rng.integers(1, 4)), int(rng.integers(1, 6))
        spec = random_spec(rng, kind=KINDS[number % len(KINDS)], batch_dim=0, shape=[3, groups, heads, each])
        if number % 2:
            spec = random_spec(rng, kind=KINDS[number % len(KINDS)], batch_dim=1, shape=[groups, 3, heads, each])
        nbytes = each * DTYPES[spec.dtype].itemsize
        with (source(p, [2, groups, src_heads, each], spec.dtype, spec.num_tensors, 0, number) as (key, sent),
              registered(d, spec) as twin):
            heads_of = {"head_dim_index": 2, "src_heads": src_heads, "src_head_range": range(first[0], first[0] + count),
                        "dst_head_range": range(first[1], first[1] + count)}
            answer = ask(d, "pull", key=[*key[:3], 1], name="kv", how=WAYS[number % 3], batch_index=2, heads=heads_of)
            assert answer.outcome == SUCCESS, answer.text
            for place, tensor in enumerate(twin.tensors):
                row = np.ascontiguousarray(tensor[:, 2]).reshape(groups, heads, nbytes)
                found = sent[place][:, 1].reshape(groups, src_heads, nbytes)
                row[:, first[1]:first[1] + count] = found[:, first[0]:first[0] + count]
                tensor[:, 2] = row.reshape(tensor.shape[0], -1)
            assert_same(d, "kv", twin, f"{spec} {heads_of}")


# -- pull_blocks ----------------------------------------------------------------------------------------------------------

def move_blocks(src: Bytes, dst: Bytes, pairs: list[tuple[int, int]]) -> None:
    """Row to row, in order."""
    for one, two in pairs:
        dst[:, two] = src[:, one].reshape(-1).reshape(dst[:, two].shape)


def some_blocks(rng: np.random.Generator, src_count: int, dst_count: int) -> tuple[list[int], list[int]]:
    """Lists of one length, the destinations in any order and now and then twice."""
    count = int(rng.integers(1, 2 * min(src_count, dst_count)))
    src, dst = rng.integers(0, src_count, count), rng.integers(0, dst_count, count)
    return [int(block) for block in src], [int(block) for block in dst]


def block_spec(rng: np.random.Generator, number: int) -> Spec:
    return random_spec(rng, kind=KINDS[number % len(KINDS)], batch_dim=0,
                       shape=[int(rng.integers(2, 9)), int(rng.integers(1, 4)), int(rng.integers(1, 20))])


def test_blocks_into_scattered_blocks(sides: Sides, rng: np.random.Generator, rounds: Callable[[int], int]) -> None:
    p, d = sides
    for number in range(rounds(40)):
        spec = block_spec(rng, number)
        shape = [6, *spec.shape[1:]]
        within(p, "allocate_blocks", name="blocks", num_tensors=spec.num_tensors, shape=shape, dtype=spec.dtype, model_id=5)
        p.call("noise", name="blocks", seed=number)
        sent = noise(geometry(spec.num_tensors, shape, DTYPES[spec.dtype].itemsize), number)
        with registered(d, spec, blocks=bool(number % 3)) as twin:
            src, dst = some_blocks(rng, 6, spec.shape[0])
            within(d, "pull_blocks", key=["blocks", 1, 5], name="kv", prompt_blocks=src, decoder_blocks=dst)
            for place, tensor in enumerate(twin.tensors):
                move_blocks(sent[place], tensor, list(zip(src, dst, strict=True)))
            for wrong in ({"prompt_blocks": [6], "decoder_blocks": [0]},
                          {"prompt_blocks": [0], "decoder_blocks": [spec.shape[0]]}):
                assert ask(d, "pull_blocks", key=["blocks", 1, 5], name="kv", **wrong).outcome == PARAM_INVALID
            assert_same(d, "kv", twin, f"{spec} {src} {dst}")
        p.call("deallocate", name="blocks")


def test_a_row_into_scattered_blocks(sides: Sides, rng: np.random.Generator, rounds: Callable[[int], int]) -> None:
    p, d = sides
    for number in range(rounds(40)):
        spec = block_spec(rng, number)
        dst = [int(block) for block in rng.permutation(spec.shape[0])[:int(rng.integers(1, spec.shape[0] + 1))]]
        block = spec.geometry.stride
        elements = block // DTYPES[spec.dtype].itemsize
        with (source(p, [2, len(dst) + 1, elements], spec.dtype, spec.num_tensors, 0, number) as (key, sent),
              registered(d, spec, blocks=True) as twin):
            within(d, "pull_blocks", key=[*key[:3], 1], name="kv", prompt_blocks=[], decoder_blocks=dst)
            for place, tensor in enumerate(twin.tensors):
                chunks = sent[place][0, 1].reshape(-1, block)
                move_blocks(chunks[None], tensor, list(enumerate(dst)))
            assert_same(d, "kv", twin, f"{spec} {dst}")


def test_blocks_into_a_row(sides: Sides, rng: np.random.Generator, rounds: Callable[[int], int]) -> None:
    """P has blocks, D a registered cache with long rows, whose batch dim may be the second one."""
    p, d = sides
    for number in range(rounds(40)):
        blocks, chunks, elements = int(rng.integers(1, 6)), int(rng.integers(1, 6)), int(rng.integers(1, 12))
        batch_dim = number % 2
        spec = random_spec(rng, kind=KINDS[number % len(KINDS)], batch_dim=batch_dim,
                           shape=[chunks, 3, elements] if batch_dim else [3, chunks, elements])
        shape = [blocks, elements]
        within(p, "allocate_blocks", name="blocks", num_tensors=spec.num_tensors, shape=shape, dtype=spec.dtype, model_id=5)
        p.call("noise", name="blocks", seed=number)
        sent = noise(geometry(spec.num_tensors, shape, DTYPES[spec.dtype].itemsize), number)
        src = [int(block) for block in rng.integers(0, blocks, int(rng.integers(1, chunks + 1)))]
        with registered(d, spec) as twin:
            within(d, "pull_blocks", key=["blocks", 1, 5], name="kv", prompt_blocks=src, decoder_blocks=[], batch_index=2)
            for place, tensor in enumerate(twin.tensors):
                row = np.ascontiguousarray(tensor[:, 2]).reshape(chunks, -1)
                row[:len(src)] = sent[place][0, src]
                tensor[:, 2] = row.reshape(tensor.shape[0], -1)
            assert_same(d, "kv", twin, f"{spec} {src}")
        p.call("deallocate", name="blocks")


# -- copies inside the process --------------------------------------------------------------------------------------------

def filled(d: Peer, twin: Memory, name: str, seed: int) -> None:
    within(d, "put_noise", name=name, seed=seed)
    twin.put(noise(twin.spec.geometry, seed))


def test_copy_cache_between_two_layouts(sides: Sides, rng: np.random.Generator, rounds: Callable[[int], int]) -> None:
    _, d = sides
    for number in range(rounds(40)):
        one = random_spec(rng, kind=KINDS[number % len(KINDS)])
        pairs = one.num_tensors % 2 == 0
        two = random_spec(rng, kind=str(rng.choice([kind for kind in KINDS if pairs or kind not in ("pairs", "interleaved")])),
                          num_tensors=one.num_tensors, dtype=one.dtype)
        with registered(d, one, "one") as src, registered(d, two, "two") as dst:
            filled(d, src, "one", number)
            filled(d, dst, "two", number + 1000)
            for names in (("two", "one"), ("one", "one"), ("one", "two")):
                memories = {"one": src, "two": dst}
                into, out_of = memories[names[0]], memories[names[1]]
                rows = int(rng.integers(out_of.rows)), int(rng.integers(into.rows))
                least = min(one.geometry.stride, two.geometry.stride)
                offset = int(rng.integers(least))
                size = int(rng.integers(1, least - offset + 1))
                within(d, "copy_cache", dst=names[0], src=names[1], dst_batch_index=rows[1], src_batch_index=rows[0],
                       offset=offset, size=size)
                into.put(copy_tensors(out_of.tensors, into.tensors, rows, offset, size))
            assert_same(d, "one", src, f"{one} {two}")
            assert_same(d, "two", dst, f"{one} {two}")


def test_copies_between_registered_and_shared_memory(sides: Sides, rng: np.random.Generator) -> None:
    _, d = sides
    for number, kind in enumerate(KINDS):
        spec = random_spec(rng, kind=kind, batch_dim=0)
        d.call("allocate", name="shared", num_tensors=spec.num_tensors, shape=list(spec.shape), dtype=spec.dtype)
        d.call("noise", name="shared", seed=number)
        shared = noise(spec.geometry, number)
        with registered(d, spec) as twin:
            filled(d, twin, "kv", number + 100)
            within(d, "copy_cache", dst="kv", src="shared", dst_batch_index=spec.shape[0] - 1)
            twin.put(copy_tensors(shared, twin.tensors, (0, spec.shape[0] - 1), 0, -1))
            within(d, "copy_cache", dst="shared", src="kv", dst_batch_index=0, src_batch_index=spec.shape[0] - 1)
            shared = np.stack(copy_tensors(twin.tensors, shared, (spec.shape[0] - 1, 0), 0, -1))
            np.testing.assert_array_equal(d.read("shared"), shared)
            assert_same(d, "kv", twin, f"{spec}")
        d.call("deallocate", name="shared")


def test_copy_blocks_in_registered_memory(sides: Sides, rng: np.random.Generator, rounds: Callable[[int], int]) -> None:
    """In the order of the dict, each copy seeing the earlier ones."""
    _, d = sides
    for number in range(rounds(30)):
        spec = block_spec(rng, number)
        with registered(d, spec, blocks=True) as twin:
            filled(d, twin, "kv", number)
            pairs = [(int(rng.integers(spec.shape[0])), [int(block) for block in rng.integers(0, spec.shape[0], 3)])
                     for _ in range(3)]
            info = dict(pairs)
            within(d, "copy_blocks", name="kv", info=info)
            for tensor in twin.tensors:
                move_blocks(tensor, tensor, [(one, two) for one, targets in info.items() for two in targets])
            assert ask(d, "copy_blocks", name="kv", info={0: [1, spec.shape[0]]}).outcome == PARAM_INVALID
            assert_same(d, "kv", twin, f"{spec} {info}")


def test_swap_blocks_out_of_and_into_private_memory(sides: Sides, rng: np.random.Generator, rounds: Callable[[int], int]) -> None:
    """The one with placement HOST is registered as well, in another layout and with another number of blocks."""
    _, d = sides
    for number in range(rounds(30)):
        spec = block_spec(rng, number)
        pairs = spec.num_tensors % 2 == 0
        kind = str(rng.choice([kind for kind in KINDS if pairs or kind not in ("pairs", "interleaved")]))
        host = random_spec(rng, kind=kind, batch_dim=0, num_tensors=spec.num_tensors, dtype=spec.dtype,
                           shape=[int(rng.integers(2, 6)), *spec.shape[1:]])
        with registered(d, spec, blocks=True) as device, registered(d, host, "host", placement="HOST") as twin:
            filled(d, device, "kv", number)
            out = dict(zip(*some_blocks(rng, spec.shape[0], host.shape[0]), strict=True))
            within(d, "swap_blocks", src="kv", dst="host", src_to_dst=out)
            back = dict(zip(*some_blocks(rng, host.shape[0], spec.shape[0]), strict=True))
            within(d, "swap_blocks", src="host", dst="kv", src_to_dst=back)
            for here, there in zip(device.tensors, twin.tensors, strict=True):
                move_blocks(here, there, list(out.items()))
                move_blocks(there, here, list(back.items()))
            assert ask(d, "swap_blocks", src="kv", dst="kv", src_to_dst={0: 1}).outcome == PARAM_INVALID
            assert ask(d, "copy_cache", dst="kv", src="host").outcome == PARAM_INVALID, "HOST is for swap_blocks alone"
            assert_same(d, "kv", device, f"{spec} {host}")
            assert_same(d, "host", twin, f"{spec} {host}")


@pytest.mark.parametrize("shift", [0, 1, 8, 24, 32, 100])
def test_two_registrations_of_one_memory(sides: Sides, shift: int) -> None:
    """Copies between them, whatever they share, are as if through a temporary."""
    _, d = sides
    base, twin = _OVERLAPPING.format(shift=shift), np.frombuffer(np.random.default_rng(3).bytes(512), np.uint8).copy()
    d.call("execute", code=base)
    views = [twin[begin:begin + 256].reshape(8, 32) for begin in (0, shift)]
    for src, dst, rows in (("one", "two", (2, 1)), ("two", "one", (2, 3)), ("one", "two", (0, 0)), ("two", "one", (7, 6))):
        within(d, "copy_cache", dst=dst, src=src, dst_batch_index=rows[1], src_batch_index=rows[0])
        views[dst == "two"][rows[1]] = views[src == "two"][rows[0]].copy()
        assert bytes(d.call("execute", code="result = agent.shared.tolist()")) == twin.tobytes(), f"{src} to {dst}"
    for src, dst, pairs in (("one", "host", {0: 1, 1: 0, 7: 7}), ("host", "two", {3: 2, 2: 4, 4: 3})):
        within(d, "swap_blocks", src=src, dst=dst, src_to_dst=pairs)
        read = views[0 if src == "one" else 1].copy()
        for one, two in pairs.items():
            views[1][two] = read[one]
        assert bytes(d.call("execute", code="result = agent.shared.tolist()")) == twin.tobytes(), f"{src} to {dst}"


_OVERLAPPING = """
agent.shared = np.frombuffer(np.random.default_rng(3).bytes(512), np.uint8).copy()
def register(name, begin, placement="DEVICE"):
    desc = shmkv.CacheDesc(1, [8, 32], shmkv.DataType.DT_UINT8, shmkv.Placement[placement])
    agent.caches[name] = agent.dist.kv_cache_manager.register_cache(desc, agent.shared[begin:begin + 256])
register("one", 0)
register("two", {shift})
register("host", {shift}, "HOST")
"""
