"""A member of a namespace in a process of its own, and looks at a namespace from outside."""
from __future__ import annotations

import time

from shmkv import segment
from shmkv.membership import Member, Namespace

MEMBER = """
import sys
from shmkv.membership import Namespace
from shmkv.errors import LLMException

name, cluster_id = sys.argv[1], int(sys.argv[2])
try:
    namespace, member = Namespace.join(name, cluster_id, 1)
except LLMException as error:
    print(error, flush=True)
    sys.exit()
print(member.slot, member.incarnation, flush=True)
for line in sys.stdin:
    if line.strip() == "leave":
        with namespace.cold(20000):
            namespace.leave(member)
        print("left", flush=True)
    elif line.strip() == "cold":
        with namespace.cold(20000):
            print("cold", flush=True)
            sys.stdin.readline()
        print("warm", flush=True)
"""


def namespace_of(name: str) -> Namespace:
    found = Namespace.peek(name)
    assert found is not None
    return found


def leave(namespace: Namespace, member: Member) -> None:
    with namespace.cold_even_unnamed(20000):
        namespace.leave(member)


def wait_until_dead(namespace: Namespace, member: Member) -> None:
    """Until the member's life byte is free."""
    deadline = time.monotonic() + 20
    while namespace.lives(member):
        assert time.monotonic() < deadline, "it lives"
        time.sleep(0.001)


def files(name: str) -> set[str]:
    return {each.removeprefix(f"{name}.") for each in segment.names(f"{name}.")}
