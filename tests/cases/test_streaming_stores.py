"""Field case FR-070: copies past the cache are fenced before anybody hears that they are done."""
from __future__ import annotations

import re
import shutil
import subprocess
import threading
from collections.abc import Callable

import numpy as np
import pytest
from peer import Namespace, StartPeer, by_id
from reference import SUCCESS
from shared_bytes import SharedFile, segments_of

from shmkv import _copy, _layout

pytestmark = pytest.mark.timeout(120)
STREAMING = re.compile(r"\b(v?movnt(?!dqa)\w*)\b")      # movntdqa is a load
NBYTES = 4 << 20
STREAMS_ALWAYS = {"SHMKV_NT_THRESHOLD": "0"}


def _functions() -> dict[str, list[str]]:
    """Instructions of each function of the extension that copies."""
    listed = subprocess.run(["objdump", "-d", "--no-show-raw-insn", _copy.__file__], capture_output=True, text=True, check=True,
                            timeout=60).stdout
    found: dict[str, list[str]] = {}
    for line in listed.splitlines():
        if head := re.match(r"[0-9a-f]+ <(.+)>:", line):
            found[head[1]] = own = []
        elif line.startswith(" "):
            own.append(line.partition(":")[2].strip())
    return found


def test_fr_070_a_fence_follows_the_last_streaming_store() -> None:
    """Streaming loops are leaves: whoever calls one through the table of kernels fences before it returns, in every path."""
    if shutil.which("objdump") is None:
        pytest.skip("needs objdump")
    functions = _functions()
    streaming = {name for name, code in functions.items() if any(STREAMING.search(line) for line in code)}
    fenced = {name for name, code in functions.items() if any(line.startswith("sfence") for line in code)}
    if {"avx2", "avx512"} & set(_copy.supported_kernels()):
        assert streaming, "the disassembly shows the streaming loops"
    assert all("shmkv_stream_" in name for name in streaming), "streaming stores stand in the leaves alone"
    callers = {name for name, code in functions.items() if name not in streaming and "copy_share" in name and "look" not in name}
    assert callers & fenced, "the function that copies a share fences"
    for name in callers & fenced:
        code = functions[name]
        last_call = max(place for place, line in enumerate(code) if line.startswith(("call ", "call\t")) and "*" in line)
        assert any(line.startswith("sfence") for line in code[last_call:]), "after the last call of a loop"


def test_fr_070_who_sees_the_flag_sees_the_bytes(namespace: Namespace, prompt: StartPeer, decoder: StartPeer,
                                                 rounds: Callable[[int], int]) -> None:
    p, d = prompt(1), decoder(2, env=STREAMS_ALWAYS)
    p.call("allocate", name="kv", num_tensors=1, shape=[8, NBYTES], dtype="DT_INT8")
    p.call("execute", code="agent.caches['kv'].tensors[0].numpy()[...] = np.arange(1, 9, dtype=np.int8)[:, None]")
    d.call("allocate", name="kv", num_tensors=1, shape=[1, NBYTES], dtype="DT_INT8")
    d.call("allocate", name="flag", num_tensors=1, shape=[1, 1], dtype="DT_INT64")
    count = rounds(150)
    data, flag = segments_of(namespace, 2)
    old: list[int] = []
    d.send("execute", code=_PULL_AND_TELL.replace("{count}", str(count)))
    with SharedFile(data) as bytes_of, SharedFile(flag) as flags:
        watch = threading.Thread(target=_watch, args=(bytes_of, flags, count, old))
        watch.start()
        answer = d.receive()
        watch.join()
    assert answer.outcome == SUCCESS, answer.trace
    assert old == [], "0 old bytes"
    assert d.outcome("pull", key=by_id(1, 1), name="kv") == SUCCESS


_PULL_AND_TELL = """
manager, cache, flag = agent.dist.kv_cache_manager, agent.caches["kv"], agent.caches["flag"].tensors[0].numpy()
for number in range(1, {count} + 1):
    manager.pull_cache(shmkv.CacheKeyByIdAndIndex(1, 1, number % 8), cache)
    flag[0, 0] = number
    while flag[0, 0] == number:      # until the watcher has looked
        pass
"""


def _watch(data: SharedFile, flags: SharedFile, count: int, old: list[int]) -> None:
    """For each number that the flag shows: the first and the last 64 bytes are those of its row."""
    start = _layout.SEGMENT_DATA
    flag = np.frombuffer(flags.bytes, np.int64, 1, start)
    seen = np.frombuffer(data.bytes, np.int8, NBYTES, start)
    for number in range(1, count + 1):
        while flag[0] != number:
            pass
        if set(seen[:64].tolist() + seen[-64:].tolist()) != {number % 8 + 1}:
            old.append(number)
        flag[0] = -number
    del flag, seen
