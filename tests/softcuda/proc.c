/* How callers find the functions: by name, and by the version of CUDA that they were written for. */
#include <string.h>

#include "internal.h"

static bool is_missing(const Entry *entry)
{
    return entry->version > (int)settings()->driver_version ||
           (settings()->no_batch && !strcmp(entry->name, "cuMemcpyBatchAsync")) ||
           (settings()->no_pitched_batch && !strcmp(entry->name, "cuMemcpy3DBatchAsync"));
}

static void (*lookup(const char *symbol, int version, int *status))(void)
{
    void (*found)(void) = NULL;
    *status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    for (size_t i = 0; i < FUNCTION_COUNT; i++) {
        const Entry *entry = &FUNCTIONS[i];
        if (strcmp(entry->name, symbol) || is_missing(entry))
            continue;
        if (entry->version <= version)
            found = entry->function;
        *status = found ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
    }
    return found;
}

/* Flag 2 asks for streams of each thread's own, which are not modelled. */
API CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status)
{
    int unused;
    if (!symbol || !function || flags > 1)
        return CUDA_ERROR_INVALID_VALUE;
    *(void (**)(void))function = lookup(symbol, version, status ? status : &unused);
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

API CUresult cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
