# cython: language_level=3, freethreading_compatible=True
"""Records of the members table, read and written for `membership.py`, which knows what they mean and holds the cold lock."""
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy, memset

from shmkv._crash cimport crash_point
from shmkv._futex cimport (
    add32_relaxed,
    fence_acquire,
    fence_release,
    load32_acquire,
    load32_relaxed,
    load64_acquire,
    load_words,
    store32_relaxed,
    store64_release,
    store_words,
)
from shmkv._layout cimport *
from shmkv._mapping cimport Region, publish_header


def create(Region region) -> None:
    """Turn zeroed memory into an empty table."""
    cdef MembersHeader* header = <MembersHeader*>region.address
    cdef Header made
    store32_relaxed(&header.slots, MEMBERS_MAX)
    store32_relaxed(&header.record_nbytes, sizeof(MemberRecord))
    memset(&made, 0, sizeof(Header))
    made.magic = MAGIC_MEMBERS
    made.fingerprint = layout_fingerprint()
    made.header_nbytes = sizeof(MembersHeader)
    made.nbytes = region.nbytes
    publish_header(&header.header, &made, b"members-header")


cdef dict read_header(Region region):
    cdef Header copy
    cdef uint32_t version
    if region.nbytes < sizeof(Header):
        return {"version": 0, "magic": 0, "fingerprint": 0, "nbytes": 0, "incarnation": 0, "found_nbytes": region.nbytes}
    version = load32_acquire(&(<Header*>region.address).version)     # consume: header
    load_words(&copy, region.address, sizeof(Header))
    return {"version": version, "magic": copy.magic, "fingerprint": copy.fingerprint, "nbytes": copy.nbytes,
            "incarnation": copy.incarnation, "found_nbytes": region.nbytes}


def header_fault(Region region, str what, uint64_t incarnation=0) -> str:
    """"" if a members table ("members") or directory ("directory") has our layout, else a sentence that says what it has."""
    found = read_header(region)
    nbytes, magic = {
        "members": (sizeof(MembersHeader) + MEMBERS_MAX * sizeof(MemberRecord), <uint64_t>MAGIC_MEMBERS),
        "directory": (DIRECTORY_NBYTES, <uint64_t>MAGIC_DIRECTORY),
    }[what]
    if found["version"] == 0:
        return f"the {what} is not ready: layout version 0, expected {LAYOUT_VERSION}"
    if found["magic"] != magic:
        return f"the {what} has magic {found['magic']:#x}, expected {magic:#x}"
    if found["version"] != LAYOUT_VERSION:
        return f"the {what} has layout version {found['version']}, expected {LAYOUT_VERSION}"
    if found["fingerprint"] != layout_fingerprint():
        return (f"the {what} has layout fingerprint {found['fingerprint']:#010x}, expected {layout_fingerprint():#010x}: "
                f"another build of version {LAYOUT_VERSION}")
    if found["nbytes"] != nbytes or found["found_nbytes"] != nbytes:
        return f"the {what} has {found['found_nbytes']} bytes and says {found['nbytes']}, expected {nbytes}"
    if found["incarnation"] != incarnation:
        return f"the {what} belongs to incarnation {found['incarnation']:#x}, expected {incarnation:#x}"
    return ""


def count_join(Region region) -> None:
    """One more join; a plain count, which is right because joins happen under the cold lock."""
    add32_relaxed(&(<MembersHeader*>region.address).joins, 1)


def joins(Region region) -> int:
    """How many joins this table has seen."""
    return load32_relaxed(&(<MembersHeader*>region.address).joins)


def write(Region region, uint32_t slot, *, uint64_t incarnation, uint64_t cluster_id, uint32_t pid, uint32_t role,
          uint64_t start_time, bytes directory) -> None:
    """Overwrite a record; the incarnation makes it valid, last."""
    cdef MemberRecord* member = member_at(region.address, slot)
    cdef MemberRecord made
    memset(&made, 0, sizeof(MemberRecord))
    made.cluster_id = cluster_id
    made.pid = pid
    made.role = role
    made.start_time = start_time
    made.layout_version = LAYOUT_VERSION
    memcpy(made.directory, <const char*>directory, min(<size_t>len(directory), sizeof(made.directory) - 1))
    store64_release(&member.incarnation, 0)
    crash_point(b"member-filling")
    fence_release()                 # free before the first field changes: who is copying looks again
    store_words(&member.cluster_id, &made.cluster_id, sizeof(MemberRecord) - sizeof(made.incarnation))
    crash_point(b"member-recording")
    store64_release(&member.incarnation, incarnation)
    crash_point(b"member-recorded")


def clear(Region region, uint32_t slot) -> None:
    """Free a record."""
    crash_point(b"member-clearing")
    store64_release(&member_at(region.address, slot).incarnation, 0)


def set_role(Region region, uint32_t slot, uint32_t role) -> None:
    """The role that `ls` shows."""
    store32_relaxed(&member_at(region.address, slot).role, role)


def read(Region region, uint32_t slot):
    """(incarnation, cluster_id, pid, role, start_time, directory) of a record, copied between two equal looks at its incarnation;
    None if it is free, or just changing hands."""
    cdef MemberRecord copy
    cdef MemberRecord* shared = member_at(region.address, slot)
    cdef uint64_t incarnation = load64_acquire(&shared.incarnation)
    if incarnation == 0:
        return None
    load_words(&copy, shared, sizeof(MemberRecord))
    fence_acquire()
    if load64_acquire(&shared.incarnation) != incarnation:
        return None
    name = copy.directory[:sizeof(copy.directory)].split(b"\0")[0]
    return incarnation, copy.cluster_id, copy.pid, copy.role, copy.start_time, name.decode("ascii", "replace")


def foreign_clusters(Region region) -> list:
    """Cluster ids recorded in a table of any layout version: the first 24 bytes of a record never change their meaning."""
    cdef MembersHeader copy
    cdef uint64_t at, slot
    cdef uint64_t words[2]
    found = []
    if region.nbytes < sizeof(MembersHeader):
        return found
    load_words(&copy, region.address, sizeof(MembersHeader))
    if copy.header.magic != MAGIC_MEMBERS or copy.record_nbytes < 24 or copy.slots > 65536:
        return found
    for slot in range(copy.slots):
        at = copy.header.header_nbytes + slot * copy.record_nbytes
        if at > region.nbytes - 24 or copy.header.header_nbytes > region.nbytes:
            break
        memcpy(words, region.address + at, 16)      # a foreign table's records may stand anywhere
        if words[0]:
            found.append(words[1])
    return found


def directory_role(Region region) -> int:
    """The role that a directory's owner has now."""
    return load32_relaxed(&directory_header(region.address).role)


def directory_is_open(Region region) -> bool:
    """Has the owner of a directory not finalized yet?"""
    return load32_acquire(&directory_header(region.address).state) == DIRECTORY_OPEN
