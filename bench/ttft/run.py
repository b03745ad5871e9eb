"""Time to the first token and to the last one, of two engines that share blocks and of those that do not.

    make test-engines       # once, for .venv-engines
    .venv-engines/bin/python bench/ttft/run.py one        # then: recompute, shmkv, example
    .venv-engines/bin/python bench/ttft/run.py report

Each way has fresh engines of SmolLM2-135M-Instruct with a thread each; what was measured is kept below TTFT_RESULTS (default: the
temporary folder), and `report` prints it as a table. A request goes to the first engine for one token and then to the second one,
as a proxy sends it; both times are from its beginning. `example` is vLLM's own connector by files in a folder, here in /dev/shm.
"""
from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "engines"))
engines: Any = importlib.import_module("engine")
models: Any = importlib.import_module("models")

LENGTHS = (128, 512, 1024, 2048, 4096)
NEW_TOKENS = 16
REPEATS = 3
RESULTS = Path(os.environ.get("TTFT_RESULTS", tempfile.gettempdir())) / "shmkv-ttft"
STORAGE = Path("/dev/shm/ttft-example-storage")
WAYS = ("one", "recompute", "shmkv", "example")
NAMES = {"one": "one engine", "recompute": "two, each computes", "shmkv": "two, ShmkvConnector", "example": "two, ExampleConnector"}


def connector(way: str, role: str) -> dict[str, Any] | None:
    if way == "shmkv":
        return {"kv_role": role, "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"capacity_bytes": 2 << 30}}
    if way == "example":
        return {"kv_connector": "ExampleConnector", "kv_connector_module_path": None, "kv_role": role,
                "kv_connector_extra_config": {"shared_storage_path": str(STORAGE)}}
    return None


def start(way: str, folder: Path) -> list[Any]:
    """The engines of a way, in the order in which a request goes through them."""
    model = RESULTS / "smollm2"
    if not model.is_dir():
        models.make("smollm2", RESULTS)
    roles = ["kv_both"] if way == "one" else ["kv_producer", "kv_consumer"]
    made = [engines.Engine(folder, role, model, f"ttft-{os.getpid()}", connector(way, role), max_model_len=LENGTHS[-1] + 128,
                           max_num_batched_tokens=LENGTHS[-1] + 128) for role in roles]
    return [each.wait_until_ready() for each in made]


def measure(made: list[Any], tokens: int, seed: int) -> tuple[float, float]:
    """(seconds to the first token, seconds to the last)."""
    prompt = random.Random(seed).choices(range(1000, 40_000), k=tokens)
    begun = time.perf_counter()
    for before in made[:-1]:
        before.call("timed", prompt=prompt, max_tokens=1)
    there = time.perf_counter() - begun
    first, last = made[-1].call("timed", prompt=prompt, max_tokens=NEW_TOKENS)
    return there + first, there + last


def run(way: str) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    STORAGE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        made = start(way, Path(folder))
        try:
            measure(made, LENGTHS[0], 0)        # what each engine does only once
            found = {tokens: [measure(made, tokens, 1 + place * REPEATS + repeat) for repeat in range(REPEATS)]
                     for place, tokens in enumerate(LENGTHS)}
            hits = made[-1].counted("hit_tokens")
        finally:
            for each in made:
                each.close()
            shutil.rmtree(STORAGE, ignore_errors=True)
    (RESULTS / f"{way}.json").write_text(json.dumps({"times": found, "hit_tokens": hits}))


def report() -> None:
    """Medians, a row a length."""
    there = {way: json.loads(path.read_text()) for way in WAYS if (path := RESULTS / f"{way}.json").exists()}
    print("| tokens of the prompt | " + " | ".join(f"{NAMES[way]}: first, last token" for way in there) + " |")
    print("| ---: |" + " ---: |" * len(there))
    for tokens in LENGTHS:
        cells = []
        for found in there.values():
            firsts, lasts = zip(*found["times"][str(tokens)], strict=True)
            cells.append(f"{statistics.median(firsts) * 1000:.0f}, {statistics.median(lasts) * 1000:.0f} ms")
        print(f"| {tokens} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    report() if sys.argv[1] == "report" else run(sys.argv[1])
