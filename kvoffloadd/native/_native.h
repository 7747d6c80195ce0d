/* What the C files of the extension share. They keep to Python's stable interface, so that one build serves every later
 * version.
 */
#ifndef KVO_NATIVE_H
#define KVO_NATIVE_H

#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdint.h>

/* The functions of each file; _native.c adds them to the module. */
#define KVO_HIDDEN __attribute__((visibility("hidden")))
extern KVO_HIDDEN PyMethodDef kvo_copyruns[], kvo_indexfind[], kvo_hashruns[];

#define KVO_METHOD(name, function) {name, (PyCFunction)(void (*)(void))function, METH_FASTCALL, NULL}

/* Takes a contiguous buffer with this number of bytes; -1: with any number. Returns -1 if there is an exception. */
static inline int take_buffer(PyObject *object, Py_buffer *buffer, Py_ssize_t bytes, int flags)
{
    if (PyObject_GetBuffer(object, buffer, flags) < 0)
        return -1;
    if (bytes >= 0 && buffer->len != bytes) {
        PyErr_Format(PyExc_ValueError, "%zd bytes where %zd are needed", buffer->len, bytes);
        return -1;
    }
    return 0;
}

/* A buffer that is all zeros was never taken. */
static inline void release_buffer(Py_buffer *buffer)
{
    if (buffer->obj != NULL)
        PyBuffer_Release(buffer);
}

#endif
