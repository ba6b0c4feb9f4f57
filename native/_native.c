/* What is done once per fragment, and to every byte of it: see __init__.py, which says when it is used.
 *
 * Built against the stable interface of CPython 3.11, so that one wheel serves all later versions. Nothing here
 * decides anything or keeps state: each function is a loop over what Python hands it, checks every number before it
 * becomes an address, and has a twin in Python that does the same (tests/native).
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "functions.h"
#include "shared.h"
#include "xxh3.h"

#ifdef Py_GIL_DISABLED
#error "tables and lists are kept as they are by the interpreter's lock: a free-threaded CPython takes the twins"
#endif

enum {
    RELEASE_AT_BYTES = 64 << 10, /* below, taking the interpreter's lock again costs more than the copy */
    STREAM_AT_BYTES = 1 << 20,   /* a run of this size would push out of the cache what others still need there */
    BODY_OFFSET = 8, /* after the generation */
    CHECK_OFFSET = 40,
};
static const uint32_t IS_SPENT = 1U << 31;
static const uint64_t MAX_GENERATION = 1ULL << 62;

static copy_blocks *copy_blocks_here;
static uint32_t crc_tables[8][256];

/* ------------------------------------------------------------------------------------------------ numbers */

/* Read an int of Python that is at most `limit`. Return -1 with an error set: TypeError where it is none,
 * OverflowError where it is negative or larger than 64 bits, else ValueError. */
int read_number(PyObject *value, const char *name, uint64_t limit, uint64_t *number) {
    if (!value) return -1;
    *number = PyLong_AsUnsignedLongLong(value);
    if (*number == (uint64_t)-1 && PyErr_Occurred()) return -1;
    if (*number <= limit) return 0;
    PyErr_Format(PyExc_ValueError, "%s %llu is above %llu", name, (unsigned long long)*number,
                 (unsigned long long)limit);
    return -1;
}

/* -------------------------------------------------------------------------------------------------- bytes */

PyDoc_STRVAR(copy_and_digest_many_doc,
             "copy_and_digest_many(into, source, length, /)\n--\n\n"
             "Copy `source`, payloads of `length` bytes back to back; return the xxh3-128 of each, 16 bytes\n"
             "after the other. The buffers have one size, a multiple of `length`, else ValueError. Where they\n"
             "overlap, the source changes while it is read; the digests are of what is stored then, too.");

static PyObject *copy_and_digest_many(PyObject *module, PyObject *args) {
    Py_buffer into, from;
    Py_ssize_t length;
    (void)module;
    if (!PyArg_ParseTuple(args, "w*y*n", &into, &from, &length)) return NULL;
    PyObject *digests = NULL;
    if (into.len != from.len)
        PyErr_Format(PyExc_ValueError, "%zd bytes into %zd", from.len, into.len);
    else if (length < XXH3_MIN_BYTES || from.len % length)
        PyErr_Format(PyExc_ValueError, "%zd bytes are not payloads of %zd", from.len, length);
    else if ((digests = PyBytes_FromStringAndSize(NULL, from.len / length * XXH3_DIGEST_BYTES)) != NULL) {
        uint8_t *digest = (uint8_t *)PyBytes_AsString(digests);
        copy_blocks *const copy_blocks_chosen = copy_blocks_here; /* `use` may run once the lock is released */
        PyThreadState *released = from.len >= RELEASE_AT_BYTES ? PyEval_SaveThread() : NULL;
        const int is_streamed = from.len >= STREAM_AT_BYTES;
        __atomic_thread_fence(__ATOMIC_RELEASE); /* the odd generations of these slots are seen before their bytes */
        for (Py_ssize_t start = 0; start < from.len; start += length, digest += XXH3_DIGEST_BYTES)
            copy_and_digest(copy_blocks_chosen, (uint8_t *)into.buf + start, (const uint8_t *)from.buf + start,
                            (size_t)length, is_streamed, digest);
#if defined(__x86_64__)
        if (is_streamed) _mm_sfence(); /* streamed bytes are seen before the header that names them */
#endif
        if (released) PyEval_RestoreThread(released);
    }
    PyBuffer_Release(&from);
    PyBuffer_Release(&into);
    return digests;
}

/* Write the digest of bytes that lie where they are to stay. Needs no interpreter. */
void digest_in_place(uint8_t *bytes, size_t length, uint8_t *digest) {
    copy_and_digest(copy_blocks_here, bytes, bytes, length, 0, digest);
}

/* ------------------------------------------------------------------------------------------------ headers */

static void make_crc_tables(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320U : 0);
        crc_tables[0][byte] = crc;
    }
    for (uint32_t byte = 0; byte < 256; byte++)
        for (int table = 1; table < 8; table++) {
            uint32_t before = crc_tables[table - 1][byte];
            crc_tables[table][byte] = before >> 8 ^ crc_tables[0][before & 0xFF];
        }
}

/* The CRC-32 of zlib, eight bytes at a time; `length` is a multiple of eight. */
static uint32_t crc32_of(const uint8_t *bytes, size_t length) {
    uint32_t crc = 0xFFFFFFFFU;
    for (; length; length -= 8, bytes += 8) {
        uint64_t word = read_u64(bytes) ^ crc;
        crc = 0;
        for (int byte = 0; byte < 8; byte++) crc ^= crc_tables[7 - byte][word >> 8 * byte & 0xFF];
    }
    return ~crc;
}

/* Attributes of a FragmentLabel in the order of `Label`'s members. */
enum { NAMESPACE_ID, GROUP, RAW_LENGTH, POSITION, PREFIX_HASH, CHECKSUM, PARENT_HASH, SPENT, NUM_ATTRIBUTES };
static const char *const ATTRIBUTE_NAMES[NUM_ATTRIBUTES] = {
    "namespace_id", "group", "raw_length", "position", "prefix_hash", "checksum", "parent_hash", "is_spent"};
static PyObject *attribute_names[NUM_ATTRIBUTES];

static int copy_bytes_of(PyObject *label, int attribute, uint8_t *into, Py_ssize_t size, int may_be_empty) {
    PyObject *value = PyObject_GetAttr(label, attribute_names[attribute]);
    char *bytes;
    Py_ssize_t length;
    int status = -1;
    if (value && PyBytes_AsStringAndSize(value, &bytes, &length) == 0) {
        if (length == size)
            memcpy(into, bytes, (size_t)size), status = 0;
        else if (may_be_empty && !length)
            memset(into, 0, (size_t)size), status = 0;
        else
            PyErr_Format(PyExc_ValueError, "%s of %zd bytes, not %zd", ATTRIBUTE_NAMES[attribute], length, size);
    }
    Py_XDECREF(value);
    return status;
}

static int read_number_of(PyObject *label, int attribute, uint64_t limit, uint64_t *number) {
    PyObject *value = PyObject_GetAttr(label, attribute_names[attribute]);
    const int status = read_number(value, ATTRIBUTE_NAMES[attribute], limit, number);
    Py_XDECREF(value);
    return status;
}

/* Write the header's body of `label` into `header`, all but its generation. Return -1 with an error set. */
static int make_header(PyObject *label, uint64_t offset, uint8_t *header) {
    uint64_t namespace_id, group, raw_length, position;
    if (read_number_of(label, NAMESPACE_ID, UINT32_MAX, &namespace_id) ||
        read_number_of(label, GROUP, UINT32_MAX, &group) ||
        read_number_of(label, RAW_LENGTH, UINT64_MAX, &raw_length) ||
        read_number_of(label, POSITION, IS_SPENT - 1, &position) ||
        copy_bytes_of(label, PREFIX_HASH, header + 48, HASH_BYTES, 0) ||
        copy_bytes_of(label, CHECKSUM, header + 80, XXH3_DIGEST_BYTES, 0) ||
        copy_bytes_of(label, PARENT_HASH, header + 96, HASH_BYTES, 1))
        return -1;
    PyObject *spent = PyObject_GetAttr(label, attribute_names[SPENT]);
    if (!spent) return -1;
    const int is_spent = PyObject_IsTrue(spent);
    Py_DECREF(spent);
    if (is_spent < 0) return -1;
    const uint32_t numbers[] = {(uint32_t)namespace_id, (uint32_t)group};
    const uint64_t lengths[] = {offset, raw_length, raw_length};
    const uint32_t last[] = {0, (uint32_t)position | (is_spent ? IS_SPENT : 0)}; /* the check is taken as zero */
    memcpy(header + 8, numbers, sizeof numbers);
    memcpy(header + 16, lengths, sizeof lengths);
    memcpy(header + CHECK_OFFSET, last, sizeof last);
    const uint32_t check = crc32_of(header + BODY_OFFSET, HEADER_BYTES - BODY_OFFSET);
    memcpy(header + CHECK_OFFSET, &check, sizeof check);
    return 0;
}

static uint64_t tag_of(const uint8_t *header) {
    uint32_t numbers[2];
    memcpy(numbers, header + 8, sizeof numbers);
    return tag_of_name(header + 48, numbers[0], numbers[1]);
}

PyDoc_STRVAR(fill_headers_doc,
             "fill_headers(headers, slots, labels, slot_bytes, last_generation, /)\n--\n\n"
             "Write the headers of `slots`, a generation each, last_generation + 2 and so on. Return their tags.\n"
             "Nothing is written if a slot or a label is not valid. Raises ValueError.");

static PyObject *fill_headers(PyObject *module, PyObject *args) {
    Py_buffer headers;
    PyObject *slot_list, *label_list, *slot_bytes_given, *generation_given;
    (void)module;
    if (!PyArg_ParseTuple(args, "w*O!O!OO", &headers, &PyList_Type, &slot_list, &PyList_Type, &label_list,
                          &slot_bytes_given, &generation_given))
        return NULL;
    /* Copies that hold what is in them: an attribute of a label may be code, which may change the lists. */
    PyObject *slots = PyList_AsTuple(slot_list), *labels = PyList_AsTuple(label_list), *tags = NULL;
    const Py_ssize_t count = labels ? PyTuple_Size(labels) : 0, num_headers = headers.len / HEADER_BYTES;
    uint64_t slot_bytes = 0, generation = 0;
    const uint64_t max_slot_bytes = num_headers ? UINT64_MAX / (uint64_t)num_headers : UINT64_MAX;
    uint8_t *made = NULL; /* the headers; generation: where it goes, until then */
    if (!slots || !labels || read_number(slot_bytes_given, "slot_bytes", max_slot_bytes, &slot_bytes) ||
        read_number(generation_given, "last_generation", MAX_GENERATION - 2 * (uint64_t)count, &generation))
        ;
    else if (PyTuple_Size(slots) != count || (uintptr_t)headers.buf % sizeof(uint64_t) || generation & 1)
        PyErr_SetString(PyExc_ValueError,
                        "as many slots as labels, headers on a boundary of 8 bytes, and an even generation");
    else if (!(made = PyMem_Malloc((size_t)(count + 1) * HEADER_BYTES)))
        PyErr_NoMemory();
    else
        tags = PyList_New(count);
    for (Py_ssize_t i = 0; tags && i < count; i++) {
        const Py_ssize_t slot = PyLong_AsSsize_t(PyTuple_GetItem(slots, i));
        uint8_t *header = made + i * HEADER_BYTES;
        PyObject *tag = NULL;
        if (slot < 0 || slot >= num_headers) {
            if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "slot %zd of %zd", slot, num_headers);
        } else if (make_header(PyTuple_GetItem(labels, i), (uint64_t)slot * slot_bytes, header) == 0) {
            memcpy(header, &slot, sizeof slot);
            tag = PyLong_FromUnsignedLongLong(tag_of(header));
        }
        if (!tag || PyList_SetItem(tags, i, tag) < 0) Py_CLEAR(tags);
    }
    for (Py_ssize_t i = 0; tags && i < count; i++) {
        uint64_t slot = read_u64(made + i * HEADER_BYTES);
        uint8_t *header = (uint8_t *)headers.buf + slot * HEADER_BYTES;
        begin_change(header);
        memcpy(header + BODY_OFFSET, made + i * HEADER_BYTES + BODY_OFFSET, HEADER_BYTES - BODY_OFFSET);
        end_change(header, generation += 2);
    }
    PyMem_Free(made);
    Py_XDECREF(slots);
    Py_XDECREF(labels);
    PyBuffer_Release(&headers);
    return tags;
}

/* -------------------------------------------------------------------------------------------------- index */

PyDoc_STRVAR(insert_entries_doc,
             "insert_entries(entries, tags, first_place, slots, /)\n--\n\n"
             "Enter (tag, first_place + slot) for each. Return how many had room, and how many of these took the\n"
             "place of a tombstone. Nothing is entered if a number is not valid. Raises ValueError.");

static PyObject *insert_entries(PyObject *module, PyObject *args) {
    Py_buffer buffer;
    PyObject *tags, *slots, *first_place_given;
    (void)module;
    if (!PyArg_ParseTuple(args, "w*O!OO!", &buffer, &PyList_Type, &tags, &first_place_given, &PyList_Type, &slots))
        return NULL;
    const uint64_t num_entries = (uint64_t)buffer.len / 16, mask = num_entries - 1;
    const Py_ssize_t count = PyList_Size(tags);
    Py_ssize_t num_inserted = 0, num_tombstones = 0;
    uint64_t *words = buffer.buf, *pairs = NULL, first_place = 0;
    int is_valid = 0;
    if (read_number(first_place_given, "first_place", UINT64_MAX, &first_place))
        ;
    else if (num_entries < MAX_PROBES || num_entries & mask || (uintptr_t)words % sizeof *words ||
             PyList_Size(slots) != count)
        PyErr_Format(PyExc_ValueError, "%llu entries, %zd tags and %zd slots", (unsigned long long)num_entries,
                     count, PyList_Size(slots));
    else if (!(pairs = PyMem_Malloc(((size_t)count + 1) * 2 * sizeof *pairs)))
        PyErr_NoMemory();
    else
        is_valid = 1;
    for (Py_ssize_t i = 0; is_valid && i < count; i++) { /* all of them, before the first one is entered */
        uint64_t *pair = pairs + 2 * i;
        is_valid = !read_number(PyList_GetItem(tags, i), "tag", UINT64_MAX, pair) &&
                   !read_number(PyList_GetItem(slots, i), "slot", UINT64_MAX - first_place, pair + 1);
        if (is_valid && pair[0] <= TOMBSTONE_TAG) {
            PyErr_SetString(PyExc_ValueError, "a tag that stands for no entry");
            is_valid = 0;
        }
    }
    for (const uint64_t *pair = pairs; is_valid && pair < pairs + 2 * count; pair += 2) {
        for (uint64_t step = 0; step < MAX_PROBES; step++) {
            uint64_t *entry = words + ((pair[0] + step & mask) << 1), there = *entry;
            if (there > TOMBSTONE_TAG) continue;
            /* Place before tag: a reader that sees the tag sees its place. */
            __atomic_store_n(entry + 1, first_place + pair[1], __ATOMIC_RELAXED);
            __atomic_store_n(entry, pair[0], __ATOMIC_RELEASE);
            num_inserted++;
            num_tombstones += there == TOMBSTONE_TAG;
            break;
        }
    }
    PyMem_Free(pairs);
    PyBuffer_Release(&buffer);
    return is_valid ? Py_BuildValue("nn", num_inserted, num_tombstones) : NULL;
}

/* ------------------------------------------------------------------------------------------------- module */

PyDoc_STRVAR(order_stores_doc,
             "order_stores()\n--\n\nStores before this are seen by other processors before those behind it.");

static PyObject *order_stores(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    __atomic_thread_fence(__ATOMIC_RELEASE);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(use_doc,
             "use(name, /)\n--\n\n"
             "Take the instructions called so (avx512, avx2, neon, plain); None: the best. For tests.\n"
             "Return whether this processor has them.");

static PyObject *use(PyObject *module, PyObject *args) {
    const char *name;
    (void)module;
    if (!PyArg_ParseTuple(args, "z", &name)) return NULL;
    copy_blocks *found = best_copy_blocks(name);
    if (found) copy_blocks_here = found, use_transform(name);
    return PyBool_FromLong(found != NULL);
}

static PyMethodDef METHODS[] = {
    {"copy_and_digest_many", copy_and_digest_many, METH_VARARGS, copy_and_digest_many_doc},
    {"fill_headers", fill_headers, METH_VARARGS, fill_headers_doc},
    {"receive_many", receive_many, METH_VARARGS, receive_many_doc},
    {"send_many", send_many, METH_VARARGS, send_many_doc},
    {"insert_entries", insert_entries, METH_VARARGS, insert_entries_doc},
    {"find_residence", find_residence, METH_VARARGS, find_residence_doc},
    {"set_residence", set_residence, METH_VARARGS, set_residence_doc},
    {"read_blocks", read_blocks, METH_VARARGS, read_blocks_doc},
    {"find_rows", find_rows, METH_VARARGS, find_rows_doc},
    {"set_rows", set_rows, METH_VARARGS, set_rows_doc},
    {"remove_rows", remove_rows, METH_VARARGS, remove_rows_doc},
    {"move_rows", move_rows, METH_VARARGS, move_rows_doc},
    {"open_ring", open_ring, METH_VARARGS, open_ring_doc},
    {"begin_reads", begin_reads, METH_VARARGS, begin_reads_doc},
    {"wait_read", wait_read, METH_VARARGS, wait_read_doc},
    {"encode_transform", encode_transform, METH_VARARGS, encode_transform_doc},
    {"decode_transform", decode_transform, METH_VARARGS, decode_transform_doc},
    {"order_stores", order_stores, METH_NOARGS, order_stores_doc},
    {"use", use, METH_VARARGS, use_doc},
    {NULL, NULL, 0, NULL},
};

static int prepare(PyObject *module) {
    (void)module;
    if (PyInterpreterState_GetID(PyInterpreterState_Get())) { /* the names below are objects of the first one */
        PyErr_SetString(PyExc_ImportError, "only the main interpreter takes native code");
        return -1;
    }
    for (int i = 0; i < NUM_ATTRIBUTES; i++)
        if (!attribute_names[i] && !(attribute_names[i] = PyUnicode_InternFromString(ATTRIBUTE_NAMES[i]))) return -1;
    make_crc_tables();
    copy_blocks_here = best_copy_blocks(NULL);
    use_transform(NULL);
    return 0;
}

static PyModuleDef_Slot SLOTS[] = {{Py_mod_exec, prepare}, {0, NULL}};
static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, METHODS, SLOTS, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&MODULE); }
