/* The token slots of pages: `page * page_size` and those behind it, int32 to int64, in one pass.
 *
 * Optional: `hicache.tiers.device` does the same in numpy where this is not built.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>

/* Chosen when the module is loaded, as in pack_token_ids.c. */
#if defined(__x86_64__) && defined(__gnu_linux__)
__attribute__((target_clones("avx2", "default")))
#endif
static void fill(int64_t *restrict slots, const int32_t *restrict pages, Py_ssize_t count, Py_ssize_t page_size)
{
    for (Py_ssize_t i = 0; i < count; i++, slots += page_size)
        for (Py_ssize_t offset = 0; offset < page_size; offset++)
            slots[offset] = (int64_t)pages[i] * page_size + offset;
}

/* Called with (slots, pages, page_size): int64 to write to, int32, and how many slots a page has. */
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
