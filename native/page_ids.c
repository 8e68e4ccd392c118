/* The identities of the pages of a prompt: the XXH64 hash of each page, whose seed is the identity of the page before.
 *
 * Optional: without it, `hicache.ghosts` uses the package xxhash, one call per page. The algorithm is that of
 * https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define P1 11400714785074694791ULL
#define P2 14029467366897019727ULL
#define P3 1609587929392839161ULL
#define P4 9650029242287828579ULL
#define P5 2870177450012600261ULL

static uint64_t rotate(uint64_t value, int bits)
{
    return (value << bits) | (value >> (64 - bits));
}

static uint64_t word(const unsigned char *from)
{
    uint64_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

static uint64_t mix(uint64_t lane, uint64_t value)
{
    return rotate(lane + value * P2, 31) * P1;
}

static uint64_t hash_page(const unsigned char *from, size_t count, uint64_t seed)
{
    uint64_t hash = seed + P5, total = count;
    if (count >= 32) {
        uint64_t a = seed + P1 + P2, b = seed + P2, c = seed, d = seed - P1;
        for (; count >= 32; count -= 32, from += 32) {
            a = mix(a, word(from));
            b = mix(b, word(from + 8));
            c = mix(c, word(from + 16));
            d = mix(d, word(from + 24));
        }
        hash = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18);
        hash = (hash ^ mix(0, a)) * P1 + P4;
        hash = (hash ^ mix(0, b)) * P1 + P4;
        hash = (hash ^ mix(0, c)) * P1 + P4;
        hash = (hash ^ mix(0, d)) * P1 + P4;
    }
    hash += total;
    for (; count >= 8; count -= 8, from += 8)
        hash = rotate(hash ^ mix(0, word(from)), 27) * P1 + P4;
    if (count >= 4) {
        uint32_t value;
        memcpy(&value, from, sizeof value);
        hash = rotate(hash ^ value * P1, 23) * P2 + P3;
        count -= 4;
        from += 4;
    }
    for (; count; count--, from++)
        hash = rotate(hash ^ *from * P5, 11) * P1;
    hash = (hash ^ hash >> 33) * P2;
    hash = (hash ^ hash >> 29) * P3;
    return hash ^ hash >> 32;
}

/* The last of them, or the number if there are none: without an object per page. */
PyObject *last_page_id(PyObject *module, PyObject *arguments)
{
    (void)module;
    unsigned long long id;
    Py_buffer run;
    Py_ssize_t page_bytes;
    if (!PyArg_ParseTuple(arguments, "Ky*n", &id, &run, &page_bytes))
        return NULL;
    if (page_bytes <= 0)
        PyErr_SetString(PyExc_ValueError, "last_page_id: page_bytes must be positive");
    else
        for (Py_ssize_t i = 0; i < run.len / page_bytes; i++)
            id = hash_page((const unsigned char *)run.buf + i * page_bytes, page_bytes, id);
    PyBuffer_Release(&run);
    return page_bytes <= 0 ? NULL : PyLong_FromUnsignedLongLong(id);
}

PyObject *page_ids(PyObject *module, PyObject *arguments)
{
    (void)module;
    unsigned long long id;
    Py_buffer run;
    Py_ssize_t page_bytes;
    if (!PyArg_ParseTuple(arguments, "Ky*n", &id, &run, &page_bytes))
        return NULL;
    PyObject *ids = NULL;
    if (page_bytes <= 0)
        PyErr_SetString(PyExc_ValueError, "page_ids: page_bytes must be positive");
    else
        ids = PyList_New(run.len / page_bytes);
    for (Py_ssize_t i = 0; ids != NULL && i < run.len / page_bytes; i++) {
        id = hash_page((const unsigned char *)run.buf + i * page_bytes, page_bytes, id);
        PyObject *number = PyLong_FromUnsignedLongLong(id);
        if (number == NULL || PyList_SetItem(ids, i, number) != 0)
            Py_CLEAR(ids);
    }
    PyBuffer_Release(&run);
    return ids;
}
