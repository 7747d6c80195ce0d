/* cuMemAlloc's memory in other processes. A handle says where the exporter's memfd is: /proc/<pid>/fd/<fd>. So the
 * kernel frees the memory when the last process lets go of it, and a dead exporter's can't be opened any more.
 */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "internal.h"

static const char MAGIC[8] = "softcuda";

typedef struct {
    char magic[8];
    int pid, fd, device;
    uint64_t size, offset, nonce; /* of the block, and where in it */
    CUuuid uuid;
} Handle;

_Static_assert(sizeof(Handle) <= sizeof(CUipcMemHandle), "a handle has 64 bytes");

static CUresult export(CUipcMemHandle *handle, CUdeviceptr address)
{
    const Range *range = range_at(&driver.device, address);
    if (!range)
        return misuse(CUDA_ERROR_INVALID_VALUE, "cuIpcGetMemHandle: no memory at 0x%llx", address);
    if (range->kind != ALLOCATED)
        return CUDA_ERROR_INVALID_VALUE;
    int device = range->context->device;
    const Block *block = range->block;
    Handle made = {.pid = getpid(), .fd = block->fd, .device = device, .size = block->size, .nonce = block->nonce,
                   .offset = range->item.key - block->start};
    memcpy(made.magic, MAGIC, sizeof MAGIC);
    made.uuid = uuid_of(device);
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &made, sizeof made);
    return CUDA_SUCCESS;
}

API CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address)
{
    Context *context;
    CUresult code = enter(&context);
    return code ? code : leave(export(handle, address));
}

/* The number may by now stand for another file: the name tells. */
static int open_memory(const Handle *handle)
{
    char path[64], name[64], wanted[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle->pid, handle->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return -1;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int expected = snprintf(wanted, sizeof wanted, "/memfd:softcuda-%016lx ", handle->nonce);
    if (readlink(path, name, sizeof name) >= expected && !memcmp(name, wanted, (size_t)expected))
        return fd;
    close(fd);
    return -1;
}

static Range *opened_before(uint64_t nonce)
{
    for (size_t i = 0; i < driver.device.count; i++) {
        Range *range = (Range *)driver.device.items[i];
        if (range->kind == OPENED && range->nonce == nonce)
            return range;
    }
    return NULL;
}

static CUresult open_first(Context *context, const Handle *handle, Range **opened)
{
    int fd = settings()->dead_exporter ? -1 : open_memory(handle);
    if (fd < 0)
        return CUDA_ERROR_MAP_FAILED;
    size_t size = rounded(handle->size);
    void *memory = map_afresh(size, 0, PROT_READ | PROT_WRITE, MAP_SHARED, fd);
    close(fd);
    if (memory == MAP_FAILED)
        return CUDA_ERROR_MAP_FAILED;
    madvise(memory, size, MADV_DONTFORK);
    *opened = range_new(&driver.device, OPENED, (uintptr_t)memory, handle->size);
    (*opened)->context = context;
    (*opened)->home = context_of_device(handle->device);
    (*opened)->nonce = handle->nonce;
    driver.counters.live_opened++;
    return CUDA_SUCCESS;
}

static CUresult import(Context *context, CUdeviceptr *address, const Handle *handle)
{
    if (memcmp(handle->magic, MAGIC, sizeof MAGIC) )
        return CUDA_ERROR_INVALID_HANDLE;
    if (settings()->open_error)
        return (CUresult)settings()->open_error;
    if (handle->pid == getpid())
        return misuse(CUDA_ERROR_INVALID_CONTEXT, "cuIpcOpenMemHandle: the process's own handle");
    if (!context_of_device(handle->device))
        return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    Range *range = opened_before(handle->nonce);
    CUresult code = range ? CUDA_SUCCESS : open_first(context, handle, &range);
    if (code)
        return code;
    range->opens++;
    driver.counters.handles_opened++;
    *address = range->item.key + handle->offset;
    return CUDA_SUCCESS;
}

API CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags)
{
    Context *context;
    Handle read;
    CUresult code = enter(&context);
    if (code)
        return code;
    if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return leave(CUDA_ERROR_INVALID_VALUE);
    memcpy(&read, &handle, sizeof read);
    return leave(import(context, address, &read));
}

API CUresult cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags)
    __attribute__((alias("cuIpcOpenMemHandle_v2")));

void opened_delete(Range *range)
{
    munmap((void *)(uintptr_t)range->item.key, rounded(range->size));
    driver.counters.live_opened--;
    range_delete(&driver.device, range);
}

static CUresult close_handle(CUdeviceptr address)
{
    bool shared = settings()->small_block;
    Range *range = shared ? range_at(&driver.device, address) : table_find(&driver.device, address);
    if (!range || range->kind != OPENED)
        return misuse(CUDA_ERROR_INVALID_VALUE,
                      "cuIpcCloseMemHandle: 0x%llx is not open: closed twice, or never opened", address);
    CUresult code = range->opens > 1 ? CUDA_SUCCESS : range_idle(range, "cuIpcCloseMemHandle");
    if (code)
        return code;
    driver.counters.handles_closed++;
    if (!--range->opens)
        opened_delete(range);
    return CUDA_SUCCESS;
}

API CUresult cuIpcCloseMemHandle(CUdeviceptr address)
{
    Context *context;
    sleep_ns(settings()->close_delay_ns);
    CUresult code = enter(&context);
    return code ? code : leave(close_handle(address));
}
