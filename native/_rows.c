/* The table of names of the catalog: 32-byte names to rows, in 256 parts by their first byte.
 *
 * A part is an array of entries of eight bytes, as many as a power of two, at most three quarters of them in use: half
 * a hash above the row and one, 0 where there is none. The names themselves are in the catalog's list. The
 * hash is that of Python's dicts, which clients cannot foresee. As in _native.c: every number is checked
 * before it becomes an address, and the twin is in appliance/core/catalog/table.py (tests/native/test_rows.py).
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

#include "functions.h"

enum { NUM_PARTS = 256, NAME_BYTES = 32, AT_ONCE = 64 };
static const uint64_t MAX_ROW = INT32_MAX;

typedef struct {
    PyObject *list;
    int flags; /* PyBUF_WRITABLE or PyBUF_SIMPLE */
    unsigned num_held;
    uint8_t numbers[NUM_PARTS], is_held[NUM_PARTS]; /* those held; whether one is, by its number */
    Py_buffer held[NUM_PARTS];
} row_parts;

/* A name that is looked for: its part, and where in that. */
typedef struct {
    const uint8_t *bytes;
    uint64_t *entries, mask, hash; /* mask + 1 entries, none where `entries` is NULL */
    uint64_t at, num_left; /* to be looked at */
    unsigned part;
} wanted_name;

static void begin_parts(row_parts *parts, PyObject *list, int flags) {
    parts->list = list, parts->flags = flags, parts->num_held = 0;
    memset(parts->is_held, 0, sizeof parts->is_held);
}

static void end_parts(row_parts *parts) {
    while (parts->num_held) PyBuffer_Release(&parts->held[parts->numbers[--parts->num_held]]);
}

static int is_part(const Py_buffer *view) {
    const uint64_t num_entries = (uint64_t)view->len / sizeof(uint64_t);
    if (!view->len || (view->len % sizeof(uint64_t) == 0 && !(num_entries & (num_entries - 1)) &&
                       (uintptr_t)view->buf % sizeof(uint64_t) == 0))
        return 1;
    PyErr_Format(PyExc_ValueError, "a part of %zd bytes", view->len);
    return 0;
}

/* Find the part of a name, and its first place there. What has another length is in no part, and cannot be entered.
 * Return -1 with an error set. */
static int want(row_parts *parts, PyObject *name, wanted_name *wanted) {
    const int is_bytes = PyBytes_CheckExact(name);
    if (is_bytes && PyBytes_Size(name) != NAME_BYTES && parts->flags == PyBUF_SIMPLE) {
        wanted->entries = NULL, wanted->num_left = 0;
        return 0;
    }
    if (!is_bytes || PyBytes_Size(name) != NAME_BYTES) {
        PyErr_Format(PyExc_ValueError, "a name is %d bytes", NAME_BYTES);
        return -1;
    }
    wanted->bytes = (const uint8_t *)PyBytes_AsString(name);
    wanted->hash = (uint64_t)PyObject_Hash(name) >> 16 & UINT32_MAX;
    const unsigned part = wanted->part = wanted->bytes[0];
    Py_buffer *view = &parts->held[part];
    if (!parts->is_held[part]) {
        PyObject *of_part = PyList_GetItem(parts->list, (Py_ssize_t)part); /* borrowed */
        if (!of_part || PyObject_GetBuffer(of_part, view, parts->flags) < 0) return -1;
        parts->is_held[part] = 1;
        parts->numbers[parts->num_held++] = (uint8_t)part;
        if (!is_part(view)) return -1;
    }
    wanted->entries = view->len ? view->buf : NULL;
    wanted->mask = (uint64_t)view->len / sizeof(uint64_t) - 1;
    wanted->at = wanted->hash & wanted->mask;
    wanted->num_left = (uint64_t)view->len / sizeof(uint64_t);
    return 0;
}

/* Go on to the next entry with the hash of a name. Return the row there, -1 where there is no further one. */
static int64_t next_alike(wanted_name *wanted) {
    for (; wanted->num_left; wanted->num_left--) {
        const uint64_t entry = wanted->entries[wanted->at];
        if (!entry) return -1;
        wanted->at = wanted->at + 1 & wanted->mask;
        if (entry >> 32 == wanted->hash) {
            wanted->num_left--;
            return (int64_t)(entry & UINT32_MAX) - 1;
        }
    }
    return -1;
}

/* Return the name of a row, borrowed; NULL where there is none. */
static PyObject *name_of(PyObject *present, int64_t row) {
    return row >= 0 && row < PyList_Size(present) ? PyList_GetItem(present, (Py_ssize_t)row) : NULL;
}

static int is_name(PyObject *name, const uint8_t *bytes) {
    return PyBytes_CheckExact(name) && PyBytes_Size(name) == NAME_BYTES &&
           memcmp(PyBytes_AsString(name), bytes, NAME_BYTES) == 0;
}

const char find_rows_doc[] =
    "find_rows(parts, present, names, /)\n--\n\n"
    "Return the row of each of `names`, -1 where it is in no part; `present`: the list of names by row.";

PyObject *find_rows(PyObject *module, PyObject *args) {
    PyObject *list, *present, *given;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!O", &PyList_Type, &list, &PyList_Type, &present, &given)) return NULL;
    PyObject *names = PySequence_Tuple(given);
    if (!names) return NULL;
    const Py_ssize_t count = PyTuple_Size(names);
    PyObject *rows = PyList_New(count);
    row_parts parts;
    begin_parts(&parts, list, PyBUF_SIMPLE);
    for (Py_ssize_t first = 0; rows && first < count; first += AT_ONCE) {
        wanted_name wanted[AT_ONCE];
        PyObject *alike[AT_ONCE];
        int64_t found[AT_ONCE];
        const int num = (int)(count - first < AT_ONCE ? count - first : AT_ONCE);
        int is_valid = 1;
        /* In three passes, each of which asks memory for what the next one reads: at ten million rows no cache holds
         * any of it. */
        for (int i = 0; is_valid && i < num; i++) {
            is_valid = want(&parts, PyTuple_GetItem(names, first + i), &wanted[i]) == 0;
            if (is_valid && wanted[i].entries) __builtin_prefetch(wanted[i].entries + wanted[i].at);
        }
        for (int i = 0; is_valid && i < num; i++) {
            found[i] = next_alike(&wanted[i]);
            alike[i] = name_of(present, found[i]);
            if (alike[i]) __builtin_prefetch(alike[i]);
        }
        for (int i = 0; is_valid && i < num; i++) {
            while (found[i] >= 0 && !(alike[i] && is_name(alike[i], wanted[i].bytes))) {
                found[i] = next_alike(&wanted[i]);
                alike[i] = name_of(present, found[i]);
            }
            PyObject *row = PyLong_FromLongLong(found[i]);
            is_valid = row && PyList_SetItem(rows, first + i, row) == 0;
        }
        if (!is_valid) Py_CLEAR(rows);
    }
    end_parts(&parts);
    Py_DECREF(names);
    return rows;
}

/* Read the arguments of a change: parts, counts, and as many rows as names. Return -1 with an error set. */
static int read_change(PyObject *args, PyObject **list, Py_buffer *counts, PyObject **names, PyObject **rows,
                       Py_ssize_t *first) {
    PyObject *names_given, *rows_given;
    *names = *rows = NULL, *first = 0;
    if (!PyArg_ParseTuple(args, "O!w*OO|n", &PyList_Type, list, counts, &names_given, &rows_given, first)) return -1;
    if ((*names = PySequence_Tuple(names_given)) && (*rows = PySequence_Tuple(rows_given))) {
        if (counts->len == NUM_PARTS * sizeof(uint32_t) && (uintptr_t)counts->buf % sizeof(uint32_t) == 0 && *first >= 0 &&
            PyTuple_Size(*names) == PyTuple_Size(*rows))
            return 0;
        PyErr_SetString(PyExc_ValueError, "as many rows as names, and a count for each part");
    }
    Py_XDECREF(*names);
    Py_XDECREF(*rows);
    PyBuffer_Release(counts);
    return -1;
}

/* Read one name of a change and its row. Return 0 with an error set. */
static int read_entry(row_parts *parts, PyObject *names, PyObject *rows, Py_ssize_t i, wanted_name *wanted,
                      uint64_t *row) {
    return read_number(PyTuple_GetItem(rows, i), "row", MAX_ROW, row) == 0 &&
           want(parts, PyTuple_GetItem(names, i), wanted) == 0;
}

static void end_change(row_parts *parts, Py_buffer *counts, PyObject *names, PyObject *rows) {
    end_parts(parts);
    Py_DECREF(names);
    Py_DECREF(rows);
    PyBuffer_Release(counts);
}

const char set_rows_doc[] =
    "set_rows(parts, counts, names, rows, first, /)\n--\n\n"
    "Enter names that are in no part, from number `first` on. Return the number of the first that has no room,\n"
    "len(names) where all had. `counts`: entries of each part, uint32.";

PyObject *set_rows(PyObject *module, PyObject *args) {
    PyObject *list, *names, *rows;
    Py_buffer counts;
    Py_ssize_t i;
    (void)module;
    if (read_change(args, &list, &counts, &names, &rows, &i) < 0) return NULL;
    row_parts parts;
    int is_valid = 1;
    begin_parts(&parts, list, PyBUF_WRITABLE);
    const Py_ssize_t count_all = PyTuple_Size(names);
    int is_full = 0;
    while (is_valid && !is_full && i < count_all) {
        wanted_name wanted[AT_ONCE];
        uint64_t entered[AT_ONCE];
        const int num = (int)(count_all - i < AT_ONCE ? count_all - i : AT_ONCE);
        for (int k = 0; is_valid && k < num; k++) { /* asks memory for what the second pass changes */
            is_valid = read_entry(&parts, names, rows, i + k, &wanted[k], &entered[k]);
            if (is_valid && wanted[k].entries) __builtin_prefetch(wanted[k].entries + wanted[k].at, 1);
        }
        for (int k = 0; is_valid && k < num; k++, i++) {
            const wanted_name *one = &wanted[k];
            uint32_t *count = (uint32_t *)counts.buf + one->part;
            is_full = !one->entries || *count >= (one->mask + 1) / 4 * 3;
            if (is_full) break;
            uint64_t at = one->at, step = 0;
            for (; one->entries[at] && step <= one->mask; step++) at = at + 1 & one->mask;
            is_full = step > one->mask; /* the count was wrong */
            if (is_full) break;
            one->entries[at] = one->hash << 32 | (entered[k] + 1);
            ++*count;
        }
    }
    end_change(&parts, &counts, names, rows);
    return is_valid ? PyLong_FromSsize_t(i) : NULL;
}

/* Empty an entry; those behind it move up, so that each is found from its first place on. */
static void take_out(uint64_t *entries, uint64_t mask, uint64_t hole) {
    uint64_t at = hole;
    for (uint64_t step = 0; step < mask; step++) {
        at = at + 1 & mask;
        const uint64_t entry = entries[at];
        if (!entry) break;
        if ((at - (entry >> 32) & mask) >= (at - hole & mask)) entries[hole] = entry, hole = at;
    }
    entries[hole] = 0;
}

const char remove_rows_doc[] =
    "remove_rows(parts, counts, names, rows, /)\n--\n\n"
    "Take these names out, each of which is entered with its row. Raises KeyError where one is not; those before\n"
    "it are out by then.";

PyObject *remove_rows(PyObject *module, PyObject *args) {
    PyObject *list, *names, *rows;
    Py_buffer counts;
    Py_ssize_t first;
    (void)module;
    if (read_change(args, &list, &counts, &names, &rows, &first) < 0) return NULL;
    row_parts parts;
    int is_valid = 1;
    begin_parts(&parts, list, PyBUF_WRITABLE);
    for (Py_ssize_t i = first; is_valid && i < PyTuple_Size(names); i++) {
        wanted_name wanted;
        uint64_t row;
        is_valid = read_entry(&parts, names, rows, i, &wanted, &row);
        int64_t found = is_valid ? next_alike(&wanted) : -1;
        while (found >= 0 && found != (int64_t)row) found = next_alike(&wanted);
        if (!is_valid) break;
        uint32_t *count = (uint32_t *)counts.buf + wanted.part;
        if (found < 0 || !*count) {
            PyErr_SetObject(PyExc_KeyError, PyTuple_GetItem(names, i));
            is_valid = 0;
        } else {
            take_out(wanted.entries, wanted.mask, wanted.at - 1 & wanted.mask);
            --*count;
        }
    }
    end_change(&parts, &counts, names, rows);
    if (!is_valid) return NULL;
    Py_RETURN_NONE;
}

const char move_rows_doc[] =
    "move_rows(part, larger, /)\n--\n\n"
    "Enter what is in a part in a larger one that is empty. Raises ValueError where that has no room.";

PyObject *move_rows(PyObject *module, PyObject *args) {
    Py_buffer from, into;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*w*", &from, &into)) return NULL;
    int is_valid = is_part(&from) && is_part(&into);
    if (is_valid && into.len <= from.len) {
        PyErr_Format(PyExc_ValueError, "%zd bytes are not more than %zd", into.len, from.len);
        is_valid = 0;
    }
    const uint64_t *entries = from.buf, num = (uint64_t)from.len / sizeof(uint64_t);
    uint64_t *larger = into.buf;
    const uint64_t mask = (uint64_t)into.len / sizeof(uint64_t) - 1;
    for (uint64_t i = 0; is_valid && i < num; i++) {
        if (!entries[i]) continue;
        uint64_t at = entries[i] >> 32 & mask, step = 0;
        for (; larger[at] && step <= mask; step++) at = at + 1 & mask;
        if (larger[at]) {
            PyErr_SetString(PyExc_ValueError, "the larger part was not empty");
            is_valid = 0;
        } else
            larger[at] = entries[i];
    }
    PyBuffer_Release(&into);
    PyBuffer_Release(&from);
    if (!is_valid) return NULL;
    Py_RETURN_NONE;
}
