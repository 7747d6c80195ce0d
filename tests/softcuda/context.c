/* The process, its contexts and which of them is current in a thread. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "internal.h"

#define STACK_MAX 64

Driver driver = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static _Thread_local struct {
    Context *contexts[STACK_MAX];
    int depth;
} stack;

static Context *current(void)
{
    return stack.depth ? stack.contexts[stack.depth - 1] : NULL;
}

/* Before the lock: a forked child may have inherited it taken. */
static CUresult enter_process(void)
{
    if (driver.forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    pthread_mutex_lock(&driver.lock);
    return driver.initialised ? CUDA_SUCCESS : leave(CUDA_ERROR_NOT_INITIALIZED);
}

CUresult enter_any(void)
{
    CUresult code = enter_process();
    if (code)
        return code;
    const Context *context = current();
    return context && context->broken ? leave(context->broken) : CUDA_SUCCESS;
}

CUresult enter(Context **context)
{
    CUresult code = enter_any();
    if (code)
        return code;
    *context = current();
    if (!*context)
        return leave(CUDA_ERROR_INVALID_CONTEXT);
    while ((*context)->submitting && !(*context)->broken)
        pthread_cond_wait(&driver.changed, &driver.lock);
    if ((*context)->broken)
        return leave((*context)->broken);
    return (*context)->retained ? CUDA_SUCCESS : leave(CUDA_ERROR_CONTEXT_IS_DESTROYED);
}

CUresult leave(CUresult code)
{
    pthread_mutex_unlock(&driver.lock);
    return code;
}

static void before_fork(void)
{
    pthread_mutex_lock(&driver.lock);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&driver.lock);
}

/* The child must not keep the memory alive: it belongs to the parent. */
static void after_fork_in_child(void)
{
    driver.forked = driver.initialised;
    for (size_t i = 0; i < driver.device.count; i++) {
        Range *range = (Range *)driver.device.items[i];
        if (range->kind == ALLOCATED && range->block->fd >= 0) {
            close(range->block->fd);
            range->block->fd = -1;
        }
    }
    pthread_mutex_unlock(&driver.lock);
}

static void initialise(void)
{
    for (int i = 0; i < settings()->visible_count; i++)
        driver.contexts[i] = (Context){.ordinal = i, .device = settings()->visible[i]};
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    __atomic_store_n(&driver.initialised, true, __ATOMIC_RELEASE); /* device.c asks without the lock */
}

API CUresult cuInit(unsigned int flags)
{
    if (driver.forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (!settings()->visible_count)
        return CUDA_ERROR_NO_DEVICE;
    if (settings()->init_error)
        return (CUresult)settings()->init_error;
    pthread_mutex_lock(&driver.lock);
    if (!driver.initialised) {
        sleep_ns(settings()->init_ns);
        initialise();
    }
    return leave(CUDA_SUCCESS);
}

Context *context_of_device(int device)
{
    for (int i = 0; i < settings()->visible_count; i++)
        if (driver.contexts[i].device == device)
            return &driver.contexts[i];
    return NULL;
}

/* The lock is held meanwhile: a context that is made keeps all other calls of the process waiting. */
static CUresult context_make(Context *context)
{
    if (settings()->context_error)
        return (CUresult)settings()->context_error;
    if (settings()->context_bytes > settings()->memory_bytes)
        return CUDA_ERROR_OUT_OF_MEMORY;
    sleep_ns(settings()->context_ns);
    context->used_bytes += settings()->context_bytes;
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    CUresult code = enter_process();
    if (code)
        return code;
    if (device < 0 || device >= settings()->visible_count)
        return leave(CUDA_ERROR_INVALID_DEVICE);
    if (driver.contexts[device].broken)
        return leave(driver.contexts[device].broken);
    if (!driver.contexts[device].retained && (code = context_make(&driver.contexts[device])))
        return leave(code);
    driver.contexts[device].retained++;
    *context = &driver.contexts[device];
    return leave(CUDA_SUCCESS);
}

static bool is_idle(const Context *context)
{
    for (size_t i = 0; i < driver.streams.count; i++) {
        const Stream *stream = (const Stream *)driver.streams.items[i];
        if (stream->context == context && stream->done < stream->queued)
            return false;
    }
    const Stream *stream = context->null_stream;
    return !stream || stream->done == stream->queued;
}

static void delete_ranges(Table *table, const Context *context)
{
    for (size_t i = table->count; i--;) {
        Range *range = (Range *)table->items[i];
        if (range->context != context)
            continue;
        if (range->kind == ALLOCATED)
            allocation_delete(range);
        else if (range->kind == OPENED)
            opened_delete(range);
        else
            registration_delete(range);
    }
}

/* All that was made in the context goes with it. */
static void context_destroy(Context *context)
{
    context->used_bytes -= settings()->context_bytes;
    delete_ranges(&driver.device, context);
    delete_ranges(&driver.host, context);
    for (size_t i = driver.streams.count; i--;) {
        Stream *stream = (Stream *)driver.streams.items[i];
        if (stream->context == context)
            stream_delete(stream);
    }
    if (context->null_stream)
        stream_delete(context->null_stream);
    context->null_stream = NULL;
    for (size_t i = driver.events.count; i--;) {
        Event *event = (Event *)driver.events.items[i];
        if (event->context == context)
            event_delete(event);
    }
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    CUresult code = enter_process();
    if (code)
        return code;
    if (device < 0 || device >= settings()->visible_count)
        return leave(CUDA_ERROR_INVALID_DEVICE);
    Context *context = &driver.contexts[device];
    if (!context->retained)
        return leave(misuse(CUDA_ERROR_INVALID_CONTEXT, "device %d: primary context released too often", device));
    if (context->retained == 1 && !context->broken) {
        if (!is_idle(context))
            return leave(misuse(CUDA_ERROR_ILLEGAL_STATE, "device %d: context released under running work", device));
        context_destroy(context);
    }
    context->retained--;
    return leave(CUDA_SUCCESS);
}

API CUresult cuDevicePrimaryCtxRelease(CUdevice device) __attribute__((alias("cuDevicePrimaryCtxRelease_v2")));

static bool is_context(const Context *context)
{
    return context >= driver.contexts && context < driver.contexts + settings()->visible_count && context->retained;
}

API CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    CUresult code = enter_process();
    if (code)
        return code;
    if (!is_context(context) || stack.depth == STACK_MAX)
        return leave(CUDA_ERROR_INVALID_CONTEXT);
    stack.contexts[stack.depth++] = context;
    return leave(CUDA_SUCCESS);
}

API CUresult cuCtxPushCurrent(CUcontext context) __attribute__((alias("cuCtxPushCurrent_v2")));

API CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    CUresult code = enter_process();
    if (code)
        return code;
    if (!stack.depth)
        return leave(CUDA_ERROR_INVALID_CONTEXT);
    Context *top = stack.contexts[--stack.depth];
    if (context)
        *context = top;
    return leave(CUDA_SUCCESS);
}

API CUresult cuCtxPopCurrent(CUcontext *context) __attribute__((alias("cuCtxPopCurrent_v2")));

/* Replaces the top of the stack; NULL takes it off. */
API CUresult cuCtxSetCurrent(CUcontext context)
{
    CUresult code = enter_process();
    if (code)
        return code;
    if (context && !is_context(context))
        return leave(CUDA_ERROR_INVALID_CONTEXT);
    if (stack.depth)
        stack.depth--;
    if (context)
        stack.contexts[stack.depth++] = context;
    return leave(CUDA_SUCCESS);
}

API CUresult cuCtxGetCurrent(CUcontext *context)
{
    CUresult code = enter_process();
    if (code)
        return code;
    *context = current();
    return leave(CUDA_SUCCESS);
}

API CUresult cuCtxGetDevice(CUdevice *device)
{
    Context *context;
    CUresult code = enter(&context);
    if (code)
        return code;
    *device = context->ordinal;
    return leave(CUDA_SUCCESS);
}

API CUresult cuCtxGetDevice_v2(CUdevice *device, CUcontext context)
{
    if (!context)
        return cuCtxGetDevice(device);
    CUresult code = enter_any();
    if (code)
        return code;
    if (!is_context(context))
        return leave(CUDA_ERROR_INVALID_CONTEXT);
    *device = context->ordinal;
    return leave(CUDA_SUCCESS);
}

/* The table may change while this waits: each round looks for a stream that still has work. */
static CUresult context_wait(Context *context)
{
    CUresult code = context->null_stream ? stream_wait(context->null_stream) : CUDA_SUCCESS;
    for (size_t i = 0; !code && i < driver.streams.count; i++) {
        Stream *stream = (Stream *)driver.streams.items[i];
        if (stream->context != context || stream->done == stream->queued)
            continue;
        uint64_t key = stream->item.key;
        code = stream_wait(stream);
        i = table_index(&driver.streams, key + 1) - 1;
    }
    return code;
}

API CUresult cuCtxSynchronize(void)
{
    Context *context;
    CUresult code = enter(&context);
    return code ? code : leave(context_wait(context));
}

API CUresult cuCtxSynchronize_v2(CUcontext context)
{
    if (!context)
        return cuCtxSynchronize();
    CUresult code = enter_any();
    if (code)
        return code;
    return leave(is_context(context) ? context_wait(context) : CUDA_ERROR_INVALID_CONTEXT);
}
