/* Send the requests for a batch of pages on a Redis connection and receive the replies, in one call and without the
 * interpreter's lock. Pages are sealed before they are sent, and verified as they arrive. It handles the expected replies
 * (RESP2: a value of a page's length, a missing value, +OK) and stops before any other one.
 *
 * Optional: without it, `hicache.backends.redis` does the same in Python, where each page takes the lock several times.
 */
#define _GNU_SOURCE
#include "pages.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

/* Buffers per system call. Linux allows 1,024; more than a few gain nothing. */
#define BUFFERS_MAX 128
/* A page is received in pieces of this size, and verified piece by piece. */
#define PIECE_BYTES ((size_t)1 << 20)
/* Pages are sealed so many bytes ahead of those that are sent: they are still in the processor's cache. */
#define SEALED_BYTES ((size_t)256 << 10)
/* Bytes read ahead of a page: enough for the length line, and few enough that copying the excess costs nothing. */
#define HEAD_BYTES ((size_t)32)
/* Pages up to this size are read ahead as far as the buffer reaches, and copied: a call costs more than the copy. */
#define COPIED_BYTES_MAX ((size_t)8192)
/* A blocking receive lasts at most this long, so that a slow peer cannot hold it beyond the time limits. */
#define BLOCK_S 0.02
/* The longest wait; longer limits would overflow the kernel's type. */
#define WAIT_S_MAX 1e6

/* The outcomes of a reply beside its length. VERIFIED: the value is the page, or the page was stored. */
enum { MISSING = -2, VERIFIED };

/* The reasons to end. MORE: none yet. STOPPED: the next reply is an unexpected one. FAILED: see `error`. RAISED: a handler
 * of a signal raised. */
enum { MORE, DONE, STOPPED, FAILED, RAISED };

typedef struct {
    int fd;
    char *ahead;  /* received bytes that are not yet used: from `start` to `end` */
    size_t ahead_bytes, start, end;
    Pages pages;  /* to receive, one for each reply; or to send, one for each request of this call */
    Seal seal;  /* how to verify or seal them; without `start` Python does */
    int writes;
    Py_ssize_t earlier, replies;  /* requests that were sent before this call; these and those of this call */
    Py_ssize_t enough;  /* the replies after which the call ends */
    Py_ssize_t sent, window, depth;  /* requests, with the earlier ones: started; that may be started now; in flight */
    Py_ssize_t sealed;  /* requests of this call whose pages are sealed */
    struct iovec *out;  /* the requests of this call; moved forward */
    Py_ssize_t *out_ends, out_at, out_count;  /* request i ends before out[out_ends[i]]; the buffer being sent */
    size_t *out_begins, out_bytes;  /* the bytes before request i; the bytes that were sent */
    int unsent;  /* true if bytes remain that may be sent now */
    struct iovec *in;  /* the buffers of the pages to receive; moved forward */
    Py_ssize_t done, in_at;  /* complete replies; the buffer being received */
    long long *lengths, length;  /* of the complete replies; of the current value, -1 outside a value */
    size_t left;  /* missing bytes of the current value */
    Xxh3 tag;  /* of the current value */
    int stopped, answered, error;
    double limit_s, wait_s, first_wait_s;
    PyThreadState *thread;
} Exchange;

/* Move `parts` forward by `size` bytes, and over empty ones. Return the first one that remains, at most `end`. */
static Py_ssize_t forward(struct iovec *parts, Py_ssize_t at, Py_ssize_t end, size_t size)
{
    while (at < end && size >= parts[at].iov_len)
        size -= parts[at++].iov_len;
    if (at < end) {
        parts[at].iov_base = (char *)parts[at].iov_base + size;
        parts[at].iov_len -= size;
    }
    return at;
}

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* After a system call that a signal interrupted, run the handlers. MORE, or RAISED. */
static int interrupted(Exchange *x)
{
    PyEval_RestoreThread(x->thread);
    int raised = PyErr_CheckSignals();
    x->thread = PyEval_SaveThread();
    return raised ? RAISED : MORE;
}

static int failed(Exchange *x, int error)
{
    x->error = error;
    return FAILED;
}

/* Wait until the socket is ready. MORE, or a reason to end. */
static int wait_for(Exchange *x, short events)
{
    double wait_s = x->answered ? x->wait_s : x->first_wait_s, left_s = x->limit_s - now_s();
    wait_s = left_s < wait_s ? left_s : wait_s;
    if (wait_s <= 0)
        return failed(x, ETIMEDOUT);
    wait_s = wait_s < WAIT_S_MAX ? wait_s : WAIT_S_MAX;
    struct timespec wait = {(time_t)wait_s, (long)((wait_s - (double)(time_t)wait_s) * 1e9)};
    struct pollfd socket = {x->fd, events, 0};
    int ready = ppoll(&socket, 1, &wait, NULL);
    if (ready < 0)
        return errno == EINTR ? interrupted(x) : failed(x, errno);
    return ready ? MORE : failed(x, ETIMEDOUT);
}

/* Record a reply: its length, MISSING, or VERIFIED for a value that is the page. */
static void finish_reply(Exchange *x, long long length)
{
    x->lengths[x->done++] = length;
    if (!x->writes)
        x->in_at = x->pages.first[x->done];
    x->length = -1;
    x->answered = 1;
}

static void finish_value(Exchange *x)
{
    int is_whole = x->seal.start != NULL && (size_t)x->length == x->pages.bytes[x->done];
    finish_reply(x, is_whole && is_proven(&x->seal, &x->pages, x->done, &x->tag) ? VERIFIED : x->length);
}

/* The number in `digits`, at most `max`; -1 for any other text. */
static long long number(const char *digits, const char *end, long long max)
{
    long long value = 0;
    for (const char *at = digits; at < end; at++) {
        if (*at < '0' || *at > '9' || value > max)
            return -1;
        value = 10 * value + (*at - '0');
    }
    return digits < end && value <= max ? value : -1;
}

/* Begin with the reply whose line is at `line`. MORE if it is as expected, else STOPPED and the line stays. */
static int begin_reply(Exchange *x, const char *line, const char *end)
{
    Py_ssize_t size = end - line;
    if (size == 3 && memcmp(line, "$-1", 3) == 0) {
        finish_reply(x, MISSING);
    } else if (x->writes) {
        if (size != 3 || memcmp(line, "+OK", 3) != 0)
            return STOPPED;
        finish_reply(x, VERIFIED);
    } else {
        long long length = *line == '$' ? number(line + 1, end, (long long)x->pages.bytes[x->done]) : -1;
        if (length <= 0 || length % FRAME_ALIGN)
            return STOPPED;
        x->length = length;
        x->left = (size_t)length;
        x->answered = 1;
        xxh3_begin(&x->tag);
    }
    x->start += (size_t)size + 2;
    return MORE;
}

/* The next `size` bytes of the current value are in its buffers. */
static void received(Exchange *x, size_t size)
{
    while (size) {
        struct iovec *part = x->in + x->in_at, piece = *part;
        piece.iov_len = size < part->iov_len ? size : part->iov_len;
        if (x->seal.start != NULL)
            add_to_tag(&x->tag, &x->seal, &piece, 1, (size_t)x->length - x->left);
        x->left -= piece.iov_len;
        size -= piece.iov_len;
        x->in_at = forward(x->in, x->in_at, x->pages.first[x->done + 1], piece.iov_len);
    }
}

/* Use the bytes that were read ahead. MORE if all are used and replies are missing, else the reason to end. */
static int parse(Exchange *x)
{
    for (;;) {
        char *at = x->ahead + x->start;
        size_t have = x->end - x->start;
        if (x->left && have) {
            size_t size = have < x->left ? have : x->left;
            size = size < x->in[x->in_at].iov_len ? size : x->in[x->in_at].iov_len;
            memcpy(x->in[x->in_at].iov_base, at, size);
            x->start += size;
            received(x, size);
        } else if (x->left) {
            return MORE;
        } else if (x->length >= 0) {
            if (have < 2)
                return MORE;
            if (memcmp(at, "\r\n", 2) != 0)
                return failed(x, EBADMSG);
            x->start += 2;
            finish_value(x);
        } else if (x->done >= x->enough && x->sent == x->replies) {
            return DONE;
        } else {
            char *end = have ? memchr(at, '\n', have < HEAD_BYTES ? have : HEAD_BYTES) : NULL;
            if (end == NULL)
                return have < HEAD_BYTES ? MORE : STOPPED;
            if (end == at || end[-1] != '\r')
                return STOPPED;
            if (x->done == x->sent)
                return MORE;  /* a reply before its request, which is sent next */
            if (begin_reply(x, at, end - 1) != MORE)
                return STOPPED;
        }
    }
}

/* Seal the next pages to be sent, before `last`: up to SEALED_BYTES, or one. */
static void seal_next(Exchange *x, Py_ssize_t last)
{
    for (size_t bytes = 0; x->seal.start != NULL && x->sealed < last && bytes < SEALED_BYTES; x->sealed++) {
        seal_page(&x->seal, &x->pages, x->sealed);
        bytes += x->pages.bytes[x->sealed];
    }
}

/* Send what may be sent, without waiting. MORE, or a reason to end. */
static int send_some(Exchange *x)
{
    if (x->sent - x->done <= x->depth / 2)
        x->window = x->replies - x->done < x->depth ? x->replies : x->done + x->depth;
    for (;;) {
        Py_ssize_t last = (x->stopped || x->window < x->sent ? x->sent : x->window) - x->earlier;
        if (x->writes && x->seal.start != NULL) {
            if (last > x->sealed && (x->sealed == 0 || x->out_at == x->out_ends[x->sealed - 1]))
                seal_next(x, last);
            last = last < x->sealed ? last : x->sealed;
        }
        Py_ssize_t end = last ? x->out_ends[last - 1] : 0, count = end - x->out_at;
        x->unsent = count > 0;
        if (!x->unsent)
            return MORE;
        struct msghdr message = {
            .msg_iov = x->out + x->out_at, .msg_iovlen = (size_t)(count < BUFFERS_MAX ? count : BUFFERS_MAX),
        };
        ssize_t size = sendmsg(x->fd, &message, x->writes && !x->stopped ? MSG_NOSIGNAL : MSG_DONTWAIT | MSG_NOSIGNAL);
        if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return MORE;
        if (size < 0)
            return errno == EINTR ? interrupted(x) : failed(x, errno);
        x->out_at = forward(x->out, x->out_at, x->out_count, (size_t)size);
        x->out_bytes += (size_t)size;
        while (x->sent < x->replies && x->out_begins[x->sent - x->earlier] < x->out_bytes)
            x->sent++;
    }
}

/* Receive into the current page, or ahead. MORE, or a reason to end. With `flags` of 0 it blocks for up to BLOCK_S. */
static int receive(Exchange *x, int flags)
{
    struct iovec to[BUFFERS_MAX];
    size_t count = 0, body = 0;
    memmove(x->ahead, x->ahead + x->start, x->end - x->start);
    x->end -= x->start;
    x->start = 0;
    if (x->left) {
        /* All of it, with the end of the value: nothing more is certain to come. */
        flags = flags ? flags : MSG_WAITALL;
        size_t wanted = x->left < PIECE_BYTES ? x->left : PIECE_BYTES;
        for (Py_ssize_t i = x->in_at; body < wanted && count < BUFFERS_MAX - 1; i++) {
            struct iovec part = x->in[i];
            part.iov_len = part.iov_len < wanted - body ? part.iov_len : wanted - body;
            body += part.iov_len;
            to[count++] = part;
        }
        if (body == x->left)
            to[count++] = (struct iovec){x->ahead, 2};
    } else {
        size_t room = x->ahead_bytes - x->end;
        int is_copied = x->writes || x->pages.bytes[x->done] <= COPIED_BYTES_MAX;
        to[count++] = (struct iovec){x->ahead + x->end, is_copied || room < HEAD_BYTES ? room : HEAD_BYTES};
    }
    struct msghdr message = {.msg_iov = to, .msg_iovlen = count};
    ssize_t size = recvmsg(x->fd, &message, flags);
    if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return flags & MSG_DONTWAIT ? MORE : wait_for(x, POLLIN);
    if (size < 0)
        return errno == EINTR ? interrupted(x) : failed(x, errno);
    if (size == 0)
        return failed(x, ECONNRESET);
    body = (size_t)size < body ? (size_t)size : body;
    if (body)
        received(x, body);
    x->end += (size_t)size - body;
    return MORE;
}

static int exchange(Exchange *x)
{
    for (;;) {
        int status = parse(x);
        if (status != MORE && status != STOPPED)
            return status;
        x->stopped = status == STOPPED;
        status = send_some(x);
        if (status != MORE)
            return status;
        if (x->stopped && !x->unsent)
            return STOPPED;
        if (now_s() >= x->limit_s)
            return failed(x, ETIMEDOUT);
        /* After a stop, or with a full buffer, only the request that was begun is sent to its end. */
        int receives = !x->stopped && (x->left || x->end - x->start < x->ahead_bytes);
        if (x->unsent)
            status = wait_for(x, receives ? POLLIN | POLLOUT : POLLOUT);
        if (status == MORE && receives)
            status = receive(x, x->unsent ? MSG_DONTWAIT : 0);
        if (status != MORE)
            return status;
    }
}

/* Run the exchange without the interpreter's lock. */
static int run(Exchange *x)
{
    double block_s = x->limit_s < BLOCK_S ? x->limit_s : x->wait_s < BLOCK_S ? x->wait_s : BLOCK_S;
    struct timeval block = {0, block_s > 1e-6 ? (long)(block_s * 1e6) : 1};
    x->thread = PyEval_SaveThread();
    x->limit_s += now_s();
    int status;
    if (setsockopt(x->fd, SOL_SOCKET, SO_RCVTIMEO, &block, sizeof block) == 0
        && setsockopt(x->fd, SOL_SOCKET, SO_SNDTIMEO, &block, sizeof block) == 0)
        status = exchange(x);
    else
        status = failed(x, errno);
    PyEval_RestoreThread(x->thread);
    return status;
}

static PyObject *result(Exchange *x)
{
    PyObject *lengths = PyList_New(x->done);
    for (Py_ssize_t i = 0; lengths != NULL && i < x->done; i++) {
        PyObject *length = x->lengths[i] == MISSING ? Py_NewRef(Py_None) : PyLong_FromLongLong(x->lengths[i]);
        if (length == NULL || PyList_SetItem(lengths, i, length) != 0)
            Py_CLEAR(lengths);
    }
    if (lengths == NULL)
        return NULL;
    return Py_BuildValue("iNnnni", x->error, lengths, x->sent - x->earlier, (Py_ssize_t)x->start,
                         (Py_ssize_t)x->end, x->answered);
}

static int append(Exchange *x, PyObject *list, Py_ssize_t i)
{
    char *bytes;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(PyList_GetItem(list, i), &bytes, &size) != 0)
        return -1;
    x->out[x->out_count++] = (struct iovec){bytes, (size_t)size};
    return 0;
}

/* Collect the buffers to send and to receive. -1 with an exception. */
static int prepare(Exchange *x, PyObject *heads, PyObject *tails)
{
    Py_ssize_t count = PyList_Size(heads), total = x->pages.first[x->pages.count];
    x->replies = x->earlier + count;
    x->enough += x->replies;
    x->sent = x->window = x->earlier;
    x->lengths = PyMem_Malloc((size_t)(x->replies + 1) * sizeof *x->lengths);
    x->out = PyMem_Malloc((size_t)(2 * count + (x->writes ? total : 0) + 1) * sizeof *x->out);
    x->out_ends = PyMem_Malloc((size_t)(count + 1) * sizeof *x->out_ends);
    x->out_begins = PyMem_Malloc((size_t)(count + 1) * sizeof *x->out_begins);
    x->in = PyMem_Malloc((size_t)(total + 1) * sizeof *x->in);
    if (!x->lengths || !x->out || !x->out_ends || !x->out_begins || !x->in) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(x->in, x->pages.vec, (size_t)total * sizeof *x->in);
    size_t bytes = 0;
    for (Py_ssize_t i = 0, from = 0; i < count; i++) {
        x->out_begins[i] = bytes;
        if (append(x, heads, i) != 0)
            return -1;
        for (Py_ssize_t part = x->pages.first[i]; x->writes && part < x->pages.first[i + 1]; part++)
            x->out[x->out_count++] = x->pages.vec[part];
        if (x->writes && append(x, tails, i) != 0)
            return -1;
        for (; from < x->out_count; from++)
            bytes += x->out[from].iov_len;
        x->out_ends[i] = x->out_count;
    }
    return 0;
}

static PyObject *exchanged(Exchange *x, PyObject *heads, PyObject *tails)
{
    PyObject *made = NULL;
    if (prepare(x, heads, tails) == 0) {
        int status = run(x);
        made = status == RAISED ? NULL : result(x);
    }
    PyMem_Free(x->lengths);
    PyMem_Free(x->out);
    PyMem_Free(x->out_ends);
    PyMem_Free(x->out_begins);
    PyMem_Free(x->in);
    return made;
}

/* Called with (fd, earlier, left, heads, pages, tails, keys, parents, fields, ahead, (start, end), depth, (limit_s, wait_s,
 * first_wait_s)); `Channel.exchange` says more. To read, `parents` is None, and the requests are the heads. */
PyObject *exchange_pages(PyObject *module, PyObject *arguments)
{
    (void)module;
    Exchange x = {.length = -1};
    PyObject *heads, *list, *tails, *keys, *parents, *fields, *made = NULL;
    Py_buffer ahead;
    Py_ssize_t start, end, left;
    if (!PyArg_ParseTuple(arguments, "innO!OOOOOw*(nn)n(ddd)", &x.fd, &x.earlier, &left, &PyList_Type, &heads, &list, &tails,
                          &keys, &parents, &fields, &ahead, &start, &end, &x.depth, &x.limit_s, &x.wait_s,
                          &x.first_wait_s))
        return NULL;
    x.writes = parents != Py_None;
    x.enough = -left;
    int seals = x.writes && fields != Py_None;
    x.ahead = ahead.buf, x.ahead_bytes = (size_t)ahead.len, x.start = (size_t)start, x.end = (size_t)end;
    if (take_pages(&x.pages, list, !x.writes) == 0) {
        Py_ssize_t count = PyList_Size(heads), pages = x.writes ? count : x.earlier + count;
        if (x.earlier < 0 || x.pages.count != pages || (x.writes && (!PyList_Check(tails) || PyList_Size(tails) != count))
            || x.depth < 1 || left < 0 || start < 0 || start > end || end > ahead.len || x.ahead_bytes < HEAD_BYTES)
            PyErr_SetString(PyExc_ValueError, "exchange_pages: pass a page for each reply, or for each request to write");
        else if (take_seal(&x.seal, fields, keys, seals ? parents : NULL, &x.pages) == 0) {
            made = exchanged(&x, heads, tails);
            release_seal(&x.seal);
        }
        release_pages(&x.pages);
    }
    PyBuffer_Release(&ahead);
    return made;
}
