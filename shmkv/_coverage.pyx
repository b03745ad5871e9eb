# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""Which tensors of a key have been pulled, and the end of the key when all have.

A coverage word has the bits of 32 tensors and, above them, the lower half of the row's generation: bits of an earlier binding never
count for a later one.
"""
from shmkv._crash cimport crash_point
from shmkv._futex cimport add32_seq, load64_seq, swap64_seq
from shmkv._layout cimport ROW_CONSUMED, TENSORS_PER_WORD, coverage_at, make_word, word_generation


cdef inline uint64_t* coverage_words(char* base, const CacheRecord* cache, uint32_t batch_index) noexcept nogil:
    return coverage_at(base, cache.first_coverage + batch_index * cache.coverage_lines)


cdef inline uint64_t word_bits(uint32_t first, uint32_t count, uint32_t number) noexcept nogil:
    """The bits of coverage word `number`, in which some of the tensors [first, first + count) have their own."""
    cdef uint32_t low = number * TENSORS_PER_WORD
    cdef uint32_t begin = first if first > low else low
    cdef uint32_t end = first + count if first + count < low + TENSORS_PER_WORD else low + TENSORS_PER_WORD
    return ((<uint64_t>1 << (end - low)) - 1) & ~((<uint64_t>1 << (begin - low)) - 1)


cdef bint cover(char* base, FoundRow* found, uint32_t first, uint32_t count) noexcept nogil:
    """Mark tensors as pulled; False if a word belongs to another binding of the row."""
    cdef uint64_t* words = coverage_words(base, &found.copy, found.batch_index)
    cdef uint64_t seen, bits, tag = word_generation(found.row_word) << 32
    cdef uint32_t number
    for number in range(first // TENSORS_PER_WORD, (first + count - 1) // TENSORS_PER_WORD + 1):
        bits = word_bits(first, count, number)
        while True:
            seen = load64_seq(&words[number])
            if seen & 0xFFFFFFFF00000000ULL != tag:
                return False
            crash_point(b"covering")
            if seen & bits == bits or swap64_seq(&words[number], seen, seen | bits):
                break
    return True


cdef bint is_full(char* base, const CacheRecord* cache, uint32_t batch_index, uint64_t row_generation) noexcept nogil:
    """Have all tensors of this binding of the row been pulled?"""
    cdef uint64_t* words = coverage_words(base, cache, batch_index)
    cdef uint32_t number
    for number in range((cache.num_tensors + TENSORS_PER_WORD - 1) // TENSORS_PER_WORD):
        if load64_seq(&words[number]) != (row_generation << 32 | word_bits(0, cache.num_tensors, number)):
            return False
    return True


cdef bint consume(FoundRow* found) noexcept nogil:
    """LIVE -> CONSUMED, once; True for the one who did it."""
    crash_point(b"consuming")
    if not swap64_seq(&found.row.word, found.row_word, make_word(word_generation(found.row_word), ROW_CONSUMED)):
        return False
    crash_point(b"consumed")
    add32_seq(&found.cache.consumed, 1)         # after the swap: who sees the count finds the row consumed
    return True
