/* Virtual memory management: chunks of memory, and how they get into another process. Addresses: vmm_map.c.
 *
 * A chunk's memory hangs on a mapping of its own, not on a descriptor: so an importer of thousands of chunks holds no
 * descriptors, as with the real driver. Only the maker of a chunk that may be exported keeps one.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

/* Takes the descriptor over. */
static CUresult chunk_new(Context *home, size_t size, int handle_types, int fd, Chunk **made)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (memory == MAP_FAILED) {
        close(fd);
        return CUDA_ERROR_MAP_FAILED;
    }
    madvise(memory, size, MADV_DONTFORK);
    Chunk *chunk = calloc(1, sizeof *chunk);
    if (!chunk)
        abort();
    *chunk = (Chunk){{handle_new()}, home, size, handle_types, fd, false, memory, 1, 0};
    table_add(&driver.chunks, &chunk->item);
    *made = chunk;
    return CUDA_SUCCESS;
}

static void chunk_drop_fd(Chunk *chunk)
{
    if (chunk->fd >= 0)
        close(chunk->fd);
    chunk->fd = -1;
}

void chunk_unuse(Chunk *chunk)
{
    if (chunk->handles || chunk->mappings)
        return;
    munmap(chunk->memory, chunk->size);
    chunk_drop_fd(chunk);
    if (chunk->made)
        chunk->home->used_bytes -= chunk->size;
    table_remove(&driver.chunks, &chunk->item);
    free(chunk);
}

CUresult chunk_find(CUmemGenericAllocationHandle handle, Chunk **chunk, const char *call)
{
    *chunk = table_find(&driver.chunks, handle);
    if (*chunk && (*chunk)->handles)
        return CUDA_SUCCESS;
    return misuse(CUDA_ERROR_INVALID_VALUE, "%s: handle 0x%llx is released, or was never made", call, handle);
}

static CUresult property_check(const CUmemAllocationProp *property)
{
    if (!property || property->type != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    if (property->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (property->location.id < 0 || property->location.id >= settings()->visible_count)
        return CUDA_ERROR_INVALID_DEVICE;
    int known = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | CU_MEM_HANDLE_TYPE_FABRIC;
    return property->requestedHandleTypes & ~known ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

API CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *property, int option)
{
    CUresult code = enter_any();
    if (code)
        return code;
    code = option < 0 || option > 1 ? CUDA_ERROR_INVALID_VALUE : property_check(property);
    if (!code)
        *granularity = GRANULE;
    return leave(code);
}

static CUresult create(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *property)
{
    CUresult code = property_check(property);
    if (code)
        return code;
    if (!size || size % GRANULE)
        return CUDA_ERROR_INVALID_VALUE;
    Context *home = &driver.contexts[property->location.id];
    if (size > settings()->memory_bytes || home->used_bytes + size > settings()->memory_bytes)
        return CUDA_ERROR_OUT_OF_MEMORY;
    char name[64];
    snprintf(name, sizeof name, "softcuda-chunk-%d-%016lx", home->device, nonce_new());
    int fd = memfd_new(name, size);
    if (fd < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    Chunk *chunk;
    if ((code = chunk_new(home, size, property->requestedHandleTypes, fd, &chunk)))
        return code;
    if (!(chunk->handle_types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
        chunk_drop_fd(chunk);
    chunk->made = true;
    home->used_bytes += size;
    *handle = chunk->item.key;
    return CUDA_SUCCESS;
}

API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *property,
                         unsigned long long flags)
{
    CUresult code = enter_any();
    return code ? code : leave(flags ? CUDA_ERROR_INVALID_VALUE : create(handle, size, property));
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    Chunk *chunk;
    CUresult code = enter_any();
    if (code)
        return code;
    if (!(code = chunk_find(handle, &chunk, "cuMemRelease"))) {
        chunk->handles--;
        chunk_unuse(chunk);
    }
    return leave(code);
}

API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
    CUresult code = enter_any();
    if (code)
        return code;
    Range *range = range_at(&driver.device, (uintptr_t)address);
    if (!range || range->kind != MAPPED)
        return leave(CUDA_ERROR_INVALID_VALUE);
    range->chunk->handles++;
    *handle = range->chunk->item.key;
    return leave(CUDA_SUCCESS);
}

API CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *property, CUmemGenericAllocationHandle handle)
{
    Chunk *chunk;
    CUresult code = enter_any();
    if (code)
        return code;
    if (!(code = chunk_find(handle, &chunk, "cuMemGetAllocationPropertiesFromHandle")))
        *property = (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                          .requestedHandleTypes = chunk->handle_types,
                                          .location = {CU_MEM_LOCATION_TYPE_DEVICE, chunk->home->ordinal}};
    return leave(code);
}

API CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle, int type,
                                          unsigned long long flags)
{
    Chunk *chunk;
    CUresult code = enter_any();
    if (code)
        return code;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || flags)
        return leave(CUDA_ERROR_INVALID_VALUE);
    if ((code = chunk_find(handle, &chunk, "cuMemExportToShareableHandle")))
        return leave(code);
    if (chunk->fd < 0)
        return leave(CUDA_ERROR_INVALID_VALUE);
    int fd = fcntl(chunk->fd, F_DUPFD_CLOEXEC, 0);
    if (fd >= 0)
        *(int *)shareable = fd;
    return leave(fd < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS);
}

/* The device of a chunk's descriptor, or -1: no such thing. */
static int device_of_fd(int fd)
{
    char path[64], name[64] = {0};
    int device;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (readlink(path, name, sizeof name - 1) < 0 || sscanf(name, "/memfd:softcuda-chunk-%d-", &device) != 1)
        return -1;
    return device;
}

static CUresult import(CUmemGenericAllocationHandle *handle, int fd)
{
    Chunk *chunk;
    struct stat status;
    int device = device_of_fd(fd);
    if (settings()->import_error)
        return (CUresult)settings()->import_error;
    if (device < 0 || fstat(fd, &status))
        return CUDA_ERROR_INVALID_VALUE;
    Context *home = context_of_device(device);
    if (!home)
        return CUDA_ERROR_INVALID_DEVICE;
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    CUresult code = chunk_new(home, (size_t)status.st_size, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, own, &chunk);
    if (code)
        return code;
    chunk_drop_fd(chunk);
    *handle = chunk->item.key;
    return CUDA_SUCCESS;
}

API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable, int type)
{
    CUresult code = enter_any();
    if (code)
        return code;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return leave(CUDA_ERROR_INVALID_VALUE);
    return leave(import(handle, (int)(intptr_t)shareable));
}
