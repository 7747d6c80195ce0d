/* Hashes many payloads in one call, without the GIL. See storage/hashing.py, which does the same one payload at a time
 * where this was not compiled.
 *
 * The hash function is the one that the Python package xxhash exports. Its address comes from xxh3.py, those of the
 * payloads from hashing.py; the caller there guarantees that they are mapped.
 */
#include "_native.h"

/* XXH128_hash_t and XXH3_128bits of xxhash.h, which are stable since xxHash 0.8.0. */
typedef struct {
    uint64_t low, high;
} Digest;
typedef Digest (*HashFunction)(const void *data, size_t bytes);

/* hash_payloads(function, addresses, sizes, digests): write the digest of each payload, high half first. `function`: an address;
 * `addresses` and `sizes`: u64 each; `digests`: two u64 each.
 */
static PyObject *hash_payloads(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Py_buffer addresses = {0}, sizes = {0}, digests = {0};
    (void)module;
    if (given != 4) {
        PyErr_SetString(PyExc_TypeError, "hash_payloads(function, addresses, sizes, digests)");
        return NULL;
    }
    HashFunction function = (HashFunction)PyLong_AsVoidPtr(args[0]);
    if (!PyErr_Occurred() && PyObject_GetBuffer(args[1], &addresses, PyBUF_SIMPLE) == 0 &&
        PyObject_GetBuffer(args[2], &sizes, PyBUF_SIMPLE) == 0 &&
        PyObject_GetBuffer(args[3], &digests, PyBUF_WRITABLE) == 0) {
        Py_ssize_t count = addresses.len / (Py_ssize_t)sizeof(uint64_t);
        if (function == NULL || sizes.len != addresses.len || digests.len != 2 * addresses.len) {
            PyErr_SetString(PyExc_ValueError, "a function is needed, and a size and two words of digest for each address");
        } else {
            const uint64_t *address = addresses.buf, *size = sizes.buf;
            uint64_t *digest = digests.buf;
            PyThreadState *state = PyEval_SaveThread();
            for (Py_ssize_t i = 0; i < count; i++, digest += 2) {
                Digest found = function((const void *)(uintptr_t)address[i], (size_t)size[i]);
                digest[0] = found.high;
                digest[1] = found.low;
            }
            PyEval_RestoreThread(state);
        }
    }
    Py_buffer *buffers[] = {&addresses, &sizes, &digests};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++)
        release_buffer(buffers[i]);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

PyMethodDef kvo_hashruns[] = {
    KVO_METHOD("hash_payloads", hash_payloads),
    {NULL, NULL, 0, NULL},
};
