"""Time to the first token and to the last one, of two engines that share blocks and of those that do not.

    make bench-ttft                 # or, where .venv-engines is there: .venv-engines/bin/python bench/ttft/run.py --help

Each way has fresh engines of SmolLM2-135M-Instruct with a thread each. All engines stay until the end, and the ways take turns at
every prompt, in an order of chance. What those take that are not asked is measured too. A request goes to the first engine for one
token and then to the second one, as a proxy sends it; times are from its beginning. A way is left out, with the reason, when what
it needs is not installed.

Whoever says other tokens than one engine alone, or computes what it should have loaded, ends the run with status 1 and is named.
"""
from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[1:1] = [str(ROOT / folder) for folder in ("bench", "bench/peers", "tests/engines")]
import figures  # noqa: E402
import report  # noqa: E402
from ways import BLOCK_TOKENS, WAYS, Way  # noqa: E402

engines: Any = importlib.import_module("engine")
models: Any = importlib.import_module("models")

NEW_TOKENS = 16
SEED = 1
IDLE_S = 3.0


def start(name: str, way: Way, workdir: Path, longest: int, stack: contextlib.ExitStack) -> list[Any]:
    """The engines of a way, in the order in which a request goes through them. Each has room for three of the longest prompts."""
    made = []
    room = longest + BLOCK_TOKENS
    way.begin(stack)
    for role in way.roles:
        os.environ.update(way.environment(), PYTHONPATH=str(Path(__file__).parent))
        made.append(engines.Engine(workdir, f"{name}-{role}", workdir / "smollm2", f"ttft-{os.getpid()}", way.connector(role),
                                   max_model_len=room, max_num_batched_tokens=room,
                                   num_gpu_blocks_override=3 * (room // BLOCK_TOKENS + 1)))
        stack.callback(made[-1].close)
        stack.callback(os.kill, made[-1].pid, signal.SIGCONT)
    for each in made:
        try:
            each.wait_until_ready()
        except AssertionError as error:
            raise RuntimeError(f"{way.title}: an engine does not start\n{each.log()[-6000:]}") from error
        each.call("execute", code="import asked; asked.prepare(agent)")
        free(each)
    return made


def free(engine: Any) -> None:
    """Let an engine run on all cores: NixlConnector ties it to the last one, where its threads would be in each other's way."""
    for thread in Path(f"/proc/{engine.pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), os.sched_getaffinity(0))


def ask(engine: Any, **arguments: Any) -> dict[str, Any]:
    answer: dict[str, Any] = engine.call("execute", code=f"import asked; result = asked.ask(agent, **{arguments!r})")
    return answer


def prompt_of(tokens: int, repeat: int) -> list[int]:
    """Random, and the same one for each way."""
    return random.Random(f"{SEED} {tokens} {repeat}").choices(range(1000, 40_000), k=tokens)


def measure(way: Way, made: list[Any], tokens: int, repeat: int) -> figures.Request:
    """One request through all engines of a way."""
    prompt = prompt_of(tokens, repeat)
    name = f"{tokens}-{repeat}"
    handed: dict[str, Any] | None = {"do_remote_decode": True} if way.hands_over else None
    begun = time.perf_counter()
    for before in made[:-1]:
        handed = ask(before, name=name, prompt=prompt, max_tokens=1, handed=handed)["handed"]
    there = time.perf_counter() - begun
    answer = ask(made[-1], name=name, prompt=prompt, max_tokens=NEW_TOKENS, handed=handed)
    return figures.Request(tokens, there, there + answer["first"], there + answer["last"], answer["loaded"], answer["tokens"])


def cpu_seconds(made: list[Any]) -> float:
    """What the processes of engines have used so far."""
    used = 0
    for each in made:
        used += sum(int(ticks) for ticks in Path(f"/proc/{each.pid}/stat").read_text().rpartition(")")[2].split()[11:13])
    return used / os.sysconf("SC_CLK_TCK")


def idle_cores(made: dict[str, list[Any]]) -> dict[str, float]:
    """How much of a core the engines of each way take while none of all is asked."""
    before = {name: cpu_seconds(each) for name, each in made.items()}
    time.sleep(IDLE_S)
    return {name: (cpu_seconds(each) - before[name]) / IDLE_S for name, each in made.items()}


@contextlib.contextmanager
def its_turn(way: Way, made: list[Any]) -> Iterator[None]:
    """Engines that are never idle are stopped while it is not their turn, so that they take nothing from the others."""
    for each in made:
        os.kill(each.pid, signal.SIGCONT)
    yield
    for each in made if way.polls else []:
        os.kill(each.pid, signal.SIGSTOP)


def fill(found: figures.Figures, made: dict[str, list[Any]], lengths: list[int], repeats: int) -> None:
    """Every way's requests. The first one of each, in which engines do what they do only once, is not among them."""
    for name, its_engines in made.items():
        measure(WAYS[name], its_engines, BLOCK_TOKENS, -1)
    found.idle_cores = idle_cores(made)
    for name, its_engines in made.items():
        with its_turn(WAYS[name], its_engines):
            pass
    order = random.Random(SEED)
    for repeat in range(repeats):
        for tokens in lengths:
            for name in order.sample(list(made), len(made)):
                with its_turn(WAYS[name], made[name]):
                    request = measure(WAYS[name], made[name], tokens, repeat)
                found.add(name, request)
                print(f"{WAYS[name].title}, {request}; says {request.said}", flush=True)


def compare(found: figures.Figures, one: Any) -> None:
    """Where a way says something else than one engine, ask that engine to compute as the way did: sums round otherwise when the
    last tokens of a prompt are computed by themselves."""
    known: dict[tuple[int, int], list[int]] = {}
    for requests in found.ways.values():
        for place, request in enumerate(requests):
            if request.loaded and request.said != found.expected(place):
                apart = max(request.tokens - request.loaded, 1)
                if (place, apart) not in known:
                    repeat = sum(earlier.tokens == request.tokens for earlier in requests[:place])
                    arguments = {"prompt": prompt_of(request.tokens, repeat), "max_tokens": NEW_TOKENS, "apart": apart}
                    known[place, apart] = one.call("say_apart", **arguments)
                request.apart = known[place, apart]


def run(names: list[str], lengths: list[int], repeats: int) -> figures.Figures:
    left_out = {name: reason for name in names if (reason := WAYS[name].missing())}
    for name, reason in left_out.items():
        print(f"{WAYS[name].title}: left out, {reason}", flush=True)
    chosen = {name: WAYS[name] for name in names if name not in left_out}
    found = figures.Figures.of_this_machine(chosen, left_out)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        models.make("smollm2", Path(folder))
        made = {name: start(name, way, Path(folder), max(lengths), stack) for name, way in chosen.items()}
        fill(found, made, lengths, repeats)
        if figures.REFERENCE in made:
            compare(found, made[figures.REFERENCE][0])
    return found


def end_in_order(number: int, _: object) -> None:
    sys.exit(128 + number)


def main() -> None:
    signal.signal(signal.SIGTERM, end_in_order)         # else engines that are stopped, servers and folders would stay
    options = argparse.ArgumentParser(description="Time to first token between two engines, each way in turn.")
    options.add_argument("ways", nargs="*", metavar="WAY", help=f"of {', '.join(WAYS)}; default: all")
    options.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 1024, 2048, 4096], help="tokens of a prompt")
    options.add_argument("--repeats", type=int, default=3, help="prompts of each length")
    options.add_argument("--json", type=Path, help="write the figures here")
    options.add_argument("--again", action="store_true", help="measure nothing: take the figures from there")
    options.add_argument("--document", type=Path, help="put the tables between the marks of this Markdown file")
    options.add_argument("--chart", type=Path, help="write a chart here, where matplotlib is installed")
    given = options.parse_args()
    found = figures.Figures.load(given.json) if given.again else run(given.ways or list(WAYS), given.lengths, given.repeats)
    print(found.tables())
    if given.json and not given.again:
        found.save(given.json)
    if given.document:
        found.document(given.document)
    if given.chart and report.has_matplotlib():
        found.chart(given.chart)
    sys.exit("\n".join(found.wrong()) or 0)


if __name__ == "__main__":
    main()
