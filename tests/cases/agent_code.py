"""Pieces of program that a test has an agent run: into another mount namespace, to another user, what it maps."""
from __future__ import annotations

_LIBC = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def must(status, what):
    if status:
        raise OSError(ctypes.get_errno(), what + ": " + os.strerror(ctypes.get_errno()))
"""

_NEW_NAMESPACE = """
CLONE_NEWNS, MS_REC_PRIVATE = 0x20000, 0x44000
must(libc.unshare(CLONE_NEWNS), "unshare")
must(libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None), "make / private")
"""


def mount_tmpfs(where: str, options: str, flags: int = 0) -> str:
    """Mount a tmpfs inside the agent's mount namespace."""
    return _LIBC + f"must(libc.mount(b'tmpfs', {where.encode()!r}, b'tmpfs', {flags}, {options.encode()!r}), 'mount')\n"


def enter_private_shm(options: str) -> str:
    """Leave for a mount namespace with an own tmpfs at /dev/shm."""
    return _LIBC + _NEW_NAMESPACE + mount_tmpfs("/dev/shm", options)


def join_private_shm(pid: int) -> str:
    """Enter the mount namespace of another agent. A thread that shares its file system state cannot, hence the unshare."""
    return _LIBC + f"""
CLONE_FS = 0x200
must(libc.unshare(CLONE_FS), "unshare")
fd = os.open("/proc/{pid}/ns/mnt", os.O_RDONLY)
must(libc.setns(fd, 0), "setns")
os.close(fd)
"""


def become(uid: int, *, default_namespace: bool = False) -> str:
    """Go on as another user; /proc/self stays readable."""
    drop = 'os.environ.pop("SHMKV_NAMESPACE", None)' if default_namespace else ""
    return _LIBC + f"""
{drop}
os.setgroups([])
os.setgid({uid})
os.setuid({uid})
PR_SET_DUMPABLE = 4
must(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")
"""


# What this process has mapped and open of the segments of its namespace.
MAPPED = """
import os
def of_ours(lines):
    return [line for line in lines if "/dev/shm/" in line]
with open("/proc/self/maps") as maps:
    result = [line.split()[5] for line in of_ours(maps)]
"""

# Records what the library logs, and everything Python could not raise.
LISTEN = """
import logging, sys
heard, unraisable = [], []
class Keep(logging.Handler):
    def emit(self, record):
        heard.append([record.levelname, record.getMessage()])
logging.getLogger("shmkv").addHandler(Keep())
logging.getLogger("shmkv").setLevel(logging.DEBUG)
sys.unraisablehook = lambda found: unraisable.append(repr(found.exc_value))
agent.heard, agent.unraisable = heard, unraisable
"""

HEARD = "result = [agent.heard, agent.unraisable]"

# For an agent that has only imported the library: spawn(work) forks a child that runs work(agent, ready) with a watchdog, and comes
# back when the child has called ready(). Nothing of a cluster is inherited; a start costs milliseconds instead of half a second.
SPAWN = """
import os, signal, traceback
from agent import Agent
def spawn(work):
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(90)
        try:
            work(Agent(), lambda: os.write(tell, b"r"))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(tell)
    said = os.read(ready, 1)
    os.close(ready)
    assert said, f"the child ended with {os.waitpid(pid, 0)[1]}"
    return pid
def kill(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
def joined(agent, role, cluster_id):
    agent.init(role, cluster_id, {"sync_kv_timeout": 20000}, {})
def linked(agent, cluster_id):
    joined(agent, "DECODER", cluster_id)
    assert agent.link([1]) == ["LLM_SUCCESS", ["LLM_SUCCESS"]]
"""
