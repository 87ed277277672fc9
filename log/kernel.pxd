# cython: language_level=3
# The types of kernel.py for the compiler. The interpreter never sees this file.
# Nothing here may change what the functions do: tests run both and compare.

cimport cython

cpdef bytes varint(object value)

cdef bint _fits(long long value) noexcept

@cython.locals(raw="unsigned long long", size=cython.int)
cdef int _varint_size(long long value) noexcept

@cython.locals(raw="unsigned long long")
cdef Py_ssize_t _put_varint(unsigned char* target, Py_ssize_t position, long long value) noexcept

@cython.locals(i=Py_ssize_t)
cdef Py_ssize_t _put_bytes(
    unsigned char* target, Py_ssize_t position, const unsigned char* source, Py_ssize_t start, Py_ssize_t size
) noexcept

@cython.locals(raw=cython.int)
cdef (long long, Py_ssize_t) _read_varint(
    const unsigned char* source, Py_ssize_t position, Py_ssize_t end
) noexcept

@cython.locals(raw="unsigned long long", byte="unsigned long long", shift=cython.int)
cdef (long long, Py_ssize_t) _read_long_varint(
    const unsigned char* source, Py_ssize_t position, Py_ssize_t end
) noexcept

@cython.locals(half="long long")
cdef long long _unzigzag(unsigned long long raw) noexcept

@cython.locals(size="long long")
cdef Py_ssize_t _skip_headers(
    const unsigned char* source, Py_ssize_t position, Py_ssize_t end, long long count
) noexcept

@cython.locals(
    count=Py_ssize_t, i=Py_ssize_t, position=Py_ssize_t, total=Py_ssize_t, size=Py_ssize_t, delta="long long",
    stamp="long long", offset="long long", stamp_deltas="long long[::1]", sizes="long long[::1]", key=bytes, value=bytes, block=bytes, target="unsigned char*", out=bytearray,
)
cpdef bytearray encode_loop(
    list timestamps, list keys, list values, list blocks, list deltas, long long base_timestamp, Py_ssize_t reserve
)

cpdef tuple decode_loop(
    bytes data, Py_ssize_t start, Py_ssize_t end, Py_ssize_t count,
    long long base_offset, long long base_timestamp, long long last_delta
)

@cython.locals(
    source="const unsigned char*", i=Py_ssize_t, position=Py_ssize_t, record_end=Py_ssize_t, size="long long",
    delta="long long", stamp="long long", previous="long long", nulls=cython.int,
    origin=Py_ssize_t, before=Py_ssize_t, start=Py_ssize_t, end=Py_ssize_t, rows=Py_ssize_t, row=Py_ssize_t,
    count=Py_ssize_t, base_offset="long long", base_timestamp="long long", last_delta="long long",
    offsets_out="long long[::1]", timestamps_out="long long[::1]", starts_out="int[::1]",
    key_to="int[::1]", key_flag="unsigned char*", key_present=bytearray,
    value_to="int[::1]", value_flag="unsigned char*", value_present=bytearray, header_to="int[::1]",
)
cpdef tuple decode_run(bytes data, list spans)

@cython.locals(piece_from="int[::1]", piece_to="int[::1]", target="unsigned char*", i=Py_ssize_t, out=bytearray)
cdef bytearray _gather(
    const unsigned char* source, Py_ssize_t origin, object starts, Py_ssize_t field, object ends, Py_ssize_t count
)

@cython.locals(
    position=Py_ssize_t, end=Py_ssize_t, shift=cython.int,
    mixed="unsigned long long", word="unsigned long long", factor="unsigned long long", mask="unsigned long long",
    signed="long long",
)
cdef long long _murmur2_at(const unsigned char* source, Py_ssize_t start, Py_ssize_t size) noexcept

cpdef long long murmur2(bytes data)

@cython.locals(positive="long long", out="int[::1]", i=Py_ssize_t, key=bytes)
cpdef object partitions_of(list keys, long long partitions)

@cython.locals(
    positive="long long", out="int[::1]", bounds="long long[::1]", flags="const unsigned char*",
    source="const unsigned char*", has_nulls=bint, i=Py_ssize_t, count=Py_ssize_t,
)
cpdef object packed_partitions(object ends, bytes data, bytes present, long long partitions)

@cython.locals(
    count=Py_ssize_t, i=Py_ssize_t, row=Py_ssize_t, position=Py_ssize_t, total=Py_ssize_t, size="long long",
    length="long long", delta="long long", base="long long", order="int[::1]", times="long long[::1]",
    key_to="long long[::1]", value_to="long long[::1]", body="long long[::1]",
    key_from="const unsigned char*", key_flag="const unsigned char*",
    value_from="const unsigned char*", value_flag="const unsigned char*",
    has_keys=bint, has_values=bint, some_keys=bint, some_values=bint,
    target="unsigned char*", out=bytearray,
)
cpdef bytearray encode_packed(
    object rows, object stamps, object key_ends, bytes key_data, bytes key_present,
    object value_ends, bytes value_data, bytes value_present, Py_ssize_t reserve
)

@cython.locals(
    polynomial="unsigned long long", product="unsigned long long", bit="unsigned long long", odd="unsigned long long"
)
cdef unsigned long long _crc_product(unsigned long long left, unsigned long long right) noexcept

cpdef unsigned long long crc_join(unsigned long long head, unsigned long long tail, Py_ssize_t size) except? 0
