"""A proxy for a prefill and a decode engine: each request goes to the prefill engine first, for one token, then as it is to the
decode engine, which finds the blocks of the prompt in shared memory.

Small on purpose: one pair of engines, no retries. When the prefill engine cannot be reached the decode engine answers alone; that
is slower and as right.
"""
from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TIMEOUT_S = 300


def prefill_request(request: dict[str, Any]) -> dict[str, Any]:
    """What the prefill engine is asked: the same prompt, one token, no stream."""
    wanted = {**request, "max_tokens": 1, "stream": False}
    wanted.pop("stream_options", None)
    if "max_completion_tokens" in wanted:
        wanted["max_completion_tokens"] = 1
    return wanted


def post(url: str, body: bytes) -> Any:
    """The open response. urllib.error.HTTPError is a response, too."""
    return urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"}), timeout=TIMEOUT_S)


class Proxy(BaseHTTPRequestHandler):
    """`prefill`, `decode`: where the engines are."""

    prefill = decode = ""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            post(self.prefill + self.path, json.dumps(prefill_request(json.loads(body))).encode()).close()
        except (OSError, ValueError) as error:
            self.log_message("the prefill engine did not answer, the decode engine prefills: %s", error)
        self._pass_on(lambda: post(self.decode + self.path, body))

    def do_GET(self) -> None:
        self._pass_on(lambda: urllib.request.urlopen(self.decode + self.path, timeout=TIMEOUT_S))

    def _pass_on(self, ask: Any) -> None:
        try:
            response = ask()
        except urllib.error.HTTPError as error:
            response = error
        except OSError as error:
            self.send_error(502, f"the decode engine does not answer: {error}")
            return
        with response:
            self.send_response(response.status)
            self.send_header("Content-Type", response.headers.get("Content-Type", "application/json"))
            self.end_headers()
            while piece := response.read1():
                self.wfile.write(piece)
                self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        if format.startswith("the "):
            super().log_message(format, *args)


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--port", type=int, default=8000)
    arguments.add_argument("--prefill", required=True)
    arguments.add_argument("--decode", required=True)
    given = arguments.parse_args()
    Proxy.prefill, Proxy.decode = given.prefill, given.decode
    ThreadingHTTPServer(("127.0.0.1", given.port), Proxy).serve_forever()


if __name__ == "__main__":
    main()
