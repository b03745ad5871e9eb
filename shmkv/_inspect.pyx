# cython: language_level=3, freethreading_compatible=True
"""A look into the directory of any cluster, for people: what `shmkv ls` shows.

Writes nothing and takes no lock. Every record is copied once and only the copy is judged and shown; a number that no owner writes
becomes the text of a fault. The caller has checked the directory's header (`_members.header_fault`).
"""
from libc.stdint cimport uint32_t, uint64_t

from shmkv._futex cimport (
    WORD_FREE,
    WORD_HELD,
    WORD_OFFERED,
    WORD_WAITERS,
    fence_acquire,
    load32_acquire,
    load32_relaxed,
    load64_seq,
    load_words,
)
from shmkv._layout cimport (
    CACHE_BLOCKS,
    CACHE_CONTIGUOUS,
    CACHE_FREE,
    CACHE_HOST,
    CACHE_LIVE,
    CACHE_REGISTERED,
    CACHE_RETIRED,
    CACHES_MAX,
    COUNT_BYTES,
    COUNT_COPY_NS,
    COUNT_FAILED,
    COUNT_PULLS,
    COUNT_TIMEOUTS,
    COUNT_WAIT_NS,
    DIRECTORY_CLOSED,
    DIRECTORY_OPEN,
    LINK_BROKEN,
    LINK_FREE,
    LINK_LIVE,
    LINK_REMOVED,
    ROW_LIVE,
    ROWS_MAX,
    SIDE_ACCEPTOR,
    SIDE_INITIATOR,
    TENSORS_MAX,
    CacheRecord,
    RowRecord,
    TensorRecord,
    cache_at,
    directory_header,
    row_at,
    tensor_at,
    word_generation,
    word_state,
)
from shmkv._mapping cimport Region

from shmkv import _link_record

cdef enum:
    TRIES = 8                       # looks at a record that its owner is changing, before it is shown as it is

cdef dict DIRECTORY_STATES = {DIRECTORY_OPEN: "open", DIRECTORY_CLOSED: "closed"}
cdef dict CACHE_STATES = {CACHE_LIVE: "live", CACHE_RETIRED: "retired"}
cdef dict CACHE_KINDS = {CACHE_CONTIGUOUS: "contiguous", CACHE_BLOCKS: "blocks", CACHE_HOST: "host",
                         CACHE_REGISTERED: "registered"}
cdef dict LINK_STATES = {LINK_FREE: "free", LINK_LIVE: "live", LINK_BROKEN: "broken", LINK_REMOVED: "removed"}
cdef dict COUNTERS = {"pulls": COUNT_PULLS, "bytes": COUNT_BYTES, "wait_ns": COUNT_WAIT_NS, "copy_ns": COUNT_COPY_NS,
                      "failed": COUNT_FAILED, "timeouts": COUNT_TIMEOUTS}


cdef str name_of(dict names, number):
    """The name of a state, or the number that no owner writes."""
    return names.get(number, f"damaged ({number})")


def state(Region directory) -> str:
    """"open", or "closed" once its owner has finalized."""
    return name_of(DIRECTORY_STATES, load32_acquire(&directory_header(directory.address).state))


# -- caches ------------------------------------------------------------------------------------------------------------

cdef uint64_t copy_cache(char* base, uint32_t slot, CacheRecord* copy) noexcept nogil:
    """Copy a record between two equal loads of its word, if its owner lets it be for that long: the word."""
    cdef CacheRecord* shared = cache_at(base, slot)
    cdef uint64_t word = load64_seq(&shared.word)
    cdef int _tried
    for _tried in range(TRIES):
        load_words(copy, shared, sizeof(CacheRecord))
        fence_acquire()             # the copy before the second look
        if load64_seq(&shared.word) == word:
            break
        word = load64_seq(&shared.word)
    return word


cdef str fault_of(char* base, const CacheRecord* copy, uint64_t others):
    """"" if the record's ranges lie within what its owner has reserved. Caches share no row, so those of all together (`others`
    are the rows seen before) are not more than a directory can have: damage costs no endless look."""
    cdef uint32_t rows = min(load32_acquire(&directory_header(base).rows_reserved), ROWS_MAX)
    cdef uint32_t tensors = min(load32_acquire(&directory_header(base).tensors_reserved), TENSORS_MAX)
    if <uint64_t>copy.first_row + copy.num_rows > rows:
        return f"its rows {copy.first_row} to {copy.first_row + <uint64_t>copy.num_rows} are beyond the {rows} of the directory"
    if others + copy.num_rows > ROWS_MAX:
        return f"its {copy.num_rows} rows are others' too: a directory has {ROWS_MAX} at most"
    if <uint64_t>copy.first_tensor + copy.num_tensors > tensors:
        return (f"its tensors {copy.first_tensor} to {copy.first_tensor + <uint64_t>copy.num_tensors} are beyond the {tensors} "
                "of the directory")
    return ""


cdef tuple count_rows(char* base, uint32_t slot, const CacheRecord* copy):
    """(rows with a living key, rows whose bytes are all published)."""
    cdef uint32_t index, keys = 0, published = 0
    cdef RowRecord* row
    for index in range(copy.first_row, copy.first_row + copy.num_rows):
        row = row_at(base, index)
        if load32_relaxed(&row.cache_slot) == slot:
            keys += word_state(load64_seq(&row.word)) == ROW_LIVE
            published += load32_acquire(&row.progress) >= copy.num_tensors
    return keys, published


cdef dict describe_cache(char* base, uint32_t slot, uint64_t word, const CacheRecord* copy, uint64_t others):
    cdef str fault = fault_of(base, copy, others)
    found = {
        "cache_id": copy.cache_id, "generation": word_generation(word), "state": name_of(CACHE_STATES, word_state(word)),
        "kind": name_of(CACHE_KINDS, copy.kind), "tensors": copy.num_tensors, "rows": copy.num_rows,
        "bytes": copy.segment_nbytes, "segment": copy.segment_serial, "keys": 0, "published_rows": 0, "tensor_bytes": 0,
        "dtype": None, "fault": fault,
    }
    if fault == "":
        found["keys"], found["published_rows"] = count_rows(base, slot, copy)
        found["tensor_bytes"], found["dtype"] = common_kind(base, copy)
    return found


cdef tuple common_kind(char* base, const CacheRecord* copy):
    """(bytes, dtype) of all tensors; 0 for bytes and "mixed" for a dtype that they do not have in common."""
    cdef TensorRecord tensor
    cdef uint32_t index
    nbytes, dtype = 0, None
    for index in range(copy.num_tensors):
        load_words(&tensor, tensor_at(base, copy.first_tensor + index), sizeof(TensorRecord))
        if index == 0:
            nbytes, dtype = tensor.nbytes, tensor.dtype
        nbytes = nbytes if nbytes == tensor.nbytes else 0
        dtype = dtype if dtype == tensor.dtype else "mixed"
    return nbytes, dtype


def caches(Region directory) -> list:
    """The caches that are recorded now, one dict each, in the order of their slots.

    `bytes` is the segment with its header; `tensor_bytes` and `dtype` (the number of a DataType) are those of each tensor, 0 and
    "mixed" where tensors differ; `keys` and `published_rows` count rows; `fault` is "" or says which numbers of the record cannot
    be right.
    """
    cdef uint32_t slot, count = min(load32_acquire(&directory_header(directory.address).caches_reserved), CACHES_MAX)
    cdef CacheRecord copy
    cdef uint64_t word, rows = 0
    found = []
    for slot in range(count):
        word = copy_cache(directory.address, slot, &copy)
        if word_state(word) != CACHE_FREE:
            found.append(describe_cache(directory.address, slot, word, &copy, rows))
            if found[-1]["fault"] == "":
                rows += copy.num_rows
    return found


def row_nbytes(Region directory, uint64_t segment) -> list:
    """Bytes of a row of each tensor of the cache in this segment (its serial number); [] if there is none or its record is
    damaged."""
    cdef uint32_t slot, index, count = min(load32_acquire(&directory_header(directory.address).caches_reserved), CACHES_MAX)
    cdef char* base = directory.address
    cdef CacheRecord copy
    cdef TensorRecord tensor
    found = []
    for slot in range(count):
        if word_state(copy_cache(base, slot, &copy)) != CACHE_FREE and copy.segment_serial == segment \
                and fault_of(base, &copy, 0) == "":
            for index in range(copy.num_tensors):
                load_words(&tensor, tensor_at(base, copy.first_tensor + index), sizeof(TensorRecord))
                found.append(<object>tensor.outer * <object>tensor.inner)
            break
    return found


# -- links -------------------------------------------------------------------------------------------------------------

cdef dict describe_lock(uint32_t word, list sides):
    """Who has the lock word: `holder` and `offered_to` are cluster ids or None."""
    cdef uint32_t holder = word & ~<uint32_t>WORD_WAITERS
    found = {"holder": None, "offered_to": None, "waiters": bool(word & WORD_WAITERS), "fault": ""}
    if holder in (WORD_HELD + SIDE_ACCEPTOR, WORD_HELD + SIDE_INITIATOR):
        found["holder"] = sides[holder - WORD_HELD]["cluster_id"]
    elif holder in (WORD_OFFERED + SIDE_ACCEPTOR, WORD_OFFERED + SIDE_INITIATOR):
        found["offered_to"] = sides[holder - WORD_OFFERED]["cluster_id"]
    elif holder != WORD_FREE:
        found["fault"] = f"lock word {word:#x} is nobody's"
    return found


cdef dict describe_side(dict side):
    found = {name: side[name] for name in ("cluster_id", "slot", "incarnation", "leases")}
    found["open"] = bool(side["open"])
    found["busy_generation"] = side["hazard"] or None
    found.update((name, side["counters"][index]) for name, index in COUNTERS.items())
    return found


def links(Region directory) -> list:
    """The links that clusters made to this directory's owner and that somebody may still use, one dict each.

    `initiator` and `acceptor` are the two sides; their counters are pulls, bytes, ns, failures and timeouts.
    """
    found = []
    for slot in range(_link_record.links_reserved(directory)):
        record = _link_record.read(directory, slot)
        sides = record["sides"]
        if record["state"] == LINK_FREE or record["state"] != LINK_LIVE and not any(side["open"] for side in sides):
            continue
        found.append({
            "slot": slot, "serial": record["serial"], "state": name_of(LINK_STATES, record["state"]),
            "lock": describe_lock(record["word"], sides),
            "initiator": describe_side(sides[SIDE_INITIATOR]), "acceptor": describe_side(sides[SIDE_ACCEPTOR]),
        })
    return found
