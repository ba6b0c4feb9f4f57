/* Functions of this module that are written in one file and listed or used in the other one. */
#ifndef KVTIER_FUNCTIONS_H
#define KVTIER_FUNCTIONS_H

#include <Python.h>
#include <stdint.h>

int read_number(PyObject *value, const char *name, uint64_t limit, uint64_t *number);

PyObject *find_residence(PyObject *module, PyObject *args);
PyObject *set_residence(PyObject *module, PyObject *args);
PyObject *read_blocks(PyObject *module, PyObject *args);
extern const char find_residence_doc[], set_residence_doc[], read_blocks_doc[];

#endif
