/* Several reads of files at a time, through an io_uring of the calling thread: tiers/cold/direct_io.py says what for.
 *
 * The kernel writes into memory after the call that asked for it has returned, so a ring holds the buffers itself,
 * until it has heard of the last one; also when it is dropped before.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "functions.h"

const char open_ring_doc[] =
    "open_ring(num_reads, /)\n--\n\n"
    "Return a ring of one thread for so many reads at a time. Raises OSError where the kernel has none, or\n"
    "refuses one.";
const char begin_reads_doc[] =
    "begin_reads(ring, reads, /)\n--\n\n"
    "Begin `reads`, a tuple of (file descriptor, offset, tuple of buffers) each; `wait_read` tells of their ends. Return\n"
    "whether any began: none does where the kernel refuses, nor in a ring of before a fork. The ring must have heard of\n"
    "all that came before. Raises ValueError; what the disk does is wait_read's.";
const char wait_read_doc[] =
    "wait_read(ring, /)\n--\n\n"
    "Wait for a read; return its place among those that were begun, and the bytes read or -errno. None: all ended.";

#ifdef IORING_FEAT_SINGLE_MMAP /* the header of Linux 5.4 or later */
enum { MAX_READS = 64 };
/* Of Linux 6.1: completions are worked off by the thread that waits for them, not by interrupting it. */
enum { SINGLE_ISSUER = 1U << 12, DEFER_TASKRUN = 1U << 13 };
static const char RING[] = "kvtier.ring";

typedef struct {
    int fd, is_in_use; /* the latter: by a call that does not hold the interpreter's lock */
    int is_lost;       /* nothing is heard of its reads any more: see is_lost() */
    int error;         /* of the reads that did not begin, and of those that are lost */
    pid_t owner;
    uint64_t told; /* the reads whose ends were told, a bit each */
    unsigned num_entries, num_reads, num_submitted, num_ended;
    unsigned *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
    struct io_uring_sqe *entries;
    struct io_uring_cqe *completions;
    void *queues;
    size_t queue_bytes, entry_bytes;
    Py_buffer *buffers; /* of all reads, and as `vectors` */
    struct iovec *vectors;
    Py_ssize_t num_buffers;
} ring;

static int enter(const ring *of, unsigned num_new, unsigned num_wanted) {
    const unsigned flags = num_wanted ? IORING_ENTER_GETEVENTS : 0;
    const long status = syscall(__NR_io_uring_enter, of->fd, num_new, num_wanted, flags, NULL, 0);
    return status < 0 ? -errno : (int)status;
}

static void release_buffers(ring *of) {
    while (of->num_buffers) PyBuffer_Release(of->buffers + --of->num_buffers);
    PyMem_Free(of->buffers);
    PyMem_Free(of->vectors);
    of->buffers = NULL, of->vectors = NULL;
}

/* Whether `enter` was refused, or this is the child of a fork, whose completions are its parent's. Such a ring is used
 * no more, and nothing of it is released, on purpose: the kernel may write into the buffers at any time, and the number
 * of its file may be another one's by now. */
static int is_lost(ring *of) { return of->is_lost |= getpid() != of->owner; }

/* Wait for a read; return its number. Needs no interpreter. */
static int wait_for_one(ring *of, int *result) {
    int number = -1;
    while (number < 0 && of->num_ended < of->num_submitted && !is_lost(of)) {
        const unsigned head = *of->cq_head;
        if (__atomic_load_n(of->cq_tail, __ATOMIC_ACQUIRE) != head) {
            const struct io_uring_cqe *found = of->completions + (head & *of->cq_mask);
            number = (int)found->user_data, *result = found->res;
            __atomic_store_n(of->cq_head, head + 1, __ATOMIC_RELEASE);
            continue;
        }
        const int status = enter(of, 0, 1);
        if (status < 0 && status != -EINTR && status != -EAGAIN && status != -EBUSY)
            of->is_lost = 1, of->error = -status;
    }
    if (number < 0) number = __builtin_ctzll(~of->told), *result = -of->error;
    of->told |= UINT64_C(1) << number;
    of->num_ended++;
    return number;
}

static void close_ring(ring *of) {
    int result;
    while (of->num_ended < of->num_submitted && !is_lost(of)) wait_for_one(of, &result);
    if (is_lost(of)) return;
    release_buffers(of);
    if (of->entries) munmap(of->entries, of->entry_bytes);
    if (of->queues) munmap(of->queues, of->queue_bytes);
    if (of->fd >= 0) close(of->fd);
    PyMem_Free(of);
}

static void drop_ring(PyObject *capsule) { close_ring(PyCapsule_GetPointer(capsule, RING)); }

/* Map what the kernel shares. Return whether that worked. */
static int map_queues(ring *of, const struct io_uring_params *is) {
    const size_t sq_bytes = is->sq_off.array + is->sq_entries * sizeof *of->sq_array;
    const size_t cq_bytes = is->cq_off.cqes + is->cq_entries * sizeof *of->completions;
    of->queue_bytes = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
    of->entry_bytes = is->sq_entries * sizeof *of->entries;
    const int access = PROT_READ | PROT_WRITE, flags = MAP_SHARED | MAP_POPULATE;
    char *queues = mmap(NULL, of->queue_bytes, access, flags, of->fd, IORING_OFF_SQ_RING);
    if (queues == MAP_FAILED) return 0;
    of->queues = queues;
    struct io_uring_sqe *entries = mmap(NULL, of->entry_bytes, access, flags, of->fd, IORING_OFF_SQES);
    if (entries == MAP_FAILED) return 0;
    of->entries = entries;
    of->num_entries = is->sq_entries;
    of->sq_tail = (unsigned *)(queues + is->sq_off.tail), of->sq_mask = (unsigned *)(queues + is->sq_off.ring_mask);
    of->sq_array = (unsigned *)(queues + is->sq_off.array), of->cq_head = (unsigned *)(queues + is->cq_off.head);
    of->cq_tail = (unsigned *)(queues + is->cq_off.tail), of->cq_mask = (unsigned *)(queues + is->cq_off.ring_mask);
    of->completions = (struct io_uring_cqe *)(queues + is->cq_off.cqes);
    return 1;
}

PyObject *open_ring(PyObject *module, PyObject *args) {
    unsigned num_reads;
    (void)module;
    if (!PyArg_ParseTuple(args, "I", &num_reads)) return NULL;
    if (!num_reads || num_reads > MAX_READS) return PyErr_Format(PyExc_ValueError, "%u reads at a time", num_reads);
    ring *of = PyMem_Calloc(1, sizeof *of);
    if (!of) return PyErr_NoMemory();
    of->owner = getpid();
    struct io_uring_params is = {.flags = SINGLE_ISSUER | DEFER_TASKRUN};
    of->fd = (int)syscall(__NR_io_uring_setup, num_reads, &is);
    if (of->fd < 0 && errno == EINVAL) {
        is = (struct io_uring_params){0};
        of->fd = (int)syscall(__NR_io_uring_setup, num_reads, &is);
    }
    PyObject *capsule = NULL;
    if (of->fd < 0 || !(is.features & IORING_FEAT_SINGLE_MMAP) || !map_queues(of, &is))
        PyErr_SetFromErrno(PyExc_OSError);
    else
        capsule = PyCapsule_New(of, RING, drop_ring);
    if (!capsule) close_ring(of);
    return capsule;
}

/* Read one of `reads`, (file, offset, buffers). Return the latter, NULL with an error set. */
static PyObject *read_request(PyObject *reads, Py_ssize_t i, int *fd, long long *offset) {
    PyObject *request = PyTuple_GetItem(reads, i), *buffers;
    if (!PyTuple_Check(request)) PyErr_SetString(PyExc_TypeError, "a read is a tuple");
    if (PyErr_Occurred() || !PyArg_ParseTuple(request, "iLO!", fd, offset, &PyTuple_Type, &buffers)) return NULL;
    return buffers;
}

/* Take the buffers of `reads`, and write their entries. Return -1 with an error set. */
static int take_buffers(ring *of, PyObject *reads) {
    Py_ssize_t total = 0, first = 0;
    const Py_ssize_t count = PyTuple_Size(reads);
    long long offset;
    int fd;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *buffers = read_request(reads, i, &fd, &offset);
        if (!buffers) return -1;
        total += PyTuple_Size(buffers);
    }
    of->buffers = PyMem_Calloc((size_t)total + 1, sizeof *of->buffers);
    of->vectors = PyMem_Calloc((size_t)total + 1, sizeof *of->vectors);
    if (!of->buffers || !of->vectors) return PyErr_NoMemory() ? 0 : -1;
    for (Py_ssize_t i = 0; i < count; i++, first = of->num_buffers) {
        PyObject *buffers = read_request(reads, i, &fd, &offset);
        if (!buffers) return -1;
        for (Py_ssize_t k = 0; k < PyTuple_Size(buffers); k++) {
            Py_buffer *one = of->buffers + of->num_buffers;
            if (PyObject_GetBuffer(PyTuple_GetItem(buffers, k), one, PyBUF_WRITABLE)) return -1;
            of->vectors[of->num_buffers++] = (struct iovec){one->buf, (size_t)one->len};
        }
        const unsigned place = (*of->sq_tail + (unsigned)i) & *of->sq_mask;
        of->entries[place] = (struct io_uring_sqe){
            .opcode = IORING_OP_READV, .fd = fd, .off = (uint64_t)offset, .user_data = (uint64_t)i,
            .addr = (uint64_t)(uintptr_t)(of->vectors + first), .len = (unsigned)(of->num_buffers - first)};
        of->sq_array[place] = place;
    }
    return 0;
}

PyObject *begin_reads(PyObject *module, PyObject *args) {
    PyObject *capsule, *reads;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO!", &capsule, &PyTuple_Type, &reads)) return NULL;
    ring *of = PyCapsule_GetPointer(capsule, RING);
    if (!of) return NULL;
    if (is_lost(of)) Py_RETURN_FALSE;
    if (of->is_in_use || of->num_ended < of->num_reads || PyTuple_Size(reads) > (Py_ssize_t)of->num_entries)
        return PyErr_Format(PyExc_ValueError, "%zd reads beside %u", PyTuple_Size(reads), of->num_reads - of->num_ended);
    of->num_reads = of->num_submitted = of->num_ended = 0, of->told = 0;
    if (take_buffers(of, reads) < 0) {
        release_buffers(of);
        return NULL;
    }
    of->num_reads = (unsigned)PyTuple_Size(reads);
    const unsigned tail = *of->sq_tail;
    __atomic_store_n(of->sq_tail, tail + of->num_reads, __ATOMIC_RELEASE);
    of->is_in_use = 1;
    PyThreadState *released = PyEval_SaveThread();
    int status = 0;
    while (of->num_submitted < of->num_reads && (status >= 0 || status == -EINTR))
        if ((status = enter(of, of->num_reads - of->num_submitted, 0)) > 0) of->num_submitted += (unsigned)status;
    PyEval_RestoreThread(released);
    of->is_in_use = 0;
    of->error = status < 0 ? -status : ECANCELED;
    __atomic_store_n(of->sq_tail, tail + of->num_submitted, __ATOMIC_RELEASE); /* the kernel looks only when asked */
    if (!of->num_submitted) {
        release_buffers(of);
        of->num_reads = 0;
    }
    return PyBool_FromLong(of->num_submitted);
}

PyObject *wait_read(PyObject *module, PyObject *args) {
    PyObject *capsule;
    (void)module;
    if (!PyArg_ParseTuple(args, "O", &capsule)) return NULL;
    ring *of = PyCapsule_GetPointer(capsule, RING);
    if (!of) return NULL;
    if (of->is_in_use) return PyErr_Format(PyExc_ValueError, "a ring of another thread");
    if (of->num_ended == of->num_reads) Py_RETURN_NONE;
    int result;
    of->is_in_use = 1;
    PyThreadState *released = PyEval_SaveThread();
    const int number = wait_for_one(of, &result);
    PyEval_RestoreThread(released);
    of->is_in_use = 0;
    if (of->num_ended == of->num_reads && !of->is_lost) release_buffers(of);
    return Py_BuildValue("ii", number, result);
}

#else

PyObject *open_ring(PyObject *module, PyObject *args) {
    (void)module, (void)args;
    errno = ENOSYS;
    return PyErr_SetFromErrno(PyExc_OSError);
}

PyObject *begin_reads(PyObject *module, PyObject *args) { return open_ring(module, args); }
PyObject *wait_read(PyObject *module, PyObject *args) { return open_ring(module, args); }

#endif
