# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""What a reader does that waits for a row: looks under the link's lock, sleeps without it.

"Will not come" is an answer as good as "is there": a key that ends while it is waited for is told at once. So is a link or a peer
that ends, by the look that follows each sleep.
"""
from libc.string cimport memset

from shmkv._core cimport BY_BLOCKS_KEY, BY_ID, BY_KEY
from shmkv._futex cimport fence_acquire, load32_acquire, load64_acquire, load64_seq, load_words, now_ns
from shmkv._layout cimport (
    CACHE_LIVE,
    ENDED_RING,
    LINK_BROKEN,
    LINK_LIVE,
    ROW_CONSUMED,
    ROW_CONSUMED_OUT,
    ROW_LIVE,
    DirectoryHeader,
    EndedKey,
    RowRecord,
    directory_header,
    ended_at,
    make_word,
    row_at,
    word_generation,
    word_state,
)
from shmkv._link cimport (
    LINK_CANCELLED,
    LINK_INTERRUPTED,
    LINK_PEER_GONE,
    LINK_TIMEOUT,
    is_cancelled,
    link_enter,
    link_leave,
    look,
    patience_init,
    raise_pending,
)
from shmkv._link_handle cimport LinkHandle
from shmkv._link_record cimport end_link
from shmkv._lookup cimport (
    FIND_CONSUMED,
    FIND_DAMAGED,
    FIND_NEVER,
    FIND_REMOVED,
    find_blocks,
    find_key,
    find_row,
    is_same_row,
    pin,
    unpin,
)
from shmkv._pull cimport request_init, set_key
from shmkv._wait cimport (
    TURN_ARM,
    TURN_LOOK,
    WAIT_NOT_YET,
    Ending,
    sleeper_count_in,
    sleeper_end_turn,
    sleeper_seen,
    sleeper_sleep,
)


cdef enum:
    RING_LOOKS = 1000               # a peer whose count of ended keys changes without end must not keep a reader for ever


# -- finding ---------------------------------------------------------------------------------------------------------

cdef int find_awaited(Link* link, Request* want, FoundRow* found, Beginning* beginning) noexcept nogil:
    """The row, pinned; AWAIT_KEY; or why it will not come. Under the link's lock."""
    cdef uint64_t ended = load64_acquire(&directory_header(link.directory).ended_count)
    cdef int status
    while True:
        if want.by == BY_KEY:
            status = find_key(link.directory, &want.key, found)
        elif want.by == BY_ID:
            status = find_row(link.directory, want.cache_id, want.select.src_row, found)
        else:
            status = find_blocks(link.directory, want.key.words[2], found)
        if status == 0 and pin(link.mine, found):
            return 0
        if status != 0:
            break
        if now_ns() >= want.wait.deadline_ns:
            return LINK_TIMEOUT
    if want.by == BY_KEY:
        return will_key_come(link.directory, want, found, status, ended, beginning)
    return will_cache_come(link, want, status)


cdef int will_cache_come(Link* link, Request* want, int status) noexcept nogil:
    """Ids are not used twice, so a cache that is being freed does not come again; a row beyond those of a cache never comes."""
    cdef FoundRow found
    if status == FIND_REMOVED and want.by == BY_BLOCKS_KEY:
        return AWAIT_KEY
    if status != FIND_NEVER:
        return status
    if want.by == BY_ID and (want.cache_id <= 0 or find_row(link.directory, want.cache_id, 0, &found) == 0):
        return status
    return AWAIT_KEY


cdef int will_key_come(char* base, Request* want, const FoundRow* found, int status, uint64_t ended,
                       Beginning* beginning) noexcept nogil:
    """A key that is not there: AWAIT_KEY, or how it ended since the wait began. `ended`: keys that had ended before the look."""
    cdef bint in_index = status == FIND_CONSUMED or status == FIND_REMOVED
    cdef uint64_t row = number_of_row(base, found.row) if in_index else 0
    cdef uint64_t generation = word_generation(found.row_word) if in_index else 0
    if status != FIND_NEVER and not in_index:
        return status
    if not beginning.noted:
        beginning.noted = True
        beginning.ended_count, beginning.row, beginning.generation = ended, row, generation
        return AWAIT_KEY
    if in_index and (row != beginning.row or generation != beginning.generation):
        return status
    status = look_at_ring(base, want, beginning)
    return AWAIT_KEY if status == 0 else status


cdef inline uint64_t number_of_row(char* base, const RowRecord* row) noexcept nogil:
    return (<size_t>row - <size_t>row_at(base, 0)) // sizeof(RowRecord)


cdef int look_at_ring(char* base, Request* want, Beginning* beginning) noexcept nogil:
    """FIND_CONSUMED or FIND_REMOVED if a binding of the key has ended that was not over when the wait began, else 0. What is left
    after RING_LOOKS looks is for the next call: ends come with an event."""
    cdef DirectoryHeader* header = directory_header(base)
    cdef uint64_t count = load64_acquire(&header.ended_count)
    cdef EndedKey copy
    cdef int _look
    for _look in range(RING_LOOKS):
        if beginning.ended_count == count:
            break
        if count - beginning.ended_count >= ENDED_RING:     # what was overwritten cannot be known; nor the entry being written
            beginning.ended_count = count - (ENDED_RING - 1)
        load_words(&copy, ended_at(base, beginning.ended_count), sizeof(EndedKey))
        fence_acquire()
        count = load64_acquire(&header.ended_count)
        if count - beginning.ended_count >= ENDED_RING:
            continue
        beginning.ended_count += 1
        if copy.key_kind == want.key.kind and copy.key[0] == want.key.words[0] and copy.key[1] == want.key.words[1] \
                and copy.key[2] == want.key.words[2] \
                and (copy.row != beginning.row or copy.generation != beginning.generation):
            return FIND_CONSUMED if copy.why == ROW_CONSUMED else FIND_REMOVED
    return 0


# -- a row that was found --------------------------------------------------------------------------------------------

cdef uint32_t progress_of(const FoundRow* found) noexcept nogil:
    """How many tensors of the row are published."""
    return load32_acquire(&found.row.progress)          # consume: progress


cdef int look_at_row(const FoundRow* found, bint by_key) noexcept nogil:
    """Can more of the row's tensors be published? AWAIT_ROW, FIND_CONSUMED or FIND_REMOVED."""
    cdef uint64_t word = load64_seq(&found.row.word)
    cdef uint32_t state = word_state(word)
    if load64_seq(&found.cache.word) != found.cache_word or word_state(found.cache_word) != CACHE_LIVE:
        return FIND_REMOVED
    if not by_key:
        return AWAIT_ROW if is_same_row(found.row_word, word) else FIND_REMOVED
    if word_generation(word) != word_generation(found.row_word):
        return FIND_REMOVED
    if state == ROW_LIVE:
        return AWAIT_ROW
    return FIND_CONSUMED if state in (ROW_CONSUMED, ROW_CONSUMED_OUT) else FIND_REMOVED


# -- sleeping --------------------------------------------------------------------------------------------------------

cdef int sleep_for(Link* link, Request* want, const FoundRow* found, int awaited, Sleeper* sleeper, uint32_t seen,
                   int64_t turn_ns, bint watched) noexcept nogil:
    """After a look that was answered AWAIT_*: 0 if it is time for another one, else why not. The first time on a word it is counted
    in, and does not sleep: what came since the look would be slept through."""
    cdef DirectoryHeader* header = directory_header(link.directory)
    cdef uint32_t* event = &found.row.event if awaited == AWAIT_ROW else &header.key_event
    cdef int status
    if turn_ns == TURN_LOOK:
        return WAIT_NOT_YET
    if sleeper.event != <uint64_t><size_t>event:
        sleeper_count_in(sleeper, event, &found.row.progress_waiters if awaited == AWAIT_ROW else &header.key_waiters)
        return 0
    if turn_ns == TURN_ARM:
        sleeper.seen = seen
        # It is counted in: who cancels it from now on changes the word.
        return LINK_CANCELLED if is_cancelled(&want.wait) else WAIT_NOT_YET
    status = sleeper_sleep(sleeper, seen, &want.wait, turn_ns, watched)
    if status == 0:
        status = look(link)
    if status == LINK_PEER_GONE:
        end_link(link.record, make_word(link.serial, LINK_LIVE), LINK_BROKEN)
    return status


# -- waiting for a key, without its bytes ----------------------------------------------------------------------------

cdef class KeyWait(Ending):
    """A wait for a key to be bound and wholly published. `run` is called until it answers something else than NOT_YET."""
    cdef Request want
    cdef FoundRow found
    cdef Beginning beginning
    cdef LinkHandle handle
    cdef readonly bint is_found     # bound, at some look
    cdef uint32_t row               # of a blocks cache: those before it are published

    def __init__(self, LinkHandle handle, bytes packed, int64_t timeout_ms):
        request_init(&self.want, (0,) * 10)
        set_key(&self.want, packed)
        patience_init(&self.want.wait, timeout_ms)
        memset(&self.beginning, 0, sizeof(Beginning))
        self.handle = handle

    def run(self, int64_t turn_ns, bint watched):
        """0, WAIT_NOT_YET at `turn_ns` (CLOCK_MONOTONIC), or why it will not come. Raises what a signal handler raised."""
        cdef Link* link = &self.handle.link
        cdef int status
        self.begin_turn(&self.want.wait)
        with nogil:
            status = self.wait(link, turn_ns, watched)
        if status == LINK_INTERRUPTED:
            raise_pending()
        return status

    cdef int wait(self, Link* link, int64_t turn_ns, bint watched) noexcept nogil:
        cdef uint32_t seen
        cdef int status = 0
        while status == 0:
            seen = sleeper_seen(&self.sleeper)
            status = link_enter(link, &self.want.wait)
            if status == 0:
                status = self.look_for_row(link)
                link_leave(link)
                if status == 0:
                    break
            if status == AWAIT_KEY or status == AWAIT_ROW:
                status = sleep_for(link, &self.want, &self.found, status, &self.sleeper, seen, turn_ns, watched)
        sleeper_end_turn(&self.sleeper, status, turn_ns)
        return status

    cdef int look_for_row(self, Link* link) noexcept nogil:
        """Under the link's lock. Nothing of the row is kept from being freed between two looks: its record stays, and says so."""
        cdef bint by_key = self.want.by == BY_KEY
        cdef int status
        if not self.is_found:
            status = find_awaited(link, &self.want, &self.found, &self.beginning)
            if status != 0:
                return status
            unpin(link.mine)
            self.is_found = True
        if self.want.by == BY_BLOCKS_KEY:
            return self.look_at_blocks(link)
        if progress_of(&self.found) < self.found.copy.num_tensors:
            return look_at_row(&self.found, by_key)
        status = look_at_row(&self.found, by_key)
        return 0 if status == AWAIT_ROW else status

    cdef int look_at_blocks(self, Link* link) noexcept nogil:
        cdef int status
        if self.found.copy.num_rows == 0:
            return FIND_DAMAGED         # no owner makes such a cache, and there is no row to look at
        while self.row < self.found.copy.num_rows:
            self.found.row = row_at(link.directory, self.found.copy.first_row + self.row)
            self.found.row_word = load64_seq(&self.found.row.word)
            if progress_of(&self.found) < self.found.copy.num_tensors:
                break
            self.row += 1
        status = look_at_row(&self.found, False)
        return 0 if status == AWAIT_ROW and self.row == self.found.copy.num_rows else status
