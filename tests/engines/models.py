"""Models for engines, as folders that vLLM loads: one of random numbers that starts quickly, and one that speaks."""
from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
VOCABULARY = 512


def make(name: str, parent: Path) -> Path:
    """The folder of "tiny" or "smollm2", made by another process: nothing of torch stays in this one."""
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


if __name__ == "__main__":
    {"tiny": tiny, "smollm2": smollm2}[sys.argv[1]](Path(sys.argv[2]))
