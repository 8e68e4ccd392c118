/* Check token ids and convert them from int64 to uint32 in one pass; numpy needs three.
 *
 * Optional: without this module, `hicache.keys` does the same in numpy. It uses the stable ABI, so one build works with
 * each Python from 3.11 on.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "stored tokens are little endian"
#endif

/* With AVX2 it is twice as fast; the version is chosen when the module is loaded. */
#if defined(__x86_64__) && defined(__gnu_linux__)
__attribute__((target_clones("avx2", "default")))
#endif
static uint64_t copy_low_words(const uint64_t *restrict from, uint32_t *restrict to, Py_ssize_t count)
{
    uint64_t seen = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        seen |= from[i];
        to[i] = (uint32_t)from[i];
    }
    return seen;
}

static PyObject *pack_token_ids(PyObject *module, PyObject *tokens)
{
    (void)module;
    Py_buffer view;
    if (PyObject_GetBuffer(tokens, &view, PyBUF_SIMPLE) != 0)
        return NULL;
    Py_ssize_t count = view.len / (Py_ssize_t)sizeof(uint64_t);
    PyObject *packed = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(uint32_t));
    if (packed != NULL) {
        /* `seen` is the OR of all ids: an id outside 0 .. 2**31 - 1 sets a bit above the 31st. */
        uint64_t seen = copy_low_words(view.buf, (uint32_t *)PyBytes_AsString(packed), count);
        if (seen > INT32_MAX) {
            Py_DECREF(packed);
            packed = Py_NewRef(Py_None);
        }
    }
    PyBuffer_Release(&view);
    return packed;
}

/* Each is defined in the file of the same name, or in page_files.c and pages.c. */
PyObject *copy_rows(PyObject *module, PyObject *arguments);
PyObject *exchange_pages(PyObject *module, PyObject *arguments);
PyObject *fill_slots(PyObject *module, PyObject *arguments);
PyObject *hash_pages(PyObject *module, PyObject *arguments);
PyObject *last_page_id(PyObject *module, PyObject *arguments);
PyObject *page_ids(PyObject *module, PyObject *arguments);
PyObject *find_page_files(PyObject *module, PyObject *arguments);
PyObject *read_page_files(PyObject *module, PyObject *arguments);
PyObject *rename_page_files(PyObject *module, PyObject *arguments);
PyObject *seal_pages(PyObject *module, PyObject *arguments);
PyObject *write_page_files(PyObject *module, PyObject *arguments);
PyObject *untrack(PyObject *module, PyObject *object);

static PyMethodDef methods[] = {
    {"copy_rows", copy_rows, METH_VARARGS, "Copy rows of bytes between two arrays, without the interpreter's lock."},
    {"exchange_pages", exchange_pages, METH_VARARGS, "Send requests for pages to Redis and receive the replies."},
    {"fill_slots", fill_slots, METH_VARARGS, "Write the int64 slots of the tokens of int32 pages."},
    {"hash_pages", hash_pages, METH_VARARGS,
     "Chained SHA-256 keys of the whole pages in some bytes, or None if the processor has no SHA instructions."},
    {"last_page_id", last_page_id, METH_VARARGS, "The last of `page_ids`."},
    {"pack_token_ids", pack_token_ids, METH_O,
     "uint32 bytes of a buffer of int64, or None if one is outside 0 .. 2**31 - 1."},
    {"page_ids", page_ids, METH_VARARGS, "The identities of the pages of some bytes, chained from a number."},
    {"find_page_files", find_page_files, METH_VARARGS, "Which pages of a namespace have files."},
    {"read_page_files", read_page_files, METH_VARARGS, "Read and verify page files."},
    {"rename_page_files", rename_page_files, METH_VARARGS, "Publish written page files, in order."},
    {"seal_pages", seal_pages, METH_VARARGS, "Write the headers and tags of pages."},
    {"write_page_files", write_page_files, METH_VARARGS, "Seal pages, and write them to temporary files."},
    {"untrack", untrack, METH_O, "Take an object from the garbage collector."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_native", .m_size = 0, .m_methods = methods};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
