# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""Caches of this process as the core knows them: addresses that are kept, not asked for, and a count of the calls that use them.

Knows nothing of who owns the memory; `memory` is only kept alive.
"""
from shmkv._futex cimport add32_seq, add64_relaxed, load32_seq, swap32_seq


cdef bint local_enter(Local* cache) noexcept nogil:
    """Count this call in, unless the cache was closed; seq_cst on both sides, as with hazards."""
    add32_seq(&cache.uses, 1)
    if load32_seq(&cache.is_open):
        return True
    local_leave(cache)
    return False


cdef void local_leave(Local* cache) noexcept nogil:
    add32_seq(&cache.uses, <uint32_t>-1)


cdef bint may_share(const Local* one, const Local* other) noexcept nogil:
    """Can the two have bytes in common? True also where one lies in the gaps of the other."""
    return one.base + one.begin < other.base + other.end and other.base + other.begin < one.base + one.end


cdef uint64_t local_numbers = 0


cdef class LocalCache:
    """Tensors of one cache in this process.

    `memory` has the address of its first byte as `base` and stays valid as long as this refers to it: a Region, or memory of the
    caller. `shapes`: a ShapeList, or one tuple a tensor as for ShapeList, in bytes from `base`; `format`: a hash of
    kv_tensor_format, 0 = none.
    """

    def __cinit__(self, memory, shapes, uint64_t format=0):
        cdef Local* local = &self.local
        cdef Shape* shape
        cdef uint32_t i
        self.memory = memory
        self.shapes = shapes if isinstance(shapes, ShapeList) else ShapeList(shapes)
        local.base = <char*><size_t>memory.base
        local.shapes = self.shapes.shapes
        local.num_tensors = self.shapes.count
        local.is_open = 1
        local.format = format
        local.number = add64_relaxed(&local_numbers, 1)
        local.begin = <uint64_t>-1
        for i in range(local.num_tensors):
            shape = &local.shapes[i]
            local.begin = min(local.begin, shape.offset)
            local.end = max(local.end, shape.offset + shape.nbytes)

    def close(self):
        """No new call may use the cache from now on."""
        swap32_seq(&self.local.is_open, 1, 0)

    def forget(self, memory):
        """Refer to nothing but `memory`, which stands for the address, from now on: the cache is closed, and no call uses it."""
        self.memory = memory

    @property
    def uses(self):
        """Calls of this process that read or write the cache now."""
        return add32_seq(&self.local.uses, 0)

    @property
    def format(self):
        """Hash of the kv_tensor_format, 0 = none was given."""
        return self.local.format

    def count_in(self):
        """Keep the cache from being freed until `leave`, also one that was deallocated and lives by its keys. The caller has
        the owner's lock, so it is not freed meanwhile."""
        add32_seq(&self.local.uses, 1)

    def leave(self):
        """The end of a `count_in`."""
        local_leave(&self.local)
