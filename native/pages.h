/* The buffers of some pages, and the headers that a codec with XXH3 tags writes and expects.
 *
 * `take_...` returns -1 with an exception. After it returned 0, `release_...` must follow. In between, the others need no
 * interpreter's lock: the caller holds the Python objects.
 */
#ifndef HICACHE_PAGES_H
#define HICACHE_PAGES_H
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <sys/uio.h>

#include "xxh3.h"

#define PAGE_KEY_BYTES 32
#define HEADER_BYTES 256
#define FRAME_ALIGN 4096

/* The offsets in a header, which `hicache.frame.header` describes. The tag covers the bytes from AT_COVERED on. */
#define AT_TAG 8
#define AT_COVERED 24
#define AT_START 36
#define AT_KEY 56
#define AT_PARENT 88
#define AT_NAMESPACE 120
#define AT_STORED 152
#define AT_METADATA 160
#define AT_TIME 200
#define AFTER_TIME 208

/* Page `i` has the buffers `vec[first[i]]` to before `vec[first[i + 1]]`, of `bytes[i]` bytes together. The first of them
 * has a whole header. */
typedef struct {
    Py_ssize_t count;
    Py_ssize_t *first;
    size_t *bytes;
    struct iovec *vec;
    Py_buffer *views;
    Py_ssize_t held; /* of `views` */
} Pages;

/* The fields of the headers: from the start to the key, the namespace, from the metadata to the time. */
typedef struct {
    const char *start, *namespace, *metadata;
    uint64_t payload, now;
    const uint8_t **keys, **parents; /* a parent may be NULL */
} Seal;

/* Take a list whose items are buffers or lists of buffers. */
int take_pages(Pages *pages, PyObject *list, int writable);
void release_pages(Pages *pages);

/* Take the pointers to the keys of a list; NULL with an exception. PyMem_Free must follow. */
const uint8_t **take_keys_of(PyObject *list, Py_ssize_t count);

/* Take the result of `FrameCodec.fields`, or None, and for each page its key, and its parent if `parents` is not
 * NULL. */
int take_seal(Seal *seal, PyObject *fields, PyObject *keys, PyObject *parents, const Pages *pages);
void release_seal(Seal *seal);

/* Write the header of a page and its tag, as `FrameCodec.seal` does, unless it has them. */
void seal_page(const Seal *seal, const Pages *pages, Py_ssize_t i);

/* Add the bytes of a page that are in `piece`, and before which it has `done` bytes, to its tag. */
void add_to_tag(Xxh3 *tag, const Seal *seal, const struct iovec *piece, int buffers, size_t done);
/* Return 1 if the page has the fields of `seal`, and the tag to which all of it was added. */
int is_proven(const Seal *seal, const Pages *pages, Py_ssize_t i, const Xxh3 *tag);
#endif
