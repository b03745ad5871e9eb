"""DLPack's C structures, as its specification (version 1) lays them out; for those who export and those who import."""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from *:
    """
    #ifndef SHMKV_DLPACK
    #define SHMKV_DLPACK
    #include <stdint.h>
    typedef struct { int32_t device_type; int32_t device_id; } dl_device;
    typedef struct { uint8_t code; uint8_t bits; uint16_t lanes; } dl_data_type;
    typedef struct {
        void *data; dl_device device; int32_t ndim; dl_data_type dtype;
        int64_t *shape; int64_t *strides; uint64_t byte_offset;
    } dl_tensor;
    typedef struct dl_managed { dl_tensor tensor; void *manager_ctx; void (*deleter)(struct dl_managed *); } dl_managed;
    typedef struct { uint32_t major, minor; } dl_version;
    typedef struct dl_versioned {
        dl_version version;
        void *manager_ctx; void (*deleter)(struct dl_versioned *); uint64_t flags; dl_tensor tensor;
    } dl_versioned;
    #endif
    """
    ctypedef struct dl_device:
        int32_t device_type
        int32_t device_id
    ctypedef struct dl_data_type:
        uint8_t code
        uint8_t bits
        uint16_t lanes
    ctypedef struct dl_tensor:
        void* data
        dl_device device
        int32_t ndim
        dl_data_type dtype
        int64_t* shape
        int64_t* strides            # in elements; NULL = C-contiguous
        uint64_t byte_offset
    ctypedef struct dl_managed:
        dl_tensor tensor
        void* manager_ctx
        void (*deleter)(dl_managed*) noexcept
    ctypedef struct dl_version:
        uint32_t major
        uint32_t minor
    ctypedef struct dl_versioned:
        dl_version version
        void* manager_ctx
        void (*deleter)(dl_versioned*) noexcept
        uint64_t flags
        dl_tensor tensor

cdef enum:
    DL_CPU = 1
    DL_CUDA_HOST = 3                # pinned memory of the host
    DL_ROCM_HOST = 11
    DL_INT = 0                      # type codes
    DL_UINT = 1
    DL_FLOAT8 = 7                   # the first of those that version 1.1 brought
    DL_FLAG_READ_ONLY = 1
    DL_FLAG_COPIED = 2
    DL_FLAG_PADDED = 4              # elements of less than a byte take a byte each
