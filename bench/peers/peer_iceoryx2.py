"""iceoryx2: the whole cache is one message; it is loaned, sent, received, and copied out. Needs: iceoryx2

A producer fills the loaned memory itself, which is not counted, as with us: it is filled in the first goes only and comes back
with its bytes.
"""
from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
from beside import Race
from cluster import ByteArray, bytes_at
from workloads import MEDIUM, SMALL, Workload

# More than a publisher has places for messages.
FILLED = 16


def address(payload: Any) -> int:
    return int(ctypes.cast(payload.as_ptr(), ctypes.c_void_p).value or 0)


def ports(iceoryx2: Any, nbytes: int) -> tuple[Any, Any]:
    """A publisher and a subscriber of a service of this process."""
    node = iceoryx2.NodeBuilder.new().create(iceoryx2.ServiceType.Ipc)
    service = node.service_builder(iceoryx2.ServiceName.new(f"bench/{os.getpid()}/{nbytes}")) \
        .publish_subscribe(iceoryx2.Slice[ctypes.c_uint8]).open_or_create()
    return service.publisher_builder().initial_max_slice_len(nbytes).create(), service.subscriber_builder().create()


def prepare(src: list[ByteArray], dst: list[ByteArray], stack: contextlib.ExitStack) -> Callable[[], None]:
    iceoryx2: Any = pytest.importorskip("iceoryx2", reason="iceoryx2 is not installed: pip install iceoryx2")
    row_nbytes, total = dst[0].nbytes, sum(row.nbytes for row in dst)
    publisher, subscriber = ports(iceoryx2, total)
    stack.callback(publisher.delete)
    stack.callback(subscriber.delete)

    def rows_at(begin: int) -> list[ByteArray]:
        return [bytes_at(begin + number * row_nbytes, row_nbytes) for number in range(len(dst))]

    # Views of the places that messages can have, so that a go makes none.
    places: dict[int, list[ByteArray]] = {}
    goes = itertools.count()

    def fetch() -> None:
        loaned = publisher.loan_slice_uninit(total)
        if next(goes) < FILLED:
            for there, row in zip(rows_at(address(loaned.payload())), src, strict=True):
                there[:] = row
        loaned.assume_init().send()
        received = subscriber.receive()
        begin = address(received.payload())
        if begin not in places:
            places[begin] = rows_at(begin)
        for row, there in zip(dst, places[begin], strict=True):
            row[:] = there
        received.delete()

    for _ in range(FILLED):
        fetch()
    return fetch


@pytest.mark.parametrize("workload", [SMALL, MEDIUM], ids=lambda workload: str(workload.name.split()[0]))
def test_iceoryx2(workload: Workload, race: Race) -> None:
    race.run_against("iceoryx2", workload, prepare)
