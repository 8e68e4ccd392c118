#include "pages.h"

#include <string.h>

#define START_BYTES (AT_KEY - AT_START)
#define METADATA_BYTES (AT_TIME - AT_METADATA)

static const char magic[AT_TAG] = "HICACHE";
static const uint8_t no_parent[PAGE_KEY_BYTES];

static Py_ssize_t buffers_of(PyObject *item)
{
    return PyList_Check(item) ? PyList_Size(item) : 1;
}

static int take_buffers(Pages *pages, Py_ssize_t i, PyObject *item, int writable)
{
    pages->first[i] = pages->held;
    pages->bytes[i] = 0;
    for (Py_ssize_t part = 0; part < buffers_of(item); part++) {
        PyObject *buffer = PyList_Check(item) ? PyList_GetItem(item, part) : item;
        Py_buffer *view = &pages->views[pages->held];
        if (buffer == NULL || PyObject_GetBuffer(buffer, view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0)
            return -1;
        pages->vec[pages->held++] = (struct iovec){view->buf, (size_t)view->len};
        pages->bytes[i] += (size_t)view->len;
        if (part == 0 && view->len < HEADER_BYTES) {
            PyErr_SetString(PyExc_ValueError, "the first buffer of a page must have its header");
            return -1;
        }
    }
    return 0;
}

int take_pages(Pages *pages, PyObject *list, int writable)
{
    memset(pages, 0, sizeof *pages);
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "pass a list of pages");
        return -1;
    }
    Py_ssize_t count = PyList_Size(list), buffers = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        buffers += buffers_of(PyList_GetItem(list, i));
    pages->count = count;
    pages->first = PyMem_Calloc((size_t)count + 1, sizeof *pages->first);
    pages->bytes = PyMem_Calloc((size_t)count + 1, sizeof *pages->bytes);
    pages->vec = PyMem_Calloc((size_t)buffers + 1, sizeof *pages->vec);
    pages->views = PyMem_Calloc((size_t)buffers + 1, sizeof *pages->views);
    int failed = !pages->first || !pages->bytes || !pages->vec || !pages->views;
    if (failed)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; !failed && i < count; i++)
        failed = take_buffers(pages, i, PyList_GetItem(list, i), writable) != 0;
    if (failed) {
        release_pages(pages);
        return -1;
    }
    pages->first[count] = pages->held;
    return 0;
}

void release_pages(Pages *pages)
{
    for (Py_ssize_t i = 0; i < pages->held; i++)
        PyBuffer_Release(&pages->views[i]);
    PyMem_Free(pages->first);
    PyMem_Free(pages->bytes);
    PyMem_Free(pages->vec);
    PyMem_Free(pages->views);
}

/* Point to the keys of a list; None is NULL. */
static int take_keys(const uint8_t **keys, PyObject *list, Py_ssize_t count, int optional)
{
    if (!PyList_Check(list) || PyList_Size(list) != count) {
        PyErr_SetString(PyExc_ValueError, "pass a list with a key for each page");
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *key = PyList_GetItem(list, i);
        if (!(optional && key == Py_None) && (!PyBytes_Check(key) || PyBytes_Size(key) != PAGE_KEY_BYTES)) {
            PyErr_SetString(PyExc_ValueError, "a key must be 32 bytes");
            return -1;
        }
        keys[i] = key == Py_None ? NULL : (const uint8_t *)PyBytes_AsString(key);
    }
    return 0;
}

static int take_fields(Seal *seal, PyObject *fields, const Pages *pages)
{
    Py_ssize_t start, namespace, metadata;
    unsigned long long payload, now;
    if (!PyArg_ParseTuple(fields, "y#y#y#KK", &seal->start, &start, &seal->namespace, &namespace, &seal->metadata,
                          &metadata, &payload, &now))
        return -1;
    seal->payload = payload;
    seal->now = now;
    int is_valid = start == START_BYTES && namespace == PAGE_KEY_BYTES && metadata == METADATA_BYTES;
    is_valid &= HEADER_BYTES - AT_COVERED + payload >= XXH3_MIN_BYTES;
    for (Py_ssize_t i = 0; i < pages->count; i++)
        is_valid &= pages->bytes[i] >= HEADER_BYTES + payload;
    if (!is_valid)
        PyErr_SetString(PyExc_ValueError, "the fields of a header have another length, or a page is too short");
    return is_valid ? 0 : -1;
}

const uint8_t **take_keys_of(PyObject *list, Py_ssize_t count)
{
    const uint8_t **keys = PyMem_Calloc((size_t)(count > 0 ? count : 0) + 1, sizeof *keys);
    if (keys == NULL)
        return (const uint8_t **)PyErr_NoMemory();
    if (take_keys(keys, list, count, 0) == 0)
        return keys;
    PyMem_Free(keys);
    return NULL;
}

int take_seal(Seal *seal, PyObject *fields, PyObject *keys, PyObject *parents, const Pages *pages)
{
    memset(seal, 0, sizeof *seal);
    if (fields != Py_None && take_fields(seal, fields, pages) != 0)
        return -1;
    for (Py_ssize_t i = 0; parents != NULL && i < pages->count; i++)
        if (pages->views[pages->first[i]].readonly) {
            PyErr_SetString(PyExc_ValueError, "the header of a page to seal must be writable");
            return -1;
        }
    seal->keys = PyMem_Calloc((size_t)pages->count + 1, sizeof *seal->keys);
    seal->parents = PyMem_Calloc((size_t)pages->count + 1, sizeof *seal->parents);
    if (!seal->keys || !seal->parents) {
        PyErr_NoMemory();
    } else if (take_keys(seal->keys, keys, pages->count, 0) == 0
               && (parents == NULL || take_keys(seal->parents, parents, pages->count, 1) == 0)) {
        return 0;
    }
    release_seal(seal);
    return -1;
}

void release_seal(Seal *seal)
{
    PyMem_Free(seal->keys);
    PyMem_Free(seal->parents);
}

void add_to_tag(Xxh3 *tag, const Seal *seal, const struct iovec *piece, int buffers, size_t done)
{
    size_t end = HEADER_BYTES + seal->payload;
    for (int i = 0; i < buffers && done < end; done += piece[i++].iov_len) {
        size_t from = done < AT_COVERED ? AT_COVERED - done : 0;
        size_t to = piece[i].iov_len < end - done ? piece[i].iov_len : end - done;
        if (from < to)
            xxh3_add(tag, (const uint8_t *)piece[i].iov_base + from, to - from);
    }
}

static uint8_t *header_of(const Pages *pages, Py_ssize_t i)
{
    return pages->vec[pages->first[i]].iov_base;
}

void seal_page(const Seal *seal, const Pages *pages, Py_ssize_t i)
{
    uint8_t made[HEADER_BYTES] = {0}, *header = header_of(pages, i);
    memcpy(made + AT_START, seal->start, START_BYTES);
    memcpy(made + AT_KEY, seal->keys[i], PAGE_KEY_BYTES);
    memcpy(made + AT_PARENT, seal->parents[i] ? seal->parents[i] : no_parent, PAGE_KEY_BYTES);
    memcpy(made + AT_NAMESPACE, seal->namespace, PAGE_KEY_BYTES);
    memcpy(made + AT_STORED, &seal->payload, sizeof seal->payload);
    memcpy(made + AT_METADATA, seal->metadata, METADATA_BYTES);
    memcpy(made + AT_TIME, &seal->now, sizeof seal->now);
    if (memcmp(header, magic, sizeof magic) == 0) {
        if (memcmp(header + AT_START, made + AT_START, AT_TIME - AT_START) == 0)
            return;
        if (memcmp(header + AT_KEY, made + AT_KEY, PAGE_KEY_BYTES) == 0
            && memcmp(header + AT_NAMESPACE, made + AT_NAMESPACE, PAGE_KEY_BYTES) == 0)
            memcpy(made + AT_TIME, header + AT_TIME, AFTER_TIME - AT_TIME); /* it is sealed again */
    }
    memcpy(header, made, HEADER_BYTES);
    Xxh3 tag;
    xxh3_begin(&tag);
    add_to_tag(&tag, seal, pages->vec + pages->first[i], (int)(pages->first[i + 1] - pages->first[i]), 0);
    xxh3_end(&tag, header + AT_TAG);
    memcpy(header, magic, sizeof magic); /* last, so that an interrupted seal leaves an unsealed page */
}

int is_proven(const Seal *seal, const Pages *pages, Py_ssize_t i, const Xxh3 *tag)
{
    const uint8_t *header = header_of(pages, i), *key = seal->keys[i];
    uint8_t hash[AT_COVERED - AT_TAG];
    if (memcmp(header, magic, sizeof magic) != 0 || memcmp(header + AT_START, seal->start, START_BYTES) != 0
        || memcmp(header + AT_KEY, key, PAGE_KEY_BYTES) != 0
        || memcmp(header + AT_NAMESPACE, seal->namespace, PAGE_KEY_BYTES) != 0
        || memcmp(header + AT_STORED, &seal->payload, sizeof seal->payload) != 0
        || (memcmp(header + AT_PARENT, key, PAGE_KEY_BYTES) == 0 && memcmp(key, no_parent, PAGE_KEY_BYTES) != 0))
        return 0;
    xxh3_end(tag, hash);
    return memcmp(header + AT_TAG, hash, sizeof hash) == 0;
}

/* Called with (pages, keys, parents, fields): see `FrameCodec.seal_all`. */
PyObject *seal_pages(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *list, *keys, *parents, *fields;
    Pages pages;
    Seal seal;
    if (!PyArg_ParseTuple(arguments, "OOOO", &list, &keys, &parents, &fields) || take_pages(&pages, list, 0) != 0)
        return NULL;
    int taken = take_seal(&seal, fields, keys, parents, &pages) == 0;
    if (taken) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < pages.count; i++)
            seal_page(&seal, &pages, i);
        Py_END_ALLOW_THREADS
        release_seal(&seal);
    }
    release_pages(&pages);
    return taken ? Py_NewRef(Py_None) : NULL;
}
