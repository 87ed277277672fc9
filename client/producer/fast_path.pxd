# cython: language_level=3
# The types of fast_path.py for the compiler. The interpreter never sees this file.
# Nothing here may change what the classes do: tests run both and compare.

cimport cython


cdef class ProducerBatch:
    cdef public object topic
    cdef public Py_ssize_t partition
    cdef public long long limit
    cdef public double opened_s
    cdef public list rows
    cdef public long long size
    cdef public Py_ssize_t count
    cdef public bint is_sealed
    cdef public bint is_done
    cdef public long long base_offset
    cdef public long long append_time_ms
    cdef public object error
    cdef public object timestamps
    cdef public bytearray data
    cdef public object condition
    cdef public list callbacks
    cdef public list waiters
    cdef public object lock
    cdef public double deadline_s
    cdef public long long sequence
    cdef public bint is_in_flight
    cdef public bint was_sent
    cdef public bint may_be_stored
    cdef public long long leader_epoch
    cdef public object last_error
    cdef public object outcome


cdef class Delivery:
    cdef public ProducerBatch _batch
    cdef public Py_ssize_t _index


cdef class TopicBuffers:
    cdef public object topic
    cdef public Py_ssize_t count
    cdef public list open
    cdef public Py_ssize_t sticky


cdef class BatchAppender:
    cdef public object lock
    cdef public dict topics
    cdef public long long row_bytes_max
    cdef public object clock_ms
    cdef public bint is_default_partitioner

    @cython.locals(buffers=TopicBuffers, batch=ProducerBatch, size="long long", index=Py_ssize_t, stamp="long long")
    cpdef object try_append(
        self, object topic, object value, object key, object partition=*, object headers=*, object timestamp_ms=*,
        object on_delivery=*
    )


@cython.locals(rows=list, index=Py_ssize_t)
cpdef Delivery append_row(ProducerBatch batch, tuple row, long long size, object on_delivery)

@cython.locals(size="long long")
cpdef long long headers_bytes(object headers) except -1

cpdef bint are_bytes(list column) except -1

@cython.locals(count=Py_ssize_t, i=Py_ssize_t, size="long long", out="long long[::1]", value=bytes, key=bytes)
cpdef object sizes_of(list values, list keys)

@cython.locals(i=Py_ssize_t, size="long long", filled="long long", held="long long[::1]", cuts=list)
cpdef list cuts_of(object sizes, long long bytes_max)

@cython.locals(
    i=Py_ssize_t, start=Py_ssize_t, end=Py_ssize_t, bounds="long long[::1]", rows=list, whole="const char*"
)
cpdef list cut_rows(object ends, bytes data)

@cython.locals(count=Py_ssize_t, i=Py_ssize_t, bounds="long long[::1]", out="long long[::1]")
cpdef object sizes_between(object ends)

@cython.locals(row=tuple, stamps=list, keys=list, values=list, headers=list, has_headers=bint)
cpdef tuple split_rows(list rows)

@cython.locals(i=Py_ssize_t, where="int[::1]", targets=list, target=list)
cpdef list scatter(object partitions, list column, Py_ssize_t count)

@cython.locals(i=Py_ssize_t, before="long long", bounds="long long[::1]")
cpdef object check_packed(object ends, bytes data, bytes present, Py_ssize_t count)

@cython.locals(
    i=Py_ssize_t, row=Py_ssize_t, size="long long", order="int[::1]", keys="long long[::1]", values="long long[::1]",
    out="long long[::1]", has_keys=bint, has_values=bint,
)
cpdef object packed_sizes(object rows, object key_ends, object value_ends)

@cython.locals(
    i=Py_ssize_t, number=Py_ssize_t, where="int[::1]", bounds="long long[::1]", nexts="long long[::1]", out="int[::1]"
)
cpdef list rows_by_partition(object partitions, Py_ssize_t count)
