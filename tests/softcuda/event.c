/* Events. Each record takes a ticket; an event is ready once the last ticket is through. */
#include <stdlib.h>

#include "internal.h"

void event_unuse(Event *event)
{
    if (!--event->users && event->destroyed)
        free(event);
}

static CUresult event_find(CUevent handle, Event **event)
{
    *event = table_find(&driver.events, (uintptr_t)handle);
    if (*event)
        return CUDA_SUCCESS;
    return misuse(CUDA_ERROR_INVALID_HANDLE, "event %p is destroyed, or was never made", (void *)handle);
}

API CUresult cuEventCreate(CUevent *handle, unsigned int flags)
{
    Context *context;
    CUresult code = enter(&context);
    if (code)
        return code;
    if (flags > 7)
        return leave(CUDA_ERROR_INVALID_VALUE);
    Event *event = calloc(1, sizeof *event);
    if (!event)
        abort();
    event->item.key = handle_new();
    event->context = context;
    table_add(&driver.events, &event->item);
    driver.counters.live_events++;
    *handle = (CUevent)(uintptr_t)event->item.key;
    return leave(CUDA_SUCCESS);
}

void event_delete(Event *event)
{
    table_remove(&driver.events, &event->item);
    driver.counters.live_events--;
    event->destroyed = true;
    event->users++;
    event_unuse(event);
}

API CUresult cuEventDestroy_v2(CUevent handle)
{
    Context *context;
    Event *event;
    CUresult code = enter(&context);
    if (code)
        return code;
    if (!(code = event_find(handle, &event)))
        event_delete(event);
    return leave(code);
}

API CUresult cuEventDestroy(CUevent handle) __attribute__((alias("cuEventDestroy_v2")));

static CUresult record(Context *context, CUevent handle, CUstream stream_handle)
{
    Event *event;
    Stream *stream;
    CUresult code = event_find(handle, &event);
    if (code || (code = stream_find(context, stream_handle, &stream)))
        return code;
    if (event->context != context)
        return misuse(CUDA_ERROR_INVALID_HANDLE, "event %p of device %d recorded in a stream of device %d",
                      (void *)handle, event->context->device, context->device);
    Op *op = op_new(RECORD, 0);
    op->event = event;
    op->value = ++event->recorded;
    event->users++;
    op_queue(stream, op);
    return CUDA_SUCCESS;
}

static CUresult record_fault(void)
{
    bool due = ++driver.records % settings()->record_fails_every == 0;
    return due ? (CUresult)settings()->record_error : CUDA_SUCCESS;
}

API CUresult cuEventRecord(CUevent event, CUstream stream)
{
    Context *context;
    CUresult code = enter(&context);
    if (code)
        return code;
    if (!(code = record_fault()))
        code = record(context, event, stream);
    return leave(code);
}

CUresult query_fault(void)
{
    bool due = ++driver.queries % settings()->query_fails_every == 0;
    return due ? (CUresult)settings()->query_error : CUDA_SUCCESS;
}

API CUresult cuEventQuery(CUevent handle)
{
    Context *context;
    Event *event;
    CUresult code = enter(&context);
    if (code)
        return code;
    if (!(code = event_find(handle, &event)) && !(code = query_fault()) && event->done < event->recorded)
        code = CUDA_ERROR_NOT_READY;
    return leave(code);
}

API CUresult cuEventSynchronize(CUevent handle)
{
    Context *context;
    Event *event;
    CUresult code = enter(&context);
    if (code)
        return code;
    if ((code = event_find(handle, &event)))
        return leave(code);
    uint64_t wanted = event->recorded;
    event->users++;
    const Context *home = event->context;
    while (event->done < wanted && !home->broken)
        pthread_cond_wait(&driver.changed, &driver.lock);
    event_unuse(event);
    return leave(home->broken);
}
