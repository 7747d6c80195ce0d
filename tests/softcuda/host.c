/* Registered host memory: only what is registered may be copied to and from behind a program's back. */
#include "internal.h"

/* Page tables that run out, and a driver that is short of something for a while. */
static bool register_fails(size_t size)
{
    uint64_t most = settings()->register_error_after, every = settings()->register_fails_every;
    if ((most && driver.registered_bytes + size > most) || (every && ++driver.registrations % every == 0))
        return true;
    driver.registered_bytes += size;
    return false;
}

static CUresult host_register(Context *context, CUdeviceptr start, size_t size, unsigned int flags)
{
    if (!size || flags > 15)
        return CUDA_ERROR_INVALID_VALUE;
    if (size >= settings()->register_max_bytes || register_fails(size))
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (range_overlaps(&driver.host, start, size))
        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    if (!is_mapped(start, size))
        return misuse(CUDA_ERROR_INVALID_VALUE, "cuMemHostRegister: no memory at 0x%llx (%zu bytes)", start, size);
    range_new(&driver.host, REGISTERED, start, size)->context = context;
    driver.counters.live_registrations++;
    return CUDA_SUCCESS;
}

static void pin(size_t size)
{
    double gib = (double)size / (1 << 30);
    sleep_ns((uint64_t)(gib * (double)settings()->register_ns_per_gib));
}

API CUresult cuMemHostRegister_v2(void *memory, size_t size, unsigned int flags)
{
    Context *context;
    CUresult code = enter(&context);
    if (code)
        return code;
    code = host_register(context, (uintptr_t)memory, size, flags);
    bool locked = settings()->register_holds_lock;
    if (locked && !code)
        pin(size);
    leave(code);
    if (!locked && !code)
        pin(size);
    return code;
}

API CUresult cuMemHostRegister(void *memory, size_t size, unsigned int flags)
    __attribute__((alias("cuMemHostRegister_v2")));

void registration_delete(Range *range)
{
    driver.counters.live_registrations--;
    range_delete(&driver.host, range);
}

API CUresult cuMemHostUnregister(void *memory)
{
    Context *context;
    CUresult code = enter(&context);
    if (code)
        return code;
    Range *range = table_find(&driver.host, (uintptr_t)memory);
    if (!range)
        return leave(misuse(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
                            "cuMemHostUnregister: %p is not registered: undone twice, or never done", memory));
    if (!(code = range_idle(range, "cuMemHostUnregister")))
        registration_delete(range);
    return leave(code);
}

API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *address, void *memory, unsigned int flags)
{
    Context *context;
    CUresult code = enter(&context);
    if (code)
        return code;
    if (flags || !range_at(&driver.host, (uintptr_t)memory))
        return leave(CUDA_ERROR_INVALID_VALUE);
    *address = (uintptr_t)memory + settings()->host_offset;
    return leave(CUDA_SUCCESS);
}

API CUresult cuMemHostGetDevicePointer(CUdeviceptr *address, void *memory, unsigned int flags)
    __attribute__((alias("cuMemHostGetDevicePointer_v2")));
