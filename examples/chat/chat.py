"""A chat whose prefill and decode are two processes, on a real model.

    python examples/chat/chat.py
    python examples/chat/chat.py --say "Name three colours." --say "And three more."

needs what examples/smollm2.py needs (`make chat` installs it and starts this). The prefill process keeps the keys and values of the
conversation and computes only those of what is new; the answer's while the person reads it. The decoder pulls what it has not got
and answers. For each turn the chat shows how many tokens were reused, what was pulled and how long that took, and the time to the
first token: with the handoff, and when one process computes the whole conversation again. With `--say` nobody is asked, and a table
is printed at the end.
"""
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from chat_screen import Screen, Turn
from smollm2 import DTYPES, Message, Peer, serve

AT_A_TIME = 4       # tokens between two looks at the screen
ROOM = 2048         # tokens of a conversation


def converse(prefill: Peer, decoder: Peer, screen: Screen, lines: Iterator[str], steps: int, *, unattended: bool) -> list[Turn]:
    """Answer line after line, until there are no more or the conversation is full."""
    turns: list[Turn] = []
    for said in lines:
        offer = prefill.ask("turn", said=said, steps=steps)
        if offer["full"]:
            screen.say("the conversation is full")
            break
        pulled = decoder.ask("pull", req_id=offer["req_id"], first_token=offer["first_token"])
        screen.begin(said if unattended else None)
        answer = stream(decoder, screen, steps)
        # Afterwards, so that nobody waits for it.
        prefill.ask("catch_up", answer=answer)
        alone = decoder.ask("recompute", token_ids=offer["token_ids"], steps=len(answer) if unattended else 1)
        turns.append(Turn(len(offer["token_ids"]), offer["reused"], pulled["pulled"], pulled["nbytes"], pulled["pull_ms"],
                          offer["prefill_ms"] + pulled["pull_ms"], alone["first_ms"],
                          alone["tokens"] == answer if unattended else None))
        screen.end(turns[-1])
    return turns


def stream(decoder: Peer, screen: Screen, steps: int) -> list[int]:
    """Show an answer of up to `steps` tokens as it comes."""
    said: Message = {"tokens": [0], "ended": False}
    while not said["ended"] and len(said["tokens"]) < steps:
        said = decoder.ask("more", steps=min(AT_A_TIME, steps - len(said["tokens"])))
        screen.answer(said["text"])
    tokens: list[int] = said["tokens"]
    return tokens


def command_of(role: str, dtype: str) -> list[str]:
    """How to start this file in one of its roles."""
    return [sys.executable, os.path.abspath(__file__), "--role", role, "--dtype", dtype]


def run_role(role: str, dtype: str) -> None:
    """Be the prefill process or the decoder until stdin ends."""
    if role == "prefill":
        from chat_prefill import Prefill

        prefill = Prefill(dtype, ROOM)
        answers: dict[str, Callable[[Message], Message]] = {"turn": prefill.turn, "catch_up": prefill.catch_up}
        close = prefill.close
    else:
        from chat_decode import Decoder

        decoder = Decoder(dtype, ROOM)
        answers = {"meet": decoder.meet, "pull": decoder.pull, "more": decoder.more, "recompute": decoder.recompute}
        close = decoder.close
    try:
        serve(answers)
    finally:
        close()


def run_chat(dtype: str, says: list[str], steps: int) -> bool:
    """Start both processes and talk. Returns whether every answer that was compared is right."""
    # A namespace of this run, so that it meets no other program of this user.
    os.environ["SHMKV_NAMESPACE"] = f"shmkv-chat-{os.getpid()}"
    screen = Screen()
    with Peer(command_of("prefill", dtype)) as prefill, Peer(command_of("decode", dtype)) as decoder:
        prefill.answer()
        decoder.answer()
        decoder.ask("meet")
        lines = iter(says) if says else iter(screen.ask, None)
        turns = converse(prefill, decoder, screen, lines, steps, unattended=bool(says))
    if turns:
        screen.table(turns)
    return all(turn.same is not False for turn in turns)


def main() -> int:
    """Command line. Returns the exit status: 1 if an answer differs from that of one process."""
    parser = argparse.ArgumentParser(description="A chat over two processes: prefill here, decode there.")
    parser.add_argument("--say", action="append", default=[], help="what to say, may be given several times: nobody is asked then")
    parser.add_argument("--tokens", type=int, default=60, help="tokens of an answer at most (default 60)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--role", choices=["prefill", "decode"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        run_role(options.role, options.dtype)
        return 0
    return 0 if run_chat(options.dtype, options.say, options.tokens) else 1


if __name__ == "__main__":
    sys.exit(main())
