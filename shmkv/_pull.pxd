"""Requests out of objects of Python."""
from shmkv._core cimport Request


cdef int request_init(Request* want, tuple select) except -1
cdef int set_key(Request* want, bytes packed) except -1
