/* Names of errors, and what happens to a caller that breaks the rules. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "internal.h"

typedef struct {
    CUresult code;
    const char *name, *text;
} Error;

#define AS_ROW(name, value, text) {name, #name, text},
static const Error ERRORS[] = {FOR_EACH_ERROR(AS_ROW)};
#undef AS_ROW

static const Error *error_find(CUresult code)
{
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (ERRORS[i].code == code)
            return &ERRORS[i];
    return NULL;
}

API CUresult cuGetErrorName(CUresult code, const char **name)
{
    const Error *error = error_find(code);
    *name = error ? error->name : NULL;
    return error ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGetErrorString(CUresult code, const char **text)
{
    const Error *error = error_find(code);
    *text = error ? error->text : NULL;
    return error ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* One write: lines of several threads don't mix. */
CUresult misuse(CUresult code, const char *format, ...)
{
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    int begun = snprintf(line, sizeof line, "softcuda: misuse: ");
    vsnprintf(line + begun, sizeof line - begun, format, arguments);
    va_end(arguments);
    dprintf(STDERR_FILENO, "%s\n", line);
    if (!settings()->misuse_is_error)
        abort();
    driver.counters.misuses++;
    return code;
}

CUresult break_context(Context *context, CUresult code)
{
    __atomic_store_n(&context->broken, code, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&driver.changed);
    return code;
}
