"""`shmkv demo --kill`: a prompt process is killed in the middle of a pull, and everybody can watch what becomes of it.

Two programs started apart, as in the plain demo. That the decoder copies is read from its link's record, as `shmkv ls` reads it; a
prompt that is killed too late for that pull is started again, and the next pull is tried.
"""
from __future__ import annotations

import select
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shmkv import _inspect, segment
from shmkv._layout import SEGMENT_DATA
from shmkv._mapping import Region
from shmkv.cli import console, ls
from shmkv.cli.demo_plan import FIRST_DECODER_ID, PROMPT_ID, Plan
from shmkv.cli.demo_run import WATCHDOG_S, Child, own_namespace
from shmkv.cli.gc import Cleaned, clean
from shmkv.errors import LLMException
from shmkv.membership import Namespace

DEFAULT_TOKENS = 2048
FEWEST_TOKENS = 64
TRIES = 10
GONE = "LLM_WAIT_PROCESS_TIMEOUT"
SUCCESS = "LLM_SUCCESS"
SPARE_NBYTES = 8 << 20


@dataclass
class Outcome:
    """What was seen, in the order in which it happens. `faults` is what is not as it should be."""

    bytes: int
    whole_pull_ms: float = 0.0
    tries: int = 0
    status: str = ""
    text: str = ""
    ended_after_ms: float = 0.0         # by then the kernel had taken the killed process apart
    status_after_ms: float = 0.0
    link_lost_after_ms: float | None = None
    tensors: int = 0
    tensors_arrived: int = 0
    removed_files: int = 0
    removed_bytes: int = 0
    next_pull: str = ""
    next_tensors_right: int = 0
    faults: list[str] = field(default_factory=list)

    def expect(self, condition: bool, fault: str) -> None:
        """Note a fault unless the condition holds."""
        if not condition:
            self.faults.append(fault)


def fitted(plan: Plan, *, may_shrink: bool) -> Plan:
    """A plan that the memory has room for; LLMException if there is none."""
    while _needed(plan) > _free() and may_shrink and plan.tokens > FEWEST_TOKENS:
        plan = replace(plan, tokens=plan.tokens // 2)
    if _needed(plan) > _free():
        raise LLMException(f"the demo needs {console.size(_needed(plan))}; {segment.SHM_DIR} and the memory limit leave "
                           f"{console.size(_free())}: choose fewer --tokens or --layers")
    return plan


def _needed(plan: Plan) -> int:
    """A request of the prompt, room for two of the decoder, and two private tensors each."""
    return 3 * (SEGMENT_DATA + plan.request_nbytes) + 4 * plan.tensor_nbytes + SPARE_NBYTES


def _free() -> int:
    limit = segment.memory_limit_left()
    return segment.free_nbytes() if limit is None else min(limit, segment.free_nbytes())


def show(plan: Plan, *, json: bool) -> int:
    """Run it and tell what happens. Returns the exit status: 1 if anything was not as it should be, 130 after Ctrl-C."""
    out = console.out()
    run = KillRun(plan, lambda text: None if json else out.print(text, soft_wrap=True), quiet=json)
    try:
        outcome = run.execute()
    except KeyboardInterrupt:
        console.error_line("interrupted; nothing is left in /dev/shm")
        return 130
    if json:
        console.print_json(asdict(outcome))
    for fault in outcome.faults:
        console.error_line(fault)
    return 1 if outcome.faults else 0


class KillRun:
    """The two processes, and the one who kills."""

    def __init__(self, plan: Plan, tell: Callable[[str], object], *, quiet: bool) -> None:
        self.plan = plan
        self.outcome = Outcome(plan.request_nbytes, tensors=plan.num_tensors)
        self.namespace = own_namespace()
        self._tell = tell
        self._quiet = quiet
        self._children: list[Child] = []
        self._request = 0

    def execute(self) -> Outcome:
        """All acts. Whatever happens, no process and no name in /dev/shm is left."""
        try:
            self._decoder = self._start("decoder", FIRST_DECODER_ID, {"SHMKV_COPY_THREADS": "1"})
            self._begin()
            self._kill_in_the_middle()
            if not self.outcome.faults:
                self._look_and_clean()
                self._start_again()
                for child in (self._decoder, self._prompt):
                    child.finish()
                left = segment.names(f"{self.namespace}.")
                self.outcome.expect(not left, f"left behind in {segment.SHM_DIR}: {', '.join(left)}")
        finally:
            for child in self._children:
                child.kill()
            if segment.names(f"{self.namespace}."):
                clean(self.namespace)
        if not self.outcome.faults:
            self._tell("both processes have ended; nothing is left in /dev/shm")
        return self.outcome

    # -- the acts ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """One pull that nobody disturbs: it shows that all is well, and how long one takes."""
        self._start_prompt()
        self._fill()
        pulled = self._ask(self._decoder, do="pull", request=self._request)
        self.outcome.whole_pull_ms = (pulled["ended_ns"] - pulled["began_ns"]) / 1e6
        right = self._ask(self._decoder, do="arrived", request=self._request)["tensors"]
        self.outcome.expect(pulled["status"] == SUCCESS and right == self.plan.num_tensors,
                            f"the first pull: {pulled['status']}, {right} tensors right")
        self._tell(f"prompt (cluster {PROMPT_ID}, pid {self._prompt.process.pid}) and decoder (cluster {FIRST_DECODER_ID}, pid "
                   f"{self._decoder.process.pid}): a request of {console.size(self.plan.request_nbytes)} was pulled in "
                   f"{self.outcome.whole_pull_ms:.1f} ms, every byte right")

    def _kill_in_the_middle(self) -> None:
        for _ in range(TRIES):
            self.outcome.tries += 1
            self._fill()
            self._decoder.send(do="pull", request=self._request)
            killed_ns = self._kill_when_it_copies()
            pulled = self._answer(self._decoder)
            if killed_ns and pulled["status"] != SUCCESS:
                self._judge(pulled, killed_ns)
                return
            if killed_ns:                   # the copy was done before the process was dead
                self._start_prompt()
        self.outcome.expect(False, f"no pull of {console.size(self.plan.request_nbytes)} was hit in {TRIES} tries: more --tokens")

    def _kill_when_it_copies(self) -> int:
        """Kill the prompt when the decoder has copied for a while: when that was, 0 if the copy was over before."""
        deadline = time.monotonic() + WATCHDOG_S
        directory = self._directory()
        while not _copies(directory):
            if _readable(self._decoder, 0) or time.monotonic() > deadline:
                return 0
        time.sleep(self.outcome.whole_pull_ms / 8000)
        if not _copies(directory):
            return 0
        killed_ns = time.monotonic_ns()
        self._prompt.process.kill()
        self._prompt.process.wait()
        self.outcome.ended_after_ms = (time.monotonic_ns() - killed_ns) / 1e6
        return killed_ns

    def _judge(self, pulled: dict[str, Any], killed_ns: int) -> None:
        outcome = self.outcome
        outcome.status, outcome.text = pulled["status"], pulled["text"]
        outcome.status_after_ms = (pulled["ended_ns"] - killed_ns) / 1e6
        lost = self._ask(self._decoder, do="lost")
        outcome.link_lost_after_ms = (lost["when_ns"][0] - killed_ns) / 1e6 if lost["when_ns"] else None
        outcome.tensors_arrived = self._ask(self._decoder, do="arrived", request=self._request)["tensors"]
        outcome.expect(outcome.status == GONE, f"the decoder got {outcome.status} and not {GONE}: {outcome.text}")
        outcome.expect(lost["links"] == [[PROMPT_ID, "died"]], f"lost links: {lost['links']}")
        tries = "" if outcome.tries == 1 else f" (hit at try {outcome.tries})"
        self._tell(f"the prompt was killed (SIGKILL) in the middle of the next pull{tries}: {outcome.tensors_arrived} of "
                   f"{outcome.tensors} tensors had come; the kernel took {outcome.ended_after_ms:.1f} ms to end it")
        self._tell(f"after {outcome.status_after_ms:.1f} ms the decoder got {outcome.status}: {outcome.text}")
        if outcome.link_lost_after_ms is not None:
            self._tell(f"after {outcome.link_lost_after_ms:.1f} ms its on_link_lost was called: cluster {PROMPT_ID} died")

    def _look_and_clean(self) -> None:
        self._tell("shmkv ls:")
        if not self._quiet:
            ls.show(self.namespace, json=False)
        living = {cluster.cluster_id: cluster.alive for cluster in ls.look(self.namespace).clusters}
        self.outcome.expect(living == {PROMPT_ID: False, FIRST_DECODER_ID: True}, f"ls: who lives is {living}")
        cleaned: Cleaned = clean(self.namespace)
        self.outcome.removed_files, self.outcome.removed_bytes = len(cleaned.files), cleaned.nbytes
        self.outcome.expect(cleaned.nbytes >= self.plan.request_nbytes, f"gc gave back {cleaned.nbytes} bytes only")
        left = [cluster.cluster_id for cluster in ls.look(self.namespace).clusters]
        self.outcome.expect(left == [FIRST_DECODER_ID], f"after gc there are the clusters {left}")
        self._tell(f"shmkv gc: {len(cleaned.files)} files of the dead process are gone, {console.size(cleaned.nbytes)} are free "
                   "again; the decoder's were not touched")

    def _start_again(self) -> None:
        self._start_prompt()
        self._fill()
        pulled = self._ask(self._decoder, do="pull", request=self._request)
        right = self._ask(self._decoder, do="arrived", request=self._request)["tensors"]
        self.outcome.next_pull, self.outcome.next_tensors_right = pulled["status"], right
        self.outcome.expect(pulled["status"] == SUCCESS, f"after the restart: {pulled['status']}: {pulled['text']}")
        tensors = f"{right} of {self.plan.num_tensors} tensors are right"
        self.outcome.expect(right == self.plan.num_tensors, f"after the restart {tensors}")
        self._tell(f"a new prompt (pid {self._prompt.process.pid}) with the same cluster id was linked; the next pull took "
                   f"{(pulled['ended_ns'] - pulled['began_ns']) / 1e6:.1f} ms, {tensors}")

    # -- processes --------------------------------------------------------------------------------------------------

    def _start(self, role: str, cluster_id: int, env: dict[str, str] | None = None) -> Child:
        child = Child(role, cluster_id, self.plan, self.namespace, module="kill_process", env=env)
        self._children.append(child)
        self._answer(child)
        return child

    def _start_prompt(self) -> None:
        self._prompt = self._start("prompt", PROMPT_ID)
        self._ask(self._decoder, do="link")

    def _fill(self) -> None:
        self._request += 1
        self._ask(self._prompt, request=self._request)

    def _ask(self, child: Child, **command: Any) -> dict[str, Any]:
        child.send(**command)
        return self._answer(child)

    def _answer(self, child: Child) -> dict[str, Any]:
        """The next line of a child; each command has one."""
        deadline = time.monotonic() + WATCHDOG_S
        while _readable(child, deadline - time.monotonic()):
            answers = child.receive()
            if answers:
                return answers[0]
        raise LLMException(f"the process {child.name} (pid {child.process.pid}) has said nothing for {WATCHDOG_S:.0f} s")

    def _directory(self) -> Region:
        found = Namespace.peek(self.namespace)
        member = None if found is None else found.find(PROMPT_ID)
        if member is None:
            raise LLMException("the prompt process is not in its namespace")
        return Region.attach(f"{segment.SHM_DIR}/{self.namespace}.{member.directory}")


def _readable(child: Child, seconds: float) -> bool:
    """Has it said something, or ended?"""
    return bool(select.select([child.process.stdout or -1], [], [], max(0.0, seconds))[0])


def _copies(directory: Region) -> bool:
    """Does a reader of the prompt's caches hold its link, with its hazard set? Then it copies."""
    return any(link["lock"]["holder"] is not None and link["initiator"]["busy_generation"] for link in _inspect.links(directory))
