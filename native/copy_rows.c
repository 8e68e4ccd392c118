/* Copy rows of bytes between two strided arrays, from any row to any row, without the interpreter's lock. numpy first
 * gathers the rows into a temporary array, and takes the lock for each call.
 *
 * Optional: without this module, `hicache.tiers.copy_cpu` does the same in numpy.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define LINE ((size_t)64)

/* How many bytes ahead the source is prefetched, across rows: the processor's own prefetch restarts at each row. The
 * speed is the same from 4 to 16 KiB; 512 bytes are too few. */
#define AHEAD ((size_t)4096)

#ifdef __SSE2__
/* Copy the whole cache lines of `size` bytes to `to`, which is aligned to a line. Return the number of bytes copied.
 *
 * The stores bypass the cache, because a cached store first reads the line that it overwrites. The source is prefetched
 * as non-temporal (NTA). During the last AHEAD bytes of the row, the first bytes of `next` are prefetched. */
static size_t stream(char *to, const char *from, size_t size, const char *next)
{
    size_t done = 0, last = size > AHEAD ? size - AHEAD : 0;
    for (; done + LINE <= size; done += LINE) {
        _mm_prefetch(done < last ? from + done + AHEAD : next + (done - last), _MM_HINT_NTA);
        const __m128i *source = (const __m128i *)(from + done);
        __m128i *target = (__m128i *)(to + done);
        __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    return done;
}

/* Order the streamed stores before any later store, so that a thread that is notified of the copy sees its bytes. */
static void finish(void)
{
    _mm_sfence();
}
#else
static size_t stream(char *to, const char *from, size_t size, const char *next)
{
    (void)to, (void)from, (void)size, (void)next;
    return 0;
}

static void finish(void)
{
}
#endif

typedef struct {
    Py_buffer rows;  /* uint8 [n, m, bytes]: row i is [i / m, i % m] */
    Py_buffer wanted;  /* int64 */
} Side;

static char *row(const Side *side, Py_ssize_t number)
{
    int64_t i = ((const int64_t *)side->wanted.buf)[number];
    return (char *)side->rows.buf + i / side->rows.shape[1] * side->rows.strides[0]
        + i % side->rows.shape[1] * side->rows.strides[1];
}

/* Return true if the bytes of each row are contiguous and all wanted rows exist. */
static int is_valid(const Side *side)
{
    const Py_buffer *rows = &side->rows;
    if (rows->ndim != 3 || rows->itemsize != 1 || (rows->strides[2] != 1 && rows->shape[2] > 1))
        return 0;
    for (Py_ssize_t i = 0; i < side->wanted.len / (Py_ssize_t)sizeof(int64_t); i++) {
        int64_t number = ((const int64_t *)side->wanted.buf)[i];
        if (number < 0 || number >= rows->shape[0] * rows->shape[1])
            return 0;
    }
    return 1;
}

static int open_side(Side *side, PyObject *rows, PyObject *wanted, int flags)
{
    if (PyObject_GetBuffer(rows, &side->rows, PyBUF_STRIDES | flags) != 0)
        return -1;
    if (PyObject_GetBuffer(wanted, &side->wanted, PyBUF_SIMPLE) == 0)
        return 0;
    PyBuffer_Release(&side->rows);
    return -1;
}

static void close_side(Side *side)
{
    PyBuffer_Release(&side->rows);
    PyBuffer_Release(&side->wanted);
}

/* Copy the rows in order. REQUIRES: rows do not overlap. All sizes are streamed, because memcpy gains little when few
 * bytes stay in the cache: for one page of 2 MiB, copied and then read, it takes 0.94 to 1.0 times as long. */
static void copy(const Side *target, const Side *source, Py_ssize_t count, size_t size)
{
    size_t last = size > AHEAD ? size - AHEAD : 0;
    Py_ssize_t rows_ahead = 1 + (Py_ssize_t)(AHEAD / (size + 1));
    for (Py_ssize_t i = 0; i < count; i++) {
        char *to = row(target, i);
        const char *from = row(source, i);
        /* The last row has no next row: it prefetches the line that it copies, which is in the cache. */
        const char *next = i + rows_ahead < count ? row(source, i + rows_ahead) : from + last;
        size_t head = -(uintptr_t)to % LINE, done = 0;
        if (head + LINE <= size) {
            memcpy(to, from, head);
            done = head + stream(to + head, from + head, size - head, next);
        }
        memcpy(to + done, from + done, size - done);
    }
    finish();
}

/* Called with (target, target_rows, source, source_rows). */
PyObject *copy_rows(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *to, *to_rows, *from, *from_rows;
    Side target, source;
    if (!PyArg_ParseTuple(arguments, "OOOO", &to, &to_rows, &from, &from_rows)
        || open_side(&target, to, to_rows, PyBUF_WRITABLE) != 0)
        return NULL;
    if (open_side(&source, from, from_rows, 0) != 0) {
        close_side(&target);
        return NULL;
    }
    int valid = target.wanted.len == source.wanted.len && is_valid(&target) && is_valid(&source)
        && target.rows.shape[2] == source.rows.shape[2];
    if (valid) {
        Py_BEGIN_ALLOW_THREADS
        copy(&target, &source, target.wanted.len / (Py_ssize_t)sizeof(int64_t), (size_t)source.rows.shape[2]);
        Py_END_ALLOW_THREADS
    } else {
        PyErr_SetString(PyExc_ValueError, "copy_rows: pass bytes [n, m, size] and as many int64 rows of both sides");
    }
    close_side(&source);
    close_side(&target);
    return valid ? Py_NewRef(Py_None) : NULL;
}
