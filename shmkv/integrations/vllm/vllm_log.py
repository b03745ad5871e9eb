"""What shmkv has to say goes where vLLM's own log goes, unless somebody has made another arrangement."""
from __future__ import annotations

import logging


def speak_in_vllms_log() -> None:
    """Give shmkv's logger the handlers and the level of vLLM's, if it has none that anybody would see. Twice is no error."""
    own, theirs = logging.getLogger("shmkv"), logging.getLogger("vllm")
    if any(not isinstance(handler, logging.NullHandler) for handler in [*own.handlers, *logging.getLogger().handlers]):
        return
    for handler in theirs.handlers:
        own.addHandler(handler)
    own.setLevel(theirs.getEffectiveLevel())
