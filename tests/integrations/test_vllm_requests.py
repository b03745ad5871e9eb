"""From vLLM's objects to plain values, as far as that goes without vLLM: objects with the same names in them."""
from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shmkv.integrations.vllm.block_keys import block_hashes
from shmkv.integrations.vllm.from_vllm import prompt_of, reads_prefixes, weight_files_of
from shmkv.integrations.vllm.weights import UNKNOWN, Adapters, weights_of


def request(lora: Any = None, **more: Any) -> Any:
    given = {"prompt_token_ids": [1, 2, 3, 4], "prompt_embeds": None, "lora_request": lora, "mm_features": None, "cache_salt": None,
             "sampling_params": SimpleNamespace(), **more}
    return SimpleNamespace(**given)


def config(model: Path, draft: Path | None = None, load_format: str = "auto", seed: int = 0) -> Any:
    models = [SimpleNamespace(model=str(each), revision=None, seed=seed) for each in (model, draft) if each is not None]
    return SimpleNamespace(
        model_config=models[0], load_config=SimpleNamespace(load_format=load_format, download_dir=None),
        speculative_config=None if draft is None else SimpleNamespace(draft_model_config=models[1]))


def weights(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    return folder


@pytest.mark.parametrize(("said", "reads"), [
    ({}, True),
    ({"skip_reading_prefix_cache": False}, True),
    ({"skip_reading_prefix_cache": True}, False),
    ({"sampling_params": None}, True),
    ({"sampling_params": SimpleNamespace(prompt_logprobs=None)}, True),
    ({"sampling_params": SimpleNamespace(prompt_logprobs=0)}, False),
    ({"sampling_params": SimpleNamespace(prompt_logprobs=None, prompt_logprob_token_ids=[5])}, False),
    # What the request says itself counts more.
    ({"sampling_params": SimpleNamespace(prompt_logprobs=1), "skip_reading_prefix_cache": False}, True),
])
def test_a_request_that_asks_something_of_each_token_reads_nothing(said: dict[str, Any], reads: bool) -> None:
    assert reads_prefixes(request(**said)) is reads


def test_the_weights_of_an_adapter_are_in_its_blocks(tmp_path: Path) -> None:
    def hashes_of(adapters: Adapters) -> list[bytes]:
        prompt = prompt_of(request(SimpleNamespace(lora_name="a", lora_path=str(folder))), adapters)
        assert prompt is not None
        return block_hashes(b"seed", prompt, 4)

    folder = weights(tmp_path / "adapter", b"one")
    engine = Adapters()
    before = hashes_of(engine)
    assert hashes_of(engine) == hashes_of(Adapters()) == before
    plain = prompt_of(request(), engine)
    assert plain is not None
    assert block_hashes(b"seed", plain, 4) != before
    weights(folder, b"two")
    assert prompt_of(request(SimpleNamespace(lora_name="a", lora_path=str(folder))), engine) is None
    assert hashes_of(Adapters()) != before


def test_the_weights_of_a_model_and_of_what_drafts_for_it_are_told_by_their_files(tmp_path: Path) -> None:
    model, draft = weights(tmp_path / "model", b"one"), weights(tmp_path / "draft", b"one")
    alone, both = weight_files_of(config(model)), weight_files_of(config(model, draft))
    assert alone == f"auto: {weights_of(str(model))}"
    assert both == f"{alone}, {weights_of(str(draft))}"
    weights(draft, b"two")
    assert weight_files_of(config(model, draft)) not in (alone, both)
    assert weight_files_of(config(model)) == alone
    weights(model, b"two")
    assert weight_files_of(config(model)) != alone
    assert weight_files_of(config(tmp_path / "nothing")) == f"auto: {UNKNOWN}"


def test_weights_that_are_made_up_are_told_by_their_seed(tmp_path: Path) -> None:
    model = weights(tmp_path, b"one")
    said = [weight_files_of(config(model, load_format="dummy", seed=seed)) for seed in (0, 0, 1)]
    assert said == ["dummy, seed 0", "dummy, seed 0", "dummy, seed 1"]
