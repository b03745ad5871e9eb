# cython: language_level=3, freethreading_compatible=True
"""From an address in the peer's process to a tensor of one of its caches.

An owner records with each tensor where it has it, which is what its callers see and send around; how the bytes of a place are
reached is a matter of the caller. The search is a hint, made without any lock: what it found is read again once the cache is
pinned.
"""
from shmkv._futex cimport load32_acquire, load64_relaxed, load_words
from shmkv._layout cimport CACHES_MAX, directory_header, tensor_at
from shmkv._lookup cimport FIND_NEVER, copy_cache
from shmkv._mapping cimport Region
from shmkv._plan cimport SHAPE_RECORD_NBYTES, check_shape, set_dense


cdef int find_place(char* base, uint64_t address, uint32_t hint, Place* place) noexcept nogil:
    """The living cache in which an address lies: 0 or FIND_NEVER. The record in slot `hint` is looked at first."""
    cdef uint32_t slot, count = min(load32_acquire(&directory_header(base).caches_reserved), <uint32_t>CACHES_MAX)
    if hint < count and is_in_cache(base, address, hint, place):
        return 0
    for slot in range(count):
        if is_in_cache(base, address, slot, place):
            return 0
    return FIND_NEVER


cdef bint is_in_cache(char* base, uint64_t address, uint32_t slot, Place* place) noexcept nogil:
    """Does the address lie in one of the tensors of the living cache in this slot? The whole segment is asked first."""
    cdef uint64_t segment
    cdef uint32_t i
    if copy_cache(base, slot, &place.found) != 0 or place.found.copy.num_tensors == 0:
        return False
    segment = start_of_tensor(base, place.found.copy.first_tensor) - offset_of_tensor(base, place.found.copy.first_tensor)
    if address - segment >= place.found.copy.segment_nbytes:       # also where it is below, which wraps
        return False
    place.found.row = NULL
    place.slot = slot
    for i in range(place.found.copy.num_tensors):
        place.tensor = i
        if read_place(base, address, place):
            return True
    return False


cdef bint read_place(char* base, uint64_t address, Place* place) noexcept nogil:
    """Copy the record of the tensor: does the address lie in it, and it in its segment?"""
    cdef uint32_t index = place.found.copy.first_tensor + place.tensor
    cdef uint64_t offset = address - start_of_tensor(base, index)
    load_words(&place.shape, tensor_at(base, index), SHAPE_RECORD_NBYTES)
    set_dense(&place.shape)
    if offset >= place.shape.nbytes or check_shape(&place.shape, place.found.copy.segment_nbytes) != 0:
        return False
    place.offset = offset
    place.room = place.shape.nbytes - offset
    return True


cdef inline uint64_t start_of_tensor(char* base, uint32_t index) noexcept nogil:
    """Where the owner has a tensor in its own memory."""
    return load64_relaxed(&tensor_at(base, index).base_address)


cdef inline uint64_t offset_of_tensor(char* base, uint32_t index) noexcept nogil:
    return load64_relaxed(&tensor_at(base, index).offset)


def tensor_of(Region directory, uint64_t address):
    """(cache id, number of the tensor) in which an address of the owner's process lies, None if in none of a living cache."""
    cdef Place place
    if find_place(directory.address, address, 0, &place) != 0:
        return None
    return place.found.copy.cache_id, place.tensor
