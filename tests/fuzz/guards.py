"""Shared memory between two pages that fault: AddressSanitizer does not know the bounds of a mapping, the processor does."""
from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

from shmkv._mapping import Region

GUARD = 64 << 10
TRIES = 64
PROT_NONE = 0
NORESERVE = 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_holes: set[tuple[int, int]] = set()              # made so far: (address, bytes); free or in use
FAILED = ctypes.c_void_p(-1).value


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def make_hole(nbytes: int) -> None:
    """A hole of exactly that size between two guards: the next mapping of that size goes there, as a rule. The guards stay."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    begin = _libc.mmap(None, _pages(nbytes) + 2 * GUARD, PROT_NONE, flags, -1, 0)
    if begin == FAILED:
        raise OSError(ctypes.get_errno(), "cannot reserve a range of addresses")
    _libc.munmap(begin + GUARD, _pages(nbytes))
    _holes.add((int(begin) + GUARD, _pages(nbytes)))


def guarded(fd: int, nbytes: int) -> Region:
    """A descriptor mapped writable between two guards."""
    elsewhere = []                                  # what fills the other holes that would fit, until one is ours
    for _ in range(TRIES):
        region = Region.map(fd, nbytes, populate=False)
        if (region.base, _pages(nbytes)) in _holes:
            return region
        elsewhere.append(region)
        make_hole(nbytes)
    raise OSError(f"no mapping of {nbytes} bytes came to stand between guards in {TRIES} tries")


def offer_holes(count: int, nbytes: int) -> None:
    """See to it that the next `count` mappings of that size, which the library makes, come to stand between guards."""
    flags, length = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE, _pages(nbytes)
    inside: list[int] = []
    for _ in range(TRIES):
        at = _libc.mmap(None, length, PROT_NONE, flags, -1, 0)      # stays where it is in another hole, and fills it
        if (at, length) in _holes:
            inside.append(at)
        elif len(inside) < count:
            make_hole(nbytes)
        if len(inside) == count:
            break
    for at in inside:
        _libc.munmap(at, length)


def memory(nbytes: int) -> Region:
    """Anonymous shared memory between two guards."""
    fd = os.memfd_create("fuzz")
    try:
        os.ftruncate(fd, nbytes)
        return guarded(fd, nbytes)
    finally:
        os.close(fd)


def guarded_mappings(name: str) -> tuple[int, int]:
    """(how many of this process's mappings of files with that name stand between guards, how many there are)."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    found = [place for place, parts in enumerate(lines) if len(parts) == 6 and name in parts[5]]
    return sum(_faults_beside(lines, place) for place in found), len(found)


def _faults_beside(lines: list[list[str]], place: int) -> bool:
    before, own, after = lines[place - 1], lines[place], lines[place + 1]
    return (before[0].split("-")[1] == own[0].split("-")[0] and before[1].startswith("---")
            and after[0].split("-")[0] == own[0].split("-")[1] and after[1].startswith("---"))
