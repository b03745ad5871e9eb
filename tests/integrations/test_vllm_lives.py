"""What an engine's tensors must look like, and what is left of a connector that ended."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peer import Namespace
from vllm_ends import DEADLINE_S, PROGRAM, StartConsumer, StartProducer
from vllm_parts import IDENTITY, hashes, load, run_step

from shmkv import LLMException, LLMParamError
from shmkv.cli.ls import look
from shmkv.integrations.vllm.layers import Layers
from shmkv.integrations.vllm.settings import ConnectorSettings
from shmkv.integrations.vllm.sharing import open_shared


@pytest.mark.parametrize(("tensors", "said"), [
    ({}, "no layers"),
    ({"a": np.zeros((4, 8), np.uint8), "b": np.zeros((4, 9), np.uint8)}, "layer 'b'"),
    ({"a": np.zeros((4, 8), np.uint16)}, "uint16"),
    ({"a": np.zeros((4, 8, 2), np.uint8)}, "layer 'a'"),
    ({"a": np.zeros((4, 16), np.uint8)[:, ::2]}, "not lie in one piece"),
])
def test_tensors_that_cannot_be_moved_are_refused(tensors: dict[str, Any], said: str) -> None:
    with pytest.raises(LLMParamError, match=said):
        Layers(tensors)


def test_two_sides_of_a_process_share_a_cluster_until_the_last_one_ends(namespace: Namespace) -> None:
    settings = ConnectorSettings()
    one, other = (open_shared(settings, IDENTITY, consumes=True, produces=False) for _ in range(2))
    assert one is other
    with pytest.raises(LLMException, match="has a connector already"):
        open_shared(settings, IDENTITY, consumes=True, produces=True)
    one.close()
    assert len(look(namespace.name).clusters) == 1
    other.close()
    assert look(namespace.name).clusters == []
    again = open_shared(settings, IDENTITY, consumes=False, produces=True)
    again.close()


IN_A_CHILD = """
import multiprocessing, sys
from vllm_parts import IDENTITY
from shmkv.integrations.vllm.settings import ConnectorSettings
from shmkv.integrations.vllm.sharing import open_shared

def engine():
    open_shared(ConnectorSettings(), IDENTITY, consumes=True, produces=True)
    sys.exit(0)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=engine)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


def test_a_process_of_multiprocessing_that_ends_leaves_nothing(namespace: Namespace, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(IN_A_CHILD)
    environment = namespace.environment({"PYTHONPATH": str(PROGRAM.parent)})
    done = subprocess.run([sys.executable, str(program)], env=environment, timeout=DEADLINE_S, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert namespace.names() == set()


def test_a_namespace_that_cannot_be_is_said_at_once(namespace: Namespace) -> None:
    with pytest.raises(LLMParamError, match=r"shmkv\.Namespace must be"):
        open_shared(ConnectorSettings(namespace="a b"), IDENTITY, consumes=True, produces=False)


def test_leaving_leaves_no_lease_and_no_link(producer: StartProducer, consumer: StartConsumer, namespace: Namespace) -> None:
    p, names = producer(), hashes(2)
    p.store(names, [5, 6])
    c = consumer()
    c.wait_for(p.cluster_id)
    run_step(c.worker, load(names, [0, 1]))
    c.close()
    (cluster,) = look(namespace.name).clusters
    assert [link["state"] for link in cluster.links] in ([], ["removed"], ["free"])
    assert sum(link[side]["leases"] for link in cluster.links for side in ("initiator", "acceptor")) == 0
