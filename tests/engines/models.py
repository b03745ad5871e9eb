"""Models for engines, as folders that vLLM loads: some of random numbers that start quickly, and one that speaks."""
from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
VOCABULARY = 512
WINDOW = 256


def make(name: str, parent: Path) -> Path:
    """The folder of a model of MODELS, made by another process: nothing of torch stays in this one."""
    subprocess.run([sys.executable, __file__, name, str(parent / name)], check=True, timeout=300)
    return parent / name


def tiny(folder: Path) -> Path:
    """A Llama of two layers whose weights are random, the same ones each time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=2048, head_dim=32)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def hybrid(folder: Path) -> Path:
    """A Gemma 3 of six layers, every third of which looks at everything and the others through a window: three KV cache groups. Its
    numbers are random; those of the tokens are small, for with big ones it would say the last token again whatever was before."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=6,
                              num_attention_heads=4, num_key_value_heads=2, head_dim=32, query_pre_attn_scalar=32,
                              max_position_embeddings=2048, sliding_window=WINDOW, initializer_range=0.2,
                              layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2)
    model = Gemma3ForCausalLM(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.1)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct in bfloat16, with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.spec_from_file_location("smollm2_model", EXAMPLES / "smollm2_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    source = module.converted_folder()
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


MODELS = {"tiny": tiny, "hybrid": hybrid, "smollm2": smollm2}

if __name__ == "__main__":
    MODELS[sys.argv[1]](Path(sys.argv[2]))
