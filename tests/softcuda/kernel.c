/* The daemon's kernel, from its own source: made by the stream's thread, which has all the warps. */
#include <string.h>

#include "internal.h"

#include "../../kvoffloadd/device/cuda/kernels/move_rows.cu"

/* Nothing tells of a kernel's pointers before it runs. Then each must be within live memory. */
static bool may_run(const Op *op)
{
    const Row *rows = (const Row *)(uintptr_t)op->address;
    for (uint64_t i = 0; i < op->size; i++) {
        const u64 sides[] = {rows[i].from, rows[i].to};
        for (int side = 0; side < 2; side++) {
            u64 at = sides[side], end = at + rows[i].size;
            while (at < end) {
                const Range *range = range_at(&driver.device, at);
                if (!range) {
                    misuse(CUDA_ERROR_ILLEGAL_ADDRESS, "move_rows: no device memory at 0x%llx (row %llu)", at,
                           (u64)i);
                    return false;
                }
                at = range_end(range);
            }
        }
    }
    return true;
}

void kernel_run(const Op *op)
{
    pthread_mutex_lock(&driver.lock);
    bool may = may_run(op);
    if (!may)
        break_context(CUDA_ERROR_ILLEGAL_ADDRESS);
    pthread_mutex_unlock(&driver.lock);
    if (!may)
        return;
    const Row *rows = (const Row *)(uintptr_t)op->address;
    move_rows(rows, op->size, (u32)op->value);
    for (uint64_t i = 0; i < op->size; i++)
        poison(rows[i].from, rows[i].size);
    poison(op->address, op->size * sizeof(Row));
}

static CUresult launch(Context *context, CUstream handle, CUdeviceptr rows, uint64_t count, uint32_t pieces)
{
    Stream *stream;
    CUresult code = stream_find(context, handle, &stream);
    if (code)
        return code;
    Op *op = op_new(KERNEL, 0);
    op->address = rows;
    op->size = count;
    op->value = pieces;
    if ((code = device_touch(op, context, rows, count * sizeof(Row), "move_rows"))) {
        op_delete(op);
        return code;
    }
    op_queue(stream, op);
    driver.counters.kernels++;
    return CUDA_SUCCESS;
}

API CUresult softcuda_move_rows(CUstream stream, CUdeviceptr rows, uint64_t count, uint32_t pieces)
{
    Context *context;
    CUresult code = enter(&context);
    if (code)
        return code;
    const Settings *s = settings();
    bool refused = s->launch_error && ++driver.launches >= s->launch_after;
    return leave(refused ? (CUresult)s->launch_error : launch(context, stream, rows, count, pieces));
}

/* Modules: every binary is taken for the daemon's kernel, in each form that a driver loads. */
static char the_module, the_function;

API CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    Context *context;
    CUresult code = enter(&context);
    if (code)
        return code;
    if (memcmp(image, "\177ELF", 4) && !strstr(image, ".entry move_rows"))
        return leave(CUDA_ERROR_INVALID_IMAGE);
    *module = (CUmodule)&the_module;
    return leave(CUDA_SUCCESS);
}

API CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    Context *context;
    CUresult code = enter(&context);
    if (code)
        return code;
    if (module != (CUmodule)&the_module)
        return leave(CUDA_ERROR_INVALID_HANDLE);
    if (strcmp(name, "move_rows"))
        return leave(CUDA_ERROR_NOT_FOUND);
    *function = (CUfunction)&the_function;
    return leave(CUDA_SUCCESS);
}

API CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                            unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,
                            CUstream stream, void **parameters, void **extra)
{
    if (function != (CUfunction)&the_function || !stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!grid_x || !grid_y || !grid_z || !block_x || block_x * block_y * block_z > 1024 || shared_bytes || extra)
        return CUDA_ERROR_INVALID_VALUE;
    return softcuda_move_rows(stream, *(CUdeviceptr *)parameters[0], *(uint64_t *)parameters[1],
                              *(uint32_t *)parameters[2]);
}
