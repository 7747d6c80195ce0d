/* The extension module: the functions of the other files. See helper.py for what each of them does. */
#include "_native.h"

static int add_functions(PyObject *module)
{
    if (PyModule_AddFunctions(module, kvo_copyruns) < 0 || PyModule_AddFunctions(module, kvo_indexfind) < 0)
        return -1;
    return PyModule_AddFunctions(module, kvo_hashruns);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)add_functions},
    {0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, NULL, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&module);
}
