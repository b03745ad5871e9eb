"""Every byte that two processes share, declared once.

Four kinds of file stand in /dev/shm, all prefixed with the namespace:

  <ns>.life           no format. Byte LIFE_FIRST + n under a kernel record lock: the process in member slot n lives. Byte
                      COLD_BYTE under a lock: somebody joins, leaves, sweeps or links (the *cold lock*).
  <ns>.members.v2     MembersHeader, then MEMBERS_MAX MemberRecords.
  <ns>.d.<inc>        one *directory* a cluster: DirectoryHeader, two rings, then the tables of links, caches, tensors,
                      rows, coverage and the key index, each in a range of its own. The file is sized once to
                      DIRECTORY_NBYTES and is sparse; the counts `*_reserved` say how much of a table has pages behind it.
                      Nothing moves, so nobody maps twice.
  <ns>.c.<inc>.<n>    one segment a cache: SegmentHeader, then the tensors from SEGMENT_DATA_OFFSET on.

What makes a record valid
  A header is valid when its version is not zero: the creator fills everything else and stores the version last
  (publish: header); an opener loads it first (consume: header), compares magic, version and fingerprint, and checks every
  length against fstat before it trusts one. The version must be equal: the memory is transient, nothing is migrated.
  A cache is named by its *generation*: 64 bits, unique in the directory, never used again. A row's key binding has a
  generation of its own, counted in the row. Both stand above a state in one word, so that one load reads both.

How a reader pulls without any lock of the owner's
  find the row (index entry, then the record, copied and compared) -> store the cache's generation into its hazard
  (exchange, seq_cst) -> load the cache word and the row word again (seq_cst): unchanged? The owner does the mirror image:
  cache word LIVE -> RETIRED (exchange, seq_cst) -> load all hazards (seq_cst). Either the owner sees the hazard or the
  reader sees the retirement; with release/acquire alone both can miss. The hazard is cleared by a release store after the
  last load of the cache's bytes.

How somebody waits
  count in (seq_cst add) -> load the event word (seq_cst) -> look -> sleep on exactly that value. Who changes something does the
  mirror image: change (seq_cst) -> load the count (seq_cst) -> if there is one: add to the event word, wake. A waiter that is
  killed leaves the count up for ever: that costs its owner a system call at each change, and nothing else. Who ends the wait of a
  thread of its own process adds to the word and wakes as well, and others wake up for nothing.

Who may write what stands beside each field: "writer; lock or ordering; when". `owner` is the directory's cluster, `initiator`
the cluster that made a link to it. A reader copies a number once, checks the copy, and uses only the copy.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t


cdef enum:
    LAYOUT_VERSION = 2
    LINE = 128                      # two cache lines: words that two processes write stand this far apart
    PAGE = 4096
    SEGMENT_DATA_OFFSET = PAGE      # first tensor of a cache segment
    TENSOR_ALIGN = 64

    MEMBERS_MAX = 1024
    # Bytes of the life file: every layout version has a range of its own, so that a slot of one never lives by another's.
    COLD_BYTE = 0
    LIFE_FIRST = LAYOUT_VERSION * 4096

    LINKS_MAX = 512
    LEASES_MAX = 192                # a side
    COUNTERS_MAX = 16               # a side
    CACHES_MAX = 1 << 16
    TENSORS_MAX = 1 << 21
    ROWS_MAX = 1 << 21
    COVERAGE_LINES_MAX = 1 << 22
    INDEX_LOG2_MIN = 8
    INDEX_LOG2_MAX = 22

    ENDED_RING = 64
    UNLINKED_RING = 512
    WORDS_PER_LINE = 16             # LINE / 8
    TENSORS_PER_WORD = 32           # the other 32 bits of a coverage word are the row generation's low half


cdef enum:
    # Bytes reserved when the directory is made, in records.
    LINKS_FIRST = 4
    CACHES_FIRST = 32
    TENSORS_FIRST = 64
    ROWS_FIRST = 16
    COVERAGE_LINES_FIRST = 32


cdef enum:
    # Where each table of a directory starts.
    ENDED_OFFSET = PAGE
    UNLINKED_OFFSET = ENDED_OFFSET + ENDED_RING * 64
    LINKS_OFFSET = UNLINKED_OFFSET + UNLINKED_RING * 8
    CACHES_OFFSET = LINKS_OFFSET + LINKS_MAX * PAGE
    TENSORS_OFFSET = CACHES_OFFSET + CACHES_MAX * 128
    ROWS_OFFSET = TENSORS_OFFSET + TENSORS_MAX * 64
    COVERAGE_OFFSET = ROWS_OFFSET + ROWS_MAX * 256
    # The index has two parts of every size: a table is only ever replaced by one in another part.
    INDEX_OFFSET = COVERAGE_OFFSET + COVERAGE_LINES_MAX * LINE
    DIRECTORY_NBYTES = INDEX_OFFSET + 2 * ((1 << (INDEX_LOG2_MAX + 1)) - (1 << INDEX_LOG2_MIN)) * 8


# "shmkvMBR", "shmkvDIR", "shmkvSEG" read as little-endian numbers.
cdef enum:
    MAGIC_MEMBERS = 0x52424D766B6D6873
    MAGIC_DIRECTORY = 0x524944766B6D6873
    MAGIC_SEGMENT = 0x474553766B6D6873


cdef enum:
    # DirectoryHeader.state
    DIRECTORY_OPEN = 1
    DIRECTORY_CLOSED = 2


cdef enum:
    # CacheRecord.word, low byte
    CACHE_FREE = 0
    CACHE_LIVE = 1
    CACHE_RETIRED = 2


cdef enum:
    # RowRecord.word, low byte
    ROW_UNBOUND = 0
    ROW_LIVE = 1
    ROW_CONSUMED = 2
    ROW_REMOVED = 3
    ROW_CONSUMED_OUT = 4            # likewise, and taken out of the index by the owner
    ROW_REMOVED_OUT = 5


cdef enum:
    # RowRecord.key_kind
    KEY_NONE = 0
    KEY_REQUEST = 1
    KEY_PREFIX = 2
    KEY_BLOCKS = 3


cdef enum:
    # CacheRecord.kind
    CACHE_CONTIGUOUS = 0
    CACHE_BLOCKS = 1
    CACHE_HOST = 2
    CACHE_REGISTERED = 3


cdef enum:
    # LinkRecord.word_state, low byte
    LINK_FREE = 0
    LINK_LIVE = 1
    LINK_BROKEN = 2
    LINK_REMOVED = 3


cdef enum:
    SIDE_ACCEPTOR = 0               # the owner of the directory that the record stands in
    SIDE_INITIATOR = 1
    SIDE_CLOSED = 0
    SIDE_OPEN = 1


cdef enum:
    # LinkSide.counters
    COUNT_PULLS = 0
    COUNT_BYTES = 1
    COUNT_WAIT_NS = 2
    COUNT_COPY_NS = 3
    COUNT_FAILED = 4
    COUNT_TIMEOUTS = 5


cdef struct Header:
    uint64_t magic                  # creator; before the version; at creation
    uint32_t version                # creator; release, last of all; at creation. 0 = not ready
    uint32_t fingerprint            # creator; before the version. crc32 over names, sizes and offsets of all fields here
    uint64_t header_nbytes          # creator; before the version. What stands before the first record
    uint64_t nbytes                 # creator; before the version. Size of the file
    uint64_t incarnation            # creator; before the version. 0 in the members table
    uint64_t serial                 # creator; before the version. Number of the cache segment; 0 elsewhere
    uint64_t reserved[2]


cdef struct MembersHeader:
    Header header
    uint32_t slots                  # creator; before the version
    uint32_t record_nbytes          # creator; before the version
    uint32_t joins                  # joiner; cold lock; at each join: a plain count
    uint32_t pad[29]
    uint64_t reserved[488]


cdef struct MemberRecord:
    # The first 24 bytes keep their meaning in every version, so that another version can name who lives here.
    uint64_t incarnation            # joiner; cold lock, release after the other fields; 0 = free
    uint64_t cluster_id             # joiner; cold lock; before incarnation
    uint32_t pid                    # joiner; cold lock; used only where the kernel says the same of the life byte
    uint32_t role                   # joiner; cold lock; LLMRole as number; again, without it, at switch_role
    uint64_t start_time             # joiner; cold lock; clock ticks after boot, as in /proc/<pid>/stat
    uint32_t layout_version         # joiner; cold lock
    uint32_t pad
    char directory[32]              # joiner; cold lock; the directory's name without its namespace
    uint64_t reserved[7]


cdef struct DirectoryHeader:
    Header header
    uint64_t cluster_id             # owner; before the version
    uint32_t role                   # owner; relaxed; at switch_role
    uint32_t state                  # owner; release; DIRECTORY_CLOSED at finalize
    uint32_t memory_waiters         # owner; seq_cst add and subtract; around a wait on memory_event
    uint32_t pad0[11]
    # How many records of each table have pages behind them.
    uint32_t links_reserved         # linker; cold lock, release after the pages are there
    uint32_t caches_reserved        # owner; release after the pages are there
    uint32_t tensors_reserved       # owner; likewise
    uint32_t rows_reserved          # owner; likewise
    uint32_t coverage_reserved      # owner; likewise; in lines
    uint32_t pad1[27]
    uint64_t index_word             # owner; seq_cst; (version << 16 | part << 8 | log2 of its entries) at each rebuild
    uint64_t pad2[15]
    uint32_t key_event              # owner and waiters; seq_cst add then futex wake; a key or cache more or less, or a wait ends
    uint32_t pad3[31]
    uint32_t key_waiters            # waiters; seq_cst add and subtract; around a wait on key_event
    uint32_t pad4[31]
    uint64_t segments_unlinked      # owner; release after the ring entry; when a segment's name is gone
    uint64_t ended_count            # owner; release after the ring entry; when a key ended
    uint64_t pad5[14]
    uint64_t reaped_count           # linkers; cold lock; a record was claimed anew: a key may be full, not consumed
    uint64_t pad6[15]
    uint32_t memory_event           # owner and waiters, pullers; seq_cst add then futex wake; if memory_waiters and any may be free
    uint32_t pad7[31]
    uint64_t reserved[384]


cdef struct EndedKey:
    uint64_t key[4]                 # owner; before ended_count
    uint32_t key_kind               # owner; before ended_count
    uint32_t why                    # owner; before ended_count; ROW_CONSUMED or ROW_REMOVED
    int64_t when_ns                 # owner; before ended_count; CLOCK_REALTIME when the owner saw it
    uint64_t generation             # owner; before ended_count; of the binding that ended, in its row
    uint64_t row                    # owner; before ended_count; number of the row's record


cdef struct CacheRecord:
    uint64_t word                   # owner; seq_cst; (generation << 8 | state)
    int64_t cache_id                # owner; before the word says LIVE (so are all below)
    uint64_t segment_serial
    uint64_t segment_nbytes         # size of the file, header included
    uint32_t kind
    uint32_t remote_accessible
    uint32_t num_tensors
    uint32_t first_tensor
    uint32_t num_rows
    uint32_t first_row
    uint32_t first_coverage         # in lines
    uint32_t coverage_lines         # lines of coverage words a row
    uint64_t blocks_model_id        # a blocks cache's key
    uint32_t blocks_bound
    uint32_t consumed               # pullers; seq_cst add, after the row's swap; a hint: that of a puller that died may be missing
    uint64_t format                 # owner; before the word says LIVE; a hash of kv_tensor_format, 0 = none was given
    uint64_t reserved[5]


cdef struct TensorRecord:
    uint64_t offset                 # owner; before the cache word says LIVE (so are all below); from the file's start
    uint64_t nbytes
    uint64_t outer                  # row b of a tensor is `outer` pieces of `inner` bytes, `rows * inner` bytes apart,
    uint64_t rows                   # the first at `b * inner`
    uint64_t inner
    uint64_t base_address           # where the owner maps it: what its per_device_tensor_addrs shows
    uint32_t dtype
    uint32_t pad
    uint64_t reserved


cdef struct RowRecord:
    uint64_t key[4]                 # owner; before the word says LIVE; req_id, prefix_id, model_id, 0
    uint32_t key_kind               # owner; before the word says LIVE
    uint32_t cache_slot             # owner; before the cache word says LIVE
    uint32_t batch_index            # owner; before the cache word says LIVE
    uint32_t progress               # owner; seq_cst; number of tensors whose bytes are published
    uint64_t pad0[10]
    uint64_t word                   # owner and pullers; seq_cst compare-and-swap; (generation << 8 | state)
    uint64_t last_use_ns            # pullers; relaxed; CLOCK_MONOTONIC of the last successful pull; with the word, as its writers
    uint32_t progress_waiters       # waiters; seq_cst add and subtract; around a wait on event
    uint32_t event                  # owner and waiters; seq_cst add then futex wake; if progress_waiters, when the row changes
    uint32_t hits                   # pullers; relaxed add, of rows with a prefix key; the owner, before the word says LIVE: 0
    uint32_t pad1
    uint64_t pad2[12]


cdef struct LinkSide:
    uint32_t open                   # this side; initiator: cold lock, SIDE_OPEN or not; acceptor: seq_cst add, threads in it
    uint32_t slot                   # initiator; cold lock; member slot of this side
    uint64_t incarnation            # initiator; cold lock; of this side's cluster
    uint64_t cluster_id             # initiator; cold lock
    uint64_t pad0[13]
    uint64_t hazard                 # this side; exchange seq_cst, cleared by release; the cache in use now, 0 = none
    uint64_t pad1[15]
    uint64_t counters[COUNTERS_MAX]     # this side; relaxed; under the link's lock, but for timeouts before it was had
    uint64_t leases[LEASES_MAX]     # this side; as the hazard, but lasting: a view, a fork, a waiting pull


cdef struct LinkRecord:
    uint64_t state                  # linker, both sides; compare-and-swap; (serial << 8 | LINK_*)
    uint64_t pad0[15]
    uint32_t word                   # both sides; the lock word of _futex.pyx
    uint32_t pad1[31]
    LinkSide sides[2]


cdef struct SegmentHeader:
    Header header
    uint64_t generation             # owner; release; of the cache that lives in the segment now


# -- addresses of records; callers have checked the index against a count --------------------------------------------

cdef inline DirectoryHeader* directory_header(char* base) noexcept nogil:
    return <DirectoryHeader*>base


cdef inline MemberRecord* member_at(char* base, uint32_t slot) noexcept nogil:
    return (<MemberRecord*>(base + sizeof(MembersHeader))) + slot


cdef inline EndedKey* ended_at(char* base, uint64_t number) noexcept nogil:
    return (<EndedKey*>(base + ENDED_OFFSET)) + number % ENDED_RING


cdef inline uint64_t* unlinked_at(char* base, uint64_t number) noexcept nogil:
    return (<uint64_t*>(base + UNLINKED_OFFSET)) + number % UNLINKED_RING


cdef inline LinkRecord* link_at(char* base, uint32_t slot) noexcept nogil:
    return (<LinkRecord*>(base + LINKS_OFFSET)) + slot


cdef inline CacheRecord* cache_at(char* base, uint32_t slot) noexcept nogil:
    return (<CacheRecord*>(base + CACHES_OFFSET)) + slot


cdef inline TensorRecord* tensor_at(char* base, uint32_t index) noexcept nogil:
    return (<TensorRecord*>(base + TENSORS_OFFSET)) + index


cdef inline RowRecord* row_at(char* base, uint32_t index) noexcept nogil:
    return (<RowRecord*>(base + ROWS_OFFSET)) + index


cdef inline uint64_t* coverage_at(char* base, uint32_t line) noexcept nogil:
    return <uint64_t*>(base + COVERAGE_OFFSET + <uint64_t>line * LINE)


cdef inline uint64_t index_part_offset(uint32_t log2, uint32_t part) noexcept nogil:
    """Byte offset in the directory of one of the two index parts of 2**log2 entries."""
    return INDEX_OFFSET + 8 * (2 * ((<uint64_t>1 << log2) - (1 << INDEX_LOG2_MIN)) + (<uint64_t>part << log2))


cdef inline uint64_t* index_part(char* base, uint32_t log2, uint32_t part) noexcept nogil:
    return <uint64_t*>(base + index_part_offset(log2, part))


cdef inline uint64_t word_generation(uint64_t word) noexcept nogil:
    return word >> 8


cdef inline uint32_t word_state(uint64_t word) noexcept nogil:
    return <uint32_t>(word & 0xFF)


cdef inline uint64_t make_word(uint64_t generation, uint32_t state) noexcept nogil:
    return generation << 8 | state


cdef uint32_t layout_fingerprint() noexcept nogil
