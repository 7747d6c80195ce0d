/* Calls on streams. The NULL stream is one more stream of its context: it does not wait for the others, which the real
 * driver's does unless they are non-blocking.
 */
#include "internal.h"

#define LEGACY ((CUstream)(uintptr_t)1) /* the NULL stream, by its other name */

/* A stream may be waited for and destroyed in any context. */
static CUresult stream_find_any(Context *context, CUstream handle, Stream **stream)
{
    if (!handle || handle == LEGACY) {
        if (!context->null_stream)
            context->null_stream = stream_new(context);
        *stream = context->null_stream;
        return CUDA_SUCCESS;
    }
    *stream = table_find(&driver.streams, (uintptr_t)handle);
    if (!*stream)
        return misuse(CUDA_ERROR_INVALID_HANDLE, "stream %p is destroyed, or was never made", (void *)handle);
    return CUDA_SUCCESS;
}

CUresult stream_find(Context *context, CUstream handle, Stream **stream)
{
    CUresult code = stream_find_any(context, handle, stream);
    if (code)
        return code;
    if ((*stream)->context != context)
        return misuse(CUDA_ERROR_INVALID_HANDLE, "stream %p of device %d used in a context of device %d",
                      (void *)handle, (*stream)->context->device, context->device);
    return CUDA_SUCCESS;
}

API CUresult cuStreamCreate(CUstream *handle, unsigned int flags)
{
    Context *context;
    CUresult code = enter(&context);
    if (code)
        return code;
    if (flags > 1)
        return leave(CUDA_ERROR_INVALID_VALUE);
    Stream *stream = stream_new(context);
    table_add(&driver.streams, &stream->item);
    driver.counters.live_streams++;
    *handle = (CUstream)(uintptr_t)stream->item.key;
    return leave(CUDA_SUCCESS);
}

API CUresult cuStreamCreateWithPriority(CUstream *handle, unsigned int flags, int priority)
{
    (void)priority;
    return cuStreamCreate(handle, flags);
}

API CUresult cuStreamDestroy_v2(CUstream handle)
{
    Context *context;
    Stream *stream;
    CUresult code = enter(&context);
    if (code)
        return code;
    if (!handle || handle == LEGACY)
        return leave(misuse(CUDA_ERROR_INVALID_HANDLE, "cuStreamDestroy: the NULL stream"));
    if (!(code = stream_find_any(context, handle, &stream)))
        stream_delete(stream);
    return leave(code);
}

API CUresult cuStreamDestroy(CUstream handle) __attribute__((alias("cuStreamDestroy_v2")));

API CUresult cuStreamSynchronize(CUstream handle)
{
    Context *context;
    Stream *stream;
    CUresult code = enter(&context);
    if (code)
        return code;
    if (!(code = stream_find_any(context, handle, &stream)))
        code = stream_wait(stream);
    return leave(code);
}

API CUresult cuStreamQuery(CUstream handle)
{
    Context *context;
    Stream *stream;
    CUresult code = enter(&context);
    if (code)
        return code;
    if (!(code = stream_find_any(context, handle, &stream)) && !(code = query_fault()) && stream->done < stream->queued)
        code = CUDA_ERROR_NOT_READY;
    return leave(code);
}

/* Nothing captures here: a thread's mode is kept, and matters for nothing. */
API CUresult cuThreadExchangeStreamCaptureMode(int *mode)
{
    static _Thread_local int own;
    int asked = *mode;
    if (asked < 0 || asked > 2)
        return CUDA_ERROR_INVALID_VALUE;
    *mode = own;
    own = asked;
    return CUDA_SUCCESS;
}

/* `op` writes where the device's address stands for. */
static CUresult write_check(Op *op, const Context *context, CUdeviceptr address)
{
    CUdeviceptr at = address - settings()->host_offset;
    Range *host = range_at(&driver.host, at);
    if (address % sizeof(uint64_t))
        return misuse(CUDA_ERROR_INVALID_VALUE, "cuStreamWriteValue64: 0x%llx is not aligned", address);
    op->address = host ? at : address;
    if (!host)
        return device_touch(op, context, address, sizeof(uint64_t), "cuStreamWriteValue64");
    if (range_end(host) - at < sizeof(uint64_t))
        return misuse(CUDA_ERROR_INVALID_VALUE, "cuStreamWriteValue64: 0x%llx reaches beyond its registration",
                      address);
    op_touches(op, host);
    return CUDA_SUCCESS;
}

API CUresult cuStreamWriteValue64_v2(CUstream handle, CUdeviceptr address, uint64_t value, unsigned int flags)
{
    Context *context;
    Stream *stream;
    CUresult code = enter(&context);
    if (code)
        return code;
    if (flags > 1)
        return leave(CUDA_ERROR_INVALID_VALUE);
    if (settings()->no_stream_writes)
        return leave(CUDA_ERROR_NOT_SUPPORTED);
    if ((code = stream_find(context, handle, &stream)))
        return leave(code);
    Op *op = op_new(WRITE, 0);
    op->value = value;
    if ((code = write_check(op, context, address)))
        op_delete(op);
    else
        op_queue(stream, op);
    return leave(code);
}

API CUresult cuStreamWriteValue64(CUstream handle, CUdeviceptr address, uint64_t value, unsigned int flags)
    __attribute__((alias("cuStreamWriteValue64_v2")));

static CUresult queue_wait(CUstream handle, OpKind kind, CUdeviceptr address, uint64_t value)
{
    Context *context;
    Stream *stream;
    CUresult code = enter(&context);
    if (code)
        return code;
    if ((code = stream_find(context, handle, &stream)))
        return leave(code);
    Op *op = op_new(kind, 0);
    op->address = address;
    op->value = value;
    op_queue(stream, op);
    return leave(CUDA_SUCCESS);
}

API CUresult softcuda_delay(CUstream handle, uint64_t ns)
{
    return queue_wait(handle, DELAY, 0, ns);
}

API CUresult softcuda_spin_until(CUstream handle, const uint64_t *word, uint64_t value)
{
    return queue_wait(handle, SPIN, (uintptr_t)word, value);
}

API void softcuda_counters(struct softcuda_counters *counters)
{
    pthread_mutex_lock(&driver.lock);
    *counters = driver.counters;
    pthread_mutex_unlock(&driver.lock);
}
