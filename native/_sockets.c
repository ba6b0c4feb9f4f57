/* Payloads over a socket: many buffers in one call, without the interpreter's lock. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <sys/socket.h>
#include <time.h>

#include "functions.h"

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Move bytes of `count` buffers over a socket from byte `*at` of all of them on, until all have, until a wait of the
 * kernel is over, or for about `most_s`. Digests of buffers that are full go to `*digest`, where that is not NULL.
 * Return 0, or errno; -1 when the other end has closed. Needs no interpreter. */
static int move_many(int descriptor, const Py_buffer *buffers, Py_ssize_t count, Py_ssize_t *at, double most_s,
                     uint8_t **digest) {
    const double ends_at = seconds_now() + most_s;
    Py_ssize_t before = 0;
    for (const Py_buffer *one = buffers; one < buffers + count; before += one++->len) {
        while (*at < before + one->len) {
            uint8_t *start = (uint8_t *)one->buf + (*at - before);
            const size_t rest = (size_t)(before + one->len - *at);
            const ssize_t moved = digest ? recv(descriptor, start, rest, MSG_WAITALL)
                                         : send(descriptor, start, rest, MSG_NOSIGNAL);
            if (moved < 0) return errno == EAGAIN || errno == EINTR ? 0 : errno;
            if (!moved) return -1;
            *at += moved;
            if (digest && *at == before + one->len) {
                digest_in_place(one->buf, (size_t)one->len, *digest);
                *digest += DIGEST_BYTES;
            }
            if (*at < before + one->len || seconds_now() >= ends_at) return 0;
        }
    }
    return 0;
}

/* Both functions of sockets: digests are of what was received. */
static PyObject *move_between(PyObject *args, int is_receiving) {
    int descriptor, status = 0;
    PyObject *list, *result = NULL;
    Py_ssize_t at;
    double most_s;
    if (!PyArg_ParseTuple(args, "iO!nd", &descriptor, &PyList_Type, &list, &at, &most_s)) return NULL;
    const Py_ssize_t count = PyList_Size(list);
    Py_ssize_t num_held = 0, total = 0;
    Py_buffer *buffers = PyMem_Calloc((size_t)count + 1, sizeof *buffers);
    uint8_t *digests = PyMem_Malloc(((size_t)count + 1) * DIGEST_BYTES), *end = digests;
    int is_valid = buffers && digests;
    if (!is_valid) PyErr_NoMemory();
    for (; is_valid && num_held < count; num_held++) {
        Py_buffer *one = buffers + num_held;
        PyObject *given = num_held < PyList_Size(list) ? PyList_GetItem(list, num_held) : NULL;
        if (!given || PyObject_GetBuffer(given, one, is_receiving ? PyBUF_WRITABLE : PyBUF_SIMPLE)) {
            if (!given) PyErr_SetString(PyExc_ValueError, "the list has changed");
            is_valid = 0;
            break;
        }
        total += one->len;
        if (is_receiving && one->len < MIN_DIGESTED_BYTES) {
            PyErr_Format(PyExc_ValueError, "a buffer of %zd bytes; at least %d", one->len, MIN_DIGESTED_BYTES);
            is_valid = 0;
        }
    }
    if (is_valid && (at < 0 || at > total)) {
        PyErr_Format(PyExc_ValueError, "byte %zd of %zd", at, total);
        is_valid = 0;
    }
    if (is_valid) {
        PyThreadState *released = PyEval_SaveThread();
        status = move_many(descriptor, buffers, count, &at, most_s, is_receiving ? &end : NULL);
        PyEval_RestoreThread(released);
        if (status < 0)
            PyErr_Format(PyExc_EOFError, "it ends %zd bytes early", total - at);
        else if (status > 0)
            errno = status, PyErr_SetFromErrno(PyExc_OSError);
        else
            result = is_receiving ? Py_BuildValue("ny#", at, (const char *)digests, (Py_ssize_t)(end - digests))
                                  : PyLong_FromSsize_t(at);
    }
    for (Py_ssize_t i = 0; i < num_held; i++) PyBuffer_Release(buffers + i);
    PyMem_Free(buffers);
    PyMem_Free(digests);
    return result;
}

const char receive_many_doc[] =
    "receive_many(descriptor, buffers, start, most_s, /)\n--\n\n"
    "Fill a list of buffers out of a blocking socket, from byte `start` of all of them on, until they are\n"
    "full, a wait in the kernel is over, or most_s are. Return the byte that comes next, and the xxh3-128\n"
    "of each buffer that became full, 16 bytes after the other. Raises OSError, EOFError at the end of\n"
    "the stream, and ValueError for a buffer below 241 bytes or another start.";

PyObject *receive_many(PyObject *module, PyObject *args) {
    (void)module;
    return move_between(args, 1);
}

const char send_many_doc[] =
    "send_many(descriptor, buffers, start, most_s, /)\n--\n\n"
    "Send a list of buffers as receive_many receives. Return the byte that comes next.";

PyObject *send_many(PyObject *module, PyObject *args) {
    (void)module;
    return move_between(args, 0);
}
