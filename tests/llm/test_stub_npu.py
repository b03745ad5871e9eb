"""`shmkv run --stub-npu` with torch: tensors on addresses of caches, on the shared memory itself and within its bounds."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from peer import Namespace

pytestmark = [pytest.mark.llm, pytest.mark.timeout(300)]
NEEDED = "needs torch: make test-llm installs it"
WATCHDOG_S = 120

# As such programs are written: device and tensors by torch's extension, the cache by its addresses.
PROGRAM = """
import sys
import torch
import torch_npu
import torchair
from llm_datadist import CacheDesc, CacheKey, DataType, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole, LLMStatusCode

role = sys.argv[1]
torch.npu.set_device(1)
assert torch.npu.current_device() == 1
dist = LLMDataDist(LLMRole.PROMPT if role == "prompt" else LLMRole.DECODER, 1 if role == "prompt" else 2)
config = LLMConfig()
config.device_id = 1
config.sync_kv_timeout = 20000
dist.init(config.generate_options())
manager = dist.kv_cache_manager
desc = CacheDesc(num_tensors=4, shape=[2, 64, 3], data_type=DataType.DT_BF16)
key = CacheKey(prompt_cluster_id=1, req_id=5, model_id=0)
cache = manager.allocate_cache(desc, [key] if role == "prompt" else ())
tensors = torchair.llm_datadist.create_npu_tensors(cache.cache_desc.shape, torch.bfloat16, cache.per_device_tensor_addrs[0])
values = torch.randn(4, 64, 3, generator=torch.Generator().manual_seed(9)).bfloat16()
if role == "prompt":
    for tensor, value in zip(tensors, values):
        tensor[0].copy_(value.npu())
    print("ready", flush=True)
    sys.stdin.readline()
else:
    peer = LLMClusterInfo()
    peer.remote_cluster_id = 1
    peer.append_local_ip_info("127.0.0.1", 26000)
    peer.append_remote_ip_info("127.0.0.1", 26000)
    assert dist.link_clusters([peer], 20000)[0] == LLMStatusCode.LLM_SUCCESS
    manager.pull_cache(key, cache, batch_index=1)
    for tensor, value in zip(tensors, values):
        assert torch.equal(tensor[1].cpu(), value) and not tensor[0].any()
    print("right")
dist.finalize()
"""


def command(path: Path, role: str) -> list[str]:
    return [sys.executable, "-m", "shmkv", "run", "--stub-npu", str(path), role]


def test_two_programs_of_an_ascend_host(namespace: Namespace, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason=NEEDED)
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    environment = namespace.environment({})
    with subprocess.Popen(command(path, "prompt"), env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "ready\n"
            done = subprocess.run(command(path, "decoder"), env=environment, capture_output=True, text=True, timeout=WATCHDOG_S)
            assert (done.returncode, done.stdout, done.stderr) == (0, "right\n", "")
            other.communicate("", timeout=WATCHDOG_S)
        finally:
            other.kill()
    assert other.returncode == 0


def test_torch_has_its_npu_however_the_imports_are_ordered(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason=NEEDED)
    path = tmp_path / "program.py"
    for imports in ("torch", "torch_npu, torch", "torch, torchair", "torchair, torch_npu, torch"):
        path.write_text(f"import {imports}\ntorch.npu.set_device('npu:2')\nx = torch.ones(2)\ny = x.npu()\nx += 1\n"
                        "print(torch.npu.current_device(), y.tolist(), type(torch.__loader__).__name__)\n"
                        "try:\n    torch.npu.empty_cache()\nexcept AttributeError as error:\n    print(error)\n")
        done = subprocess.run([*command(path, "")[:-1]], capture_output=True, text=True, timeout=WATCHDOG_S)
        first, last = done.stdout.splitlines()
        assert (done.returncode, first, done.stderr) == (0, "2 [1.0, 1.0] SourceFileLoader", "")
        assert last.startswith("module 'torch_npu.npu' has no attribute 'empty_cache'")


# -- bounds ------------------------------------------------------------------------------------------------------------

@pytest.fixture
def made(here: Any) -> Any:
    """A manager, a cache of three tensors of 16 float32 in this process, and the function."""
    pytest.importorskip("torch", reason=NEEDED)
    from shmkv import CacheDesc, DataType
    from shmkv.npu_stand_in import create_npu_tensors

    manager = here("PROMPT").kv_cache_manager
    return manager, manager.allocate_cache(CacheDesc(3, [4, 4], DataType.DT_FLOAT)), create_npu_tensors


def test_tensors_lie_on_the_memory_itself(made: Any) -> None:
    import torch

    _, cache, create = made
    addresses = cache.per_device_tensor_addrs[0]
    tensors = create([4, 4], torch.float32, addresses)
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    tensors[2].fill_(2.5)
    assert (cache.tensors[2].numpy() == 2.5).all()
    assert not cache.tensors[1].numpy().any()
    [row] = create((2, 2), torch.float32, [addresses[2] + 16])      # a part, at an address within
    row[0, 0] = 7
    assert cache.tensors[2].numpy()[1, 0] == 7
    [other] = create([8], torch.int64, [addresses[1]])              # other elements, as on a device
    other[:] = -1
    assert cache.tensors[1].raw.tobytes() == b"\xff" * 64


@pytest.mark.parametrize(("shape", "shift"), [
    ([5, 4], 0), ([4, 4], 4), ([2], 60), ([1], 3 * 64), ([1], -4), ([2**31 - 1, 2**31 - 1], 0), ([1], 2)])
def test_beyond_the_bounds_is_refused(made: Any, shape: list[int], shift: int) -> None:
    import torch

    _, cache, create = made
    with pytest.raises(ValueError, match="address"):
        create(shape, torch.float32, [cache.per_device_tensor_addrs[0][0], cache.per_device_tensor_addrs[0][0] + shift])


@pytest.mark.parametrize(("shape", "addresses", "error"), [
    ([4, 0], [64], ValueError), ([-1], [64], ValueError), ("4", [64], TypeError), ([4.0], [64], TypeError),
    ([4], 64, TypeError), ([4], ["64"], TypeError), ([4], [-64], ValueError), ([4], [2**80], ValueError), (None, [], TypeError)])
def test_wrong_arguments(made: Any, shape: Any, addresses: Any, error: type[Exception]) -> None:
    import torch

    with pytest.raises(error):
        made[2](shape, torch.float32, addresses)


def test_no_tensors_of_no_addresses(made: Any) -> None:
    import torch

    assert made[2]([4], torch.float32, []) == []


def test_a_deallocated_cache_has_none_and_its_tensors_keep_their_bytes(made: Any) -> None:
    import torch

    manager, cache, create = made
    addresses = list(cache.per_device_tensor_addrs[0])
    [tensor] = create([4, 4], torch.float32, addresses[:1])
    tensor.fill_(3)
    manager.deallocate_cache(cache)
    with pytest.raises(ValueError, match="do not lie within a tensor of a living cache"):
        create([4, 4], torch.float32, addresses[:1])
    again = manager.allocate_cache(cache.cache_desc)
    for view in again.tensors:
        view.numpy()[:] = 9
    assert tensor.tolist() == [[3.0] * 4] * 4


def test_there_is_none_without_an_instance(namespace: Namespace) -> None:
    torch = pytest.importorskip("torch", reason=NEEDED)
    from shmkv import LLMException
    from shmkv.npu_stand_in import create_npu_tensors

    assert os.environ["SHMKV_NAMESPACE"] == namespace.name
    with pytest.raises(LLMException, match=r"before LLMDataDist\.init"):
        create_npu_tensors([4], torch.float32, [64])
