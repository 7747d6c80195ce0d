/* Virtual memory management: reserved addresses, and which chunk can be seen at which of them. */
#include <sys/mman.h>

#include "internal.h"

static void *pointer(CUdeviceptr address)
{
    return (void *)(uintptr_t)address;
}

static bool is_granular(CUdeviceptr start, size_t size)
{
    return size && !(start % GRANULE) && !(size % GRANULE);
}

/* The wanted address is a hint, as with the real driver: this one never takes it. */
API CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wanted,
                                 unsigned long long flags)
{
    (void)wanted;
    CUresult code = enter_any();
    if (code)
        return code;
    if (!is_granular(0, size) || (alignment & (alignment - 1)) || flags)
        return leave(CUDA_ERROR_INVALID_VALUE);
    void *memory = map_afresh(size, alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    if (memory == MAP_FAILED)
        return leave(CUDA_ERROR_OUT_OF_MEMORY);
    *address = range_new(&driver.reserved, RESERVED, (uintptr_t)memory, size)->item.key;
    driver.counters.live_reservations++;
    return leave(CUDA_SUCCESS);
}

static CUresult address_free(CUdeviceptr address, size_t size)
{
    Range *range = table_find(&driver.reserved, address);
    if (!range || range->size != size)
        return misuse(CUDA_ERROR_INVALID_VALUE, "cuMemAddressFree: 0x%llx (%zu bytes) is not reserved as such", address,
                      size);
    if (range_overlaps(&driver.device, address, size))
        return misuse(CUDA_ERROR_INVALID_VALUE, "cuMemAddressFree: memory is still mapped in 0x%llx (%zu bytes)",
                      address, size);
    munmap(pointer(address), size);
    range_delete(&driver.reserved, range);
    driver.counters.live_reservations--;
    return CUDA_SUCCESS;
}

API CUresult cuMemAddressFree(CUdeviceptr address, size_t size)
{
    CUresult code = enter_any();
    return code ? code : leave(address_free(address, size));
}

static CUresult map(CUdeviceptr address, size_t size, Chunk *chunk)
{
    const Range *reserved = range_at(&driver.reserved, address);
    if (!reserved || size > range_end(reserved) - address)
        return misuse(CUDA_ERROR_INVALID_VALUE, "cuMemMap: 0x%llx (%zu bytes) is not reserved", address, size);
    if (range_overlaps(&driver.device, address, size))
        return misuse(CUDA_ERROR_ALREADY_MAPPED, "cuMemMap: memory is mapped in 0x%llx (%zu bytes) already", address,
                      size);
    /* With an old size of 0, a shared mapping is doubled, not moved. */
    void *memory = mremap(chunk->memory, 0, size, MREMAP_MAYMOVE | MREMAP_FIXED, pointer(address));
    if (memory == MAP_FAILED || mprotect(memory, size, PROT_NONE))
        return CUDA_ERROR_MAP_FAILED;
    Range *range = range_new(&driver.device, MAPPED, address, size);
    range->chunk = chunk;
    chunk->mappings++;
    driver.counters.live_mappings++;
    return CUDA_SUCCESS;
}

API CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                      unsigned long long flags)
{
    Chunk *chunk;
    CUresult code = enter_any();
    if (code)
        return code;
    if (!is_granular(address, size) || offset || flags)
        return leave(CUDA_ERROR_INVALID_VALUE);
    if ((code = chunk_find(handle, &chunk, "cuMemMap")))
        return leave(code);
    return leave(size == chunk->size ? map(address, size, chunk) : CUDA_ERROR_INVALID_VALUE);
}

/* Whether whole mappings, side by side, make up the range; `first` is the index of the first one. */
static CUresult span(CUdeviceptr start, size_t size, size_t *first, const char *call)
{
    CUdeviceptr next = start;
    *first = table_index(&driver.device, start);
    for (size_t i = *first; next < start + size && i < driver.device.count; i++) {
        const Range *range = (const Range *)driver.device.items[i];
        if (range->item.key != next || range->kind != MAPPED)
            break;
        next = range_end(range);
    }
    if (size && next == start + size)
        return CUDA_SUCCESS;
    return misuse(CUDA_ERROR_INVALID_VALUE, "%s: 0x%llx (%zu bytes) is not made of whole mappings", call, start, size);
}

/* The addresses stay reserved. */
static void mapping_delete(Range *range)
{
    Chunk *chunk = range->chunk;
    mmap(pointer(range->item.key), range->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
         0);
    range_delete(&driver.device, range);
    driver.counters.live_mappings--;
    chunk->mappings--;
    chunk_unuse(chunk);
}

static CUresult unmap(CUdeviceptr start, size_t size)
{
    size_t first, end;
    CUresult code = span(start, size, &first, "cuMemUnmap");
    end = table_index(&driver.device, start + size);
    for (size_t i = first; !code && i < end; i++)
        code = range_idle((const Range *)driver.device.items[i], "cuMemUnmap");
    for (size_t i = end; !code && i > first; i--)
        mapping_delete((Range *)driver.device.items[i - 1]);
    return code;
}

API CUresult cuMemUnmap(CUdeviceptr start, size_t size)
{
    CUresult code = enter_any();
    return code ? code : leave(unmap(start, size));
}

static CUresult access_check(const CUmemAccessDesc *access, size_t count)
{
    if (!access || !count)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        const CUmemLocation *location = &access[i].location;
        if (location->type != CU_MEM_LOCATION_TYPE_DEVICE || access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READ)
            return CUDA_ERROR_NOT_SUPPORTED;
        if (location->id < 0 || location->id >= settings()->visible_count)
            return CUDA_ERROR_INVALID_DEVICE;
    }
    return CUDA_SUCCESS;
}

static void access_set(Range *range, const CUmemAccessDesc *access, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t device = 1u << access[i].location.id;
        range->access = access[i].flags ? range->access | device : range->access & ~device;
    }
    mprotect(pointer(range->item.key), range->size, range->access ? PROT_READ | PROT_WRITE : PROT_NONE);
}

API CUresult cuMemSetAccess(CUdeviceptr start, size_t size, const CUmemAccessDesc *access, size_t count)
{
    size_t first;
    CUresult code = enter_any();
    if (code)
        return code;
    if ((code = access_check(access, count)) || (code = span(start, size, &first, "cuMemSetAccess")))
        return leave(code);
    size_t end = table_index(&driver.device, start + size);
    for (size_t i = first; i < end; i++)
        access_set((Range *)driver.device.items[i], access, count);
    return leave(CUDA_SUCCESS);
}
