/* Copies as they are asked for: what may not be copied is refused here, before anything is queued. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

static CUresult may_use(const Range *range, const Context *context, const char *call)
{
    if (range->kind == MAPPED) {
        if (range->access & 1u << context->ordinal)
            return CUDA_SUCCESS;
        return misuse(CUDA_ERROR_INVALID_VALUE, "%s: 0x%llx is mapped, but device %d has no access to it", call,
                      (CUdeviceptr)range->item.key, context->device);
    }
    if (range->context == context)
        return CUDA_SUCCESS;
    return misuse(CUDA_ERROR_INVALID_VALUE, "%s: memory of device %d at 0x%llx used in a context of device %d", call,
                  range->context->device, (CUdeviceptr)range->item.key, context->device);
}

/* Chunks that are mapped side by side are one memory; two allocations never are. */
CUresult device_touch(Op *op, const Context *context, CUdeviceptr start, size_t size, const char *call)
{
    Range *range = range_at(&driver.device, start);
    if (!range || size > UINT64_MAX - start)
        return misuse(CUDA_ERROR_INVALID_VALUE, "%s: no device memory at 0x%llx (%zu bytes)", call, start, size);
    for (;;) {
        CUresult code = may_use(range, context, call);
        if (code)
            return code;
        op_touches(op, range);
        if (start + size <= range_end(range))
            return CUDA_SUCCESS;
        Range *next = range_at(&driver.device, range_end(range));
        if (range->kind != MAPPED || !next || next->kind != MAPPED)
            return misuse(CUDA_ERROR_INVALID_VALUE, "%s: 0x%llx (%zu bytes) reaches beyond its end, 0x%llx", call,
                          start, size, range_end(range));
        range = next;
    }
}

/* `staged`: the driver moves the bytes by way of its own buffers, so that memory need not be registered. */
CUresult host_touch(Op *op, CUdeviceptr start, size_t size, bool staged, const char *call)
{
    Range *range = range_at(&driver.host, start);
    if (range && size <= range_end(range) - start) {
        op_touches(op, range);
        return CUDA_SUCCESS;
    }
    if (range || range_overlaps(&driver.host, start, size))
        return misuse(CUDA_ERROR_INVALID_VALUE, "%s: host memory 0x%llx (%zu bytes) is not within one registration",
                      call, start, size);
    if (!staged)
        return misuse(CUDA_ERROR_INVALID_VALUE, "%s: host memory 0x%llx (%zu bytes) is not registered", call, start,
                      size);
    if (!is_mapped(start, size))
        return misuse(CUDA_ERROR_INVALID_VALUE, "%s: no memory at 0x%llx (%zu bytes)", call, start, size);
    return CUDA_SUCCESS;
}

static CUresult copy_check(Op *op, const Context *context, Copy *copy, bool staged, const char *call)
{
    bool to_device = range_at(&driver.device, copy->to), from_device = range_at(&driver.device, copy->from);
    Direction asked = copy->direction;
    copy->direction = !to_device ? TO_HOST : from_device ? WITHIN_DEVICE : TO_DEVICE;
    if (!to_device && !from_device)
        return misuse(CUDA_ERROR_INVALID_VALUE, "%s: neither 0x%llx nor 0x%llx is live device memory", call, copy->to,
                      copy->from);
    if (asked != EITHER && asked != copy->direction)
        return misuse(CUDA_ERROR_INVALID_VALUE, "%s: a copy of another kind: to 0x%llx from 0x%llx", call, copy->to,
                      copy->from);
    CUresult code = to_device ? device_touch(op, context, copy->to, copy->size, call)
                              : host_touch(op, copy->to, copy->size, staged, call);
    if (code)
        return code;
    return from_device ? device_touch(op, context, copy->from, copy->size, call)
                       : host_touch(op, copy->from, copy->size, staged, call);
}

bool submit_fails(void)
{
    uint64_t every = settings()->fail_submit_every;
    return ++driver.submits, every && driver.submits % every == 0;
}

/* The source of a staged copy is read within the call; its destination is written by its end. */
static void read_now(Op *op)
{
    Copy *copy = op->copies;
    op->early = malloc(copy->size);
    if (!op->early)
        abort();
    memcpy(op->early, (const void *)(uintptr_t)copy->from, copy->size);
    copy->from = (uintptr_t)op->early;
}

static CUresult copy_queue(Context *context, Stream *stream, const Copy *copy, const char *call)
{
    if (!copy->size)
        return CUDA_SUCCESS;
    Op *op = op_new(COPIES, 1);
    op->copies[0] = *copy;
    CUresult code = copy_check(op, context, op->copies, true, call);
    if (code) {
        op_delete(op);
        return code;
    }
    Direction direction = op->copies[0].direction;
    bool staged = direction != WITHIN_DEVICE && !range_at(&driver.host, direction == TO_HOST ? copy->to : copy->from);
    if (staged && direction == TO_DEVICE)
        read_now(op);
    op_queue(stream, op);
    if (!staged)
        return CUDA_SUCCESS;
    driver.counters.staged_copies++;
    return direction == TO_HOST ? stream_wait(stream) : CUDA_SUCCESS;
}

static CUresult copy_async(Copy copy, CUstream handle, const char *call)
{
    Context *context;
    Stream *stream;
    sleep_ns(settings()->submit_ns);
    CUresult code = enter(&context);
    if (code)
        return code;
    if (!(code = stream_find(context, handle, &stream)))
        code = submit_fails() ? CUDA_ERROR_INVALID_VALUE : copy_queue(context, stream, &copy, call);
    return leave(code);
}

static CUresult copy_now(Copy copy, const char *call)
{
    Context *context;
    Stream *stream;
    CUresult code = enter(&context);
    if (code)
        return code;
    if (!(code = stream_find(context, NULL, &stream)) && !(code = copy_queue(context, stream, &copy, call)))
        code = stream_wait(stream);
    return leave(code);
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size)
{
    return copy_now((Copy){to, (uintptr_t)from, size, TO_DEVICE, false}, "cuMemcpyHtoD");
}

API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size)
{
    return copy_now((Copy){(uintptr_t)to, from, size, TO_HOST, false}, "cuMemcpyDtoH");
}

API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t size)
{
    return copy_now((Copy){to, from, size, WITHIN_DEVICE, false}, "cuMemcpyDtoD");
}

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, CUstream stream)
{
    return copy_async((Copy){to, (uintptr_t)from, size, TO_DEVICE, false}, stream, "cuMemcpyHtoDAsync");
}

API CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, CUstream stream)
{
    return copy_async((Copy){(uintptr_t)to, from, size, TO_HOST, false}, stream, "cuMemcpyDtoHAsync");
}

API CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
    return copy_async((Copy){to, from, size, EITHER, false}, stream, "cuMemcpyAsync");
}

API CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t size) __attribute__((alias("cuMemcpyHtoD_v2")));
API CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t size) __attribute__((alias("cuMemcpyDtoH_v2")));
API CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t size) __attribute__((alias("cuMemcpyDtoD_v2")));
API CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t size, CUstream stream)
    __attribute__((alias("cuMemcpyHtoDAsync_v2")));
API CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t size, CUstream stream)
    __attribute__((alias("cuMemcpyDtoHAsync_v2")));

typedef struct {
    CUdeviceptr *to, *from;
    size_t *sizes;
    size_t count;
    CUmemcpyAttributes *attributes;
    size_t *first; /* the index of the first copy that each attribute is for */
    size_t attribute_count;
} Batch;

CUresult order_check(int order, const char *call)
{
    if (order < CU_MEMCPY_SRC_ACCESS_ORDER_STREAM || order > CU_MEMCPY_SRC_ACCESS_ORDER_ANY)
        return CUDA_ERROR_INVALID_VALUE;
    if (order == CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL)
        return misuse(CUDA_ERROR_NOT_SUPPORTED, "%s: DURING_API_CALL is not modelled", call);
    return CUDA_SUCCESS;
}

/* 1: not with the processors (PREFER_OVERLAP_WITH_COMPUTE). */
CUresult flags_check(unsigned int flags, const char *call)
{
    return flags > 1 ? misuse(CUDA_ERROR_INVALID_VALUE, "%s: flags %u", call, flags) : CUDA_SUCCESS;
}

static CUresult attributes_check(const Batch *batch)
{
    if (!batch->attributes || !batch->first || !batch->attribute_count || batch->attribute_count > batch->count)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < batch->attribute_count; i++) {
        if (i ? batch->first[i] <= batch->first[i - 1] || batch->first[i] >= batch->count : batch->first[i])
            return CUDA_ERROR_INVALID_VALUE;
        CUresult code = order_check(batch->attributes[i].srcAccessOrder, "cuMemcpyBatchAsync");
        if (code || (code = flags_check(batch->attributes[i].flags, "cuMemcpyBatchAsync")))
            return code;
    }
    return CUDA_SUCCESS;
}

static int by_destination(const void *left, const void *right)
{
    CUdeviceptr l = ((const Copy *)left)->to, r = ((const Copy *)right)->to;
    return (l > r) - (l < r);
}

/* A batch has no order: where two of its copies write the same byte, either may win. The order that is left behind is
 * no promise either: the stream shuffles it. */
CUresult overlap_check(Op *op, const char *call)
{
    qsort(op->copies, op->count, sizeof *op->copies, by_destination);
    for (size_t i = 1; i < op->count; i++) {
        const Copy *copy = &op->copies[i];
        if (copy[-1].to + copy[-1].size > copy->to)
            return misuse(CUDA_ERROR_INVALID_VALUE, "%s: overlapping destinations at 0x%llx", call, copy->to);
    }
    return CUDA_SUCCESS;
}

/* Sources whose order is ANY may be read at any time before the stream comes to them: as early as can be, if asked. */
void read_early(Op *op)
{
    size_t bytes = 0;
    if (!settings()->read_early)
        return;
    for (size_t i = 0; i < op->count; i++)
        bytes += op->copies[i].size;
    unsigned char *to = op->early = malloc(bytes);
    if (!to)
        abort();
    for (size_t i = 0; i < op->count; i++) {
        Copy *copy = &op->copies[i];
        if (!copy->any_order)
            continue;
        memcpy(to, (const void *)(uintptr_t)copy->from, copy->size);
        copy->from = (uintptr_t)to;
        to += copy->size;
    }
}

static CUresult batch_fill(Op *op, const Context *context, const Batch *batch, size_t *failed)
{
    size_t attribute = 0;
    for (size_t i = 0; i < batch->count; i++) {
        while (attribute + 1 < batch->attribute_count && batch->first[attribute + 1] <= i)
            attribute++;
        bool any_order = batch->attributes[attribute].srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_ANY;
        op->copies[i] = (Copy){batch->to[i], batch->from[i], batch->sizes[i], EITHER, any_order};
        CUresult code = batch->sizes[i] ? copy_check(op, context, &op->copies[i], false, "cuMemcpyBatchAsync")
                                        : CUDA_ERROR_INVALID_VALUE;
        if (code) {
            *failed = i;
            return code;
        }
    }
    read_early(op);
    return overlap_check(op, "cuMemcpyBatchAsync");
}

static CUresult batch_queue(Context *context, const Batch *batch, CUstream handle, size_t *failed)
{
    Stream *stream;
    if (!handle || !batch->to || !batch->from || !batch->sizes || !batch->count)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult code = attributes_check(batch);
    if (code || (code = stream_find(context, handle, &stream)))
        return code;
    if (submit_fails())
        return CUDA_ERROR_INVALID_VALUE;
    Op *op = op_new(COPIES, batch->count);
    if ((code = batch_fill(op, context, batch, failed))) {
        op_delete(op);
        return code;
    }
    driver.counters.batches++;
    op->hangs = settings()->batch_hangs_after && driver.counters.batches >= settings()->batch_hangs_after;
    op_queue(stream, op);
    driver.counters.engine_batches += batch->attribute_count == 1 && batch->attributes[0].flags;
    return CUDA_SUCCESS;
}

/* The call of CUDA 12.8. */
API CUresult cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count,
                                CUmemcpyAttributes *attributes, size_t *first, size_t attribute_count, size_t *failed,
                                CUstream stream)
{
    Context *context;
    size_t none;
    if (!failed)
        failed = &none;
    *failed = SIZE_MAX;
    sleep_ns(settings()->submit_ns * count);
    CUresult code = enter(&context);
    Batch batch = {to, from, sizes, count, attributes, first, attribute_count};
    return code ? code : leave(batch_queue(context, &batch, stream, failed));
}

/* The call of CUDA 13. */
API CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count,
                                   CUmemcpyAttributes *attributes, size_t *first, size_t attribute_count,
                                   CUstream stream)
{
    return cuMemcpyBatchAsync(to, from, sizes, count, attributes, first, attribute_count, NULL, stream);
}

static CUresult fill_queue(Context *context, CUdeviceptr start, unsigned char value, size_t size, CUstream handle,
                           Stream **stream)
{
    CUresult code = stream_find(context, handle, stream);
    if (code || !size)
        return code;
    Op *op = op_new(FILL, 0);
    op->address = start;
    op->value = value;
    op->size = size;
    if ((code = device_touch(op, context, start, size, "cuMemsetD8")))
        op_delete(op);
    else
        op_queue(*stream, op);
    return code;
}

API CUresult cuMemsetD8Async(CUdeviceptr start, unsigned char value, size_t size, CUstream handle)
{
    Context *context;
    Stream *stream;
    CUresult code = enter(&context);
    return code ? code : leave(fill_queue(context, start, value, size, handle, &stream));
}

API CUresult cuMemsetD8_v2(CUdeviceptr start, unsigned char value, size_t size)
{
    Context *context;
    Stream *stream;
    CUresult code = enter(&context);
    if (code)
        return code;
    if (!(code = fill_queue(context, start, value, size, NULL, &stream)))
        code = stream_wait(stream);
    return leave(code);
}

API CUresult cuMemsetD8(CUdeviceptr start, unsigned char value, size_t size) __attribute__((alias("cuMemsetD8_v2")));
