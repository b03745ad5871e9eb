"""Writes SmolLM2-135M-Instruct in bfloat16, with its tokenizer, to the folder that is given: what a server of vLLM loads."""
from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from smollm2_model import converted_folder
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: str) -> None:
    source = converted_folder()
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1])
