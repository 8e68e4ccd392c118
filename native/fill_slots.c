/* Expand int32 pages to the int64 slots of their tokens in one pass: `page_size` slots from `page * page_size` on.
 *
 * Optional: without this module, `hicache.tiers.device` does the same in numpy.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>

/* The version is chosen when the module is loaded, as in pack_token_ids.c. */
#if defined(__x86_64__) && defined(__gnu_linux__)
__attribute__((target_clones("avx2", "default")))
#endif
static void fill(int64_t *restrict slots, const int32_t *restrict pages, Py_ssize_t count, Py_ssize_t page_size)
{
    if (page_size == 1) { /* so that the compiler uses vectors */
        for (Py_ssize_t i = 0; i < count; i++)
            slots[i] = pages[i];
        return;
    }
    for (Py_ssize_t i = 0; i < count; i++, slots += page_size)
        for (Py_ssize_t offset = 0; offset < page_size; offset++)
            slots[offset] = (int64_t)pages[i] * page_size + offset;
}

/* Called with (slots, pages, page_size): the int64 slots to write, the int32 pages, and the slots per page. */
PyObject *fill_slots(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer slots, pages;
    Py_ssize_t page_size;
    if (!PyArg_ParseTuple(arguments, "w*y*n", &slots, &pages, &page_size))
        return NULL;
    Py_ssize_t count = pages.len / (Py_ssize_t)sizeof(int32_t), slot_count = slots.len / (Py_ssize_t)sizeof(int64_t);
    int valid = page_size > 0 && slot_count % page_size == 0 && slot_count / page_size == count;
    if (valid)
        fill(slots.buf, pages.buf, count, page_size);
    else
        PyErr_SetString(PyExc_ValueError, "fill_slots: pass as many int64 slots as the int32 pages have");
    PyBuffer_Release(&slots);
    PyBuffer_Release(&pages);
    return valid ? Py_NewRef(Py_None) : NULL;
}
