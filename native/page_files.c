/* Batches of page files in one call each, without the interpreter's lock. A process whose other threads compute gets the
 * lock back after some milliseconds only, so a call for each step of each page is slow beside a busy interpreter.
 *
 * Optional: without it, `hicache.backends.file.pages` does the same page by page. Names, flags and checks are those of
 * that module: a directory or a file that is a link is not followed, and what is unusual is left to it.
 */
#include "pages.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define STEP_FLAGS (O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
#define READ_FLAGS (O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC)
#define CREATE_FLAGS (O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC)
#define FILE_MODE 0600
/* A piece stays in the processor's cache until it is hashed. */
#define PIECE_BYTES ((size_t)1 << 20)
#define PIECE_BUFFERS 256

/* The outcomes of a page. An error of a transfer is its errno, of a lookup too. */
enum { DONE = 0, NOT_STARTED = -1, MISSING = -2, UNUSUAL = -3, READ = -4 };

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* Write the 64 digits of a key, and a zero. The first two are the name of its directory. */
static void name_of(char *name, const uint8_t *key)
{
    for (int i = 0; i < PAGE_KEY_BYTES; i++) {
        name[2 * i] = "0123456789abcdef"[key[i] >> 4];
        name[2 * i + 1] = "0123456789abcdef"[key[i] & 15];
    }
    name[2 * PAGE_KEY_BYTES] = 0;
}

/* fstatat(2), or fstat(2) for an empty name, as a system call: the function needs a newer C library than wheels may. */
static int find_state(int folder, const char *name, struct stat *found)
{
    return (int)syscall(SYS_newfstatat, folder, name, found, *name ? AT_SYMLINK_NOFOLLOW : AT_EMPTY_PATH);
}

/* Open the directory of the page `name` for lookups; -1 with errno. */
static int open_fan(int folder, const char *name)
{
    char fan[3] = {name[0], name[1], 0};
    return openat(folder, fan, STEP_FLAGS);
}

static void close_quietly(int fd)
{
    int before = errno;
    if (fd >= 0)
        close(fd);
    errno = before;
}

/* struct open_how of openat2(2), which is newer than some headers. */
typedef struct {
    uint64_t flags, mode, resolve;
} OpenHow;
#define NO_LINKS_BENEATH (0x04 | 0x08) /* RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH */

/* Open the page `name` for reading, in one system call where the kernel has it. */
static int open_page(int folder, const char *name)
{
#ifdef SYS_openat2
    static volatile int is_missing = 0;
    if (!is_missing) {
        char path[2 + 1 + 2 * PAGE_KEY_BYTES + 1] = {name[0], name[1], '/'};
        memcpy(path + 3, name, 2 * PAGE_KEY_BYTES + 1);
        OpenHow how = {.flags = READ_FLAGS, .resolve = NO_LINKS_BENEATH};
        long fd = syscall(SYS_openat2, folder, path, &how, sizeof how);
        if (fd >= 0 || (errno != ENOSYS && errno != EPERM))
            return (int)fd;
        is_missing = 1; /* an old kernel, or a sandbox that does not know it */
    }
#endif
    int fan = open_fan(folder, name), fd = fan < 0 ? -1 : openat(fan, name, READ_FLAGS);
    close_quietly(fan);
    return fd;
}

/* Bytes of a page in order: the next ones are at `offset` of the buffer `at`. */
typedef struct {
    const struct iovec *at;
    size_t offset;
} Cursor;

/* Cut the next piece, of at most `bytes` bytes, and return its bytes. */
static size_t next_piece(Cursor *cursor, size_t bytes, struct iovec *piece, int *buffers)
{
    size_t cut = 0;
    for (*buffers = 0; cut < bytes && *buffers < PIECE_BUFFERS; ) {
        size_t left = cursor->at->iov_len - cursor->offset, count = left < bytes - cut ? left : bytes - cut;
        if (count)
            piece[(*buffers)++] = (struct iovec){(char *)cursor->at->iov_base + cursor->offset, count};
        cut += count;
        cursor->offset += count;
        if (count == left) {
            cursor->at++;
            cursor->offset = 0;
        }
    }
    return cut;
}

/* Read or write a whole piece. Return 0, an errno, or UNUSUAL if the file ends. */
static int transfer(int fd, int writes, const struct iovec *piece, int buffers, off_t at)
{
    struct iovec rest[PIECE_BUFFERS], *next = rest;
    memcpy(rest, piece, (size_t)buffers * sizeof *piece);
    while (buffers) {
        ssize_t count = writes ? pwritev(fd, next, buffers, at) : preadv(fd, next, buffers, at);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            return count < 0 ? errno : UNUSUAL;
        at += count;
        for (; buffers && (size_t)count >= next->iov_len; next++, buffers--)
            count -= (ssize_t)next->iov_len;
        if (buffers) {
            next->iov_base = (char *)next->iov_base + count;
            next->iov_len -= (size_t)count;
        }
    }
    return 0;
}

/* Read or write the first `size` bytes of a page, and add them to `tag` if it is not NULL. Return as `transfer`. */
static int move_page(int fd, int writes, const Pages *pages, Py_ssize_t i, size_t size, Xxh3 *tag, const Seal *seal)
{
    Cursor cursor = {pages->vec + pages->first[i], 0};
    struct iovec piece[PIECE_BUFFERS];
    int buffers, failure = 0;
    for (size_t done = 0, cut; done < size && !failure; done += cut) {
        size_t wanted = size - done < PIECE_BYTES + PIECE_BYTES / 4 ? size - done : PIECE_BYTES;
        cut = next_piece(&cursor, wanted, piece, &buffers);
        failure = transfer(fd, writes, piece, buffers, (off_t)done);
        if (!failure && tag != NULL)
            add_to_tag(tag, seal, piece, buffers, done);
    }
    return failure;
}

static int read_page(int folder, const Pages *pages, Py_ssize_t i, const Seal *seal, const uint8_t *key,
                     struct stat *found)
{
    char name[2 * PAGE_KEY_BYTES + 1];
    name_of(name, key);
    int fd = open_page(folder, name);
    if (fd < 0)
        return errno == ENOENT ? MISSING : UNUSUAL;
    int outcome = UNUSUAL;
    size_t size = find_state(fd, "", found) == 0 && S_ISREG(found->st_mode) ? (size_t)found->st_size : 0;
    if (size > HEADER_BYTES && size <= pages->bytes[i] && size % FRAME_ALIGN == 0) {
        Xxh3 tag;
        xxh3_begin(&tag);
        outcome = move_page(fd, 0, pages, i, size, seal == NULL ? NULL : &tag, seal);
        if (outcome == DONE && (seal == NULL || size != pages->bytes[i] || !is_proven(seal, pages, i, &tag)))
            outcome = READ;
    }
    close_quietly(fd);
    return outcome;
}

static int write_page(int folder, const char *name, const Pages *pages, Py_ssize_t i, const Seal *seal, int syncs,
                      uint64_t copied_before)
{
    if (seal != NULL)
        seal_page(seal, pages, i);
    int fd = openat(folder, name, CREATE_FLAGS, FILE_MODE);
    if (fd < 0)
        return errno;
    int failure = move_page(fd, 1, pages, i, pages->bytes[i], NULL, NULL);
    uint64_t stored;
    memcpy(&stored, (const uint8_t *)pages->vec[pages->first[i]].iov_base + AT_TIME, sizeof stored);
    struct timespec times[2] = {{(time_t)stored, 0}, {(time_t)stored, 0}};
    if (!failure && syncs && fdatasync(fd) != 0)
        failure = errno;
    if (!failure && stored && stored < copied_before && futimens(fd, times) != 0)
        failure = errno;
    if (close(fd) != 0 && !failure)
        failure = errno;
    return failure == UNUSUAL ? EIO : failure;
}

static PyObject *outcome_of(int outcome, const struct stat *found)
{
    if (outcome != READ)
        return PyLong_FromLong(outcome);
    long long changed = (long long)found->st_mtim.tv_sec * 1000000000 + found->st_mtim.tv_nsec;
    return Py_BuildValue("KLL", (unsigned long long)found->st_ino, changed, (long long)found->st_size);
}

/* Open a directory of the root for lookups. */
static int open_folder(int root, const char *name)
{
    return openat(root, name, STEP_FLAGS);
}

/* Called with (root, namespace, keys, pages, fields or None, seconds). Return a list: 0 for a page with the fields and a
 * proven tag, the identity of the file for another that was read whole, an outcome or an errno. */
PyObject *read_page_files(PyObject *module, PyObject *arguments)
{
    (void)module;
    int root;
    const char *namespace;
    PyObject *keys, *list, *fields;
    double seconds;
    Pages pages;
    Seal seal;
    if (!PyArg_ParseTuple(arguments, "isOOOd", &root, &namespace, &keys, &list, &fields, &seconds)
        || take_pages(&pages, list, 1) != 0)
        return NULL;
    PyObject *answer = NULL;
    struct stat *found = PyMem_Calloc((size_t)pages.count + 1, sizeof *found);
    int *outcomes = PyMem_Calloc((size_t)pages.count + 1, sizeof *outcomes);
    if (!found || !outcomes) {
        PyErr_NoMemory();
    } else if (take_seal(&seal, fields, keys, NULL, &pages) == 0) {
        Py_BEGIN_ALLOW_THREADS
        double end = now_s() + seconds;
        int folder = open_folder(root, namespace), missing = folder < 0 && errno == ENOENT;
        for (Py_ssize_t i = 0; i < pages.count; i++) {
            if (folder < 0)
                outcomes[i] = missing ? MISSING : UNUSUAL;
            else if (now_s() >= end)
                outcomes[i] = NOT_STARTED;
            else
                outcomes[i] = read_page(folder, &pages, i, seal.start == NULL ? NULL : &seal, seal.keys[i], &found[i]);
        }
        close_quietly(folder);
        Py_END_ALLOW_THREADS
        release_seal(&seal);
        answer = PyList_New(pages.count);
        for (Py_ssize_t i = 0; answer != NULL && i < pages.count; i++) {
            PyObject *outcome = outcome_of(outcomes[i], &found[i]);
            if (outcome == NULL || PyList_SetItem(answer, i, outcome) != 0)
                Py_CLEAR(answer);
        }
    }
    PyMem_Free(found);
    PyMem_Free(outcomes);
    release_pages(&pages);
    return answer;
}

static PyObject *numbers(const int *values, Py_ssize_t count)
{
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        PyObject *number = PyLong_FromLong(values[i]);
        if (number == NULL || PyList_SetItem(list, i, number) != 0)
            Py_CLEAR(list);
    }
    return list;
}

/* The strings of a list; NULL with an exception. They live as long as the list. */
static const char **take_names(PyObject *list, Py_ssize_t count)
{
    const char **names = PyMem_Calloc((size_t)count + 1, sizeof *names);
    if (names == NULL)
        return (const char **)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *name = PyList_GetItem(list, i);
        names[i] = name == NULL ? NULL : PyUnicode_AsUTF8AndSize(name, NULL);
        if (names[i] == NULL) {
            PyMem_Free(names);
            return NULL;
        }
    }
    return names;
}

static int has_no_room(int failure)
{
    return failure == ENOSPC || failure == EDQUOT || failure == EROFS;
}

/* Called with (root, folder, names, pages, keys, parents, fields or None, sync, copied_before, seconds). Seal the pages if
 * there are fields, and write each to a new file. Return a list of 0, an errno, or NOT_STARTED; after an errno that says
 * that there is no room, no other page is started. */
PyObject *write_page_files(PyObject *module, PyObject *arguments)
{
    (void)module;
    int root, syncs;
    const char *path;
    PyObject *names, *list, *keys, *parents, *fields;
    unsigned long long copied_before;
    double seconds;
    Pages pages;
    Seal seal = {0};
    if (!PyArg_ParseTuple(arguments, "isOOOOOpKd", &root, &path, &names, &list, &keys, &parents, &fields, &syncs,
                          &copied_before, &seconds)
        || take_pages(&pages, list, 0) != 0)
        return NULL;
    PyObject *answer = NULL;
    const char **files = take_names(names, pages.count);
    int *outcomes = PyMem_Calloc((size_t)pages.count + 1, sizeof *outcomes);
    int seals = fields != Py_None;
    if (files == NULL || outcomes == NULL) {
        if (!PyErr_Occurred())
            PyErr_NoMemory();
    } else if (!seals || take_seal(&seal, fields, keys, parents, &pages) == 0) {
        Py_BEGIN_ALLOW_THREADS
        double end = now_s() + seconds;
        int folder = open_folder(root, path), failure = folder < 0 ? errno : 0, is_full = 0;
        for (Py_ssize_t i = 0; i < pages.count; i++) {
            if (is_full || now_s() >= end)
                outcomes[i] = NOT_STARTED;
            else
                outcomes[i] = failure ? failure : write_page(folder, files[i], &pages, i, seals ? &seal : NULL, syncs,
                                                             copied_before);
            is_full |= has_no_room(outcomes[i]);
        }
        close_quietly(folder);
        Py_END_ALLOW_THREADS
        release_seal(&seal);
        answer = numbers(outcomes, pages.count);
    }
    PyMem_Free(files);
    PyMem_Free(outcomes);
    release_pages(&pages);
    return answer;
}

/* Called with (root, folder, names, namespace, keys). Rename files of the folder to the pages `keys`, in order. Return how
 * many were renamed before the first that could not be. */
PyObject *rename_page_files(PyObject *module, PyObject *arguments)
{
    (void)module;
    int root;
    const char *path, *namespace;
    PyObject *names, *keys;
    if (!PyArg_ParseTuple(arguments, "isOsO", &root, &path, &names, &namespace, &keys))
        return NULL;
    Py_ssize_t count = PyList_Size(names), done = 0;
    const uint8_t **pages = take_keys_of(keys, count);
    const char **files = pages == NULL ? NULL : take_names(names, count);
    if (files != NULL) {
        Py_BEGIN_ALLOW_THREADS
        int from = open_folder(root, path), folder = open_folder(root, namespace);
        for (; from >= 0 && folder >= 0 && done < count; done++) {
            char name[2 * PAGE_KEY_BYTES + 1];
            name_of(name, pages[done]);
            int fan = open_fan(folder, name);
            int failed = fan < 0 || renameat(from, files[done], fan, name) != 0;
            close_quietly(fan);
            if (failed)
                break;
        }
        close_quietly(from);
        close_quietly(folder);
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(files);
    PyMem_Free(pages);
    return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(done);
}

/* Called with (root, namespace, keys, frame_bytes). Return a byte for each key: 1 for a file that may be a page of at most
 * that size, 0 if there is none, 2 if that could not be found out. */
PyObject *find_page_files(PyObject *module, PyObject *arguments)
{
    (void)module;
    int root;
    const char *namespace;
    PyObject *keys;
    Py_ssize_t frame_bytes;
    if (!PyArg_ParseTuple(arguments, "isOn", &root, &namespace, &keys, &frame_bytes))
        return NULL;
    Py_ssize_t count = PyList_Size(keys);
    const uint8_t **pages = take_keys_of(keys, count);
    PyObject *answer = pages == NULL ? NULL : PyBytes_FromStringAndSize(NULL, count);
    if (answer != NULL) {
        char *found = PyBytes_AsString(answer);
        Py_BEGIN_ALLOW_THREADS
        int folder = open_folder(root, namespace), missing = folder < 0 && (errno == ENOENT || errno == ENOTDIR);
        for (Py_ssize_t i = 0; i < count; i++) {
            char name[2 * PAGE_KEY_BYTES + 1];
            struct stat file;
            name_of(name, pages[i]);
            int fan = folder < 0 ? -1 : open_fan(folder, name);
            int failed = fan < 0 || find_state(fan, name, &file) != 0;
            close_quietly(fan);
            if (failed)
                found[i] = missing || (folder >= 0 && (errno == ENOENT || errno == ENOTDIR)) ? 0 : 2;
            else
                found[i] = S_ISREG(file.st_mode) && file.st_size > HEADER_BYTES && file.st_size <= frame_bytes
                           && file.st_size % FRAME_ALIGN == 0;
        }
        close_quietly(folder);
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(pages);
    return answer;
}
