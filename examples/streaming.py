"""Layer by layer: the decoder gets each layer of the KV cache while the prefill computes the next one.

    python examples/streaming.py [--layers 32] [--ms-a-layer 10] [--ms-to-decode 3]

The plain call starts two programs, this file with `--role prompt` and with `--role decoder`. The prompt's "prefill" takes a while
for each layer, fills its K and V and marks it; the decoder waits for the key, before it is even bound, takes the layers as they
come, and works on each as soon as it has it, while the prompt computes the next ones. Both print when; the clock is
CLOCK_MONOTONIC, so their times can be compared. The last line says how long after the last mark the decoder was through all layers:
that is its work on one layer and a little more, and not the transfer of the whole cache and the work on all of them.
"""
from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np

from shmkv import CacheDesc, CacheKey, DataType, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole

PROMPT_CLUSTER, DECODER_CLUSTER = 1, 2
TENSORS_A_LAYER = 2
ROW = [1, 8, 512, 64]           # batch, heads, tokens, head size


def start_engine(role: LLMRole, cluster_id: int) -> LLMDataDist:
    """An initialised cluster of this process."""
    config = LLMConfig()
    config.sync_kv_timeout = 60_000
    engine = LLMDataDist(role, cluster_id)
    engine.init(config.generate_options())
    return engine


def say(who: str, text: str) -> None:
    """One line of the timeline; whole lines, since two processes write."""
    sys.stdout.write(f"{time.monotonic() * 1000:.3f} {who} {text}\n")
    sys.stdout.flush()


def prefill(layers: int, ms_a_layer: float) -> None:
    """The prompt's side."""
    engine = start_engine(LLMRole.PROMPT, PROMPT_CLUSTER)
    manager = engine.kv_cache_manager
    sys.stdin.readline()                        # the decoder is linked and waits
    desc = CacheDesc(TENSORS_A_LAYER * layers, ROW, DataType.DT_FLOAT16)
    cache = manager.allocate_cache(desc, [CacheKey(PROMPT_CLUSTER, req_id=7)], publish=False)
    done = manager.layer_publisher(cache, rows=[0])
    say("prefill", "begins")
    for layer in range(layers):
        time.sleep(ms_a_layer / 1000)           # attention and so on
        for tensor in range(TENSORS_A_LAYER * layer, TENSORS_A_LAYER * (layer + 1)):
            cache.tensors[tensor].numpy()[0] = tensor
        say("prefill", f"marks {layer}")        # before it does: whoever waits for the mark is woken by it
        done(layer)
    sys.stdin.readline()                        # the decoder has all
    engine.finalize()


def attend(tensors: Sequence[np.ndarray], first: int, ms_to_decode: float) -> None:
    """The decoder's work on one layer: it reads K and V, looks whether they are what was computed, and takes a while."""
    for number, tensor in enumerate(tensors, first):
        if not np.all(tensor == number):
            raise SystemExit(f"tensor {number} has wrong bytes")
    time.sleep(ms_to_decode / 1000)


def decode(layers: int, ms_to_decode: float) -> None:
    """The decoder's side."""
    engine = start_engine(LLMRole.DECODER, DECODER_CLUSTER)
    manager = engine.kv_cache_manager
    peer = LLMClusterInfo()
    peer.remote_cluster_id = PROMPT_CLUSTER
    peer.append_local_ip_info("127.0.0.1", 1)   # checked for form, never used
    peer.append_remote_ip_info("127.0.0.1", 1)
    status, _ = engine.link_clusters([peer], timeout=20_000)
    if status != 0:
        raise SystemExit(f"no link: {status}")
    cache = manager.allocate_cache(CacheDesc(TENSORS_A_LAYER * layers, ROW, DataType.DT_FLOAT16))
    say("decoder", "waits")
    arrays = [view.numpy()[0] for view in cache.tensors]
    for layer in manager.pull_layers(CacheKey(PROMPT_CLUSTER, req_id=7), cache):
        say("decoder", f"decodes layer {layer}")
        first = TENSORS_A_LAYER * layer
        attend(arrays[first:first + TENSORS_A_LAYER], first, ms_to_decode)
        say("decoder", f"is through layer {layer}")
    engine.finalize()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--ms-a-layer", type=float, default=10.0)
    parser.add_argument("--ms-to-decode", type=float, default=3.0, help="the decoder's work on a layer")
    parser.add_argument("--role", choices=["prompt", "decoder"], help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.role == "prompt":
        prefill(given.layers, given.ms_a_layer)
    elif given.role == "decoder":
        decode(given.layers, given.ms_to_decode)
    else:
        both(given.layers, given.ms_a_layer, given.ms_to_decode)


def both(layers: int, ms_a_layer: float, ms_to_decode: float) -> None:
    """Start the two programs and print one timeline."""
    def start(role: str) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, "--role", role, "--layers", str(layers), "--ms-a-layer", str(ms_a_layer),
                   "--ms-to-decode", str(ms_to_decode)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                env={"SHMKV_NAMESPACE": f"streaming-{os.getpid()}", **os.environ})

    prompt, decoder = start("prompt"), start("decoder")
    assert prompt.stdin is not None
    assert prompt.stdout is not None
    assert decoder.stdout is not None
    lines = [decoder.stdout.readline()]         # it waits
    prompt.stdin.write("go\n")
    prompt.stdin.flush()
    lines += decoder.stdout.readlines()
    prompt.stdin.write("enough\n")
    prompt.stdin.flush()
    lines += prompt.stdout.readlines()
    if (prompt.wait(), decoder.wait()) != (0, 0):
        raise SystemExit("one of the two failed")
    show(sorted((float(at), who, text.rstrip()) for at, who, text in (line.split(" ", 2) for line in lines)))


def show(events: list[tuple[float, str, str]]) -> None:
    """The timeline in ms from the beginning of the prefill, and what is left to do at its end."""
    begins = next(at for at, who, text in events if text == "begins")
    for at, who, text in events:
        print(f"{at - begins:9.2f} ms  {'' if who == 'prefill' else ' ' * 24}{who} {text}")
    last_mark = max(at for at, who, text in events if text.startswith("marks"))
    through = [at for at, who, text in events if text.startswith("is through layer")]
    if min(through) >= last_mark:
        raise SystemExit("the decoder has not worked on layer 0 before the last layer was marked")
    print(f"decode is through {max(through) - last_mark:.2f} ms after the last layer was marked, "
          f"{last_mark - begins:.0f} ms after the prefill began; "
          f"through {sum(at < last_mark for at in through)} of {len(through)} layers before that mark")


if __name__ == "__main__":
    main()
