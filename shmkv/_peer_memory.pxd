"""Memory that is private to another process of the user: read and written by `process_vm_readv` and `process_vm_writev`.

Two calls, both without the GIL. The caller fills in a PeerProcess (all but `pid`) from its link: the life file, the members table,
slot and incarnation of the peer. Then `peer_move` carries out a plan whose offsets count from `here` in this process and from
`there` in the peer's:

    status = peer_move(&plan, &peer, here, there, writes, check, context, &fault)

  writes      True: the plan's sources are here and its destinations there (a push); False: the other way round (a pull)
  check       asked between two shares of 4 MiB (1 MiB where threads share the move), on the calling thread, as the memory mover
              asks it; a status other than 0 ends the move
  fault       the peer's address at which MEMORY_UNMAPPED was answered, or the own one of MEMORY_OWN_UNMAPPED

0, LINK_PEER_GONE, MEMORY_*, or what `check` said. Bytes may have been moved whatever the answer. `peer_verify`, which `peer_move`
calls first and last, may be asked alone: is this process still the one that the record names, as the kernel sees it?

`transfer` is the same for Python, for a list of runs.
"""
from libc.stdint cimport uint32_t, uint64_t

from shmkv._copy cimport CheckFn
from shmkv._plan cimport Plan


cdef enum:
    # Answers besides 0 and those of _link.
    MEMORY_FORBIDDEN = -1801        # the kernel does not let this process reach the peer's memory
    MEMORY_UNSUPPORTED = -1802      # there are no such calls here
    MEMORY_ELSEWHERE = -1803        # who holds the life byte is not to be seen here, or under another pid than the one recorded
    MEMORY_REPLACED = -1804         # that pid belongs to a process which started at another time than the one recorded
    MEMORY_UNMAPPED = -1805         # the peer has no memory at an address, or none that allows this
    MEMORY_OWN_UNMAPPED = -1806     # this process has none
    MEMORY_UNSURE = -1807           # the life byte, or the start of the process, cannot be looked at
    MEMORY_NO_ROOM = -1808          # the kernel has no memory for the call


cdef struct PeerProcess:
    int life_fd
    char* members                   # the members table
    uint32_t slot
    uint64_t incarnation
    int pid                         # as the kernel names it here; set by peer_verify


cdef int peer_verify(PeerProcess* peer) noexcept nogil
cdef int peer_move(const Plan* plan, PeerProcess* peer, char* here, uint64_t there, bint writes, CheckFn check, void* context,
                   uint64_t* fault) noexcept nogil
