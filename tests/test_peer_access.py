"""Whether the kernel lets processes reach each other's memory: it is asked and obeyed, and a refusal says what to do about it."""
from __future__ import annotations

import errno
import os
import platform
from pathlib import Path
from typing import Any

import pytest
from peer import Namespace, Peer

from shmkv import _link, _peer_memory, peer_access
from shmkv.config import Settings
from shmkv.errors import LLMStatusCode

pytestmark = pytest.mark.timeout(120)
USER, OTHER = 1000, 1001
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")

# As an agent's code: go on as another user, without any capability; dumpable, or not.
BECOME = """
import ctypes, os
os.setgroups([])
os.setgid({uid})
os.setuid({uid})
assert ctypes.CDLL(None).prctl(4, {dumpable}, 0, 0, 0) == 0
"""
MEMORY = "agent.bytes = np.arange(64, dtype=np.uint8)\nresult = agent.bytes.ctypes.data"
# Another process, which is no member, moves 64 bytes out of that memory or into it.
TRANSFER = """
from shmkv import _peer_memory, peer_access
from shmkv.membership import Namespace
space = agent.space = getattr(agent, "space", None) or Namespace.peek({name!r})
own = np.full(64, 255, np.uint8)
{before}
def answer(member):
    status, _, _ = _peer_memory.transfer(space.table, space.life_fd, member.slot, member.incarnation,
                                         [(own.ctypes.data, {base}, 64)], {writes}, 20000)
    text = peer_access.access_sentence(status, "cluster 1", member.pid, "") if status in peer_access.STATUSES else ""
    return [status, text, own.tolist()]
member = next(each for each in space.members() if each.pid == {pid})
result = answer(member)
"""
# A filter of system calls that answers those two with an errno, in C's struct sock_fprog.
FILTER = """
import ctypes, struct
def refuse(numbers, number):
    code = [(0x20, 0, 0, 0)] + [(0x15, len(numbers) - place, 0, call) for place, call in enumerate(numbers)]
    code += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | number)]
    agent.filter = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in code))
    program = struct.pack("@HP", len(code), ctypes.addressof(agent.filter))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()
"""
CALLS = {"x86_64": [310, 311], "aarch64": [270, 271]}.get(platform.machine())


class World:
    """A member with private memory, and a process that tries to reach it."""

    def __init__(self, namespace: Namespace, owner_uid: int, owner_dumpable: bool = True) -> None:
        self.namespace = namespace
        self.owner, self.reader = namespace.start(), namespace.start()
        if owner_uid:
            self.owner.call("execute", code=BECOME.format(uid=owner_uid, dumpable=int(owner_dumpable)))
        self.owner.call("init", role="PROMPT", cluster_id=1, options={}, raw={})
        self.base = self.owner.call("execute", code=MEMORY)

    def transfer(self, *, writes: bool, before: str = "") -> tuple[int, str, list[int]]:
        code = TRANSFER.format(name=self.namespace.name, pid=self.owner.pid, base=self.base, writes=writes, before=before)
        return tuple(self.reader.call("execute", code=code))

    def in_owner(self) -> list[int]:
        return list(self.owner.call("execute", code="result = agent.bytes.tolist()"))

    def assert_refused(self, status: int, *parts: str, before: str = "") -> None:
        """Neither direction moves a byte, and the sentence says what to do."""
        for writes in (False, True):
            found, text, own = self.transfer(writes=writes, before=before if not writes else "")
            assert found == status, text
            assert own == [255] * 64
            assert all(part in text for part in parts), text
        assert self.in_owner() == list(range(64))


@AS_ROOT
def test_two_processes_of_a_user_without_capabilities(namespace: Namespace) -> None:
    world = World(namespace, USER)
    world.reader.call("execute", code=BECOME.format(uid=USER, dumpable=1))
    if peer_access.ptrace_scope():
        world.assert_refused(_peer_memory.FORBIDDEN, "kernel.yama.ptrace_scope", "CAP_SYS_PTRACE", "PR_SET_PTRACER")
    else:
        assert world.transfer(writes=False) == (0, "", list(range(64)))
        assert world.transfer(writes=True)[0] == 0
        assert world.in_owner() == [255] * 64


@AS_ROOT
def test_a_process_that_is_not_dumpable_is_not_reached(namespace: Namespace) -> None:
    world = World(namespace, USER, owner_dumpable=False)
    world.reader.call("execute", code=BECOME.format(uid=USER, dumpable=1))
    world.assert_refused(_peer_memory.FORBIDDEN, f"process {world.owner.pid}", "allocate_cache",
                         "kernel.yama" if peer_access.ptrace_scope() else "PR_SET_DUMPABLE")


@AS_ROOT
def test_a_process_of_another_user_is_not_reached(namespace: Namespace) -> None:
    world = World(namespace, 0)
    before = BECOME.format(uid=OTHER, dumpable=1)           # after it has opened the namespace, which it could not any more
    world.assert_refused(_peer_memory.FORBIDDEN, f"process {world.owner.pid} runs as user 0 and this one as user {OTHER}",
                         before=before)


@AS_ROOT
@pytest.mark.skipif(CALLS is None, reason="numbers of system calls of another processor")
@pytest.mark.parametrize(("number", "status", "part"), [(errno.EPERM, _peer_memory.FORBIDDEN, "seccomp filter"),
                                                        (errno.ENOSYS, _peer_memory.UNSUPPORTED, "there is no process_vm_readv")])
def test_a_filter_of_system_calls_refuses(namespace: Namespace, number: int, status: int, part: str) -> None:
    world = World(namespace, 0)
    world.assert_refused(status, part, "seccomp", before=FILTER + f"refuse({CALLS}, {number})")
    assert world.reader.call("execute", code="from shmkv import peer_access\nresult = peer_access.refusal()") != ""


@AS_ROOT
def test_a_peer_in_another_pid_namespace_is_not_reached(namespace: Namespace) -> None:
    """A child of the reader in a pid namespace of its own sees the life byte held by nobody that has a pid there."""
    world = World(namespace, 0)
    before = """
import ctypes, json, os
CLONE_NEWPID = 0x20000000
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(CLONE_NEWPID) == 0, os.strerror(ctypes.get_errno())
"""
    code = TRANSFER.format(name=namespace.name, pid=world.owner.pid, base=world.base, writes=True, before=before)
    code = code.removesuffix("result = answer(member)\n") + """
ready, tell = os.pipe()
if os.fork() == 0:
    os.write(tell, json.dumps(answer(member)).encode())
    os._exit(0)
os.close(tell)
result = json.loads(os.read(ready, 65536))
os.close(ready)
os.wait()
"""
    status, text, own = world.reader.call("execute", code=code)
    assert (status, own) == (_peer_memory.ELSEWHERE, [255] * 64)
    assert "pid namespace" in text
    assert world.in_owner() == list(range(64))


def test_what_is_asked_is_what_happens(namespace: Namespace) -> None:
    """`refusal` asks with a child; a process started apart is treated alike."""
    world = World(namespace, 0)
    assert (peer_access.refusal() == "") == (world.transfer(writes=False)[0] == 0)


@AS_ROOT
def test_the_option_is_told_to_the_kernel(namespace: Namespace) -> None:
    """A filter answers prctl(PR_SET_PTRACER, any) with an errno of its own: that call was made, and failing it does no harm."""
    if CALLS is None:
        pytest.skip("numbers of system calls of another processor")
    peer: Peer = namespace.start()
    number = {"x86_64": 157, "aarch64": 167}[platform.machine()]
    code = FILTER + f"""
from shmkv import _peer_memory
before = _peer_memory.allow_all()
refuse([{number}], {errno.EXDEV})
result = [before, _peer_memory.allow_all()]
"""
    before, after = peer.call("execute", code=code)
    assert before == (0 if peer_access.ptrace_scope() is not None else -errno.EINVAL)
    assert after == -errno.EXDEV


# -- sentences ---------------------------------------------------------------------------------------------------------

@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """pretended(scope, capable): what the system says of itself."""

    def pretend(scope: str | None, *, capable: bool = False, filtered: bool = False) -> None:
        monkeypatch.setattr(peer_access, "PTRACE_SCOPE", tmp_path / "ptrace_scope")
        if scope is not None:
            (tmp_path / "ptrace_scope").write_text(scope + "\n")
        words = {"CapEff": ["0000000000080000" if capable else "0"], "Seccomp": ["2" if filtered else "0"],
                 "Uid": [str(os.geteuid())] * 4}
        monkeypatch.setattr(peer_access, "_words_of", lambda process, name: words[name])

    return pretend


@pytest.mark.parametrize(("scope", "part"), [("1", "SHMKV_ALLOW_PTRACE=1"), ("2", "give this process CAP_SYS_PTRACE"),
                                             ("3", "until the machine starts again"), ("0", "PR_SET_DUMPABLE"),
                                             (None, "PR_SET_DUMPABLE")])
def test_what_to_do_depends_on_yama(pretended: Any, scope: str | None, part: str) -> None:
    pretended(scope)
    assert part in peer_access.how_to_allow(os.getpid())
    assert ("kernel.yama.ptrace_scope" in peer_access.how_to_allow(os.getpid())) == (scope not in (None, "0"))


def test_who_may_trace_all_is_not_told_of_yama(pretended: Any) -> None:
    pretended("1", capable=True)
    assert "yama" not in peer_access.how_to_allow(os.getpid())
    pretended("1", capable=True, filtered=True)
    assert "seccomp" in peer_access.how_to_allow(os.getpid())


def test_every_answer_has_a_status_and_a_sentence() -> None:
    for cache_manager, timeout in (("0", LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT), ("1", LLMStatusCode.LLM_TIMEOUT)):
        settings = Settings.from_options({"llm.EnableCacheManager": cache_manager}, {})
        codes = {status: peer_access.access_code(status, settings) for status in peer_access.STATUSES}
        assert codes == {
            _peer_memory.FORBIDDEN: LLMStatusCode.LLM_PARAM_INVALID, _peer_memory.UNSUPPORTED: LLMStatusCode.LLM_PARAM_INVALID,
            _peer_memory.ELSEWHERE: LLMStatusCode.LLM_PARAM_INVALID, _peer_memory.REPLACED: timeout,
            _peer_memory.UNMAPPED: LLMStatusCode.LLM_PARAM_INVALID, _peer_memory.OWN_UNMAPPED: LLMStatusCode.LLM_PARAM_INVALID,
            _peer_memory.UNSURE: LLMStatusCode.LLM_FAILED, _peer_memory.NO_ROOM: settings.out_of_memory_status}
        assert peer_access.access_code(_link.PEER_GONE, settings) == timeout
        assert peer_access.access_code(_link.TIMEOUT, settings) == timeout
    for status in peer_access.STATUSES:
        assert len(peer_access.access_sentence(status, "cluster 7", os.getpid(), "address 0x10")) > 40
    for status in (_peer_memory.UNMAPPED, _peer_memory.OWN_UNMAPPED):
        assert "address 0x10" in peer_access.access_sentence(status, "cluster 7", 1, "address 0x10")
