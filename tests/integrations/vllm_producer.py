"""The program of a producer without vLLM: publishes blocks of seeded bytes, says what it has, and stays until its stdin ends.

Commands, a JSON list a line: ["store", hashes in hex, block ids], ["forget"], ["collect"], ["state"].
"""
from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from vllm_parts import other_identity, random_layers, run_step, store

from shmkv.integrations.vllm.plans import StepPlan
from shmkv.integrations.vllm.settings import ConnectorSettings
from shmkv.integrations.vllm.sharing import open_shared
from shmkv.integrations.vllm.worker import WorkerSide


def main(settings: dict[str, Any], identity: dict[str, Any], seed: int, shard: int) -> None:
    shared = open_shared(ConnectorSettings.of(settings), other_identity(**identity), consumes=False, produces=True)
    layers = random_layers(16, np.random.default_rng(seed))
    worker = WorkerSide(shared, [layers], other_identity(**identity), shard, consumes=False, produces=True)
    print(json.dumps(shared.endpoint.cluster_id), flush=True)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        answer: Any = None
        if command == "store":
            run_step(worker, store([bytes.fromhex(each) for each in arguments[0]], arguments[1]))
        elif command == "forget":
            run_step(worker, StepPlan(forget=True))
        elif command == "state":
            answer = {**shared.endpoint.manager.stats(), **shared.counters.take()}
        print(json.dumps(answer), flush=True)
    worker.close()
    shared.close()


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
