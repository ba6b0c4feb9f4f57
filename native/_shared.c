/* What clients read of shared memory without a call, and the table that tells them where blocks are.
 *
 * As in _native.c: loops over what Python hands over, every number checked before it becomes an address, nothing
 * decided, and a twin in Python for each (tests/native/test_shared.py).
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "functions.h"
#include "shared.h"

enum { RELEASE_AT_BYTES = 64 << 10 }; /* as in _native.c */
static const uint64_t MAX_PLACE = 1ULL << 63;

/* Return the mask of a table of entries of 16 bytes; 0, with an error set, where the buffer is none. */
static uint64_t mask_of(const Py_buffer *table, uint64_t least) {
    const uint64_t num_entries = (uint64_t)table->len / 16;
    if (num_entries >= least && !(num_entries & (num_entries - 1)) && (uintptr_t)table->buf % sizeof(uint64_t) == 0)
        return num_entries - 1;
    PyErr_Format(PyExc_ValueError, "a table of %zd bytes", table->len);
    return 0;
}

const char find_residence_doc[] =
    "find_residence(table, names, namespace_id, /)\n--\n\n"
    "Return the codes, one byte each, of the longest prefix of `names`, 32 bytes each, that is in the table.";

PyObject *find_residence(PyObject *module, PyObject *args) {
    Py_buffer table, names;
    PyObject *id_given, *codes = NULL;
    uint64_t namespace_id, mask;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*O", &table, &names, &id_given)) return NULL;
    if (!read_number(id_given, "namespace_id", UINT32_MAX, &namespace_id) && (mask = mask_of(&table, RESIDENCE_PROBES))) {
        const size_t count = (size_t)names.len / HASH_BYTES;
        uint8_t *found = PyMem_Malloc(count + 1);
        if (!found)
            PyErr_NoMemory();
        else if (names.len % HASH_BYTES)
            PyErr_Format(PyExc_ValueError, "names of %zd bytes", names.len);
        else
            codes = PyBytes_FromStringAndSize(
                (const char *)found, (Py_ssize_t)find_codes(table.buf, mask, names.buf, count, namespace_id, found));
        PyMem_Free(found);
    }
    PyBuffer_Release(&names);
    PyBuffer_Release(&table);
    return codes;
}

const char set_residence_doc[] =
    "set_residence(table, names, namespace_id, code, /)\n--\n\n"
    "Set the code of each of `names`, 32 bytes each; 0 takes it out. Return how many more entries and tombstones\n"
    "there are, and how many names found no room.";

PyObject *set_residence(PyObject *module, PyObject *args) {
    Py_buffer table, names;
    PyObject *id_given, *code_given, *answer = NULL;
    uint64_t namespace_id, code, mask;
    (void)module;
    if (!PyArg_ParseTuple(args, "w*y*OO", &table, &names, &id_given, &code_given)) return NULL;
    if (read_number(id_given, "namespace_id", UINT32_MAX, &namespace_id) ||
        read_number(code_given, "code", CODE_MASK, &code) || !(mask = mask_of(&table, RESIDENCE_PROBES)))
        ;
    else if (names.len % HASH_BYTES)
        PyErr_Format(PyExc_ValueError, "names of %zd bytes", names.len);
    else {
        residence_change change = {0, 0, 0};
        const uint8_t *end = (const uint8_t *)names.buf + names.len;
        for (const uint8_t *name = names.buf; name < end; name += HASH_BYTES)
            set_code(table.buf, mask, name, namespace_id, code, &change);
        answer = Py_BuildValue("LLL", (long long)change.num_entries, (long long)change.num_tombstones,
                               (long long)change.num_dropped);
    }
    PyBuffer_Release(&names);
    PyBuffer_Release(&table);
    return answer;
}

/* ------------------------------------------------------------------------------------------- one-sided reads */

/* One fragment that was found: to be copied, and its slot to be looked at again. */
typedef struct {
    const uint8_t *header, *source;
    uint64_t generation, length;
} found_fragment;

/* What a read is about, checked. */
typedef struct {
    const uint64_t *words;
    uint64_t mask, data_bytes, namespace_id;
    PyObject *extents;   /* number -> all bytes of the extent: data, then headers */
    uint64_t number;     /* of the extent looked at last */
    Py_buffer extent;    /* its memory, while `is_held` */
    int is_held;
} reading;

/* Hold the memory of an extent. Return 0 where it is not mapped, -1 with an error set. */
static int hold_extent(reading *read, uint64_t number) {
    if (read->is_held && read->number == number) return 1;
    if (read->is_held) PyBuffer_Release(&read->extent), read->is_held = 0;
    PyObject *key = PyLong_FromUnsignedLongLong(number);
    if (!key) return -1;
    PyObject *memory = PyDict_GetItemWithError(read->extents, key); /* borrowed */
    Py_DECREF(key);
    if (!memory) return PyErr_Occurred() ? -1 : 0;
    if (PyObject_GetBuffer(memory, &read->extent, PyBUF_SIMPLE) < 0) return -1;
    read->number = number, read->is_held = 1;
    if (read->data_bytes % sizeof(uint64_t) == 0 && (uintptr_t)read->extent.buf % sizeof(uint64_t) == 0 &&
        (uint64_t)read->extent.len >= read->data_bytes)
        return 1;
    PyErr_Format(PyExc_ValueError, "an extent of %zd bytes", read->extent.len);
    return -1;
}

/* Find one fragment by the index and prove it by its header. Return 0 where that is not possible, -1 with an error. */
static int find_fragment(reading *read, const wanted_fragment *wanted, uint64_t tag, found_fragment *found) {
    for (uint64_t step = 0; step < MAX_PROBES; step++) {
        const uint64_t *entry = read->words + ((tag + step & read->mask) << 1), there = load_acquire(entry);
        if (there == EMPTY_TAG) return 0;
        if (there != tag) continue;
        const uint64_t place = load_relaxed(entry + 1), slot = place & UINT32_MAX;
        if (place >= MAX_PLACE) return 0;
        const int is_mapped = hold_extent(read, place >> 32);
        if (is_mapped <= 0) return is_mapped; /* the other way maps it */
        const uint8_t *data = read->extent.buf, *headers = data + read->data_bytes;
        if (slot >= ((uint64_t)read->extent.len - read->data_bytes) / HEADER_BYTES) return 0;
        uint64_t offset;
        found->header = headers + slot * HEADER_BYTES;
        found->generation = generation_of(found->header, wanted, read->data_bytes, &offset);
        if (found->generation & 1) continue; /* recycled, or another fragment with the same tag */
        found->source = data + offset, found->length = wanted->length;
        return 1;
    }
    return 0;
}

/* Copy fragments to `into`, back to back, as far as they are provably right; return how many that is. */
static Py_ssize_t copy_found(const found_fragment *found, Py_ssize_t count, uint8_t *into) {
    for (Py_ssize_t i = 0; i < count; into += found[i++].length) {
        memcpy(into, found[i].source, found[i].length);
        if (!is_still(found[i].header, found[i].generation)) return i;
    }
    return count;
}

/* Read the lengths of a block's fragments. Return how many these are; -1 with an error set. */
static Py_ssize_t read_lengths(PyObject *given, uint64_t **lengths, uint64_t *block_bytes) {
    const Py_ssize_t count = PyTuple_Size(given);
    *block_bytes = 0;
    if (!(*lengths = PyMem_Malloc(((size_t)count + 1) * sizeof **lengths))) return PyErr_NoMemory(), -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (read_number(PyTuple_GetItem(given, i), "length", 1ULL << 40, *lengths + i)) return -1;
        *block_bytes += (*lengths)[i];
    }
    return count;
}

const char read_blocks_doc[] =
    "read_blocks(entries, extents, data_bytes, namespace_id, names, fragment_bytes, address, /)\n--\n\n"
    "Copy blocks, fragments back to back, to `address`, where there is room for all of them; return how many from the\n"
    "first one on were provably right. `extents`: memory by number, data_bytes and then slot headers. What is behind\n"
    "the blocks that were read is undefined.";

PyObject *read_blocks(PyObject *module, PyObject *args) {
    Py_buffer entries, names;
    PyObject *extents, *bytes_given, *id_given, *lengths_given, *address_given;
    uint64_t address = 0, *lengths = NULL, block_bytes = 0;
    Py_ssize_t num_groups = 0, num_blocks = 0, num_found = 0, num_read = -1;
    found_fragment *found = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*O!OOy*O!O", &entries, &PyDict_Type, &extents, &bytes_given, &id_given, &names,
                          &PyTuple_Type, &lengths_given, &address_given))
        return NULL;
    reading read = {.words = entries.buf, .extents = extents};
    if (read_number(bytes_given, "data_bytes", 1ULL << 62, &read.data_bytes) ||
        read_number(id_given, "namespace_id", UINT32_MAX, &read.namespace_id) ||
        read_number(address_given, "address", UINT64_MAX, &address) || !(read.mask = mask_of(&entries, MAX_PROBES)) ||
        (num_groups = read_lengths(lengths_given, &lengths, &block_bytes)) < 0)
        ;
    else if (!num_groups || num_groups > 1 << 20 || names.len % HASH_BYTES || !address)
        PyErr_Format(PyExc_ValueError, "%zd groups, names of %zd bytes", num_groups, names.len);
    else if (!(found = PyMem_Malloc((size_t)(names.len / HASH_BYTES * num_groups + 1) * sizeof *found)))
        PyErr_NoMemory();
    else
        num_blocks = names.len / HASH_BYTES, num_read = 0;
    /* Extents are held one at a time: those that are mapped here stay mapped (clients/memory/extents.py). */
    int status = 1;
    for (Py_ssize_t block = 0; status > 0 && block < num_blocks; block++)
        for (Py_ssize_t group = 0; status > 0 && group < num_groups; group++) {
            const uint8_t *name = (const uint8_t *)names.buf + block * HASH_BYTES;
            const wanted_fragment wanted = {name, read.namespace_id | (uint64_t)group << 32, lengths[group]};
            status = find_fragment(&read, &wanted, tag_of_name(name, read.namespace_id, (uint64_t)group), found + num_found);
            num_found += status > 0;
        }
    if (status >= 0 && num_read == 0 && (num_blocks = num_found / num_groups)) {
        PyThreadState *released = (uint64_t)num_blocks * block_bytes >= RELEASE_AT_BYTES ? PyEval_SaveThread() : NULL;
        num_read = copy_found(found, num_blocks * num_groups, (uint8_t *)(uintptr_t)address) / num_groups;
        if (released) PyEval_RestoreThread(released);
    }
    if (read.is_held) PyBuffer_Release(&read.extent);
    PyMem_Free(found);
    PyMem_Free(lengths);
    PyBuffer_Release(&names);
    PyBuffer_Release(&entries);
    return status < 0 || num_read < 0 ? NULL : PyLong_FromSsize_t(num_read);
}
