"""The proxy of examples/vllm, between two servers that are none of vLLM's."""
from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

PROXY = Path(__file__).resolve().parents[2] / "examples" / "vllm" / "proxy.py"
DEADLINE_S = 20.0


class Engine:
    """Answers with its name, in three pieces, and keeps what it was asked."""

    def __init__(self, name: str, status: int = 200) -> None:
        self.asked: list[tuple[str, Any]] = []
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                engine.asked.append((self.path, json.loads(body)))
                self._answer()

            def do_GET(self) -> None:
                self._answer()

            def _answer(self) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                for _ in range(3):
                    self.wfile.write(f"{name} ".encode())

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def engines() -> Iterator[tuple[Engine, Engine]]:
    made = Engine("prefill"), Engine("decode")
    yield made
    for each in made:
        each.close()


@pytest.fixture
def proxy(engines: tuple[Engine, Engine], request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the proxy is; with the parameter "alone" its prefill engine is not there."""
    port = free_port()
    prefill = f"http://127.0.0.1:{free_port()}" if getattr(request, "param", "") == "alone" else engines[0].url
    process = subprocess.Popen([sys.executable, str(PROXY), "--port", str(port), "--prefill", prefill, "--decode", engines[1].url],
                               stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + DEADLINE_S
    while not listens(port):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(DEADLINE_S)


def post(url: str, wanted: dict[str, Any]) -> tuple[str, str]:
    request = urllib.request.Request(url, json.dumps(wanted).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        return response.read().decode(), response.headers["Content-Type"]


def test_both_engines_are_asked_the_first_for_one_token(engines: tuple[Engine, Engine], proxy: str) -> None:
    wanted = {"prompt": "x", "max_tokens": 9, "max_completion_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
    assert post(f"{proxy}/v1/completions", wanted) == ("decode decode decode ", "text/event-stream")
    assert engines[0].asked == [("/v1/completions", {"prompt": "x", "max_tokens": 1, "max_completion_tokens": 1, "stream": False})]
    assert engines[1].asked == [("/v1/completions", wanted)]


@pytest.mark.parametrize("proxy", ["alone"], indirect=True)
def test_the_second_answers_without_the_first(engines: tuple[Engine, Engine], proxy: str) -> None:
    assert post(f"{proxy}/v1/completions", {"prompt": "x"})[0] == "decode decode decode "
    assert engines[0].asked == []


def test_without_the_second_there_is_no_answer(engines: tuple[Engine, Engine], proxy: str) -> None:
    engines[1].close()
    with pytest.raises(urllib.error.HTTPError, match="502") as failure:
        post(f"{proxy}/v1/completions", {"prompt": "x"})
    failure.value.close()
