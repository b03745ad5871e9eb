"""A build in which a word of shared memory is changed as soon as it was loaded: whoever reads it twice reads two values.

The library loads shared words through the functions of `_futex.pxd` alone (`tests/test_single_reads.py` sees to that). Here each of
them gets a second line: when a page at a fixed address says so, and the word lies in a range that the page names, another value
goes into its place, now and then, from a seeded generator. An ordinary build knows nothing of this.
"""
from __future__ import annotations

import ctypes
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import builds

from shmkv._mapping import Region

PAGE_ADDRESS = 0x2000_0000_0000
RANGES = 4
ALWAYS = 16                             # then no two loads agree, ever
LOADS = re.compile(r"^    static inline uint(?P<bits>32|64)_t load(?P=bits)_\w+\(.*$", re.MULTILINE)
HOOK = f"""
    struct shmkv_flip {{ uint64_t armed, state, count; struct {{ uint64_t begin, end; }} ranges[{RANGES}]; }};
    static inline void shmkv_flip(uint64_t at, int bits)
    {{
        static const uint64_t values[8] = {{ 0, 1, ~0ull, 1ull << 31, 1ull << 32, 1ull << 63, 0xffffffffull, 4096 }};
        struct shmkv_flip *f = (struct shmkv_flip *){PAGE_ADDRESS:#x};
        uint64_t x, new;
        int i;
        if (!f->armed) return;
        for (i = 0; i < {RANGES} && (at < f->ranges[i].begin || at >= f->ranges[i].end); i++);
        if (i == {RANGES}) return;
        x = f->state; x ^= x << 13; x ^= x >> 7; x ^= x << 17; f->state = x;
        if (x >> 60 >= f->armed) return;
        if (f->armed == {ALWAYS}) new = (bits == 32 ? *(uint32_t *)at : *(uint64_t *)at) + 256;
        else new = x >> 32 & 1 ? values[x >> 33 & 7] : *(uint32_t *)at + (x >> 40 & 7) - 3;
        if (bits == 32) *(volatile uint32_t *)at = (uint32_t)new; else *(volatile uint64_t *)at = new;
        f->count++;
    }}
"""


class _Page(ctypes.Structure):
    _fields_ = (("armed", ctypes.c_uint64), ("state", ctypes.c_uint64), ("count", ctypes.c_uint64),
                ("ranges", ctypes.c_uint64 * (2 * RANGES)))


_page: _Page | None = None


def edits() -> list[builds.Edit]:
    """What makes an ordinary source one whose loads flip."""
    text = (builds.ROOT / "shmkv" / "_futex.pxd").read_text()
    found = []
    for number, load in enumerate(LOADS.finditer(text)):
        line, bits = load[0], load["bits"]
        new = re.sub(r"\{ return (.*); \}$", rf"{{ uint{bits}_t v = \1; shmkv_flip((uint64_t)p, {bits}); return v; }}", line)
        assert new != line, line
        found.append(builds.Edit("_futex.pxd", line, new if number else HOOK + new))
    assert len(found) >= 6
    return found


def build() -> Path:
    """The sanitized build with flipping loads."""
    return builds.build_edited("address", "flips", edits())


def prepare() -> None:
    """Map the page that the loads of such a build look at. Before the first of the package's extensions is used."""
    global _page
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    got = libc.mmap(PAGE_ADDRESS, 4096, 3, 0x100022, -1, 0)         # private, anonymous, at this address or not at all
    assert got == PAGE_ADDRESS, "the address of the page is taken"
    _page = _Page.from_address(PAGE_ADDRESS)


@contextmanager
def armed(rng: random.Random, *regions: Region) -> Iterator[None]:
    """Loads from these regions flip, in a build for it; nothing happens in another one."""
    if _page is None:
        yield
        return
    _fill(_page, rng, regions)
    try:
        yield
    finally:
        _page.armed = 0


@contextmanager
def always(address: int, nbytes: int) -> Iterator[None]:
    """Each load from this range is followed by a change, so that no two agree."""
    assert _page is not None, "a build for it"
    _page.ranges[:] = [address, address + nbytes, *[0] * (2 * RANGES - 2)]
    _page.state, _page.armed = 1, ALWAYS
    try:
        yield
    finally:
        _page.armed = 0


def _fill(page: _Page, rng: random.Random, regions: Sequence[Region]) -> None:
    for number, region in enumerate(regions):
        page.ranges[2 * number], page.ranges[2 * number + 1] = region.base, region.base + region.nbytes
    page.state = rng.getrandbits(64) | 1
    page.armed = rng.choice((1, 1, 2, 4, ALWAYS))                   # sixteenths of the loads


def count() -> int:
    """Words changed so far."""
    return 0 if _page is None else int(_page.count)
