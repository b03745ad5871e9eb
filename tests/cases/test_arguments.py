"""Field cases FR-049, 074, 076: numbers at the edges of their types, sizes that do not fit 64 bits, all bf16 bits."""
from __future__ import annotations

import hashlib
import itertools
import os
from typing import Any

import numpy as np
import pytest
from peer import SHM, Namespace, Peer, StartPeer, req
from reference import SUCCESS, Pull, canary, expected_pull, geometry, pattern
from shared_bytes import segments_of

pytestmark = pytest.mark.timeout(120)
INVALID, MISSING, WRONG_TYPE = "LLM_PARAM_INVALID", "LLM_KV_CACHE_NOT_EXIST", "TypeError"
ROWS = geometry(4, [2, 64], 1)
NUMBERS = [-2, -1, 0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1, 2**64]
GIVEN: dict[str, Any] = {**{str(number): number for number in NUMBERS}, "True": 1, "1.0": 1.0, "'1'": "1", "None": None,
                         "np.int64(1)": np.int64(1)}
VALUES = list(GIVEN)

# Runs many calls in D and answers each with its outcome and what the destination holds afterwards; the canaries are
# the 64 bytes before the first tensor, which are no tensor's, and every byte that was not asked for.
_MANY = """
import cache_bytes, ctypes, hashlib, reference
cache, manager = agent.caches["kv"], agent.dist.kv_cache_manager
blank = reference.canary(cache_bytes.geometry_of(cache))
before = (ctypes.c_ubyte * 64).from_address(cache.per_device_tensor_addrs[0][0] - 64)
before[:] = [0xA5] * 64
def run(text):
    cache_bytes.write(cache, blank)
    try:
        eval(text)
        outcome = "LLM_SUCCESS"
    except shmkv.LLMException as error:
        outcome = error.status_code.name + ("" if isinstance(error, ValueError) == (error.status_code == 0x5010B005) else "?")
    except TypeError:
        outcome = "TypeError"
    return [outcome, hashlib.sha256(cache_bytes.read(cache).tobytes()).hexdigest()]
result = [run(text) for text in TEXTS]
assert set(before) == {0xA5}, "canary before the destination"
"""


def _run(d: Peer, texts: list[str]) -> list[list[str]]:
    """Outcome and digest of each call, in D; in portions that stay well under the watchdog."""
    found: list[list[str]] = []
    for first in range(0, len(texts), 500):
        found += d.call("execute", code=f"TEXTS = {texts[first:first + 500]!r}\n{_MANY}")
    return found


def _wanted(how: Pull) -> list[str]:
    outcome, after = expected_pull(pattern(ROWS, 1), canary(ROWS), how)
    return [outcome, hashlib.sha256(after.tobytes()).hexdigest()]


def _pull_text(**how: str) -> str:
    given = "".join(f", {name}={value}" for name, value in how.items())
    return f"manager.pull_cache(shmkv.CacheKeyByIdAndIndex(1, 1), cache{given})"


@pytest.fixture
def pair(prompt: StartPeer, decoder: StartPeer) -> tuple[Peer, Peer]:
    p, d = prompt(1), decoder(2)
    for peer in (p, d):
        peer.call("allocate", name="kv", shape=[2, 64], dtype="DT_INT8", keys=[req(1, 1)] if peer is p else [])
    p.call("fill", name="kv", generation=1)
    return p, d


@pytest.mark.parametrize("name", ["size", "batch_index", "src_cache_offset", "dst_cache_offset"])
def test_fr_076_edge_values_of_one_argument(pair: tuple[Peer, Peer], name: str) -> None:
    fixed = {"size": "32"} if name.endswith("offset") else {}
    found = _run(pair[1], [_pull_text(**{**fixed, name: value}) for value in VALUES])
    for value, answer in zip(VALUES, found, strict=True):
        how = Pull(**{**{key: int(text) for key, text in fixed.items()}, name: GIVEN[value]})
        assert answer == _wanted(how), f"{name}={value}: the table of answers equals the documented one"


def test_fr_076_edge_values_of_a_cache_id(pair: tuple[Peer, Peer]) -> None:
    table = {"1": SUCCESS, "True": SUCCESS, **dict.fromkeys(map(str, [2**63, 2**64 - 2, 2**64 - 1, 2**64]), INVALID),
             **dict.fromkeys(["1.0", "'1'", "None", "np.int64(1)"], WRONG_TYPE)}
    found = _run(pair[1], [f"manager.pull_cache(shmkv.CacheKeyByIdAndIndex(1, {value}), cache)" for value in VALUES])
    for value, (outcome, digest) in zip(VALUES, found, strict=True):
        assert outcome == table.get(value, MISSING), f"cache_id={value}"
        full = _wanted(Pull())[1] if outcome == SUCCESS else hashlib.sha256(canary(ROWS).tobytes()).hexdigest()
        assert digest == full, f"cache_id={value}: right bytes or none"


def test_fr_076_edge_values_of_a_request_id(pair: tuple[Peer, Peer]) -> None:
    # An offset keeps the key. Both ids 2**64 - 1 is a key that names nothing.
    table = {"1": SUCCESS, "True": SUCCESS, **dict.fromkeys(map(str, [-2, -1, 2**64 - 1, 2**64]), INVALID),
             **dict.fromkeys(["1.0", "'1'", "None", "np.int64(1)"], WRONG_TYPE)}
    found = _run(pair[1], [f"manager.pull_cache(shmkv.CacheKey(1, {value}), cache, src_cache_offset=0)"
                           for value in VALUES])
    for value, (outcome, digest) in zip(VALUES, found, strict=True):
        assert outcome == table.get(value, MISSING), f"req_id={value}"
        full = _wanted(Pull())[1] if outcome == SUCCESS else hashlib.sha256(canary(ROWS).tobytes()).hexdigest()
        assert digest == full, f"req_id={value}: right bytes or none"


def test_fr_076_offset_plus_size_never_wraps(pair: tuple[Peer, Peer]) -> None:
    offsets = [None, *NUMBERS, 32, 63, 64]
    asked = list(itertools.product([*NUMBERS, 16, 64], offsets, offsets))
    texts = [_pull_text(size=str(size), src_cache_offset=str(src), dst_cache_offset=str(dst))
             for size, src, dst in asked]
    wrong = [(how, answer) for how, answer in zip(asked, _run(pair[1], texts), strict=True)
             if answer != _wanted(Pull(size=how[0], src_cache_offset=how[1], dst_cache_offset=how[2]))]
    assert wrong == [], "offset + size is compared without wrapping"


def _allocate(p: Peer, num_tensors: int, shape: list[int]) -> Any:
    return p.attempt("allocate", name="big", num_tensors=num_tensors, shape=shape, dtype="DT_INT8")


def test_fr_049_products_that_do_not_fit(namespace: Namespace, prompt: StartPeer) -> None:
    p = prompt(1)
    for num_tensors, shape in ((2**16, [2**16, 2**31]), (1, [2**62, 2]), (2, [2**31, 2**31]), (1, [2**61 + 1, 8]),
                               (2**16, [2**16, 2**33]), (8, [2**61 + 1]), (2**32 - 1, [2**62]), (1, [2**63 - 1])):
        answer = _allocate(p, num_tensors, shape)
        assert answer.outcome in (INVALID, "LLM_DEVICE_OUT_OF_MEMORY"), f"{num_tensors} x {shape}"
        assert segments_of(namespace, 1) == [], "never a small segment"
    assert p.outcome("allocate", name="kv") == SUCCESS, "P lives"


def test_fr_049_a_cache_of_more_than_4_gib(namespace: Namespace, prompt: StartPeer) -> None:
    nbytes = 2**32 + 8
    free = os.statvfs(SHM)
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fits = min(free.f_bavail * free.f_frsize, available) > nbytes + (1 << 30)
    p = prompt(1, env={"SHMKV_RECYCLE_BYTES": "0"})
    answer = _allocate(p, 1, [1, nbytes])
    if not fits and answer.outcome != SUCCESS:
        assert answer.outcome == "LLM_DEVICE_OUT_OF_MEMORY", "too little memory on this host is an answer"
        return
    assert answer.outcome == SUCCESS, "works if memory allows"
    (name,) = segments_of(namespace, 1)
    assert os.stat(SHM / name).st_size >= nbytes, "st_size >= 2**32 + 8"
    ends = "a = agent.caches['big'].tensors[0].numpy()\na[0, 0] = 1\na[0, -1] = 2\nresult = [int(a[0, 0]), int(a[0, 8])]"
    assert p.call("execute", code=ends) == [1, 0], "its last byte is not its first one"
    p.call("deallocate", name="big")


_ALL_BITS = """
import ml_dtypes
tensor = agent.caches["kv"].tensors[0]
array = tensor.numpy()
"""


def test_fr_074_every_pattern_of_bfloat16(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d, other = prompt(1), decoder(2), decoder(3)
    for peer, dtype in ((p, "DT_BF16"), (d, "DT_BF16"), (other, "DT_FLOAT16")):
        peer.call("allocate", name="kv", num_tensors=1, shape=[2, 65536], dtype=dtype)
    p.call("execute", code=_ALL_BITS + "bits = np.arange(65536, dtype=np.uint16)\n"
           "array[0].view(np.uint16)[...] = bits\narray[1] = bits[::-1].copy().view(ml_dtypes.bfloat16)")
    kind = d.call("execute", code=_ALL_BITS + "result = [str(array.dtype), array.dtype.itemsize, tensor.nbytes]")
    assert kind == ["bfloat16", 2, 2 * 2 * 65536], "item size 2"
    same = "result = [bool((array[row].view(np.uint16) == np.arange(65536)[::step]).all())"
    for row, step in ((0, 1), (1, -1)):
        for peer in (d, other):
            peer.call("pull", key=["id", 1, 1, row], name="kv", batch_index=row)
            text = _ALL_BITS + same.replace("row", str(row)).replace("step", str(step)) + "]"
            assert peer.call("execute", code=text) == [True], "bit-exact; into float16 it is a copy of bytes"
