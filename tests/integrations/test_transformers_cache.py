"""A ShmCache in one process: what the model may do with it, what it may not, and what becomes of its memory."""
from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny_models
from model_peers import need_models
from tiny_models import prompt_ids as ids_of

from shmkv import CacheKey, LLMParamError

pytestmark = [pytest.mark.llm, pytest.mark.timeout(300)]
LENGTH, STEPS = 13, 9


@pytest.fixture
def manager(here: Callable[..., Any]) -> Any:
    need_models()
    return here("PROMPT").kv_cache_manager


@pytest.fixture
def new(manager: Any) -> Iterator[Callable[..., Any]]:
    """new(model, tokens, rows): a ShmCache, closed afterwards."""
    from shmkv.integrations.transformers import ShmCache

    made: list[Any] = []

    def make(model: Any, tokens: int = LENGTH + STEPS, rows: int = 1) -> Any:
        made.append(ShmCache(model, manager, tokens, rows))
        return made[-1]

    yield make
    for cache in made:
        cache.close()


def forward(model: Any, cache: Any, rows: list[list[int]], **options: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor(rows), **told(model, cache), **options).logits


def told(model: Any, cache: Any) -> dict[str, Any]:
    from shmkv.integrations.transformers import cache_argument

    return {cache_argument(model): cache}


def generate(model: Any, rows: list[list[int]], **options: Any) -> list[list[int]]:
    import torch

    tokens = torch.tensor(rows)
    said = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=STEPS, pad_token_id=0, do_sample=False,
                          **options)
    return [list(row[len(rows[0]):]) for row in said.tolist()]


def test_the_core_imports_neither_torch_nor_transformers() -> None:
    code = ("import sys, shmkv, shmkv.integrations, shmkv.__main__\n"
            "sys.exit(bool({'torch', 'transformers', 'shmkv.integrations.transformers'} & set(sys.modules)))")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_forward_writes_the_shared_memory_itself(new: Callable[..., Any]) -> None:
    model = tiny_models.kept("llama")
    cache = new(model)
    forward(model, cache, [ids_of(LENGTH)])
    for layer, (keys, values) in zip(cache.layers, cache.layout.places(), strict=True):
        for tensor, place in ((layer.keys, keys), (layer.values, values)):
            assert tensor.data_ptr() == cache.memory.tensors[place].data_ptr
            assert tensor[0, :LENGTH].abs().min() > 0
            assert not tensor[0, LENGTH:].any()


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_logits_are_those_of_a_cache_of_transformers(new: Callable[..., Any], family: str) -> None:
    import torch
    from transformers import DynamicCache

    model, ids = tiny_models.kept(family), ids_of(LENGTH + STEPS)
    cache, plain = new(model), DynamicCache(config=model.config)
    for first, stop in ((0, 1), (1, 5), (5, 6), (6, LENGTH), (LENGTH, LENGTH + STEPS)):
        ours, theirs = (forward(model, each, [ids[first:stop]]) for each in (cache, plain))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert cache.lengths == [LENGTH + STEPS]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_beam_search_reorders_rows_in_place(new: Callable[..., Any], family: str) -> None:
    model, ids = tiny_models.kept(family), [ids_of(LENGTH)]
    cache = new(model, rows=3)
    addresses = [layer.keys.data_ptr() for layer in cache.layers]
    assert generate(model, ids, num_beams=3, **told(model, cache)) == generate(model, ids, num_beams=3)
    assert [layer.keys.data_ptr() for layer in cache.layers] == addresses


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_tokens_can_be_taken_back(new: Callable[..., Any], family: str) -> None:
    model, ids = tiny_models.kept(family), ids_of(LENGTH)
    cache = new(model)
    wanted = forward(model, cache, [ids])[0, -1].argmax()
    for give_back in (lambda: cache.crop(-5), lambda: cache.crop(LENGTH - 5), lambda: cache.set_lengths([LENGTH - 5])):
        cache.set_lengths([LENGTH])
        forward(model, cache, [[1, 2]])
        cache.crop(-2)
        give_back()
        assert cache.lengths == [LENGTH - 5]
        assert forward(model, cache, [ids[-5:]])[0, -1].argmax() == wanted
    cache.crop(0)
    assert cache.lengths == [LENGTH]
    cache.reset()
    assert cache.lengths == [0]


def test_a_model_with_the_older_name_for_its_cache_is_given_it_by_that(new: Callable[..., Any]) -> None:
    import torch
    from transformers import LlamaForCausalLM

    from shmkv.integrations.transformers import cache_argument, layout_of

    model = tiny_models.kept("llama")

    class Older(LlamaForCausalLM):      # type: ignore[misc]
        def forward(self, input_ids: Any, past_key_values: Any = None, use_cache: bool = True) -> Any:
            return super().forward(input_ids, use_cache=use_cache, **told(model, past_key_values))

    older = Older(model.config).eval()
    older.load_state_dict(model.state_dict())
    assert cache_argument(older) == "past_key_values"
    assert layout_of(older) == layout_of(model)
    cache = new(older)
    forward(older, cache, [ids_of(LENGTH)])
    assert cache.lengths == [LENGTH]
    # It gave positions where newer versions give a number.
    assert cache.layers[0].get_mask_sizes(torch.arange(3)) == cache.layers[0].get_mask_sizes(3) == (LENGTH + 3, 0)
    assert cache.layers[0].get_max_cache_shape() == LENGTH + STEPS
    with pytest.raises(TypeError, match="takes neither cache nor past_key_values"):
        cache_argument(torch.nn.Linear(1, 1))


def tiny(config: str, model: str, **values: Any) -> Any:
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**{**tiny_models.COMMON, **values})).eval()


@pytest.mark.parametrize(("make", "text"), [
    (lambda: tiny("Lfm2Config", "Lfm2ForCausalLM", num_key_value_heads=2, layer_types=["full_attention", "conv"]),
     "layer 1 of Lfm2ForCausalLM is kept by a LinearAttentionLayer"),
    (lambda: tiny("Qwen3NextConfig", "Qwen3NextForCausalLM", num_key_value_heads=2, num_experts=2, moe_intermediate_size=8,
                  shared_expert_intermediate_size=8, layer_types=["linear_attention", "full_attention"]),
     "layer 0 of Qwen3NextForCausalLM is kept by a LinearAttentionLayer"),
    (lambda: tiny("MambaConfig", "MambaForCausalLM", state_size=4),
     "layer 0 of MambaForCausalLM is kept by a LinearAttentionLayer"),
    (lambda: tiny("DeepseekV32Config", "DeepseekV32ForCausalLM", **tiny_models.settings("deepseek_v3")[1], index_n_heads=2,
                  index_head_dim=16, index_topk=4),
     "layer 0 of DeepseekV32ForCausalLM is kept by a DynamicIndexedLayer"),
    (lambda: tiny("T5Config", "T5ForConditionalGeneration", d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2),
     "T5ForConditionalGeneration has an encoder"),
], ids=["conv", "linear", "mamba", "indexer", "encoder"])
def test_layers_that_cannot_be_handed_over_are_named(new: Callable[..., Any], make: Callable[[], Any], text: str) -> None:
    with pytest.raises(LLMParamError, match=text):
        new(make())


def test_a_model_that_is_not_on_the_cpu(new: Callable[..., Any]) -> None:
    with pytest.raises(LLMParamError, match="is on meta: keys and values in shared memory need a model on the CPU"):
        new(tiny_models.make("llama").to("meta"))


def test_states_of_another_shape_or_type_are_refused_before_a_byte(new: Callable[..., Any]) -> None:
    import torch

    cache = new(tiny_models.kept("llama"), rows=2)
    layer, right = cache.layers[1], torch.ones(2, 2, 3, 8)
    for keys, values, text in (
        (right[:1], right, r"layer 1: keys of shape \[1, 2, 3, 8\] and torch.float32, the cache takes \[2, 2, 3, 8\]"),
        (right, right[:, :1], r"layer 1: values of shape \[2, 1, 3, 8\]"),
        (right, right[:, :, :2], r"layer 1: values of shape \[2, 2, 2, 8\]"),
        (right.to(torch.bfloat16), right, "torch.bfloat16, the cache takes"),
    ):
        with pytest.raises(LLMParamError, match=text):
            layer.update(keys, values)
    assert layer.filled == [0, 0]
    assert not layer.keys.any()
    assert not layer.values.any()
    for call in (lambda: cache.batch_repeat_interleave(2), lambda: cache.batch_select_indices(torch.tensor([0]))):
        with pytest.raises(LLMParamError, match="would change the number of rows"):
            call()


def test_rows_of_unequal_lengths(new: Callable[..., Any]) -> None:
    """One token at a time, each at its row's own position; refused where the model's mask would be wrong."""
    import torch

    model = tiny_models.kept("llama")
    prompts = [ids_of(LENGTH), ids_of(5, seed=9)]
    cache = new(model, rows=2)
    forward(model, cache, [prompts[0], prompts[1] + [0] * (LENGTH - 5)])
    cache.set_lengths([LENGTH, 5])
    seen = torch.arange(LENGTH + 1) <= torch.tensor([[LENGTH], [5]])
    said = forward(model, cache, [[7], [7]], attention_mask=seen, position_ids=torch.tensor([[LENGTH], [5]]))
    for row, ids in enumerate(prompts):
        alone = new(model)
        torch.testing.assert_close(said[row, -1], forward(model, alone, [[*ids, 7]])[0, -1], rtol=1e-4, atol=1e-4)
    assert cache.lengths == [LENGTH + 1, 6]
    with pytest.raises(LLMParamError, match=r"rows of unequal lengths \[14, 6\] take one token at a time"):
        forward(model, cache, [[1, 2], [1, 2]])
    sliding = new(tiny_models.kept("gemma3"), rows=2)
    sliding.set_lengths([4, 5])
    with pytest.raises(LLMParamError, match=r"layer 0: rows of unequal lengths \[4, 5\] take no more tokens in a sliding layer"):
        forward(tiny_models.kept("gemma3"), sliding, [[1], [1]])
    with pytest.raises(LLMParamError, match="argument 'lengths' must have 2 numbers from 0 to 22"):
        cache.set_lengths([1, LENGTH + STEPS + 1])


def test_a_forward_that_failed_on_the_way_is_not_handed_over(new: Callable[..., Any]) -> None:
    from shmkv.integrations.transformers import handoff

    model = tiny_models.make("llama")
    cache = new(model)

    def fail(*_: object) -> None:
        raise ArithmeticError("on the way")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        forward(model, cache, [ids_of(LENGTH)])
    hook.remove()
    with pytest.raises(LLMParamError, match=r"layer 0 holds \[13\] tokens and layer 1 \[0\]: a forward failed on the way"):
        handoff(cache, CacheKey(1, 5))
    cache.set_lengths([0])
    forward(model, cache, [ids_of(LENGTH)])
    assert handoff(cache, CacheKey(1, 5)) == LENGTH


def test_what_was_handed_over_is_written_no_more_until_it_is_taken_back(new: Callable[..., Any], manager: Any) -> None:
    from shmkv.integrations.transformers import handoff

    model = tiny_models.kept("llama")
    cache = new(model, rows=2)
    forward(model, cache, [ids_of(LENGTH)] * 2)
    handoff(cache, CacheKey(1, 5), row=1, keep=True)
    for write in (lambda: forward(model, cache, [[1], [1]]), lambda: cache.set_lengths([0, 0]), lambda: cache.crop(-1),
                  cache.reset):
        with pytest.raises(LLMParamError, match="was handed over"):
            write()
    assert cache.lengths == [LENGTH] * 2
    assert manager.contains(CacheKey(1, 5))
    cache.resume()
    assert not manager.contains(CacheKey(1, 5))
    forward(model, cache, [[1], [1]])
    assert cache.lengths == [LENGTH + 1] * 2


def test_memory_is_the_next_cache_s_after_close_and_after_the_last_key(new: Callable[..., Any], manager: Any) -> None:
    from shmkv.integrations.transformers import handoff

    model = tiny_models.kept("llama")
    cache = new(model)
    address = cache.memory.tensors[1].data_ptr
    forward(model, cache, [ids_of(LENGTH)])
    handoff(cache, CacheKey(1, 5))
    with pytest.raises(LLMParamError, match="the cache is closed"):
        forward(model, cache, [[1]])
    with pytest.raises(LLMParamError, match="the cache is closed"):
        cache.resume()
    assert manager.stats()["caches"] == 1       # the key alone keeps it
    assert new(model).memory.tensors[1].data_ptr != address
    manager.remove_cache_key(CacheKey(1, 5))
    gc.collect()
    again = new(model)
    assert again.memory.tensors[1].data_ptr == address
    cache.close()
    with again:
        assert again.lengths == [0]
    assert manager.stats()["caches"] == 1


def test_a_role_that_may_not_hand_over(here: Callable[..., Any]) -> None:
    need_models()
    from shmkv.integrations.transformers import ShmCache, handoff

    model = tiny_models.kept("llama")
    with ShmCache(model, here("DECODER").kv_cache_manager, LENGTH) as cache:
        forward(model, cache, [ids_of(LENGTH)])
        with pytest.raises(LLMParamError, match="bind needs role"):
            handoff(cache, CacheKey(1, 5))
        cache.crop(-1)                          # still the caller's to write
        with pytest.raises(LLMParamError, match="'tokens' must be greater than 0"):
            ShmCache(model, cache.manager, 0)
