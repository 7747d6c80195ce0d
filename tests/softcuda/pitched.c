/* Pitched copies: runs of rows that lie evenly apart on both sides, one in a call or many. */
#include "internal.h"

#define ONE "cuMemcpy2DAsync"
#define MANY "cuMemcpy3DBatchAsync"

/* Where the first row begins, and how far apart the rows are. */
typedef struct {
    CUdeviceptr start;
    size_t pitch;
} Side;

typedef struct {
    Side to, from;
    size_t width, height;
    bool any_order;
} Run;

/* `run` has its width and height. Documentation has no largest pitch for batches; one is assumed. */
static CUresult pitch_check(const Run *run, size_t pitch, size_t offset, const char *call)
{
    if (pitch > PITCH_MAX || (pitch && pitch < offset + run->width) || (!pitch && run->height > 1))
        return misuse(CUDA_ERROR_INVALID_VALUE, "%s: rows of %zu bytes, %zu apart", call, run->width, pitch);
    return CUDA_SUCCESS;
}

/* Fills in the rows, from `first` on. All that lies between the first row and the last is one range to the driver, so
 * each side is one memory. */
static CUresult run_rows(Op *op, size_t first, const Context *context, const Run *run, const char *call)
{
    const Side *to = &run->to, *from = &run->from;
    size_t to_span = (run->height - 1) * to->pitch + run->width;
    size_t from_span = (run->height - 1) * from->pitch + run->width;
    bool to_device = range_at(&driver.device, to->start), from_device = range_at(&driver.device, from->start);
    if (!to_device && !from_device)
        return misuse(CUDA_ERROR_INVALID_VALUE, "%s: neither 0x%llx nor 0x%llx is live device memory", call, to->start,
                      from->start);
    Direction direction = !to_device ? TO_HOST : from_device ? WITHIN_DEVICE : TO_DEVICE;
    CUresult code = to_device ? device_touch(op, context, to->start, to_span, call)
                              : host_touch(op, to->start, to_span, false, call);
    if (!code)
        code = from_device ? device_touch(op, context, from->start, from_span, call)
                           : host_touch(op, from->start, from_span, false, call);
    for (size_t i = 0; !code && i < run->height; i++)
        op->copies[first + i] = (Copy){to->start + i * to->pitch, from->start + i * from->pitch, run->width, direction,
                                       run->any_order};
    return code;
}

/* The fields are the public API's: the address stands in the field of its kind, and is moved by whole rows and by
 * bytes. */
static CUresult side_of(Side *side, int type, const void *host, CUdeviceptr device, size_t pitch, size_t x, size_t y,
                        const Run *run)
{
    if (type != CU_MEMORYTYPE_HOST && type != CU_MEMORYTYPE_DEVICE && type != CU_MEMORYTYPE_UNIFIED)
        return misuse(CUDA_ERROR_INVALID_VALUE, ONE ": memory of kind %d is not modelled", type);
    *side = (Side){(type == CU_MEMORYTYPE_HOST ? (uintptr_t)host : device) + y * pitch + x, pitch};
    return pitch_check(run, pitch, x, ONE);
}

static CUresult pitched_queue(Context *context, const CUDA_MEMCPY2D *asked, CUstream handle)
{
    Stream *stream;
    Run run = {.width = asked->WidthInBytes, .height = asked->Height};
    CUresult code = stream_find(context, handle, &stream);
    if (!code)
        code = side_of(&run.to, asked->dstMemoryType, asked->dstHost, asked->dstDevice, asked->dstPitch,
                       asked->dstXInBytes, asked->dstY, &run);
    if (!code)
        code = side_of(&run.from, asked->srcMemoryType, asked->srcHost, asked->srcDevice, asked->srcPitch,
                       asked->srcXInBytes, asked->srcY, &run);
    if (code || !run.width || !run.height)
        return code;
    if (submit_fails())
        return CUDA_ERROR_INVALID_VALUE;
    Op *op = op_new(COPIES, run.height);
    if ((code = run_rows(op, 0, context, &run, ONE))) {
        op_delete(op);
        return code;
    }
    op_queue(stream, op);
    driver.counters.pitched++;
    return CUDA_SUCCESS;
}

API CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *asked, CUstream stream)
{
    Context *context;
    sleep_ns(settings()->submit_ns);
    CUresult code = enter(&context);
    if (code)
        return code;
    return leave(settings()->pitched_error ? (CUresult)settings()->pitched_error
                                           : pitched_queue(context, asked, stream));
}

API CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D *asked, CUstream stream) __attribute__((alias("cuMemcpy2DAsync_v2")));

/* Between pointers an element is a byte. Rows of length 0, and layers of height 0, lie side by side. */
static CUresult operand_side(Side *side, const CUmemcpy3DOperand *operand, const CUDA_MEMCPY3D_BATCH_OP *asked,
                             const Run *run)
{
    if (operand->type != CU_MEMCPY_OPERAND_TYPE_POINTER)
        return misuse(CUDA_ERROR_INVALID_VALUE, MANY ": an operand of kind %d is not modelled", operand->type);
    if (operand->op.ptr.layerHeight && operand->op.ptr.layerHeight < asked->extent.height)
        return misuse(CUDA_ERROR_INVALID_VALUE, MANY ": layers of %zu rows, %zu apart", asked->extent.height,
                      operand->op.ptr.layerHeight);
    size_t pitch = operand->op.ptr.rowLength ? operand->op.ptr.rowLength : run->width;
    *side = (Side){operand->op.ptr.ptr, pitch};
    return pitch_check(run, pitch, 0, MANY);
}

static CUresult batched_run(Op *op, size_t first, const Context *context, const CUDA_MEMCPY3D_BATCH_OP *asked)
{
    Run run = {.width = asked->extent.width,
               .height = asked->extent.height,
               .any_order = asked->srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_ANY};
    CUresult code = order_check(asked->srcAccessOrder, MANY);
    if (!code)
        code = flags_check(asked->flags, MANY);
    if (!code)
        code = operand_side(&run.to, &asked->dst, asked, &run);
    if (!code)
        code = operand_side(&run.from, &asked->src, asked, &run);
    return code ? code : run_rows(op, first, context, &run, MANY);
}

/* How many rows the runs have. */
static CUresult rows_count(const CUDA_MEMCPY3D_BATCH_OP *asked, size_t count, size_t *rows, size_t *failed)
{
    *rows = 0;
    for (size_t i = 0; i < count; i++) {
        const CUextent3D *extent = &asked[i].extent;
        *failed = i;
        if (!extent->width || !extent->height || !extent->depth)
            return CUDA_ERROR_INVALID_VALUE;
        if (extent->depth > 1)
            return misuse(CUDA_ERROR_NOT_SUPPORTED, MANY ": %zu layers: more than one is not modelled", extent->depth);
        *rows += extent->height;
    }
    return CUDA_SUCCESS;
}

static CUresult many_queue(Context *context, const CUDA_MEMCPY3D_BATCH_OP *asked, size_t count, unsigned long long flags,
                           CUstream handle, size_t *failed)
{
    Stream *stream;
    size_t rows, first = 0, at;
    if (!handle || !asked || !count || flags)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult code = stream_find(context, handle, &stream);
    if (code || (code = rows_count(asked, count, &rows, failed)))
        return code;
    *failed = SIZE_MAX;
    if (submit_fails())
        return CUDA_ERROR_INVALID_VALUE;
    Op *op = op_new(COPIES, rows);
    for (at = 0; at < count && !code; first += asked[at++].extent.height)
        code = batched_run(op, first, context, &asked[at]);
    if (code)
        *failed = at - 1;
    else {
        read_early(op);
        code = overlap_check(op, MANY);
    }
    if (code) {
        op_delete(op);
        return code;
    }
    driver.counters.pitched += count;
    driver.counters.pitched_batches++;
    uint64_t after = settings()->pitched_batch_hangs_after;
    op->hangs = after && driver.counters.pitched_batches >= after;
    op_queue(stream, op);
    bool engines = true;
    for (at = 0; at < count; at++)
        engines &= asked[at].flags == 1;
    driver.counters.engine_batches += engines;
    return CUDA_SUCCESS;
}

/* The call of CUDA 12.8. */
API CUresult cuMemcpy3DBatchAsync(size_t count, const CUDA_MEMCPY3D_BATCH_OP *asked, size_t *failed,
                                  unsigned long long flags, CUstream stream)
{
    const Settings *s = settings();
    Context *context;
    size_t none;
    if (!failed)
        failed = &none;
    *failed = SIZE_MAX;
    sleep_ns(s->submit_ns * count);
    CUresult code = enter(&context);
    if (code)
        return code;
    uint64_t error = s->pitched_batch_error ? s->pitched_batch_error : s->pitched_error;
    return leave(error ? (CUresult)error : many_queue(context, asked, count, flags, stream, failed));
}

/* The call of CUDA 13. */
API CUresult cuMemcpy3DBatchAsync_v2(size_t count, const CUDA_MEMCPY3D_BATCH_OP *asked, unsigned long long flags,
                                     CUstream stream)
{
    return cuMemcpy3DBatchAsync(count, asked, NULL, flags, stream);
}
