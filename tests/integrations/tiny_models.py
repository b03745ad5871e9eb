"""Tiny models with random weights, one of each family, the same in every process that asks for the same.

Weights are drawn so large that the greedy token depends on what is cached: with the usual ones a tiny model says one token for
ever, and where the first and the last matrix are one it says again what it heard.
"""
from __future__ import annotations

import json
import random
from functools import lru_cache
from typing import Any

FAMILIES = ("llama", "qwen3", "gpt2", "gemma3", "gemma4", "deepseek_v3")
VOCABULARY = 64
COMMON = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
          "initializer_range": 0.4, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
          "pad_token_id": None}
WINDOW = 6


def settings(family: str) -> tuple[str, dict[str, Any]]:
    """The prefix of the family's classes, and the arguments of its configuration."""
    gqa = {**COMMON, "num_key_value_heads": 2}
    latent = {"kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
               "first_k_dense_replace": 1, "moe_intermediate_size": 16}
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    return {
        "llama": ("Llama", gqa),
        "qwen3": ("Qwen3", {**gqa, "head_dim": 16}),
        "gpt2": ("GPT2", {**COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
        "gemma3": ("Gemma3", {**gqa, "head_dim": 16, "num_hidden_layers": 3, "sliding_window": WINDOW, "layer_types": layer_types}),
        # Layers 2 and 3 use the keys and values of layers 0 and 1, which alone are cached.
        "gemma4": ("Gemma4", {**gqa, "head_dim": 16, "global_head_dim": 24, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
                              "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2,
                              "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}),
        "deepseek_v3": ("DeepseekV3", {**COMMON, "num_key_value_heads": 4, **latent, **experts}),
    }[family]


def classes(prefix: str) -> tuple[Any, Any]:
    """Configuration and model of a family."""
    import transformers

    config = {"Gemma3": "Gemma3TextConfig", "Gemma4": "Gemma4TextConfig"}.get(prefix, f"{prefix}Config")
    model = {"GPT2": "GPT2LMHeadModel"}.get(prefix, f"{prefix}ForCausalLM")
    return getattr(transformers, config), getattr(transformers, model)


def make(family: str, dtype: str = "float32", seed: int = 0, **changes: Any) -> Any:
    """A model of `family`, with some of its settings changed."""
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    prefix, values = settings(family)
    config, model = classes(prefix)
    if family == "gpt2":
        values = {name: value for name, value in values.items() if name not in ("hidden_size", "num_hidden_layers",
                                                                               "num_attention_heads", "intermediate_size")}
    torch.manual_seed(seed)
    made = model(config(**{**values, **changes})).to(getattr(torch, dtype)).eval()
    made.generation_config.eos_token_id = None
    return made


@lru_cache(maxsize=16)
def _kept(family: str, changes: str) -> Any:
    return make(family, **json.loads(changes))


def kept(family: str, **changes: Any) -> Any:
    """The same, made once."""
    return _kept(family, json.dumps(changes, sort_keys=True))


def prompt_ids(length: int, seed: int = 1) -> list[int]:
    """Random token ids."""
    drawn = random.Random(seed)
    return [drawn.randrange(VOCABULARY) for _ in range(length)]
