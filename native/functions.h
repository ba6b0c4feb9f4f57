/* Functions of this module that are written in one file and listed or used in the other one. */
#ifndef KVTIER_FUNCTIONS_H
#define KVTIER_FUNCTIONS_H

#include <Python.h>
#include <stdint.h>

int read_number(PyObject *value, const char *name, uint64_t limit, uint64_t *number);

enum { MIN_DIGESTED_BYTES = 241, DIGEST_BYTES = 16 };
void digest_in_place(uint8_t *bytes, size_t length, uint8_t *digest);

PyObject *receive_many(PyObject *module, PyObject *args);
PyObject *send_many(PyObject *module, PyObject *args);
extern const char receive_many_doc[], send_many_doc[];

PyObject *find_residence(PyObject *module, PyObject *args);
PyObject *set_residence(PyObject *module, PyObject *args);
PyObject *read_blocks(PyObject *module, PyObject *args);
extern const char find_residence_doc[], set_residence_doc[], read_blocks_doc[];

PyObject *find_rows(PyObject *module, PyObject *args);
PyObject *set_rows(PyObject *module, PyObject *args);
PyObject *remove_rows(PyObject *module, PyObject *args);
PyObject *move_rows(PyObject *module, PyObject *args);
extern const char find_rows_doc[], set_rows_doc[], remove_rows_doc[], move_rows_doc[];

PyObject *open_ring(PyObject *module, PyObject *args);
PyObject *begin_reads(PyObject *module, PyObject *args);
PyObject *wait_read(PyObject *module, PyObject *args);
extern const char open_ring_doc[], begin_reads_doc[], wait_read_doc[];

PyObject *encode_transform(PyObject *module, PyObject *args);
PyObject *decode_transform(PyObject *module, PyObject *args);
void use_transform(const char *name);
extern const char encode_transform_doc[], decode_transform_doc[];

#endif
