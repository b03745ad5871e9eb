"""What goes into every key, asked of vLLM's own configuration objects: two engines that differ in anything that the bytes of a
block depend on never meet, and each is told what differs. No engine runs."""
from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import make

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
Describe = Callable[..., Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models: `tiny`, its copy `twin`, and `hybrid`."""
    folder = tmp_path_factory.mktemp("models")
    make("tiny", folder)
    make("hybrid", folder)
    shutil.copytree(folder / "tiny", folder / "twin")
    return folder


def _negate_weights(model: Path) -> None:
    from safetensors.torch import load_file, save_file

    (weights,) = model.glob("*.safetensors")
    save_file({name: -tensor for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})


@pytest.fixture
def describe(models: Path) -> Describe:
    """describe(model, layers=..., block_size=..., **options of the engine): the identity that its connector would have."""
    def identity(model: str, *, layers: int = 2, block_size: int = 128, **options: Any) -> Any:
        from vllm.engine.arg_utils import EngineArgs

        from shmkv.integrations.vllm.from_vllm import identity_of

        config = EngineArgs(str(models / model), max_model_len=1024, enforce_eager=True, skip_tokenizer_init=True,
                            **{"dtype": "bfloat16", **options}).create_engine_config()
        return identity_of(config, _caches(config, layers, block_size))
    return identity


def _caches(config: Any, layers: int, block_size: int) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=32, dtype=config.model_config.dtype)
    groups = [KVCacheGroupSpec([f"layers.{number}" for number in range(layers)], spec)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def test_the_same_engine_twice_is_the_same(describe: Describe) -> None:
    one, other = describe("tiny"), describe("tiny")
    assert one.seed() == other.seed()
    assert one.differences(other.card()) == []


def test_weights_that_were_trained_on_are_others(describe: Describe, models: Path) -> None:
    """In the same folder, under the same name, with the same configuration."""
    shutil.copytree(models / "tiny", models / "trained")
    before = describe("trained")
    _negate_weights(models / "trained")
    assert {line.partition(":")[0] for line in before.differences(describe("trained").card())} == {"weight_files"}


@pytest.mark.parametrize(("model", "options", "named"), [
    ("tiny", {"dtype": "float32"}, {"weights", "cache_dtype of group 0", "block_nbytes of group 0"}),
    ("tiny", {"layers": 3}, {"num_layers of group 0"}),
    ("tiny", {"block_size": 64}, {"block_size", "block_nbytes of group 0"}),
    ("twin", {}, {"model", "model_digest"}),
    ("hybrid", {}, {"model", "model_digest", "weight_files"}),
    ("tiny", {"load_format": "dummy"}, {"weight_files"}),
    ("tiny", {"hf_overrides": {"rope_theta": 5000.0}}, {"model_digest"}),
], ids=["dtype", "layers", "block size", "another folder", "another model", "dummy weights", "configuration"])
def test_what_differs_is_in_the_key_and_is_named(describe: Describe, model: str, options: dict[str, Any], named: set[str]) -> None:
    ours, theirs = describe("tiny"), describe(model, **options)
    assert ours.seed() != theirs.seed()
    found = {line.partition(":")[0] for line in ours.differences(theirs.card())}
    assert found == named
    assert {line.partition(":")[0] for line in theirs.differences(ours.card())} == named
