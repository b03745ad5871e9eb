"""Asks a proxy of two engines, then says how many tokens the decode engine did not have to compute."""
from __future__ import annotations

import argparse
import json
import re
import sys
import time
import urllib.error
import urllib.request
from typing import Any

STORY = ("A lighthouse stands on the cape where two seas meet. Its keeper climbs the stairs each evening, winds the clock that "
         "turns the lens, and writes down the weather. In winter the fog is so thick that ships hear the horn before they see the "
         "light. ")
QUESTIONS = ["What does the keeper do each evening?", "When is the fog thick?", "Where does the lighthouse stand?"]


def wait_for(urls: list[str], seconds: float) -> None:
    """Until all of them answer."""
    deadline = time.monotonic() + seconds
    for url in urls:
        while True:
            try:
                urllib.request.urlopen(url, timeout=5).close()
                break
            except (urllib.error.URLError, OSError) as error:
                if time.monotonic() > deadline:
                    sys.exit(f"{url} does not answer: {error}")
                time.sleep(1)


def ask(url: str, number: int, question: str) -> str:
    """Each question is about a story of its own: what a decode engine has had before it need not take from anybody."""
    story = f"Letter {number}. {STORY * 8}"
    wanted = {"model": "model", "temperature": 0, "max_tokens": 32,
              "messages": [{"role": "system", "content": story}, {"role": "user", "content": question}]}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(wanted).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        answer: dict[str, Any] = json.load(response)
    return str(answer["choices"][0]["message"]["content"])


def count(metrics: str, name: str) -> int:
    """A counter of the connector, over all engines behind an address."""
    with urllib.request.urlopen(metrics, timeout=10) as response:
        text = response.read().decode()
    return int(sum(float(value) for value in re.findall(rf"^vllm:shmkv_{name}_total{{[^}}]*}} (\S+)$", text, re.MULTILINE)))


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--url", required=True)
    arguments.add_argument("--metrics", required=True, help="of the decode engine")
    arguments.add_argument("--prefill", required=True, help="the prefill engine, to be waited for")
    arguments.add_argument("--wait-s", type=float, default=300)
    given = arguments.parse_args()
    wait_for([f"{given.prefill}/health", f"{given.url}/health"], given.wait_s)
    for number, question in enumerate(QUESTIONS):
        begun = time.monotonic()
        print(f"{question}\n  {ask(given.url, number, question)}  ({time.monotonic() - begun:.2f} s)", flush=True)
    hits, blocks = count(given.metrics, "hit_tokens"), count(given.metrics, "loaded_blocks")
    print(f"the decode engine took {hits} tokens ({blocks} blocks) from the prefill engine instead of computing them")
    if not hits:
        sys.exit("nothing was shared")


if __name__ == "__main__":
    main()
