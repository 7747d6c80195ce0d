/* Ranges of addresses, and device memory that cuMemAlloc gives: a memfd each, mapped at the device address. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

#include "internal.h"

#define SMALL_ALIGNMENT 512
/* Below where the kernel puts mappings of its own. Differs between processes, so that nobody takes an address for
 * good in another one. */
#define FIRST_ADDRESS ((CUdeviceptr)0x7e9000000000 + ((CUdeviceptr)(getpid() & 31) << 33))

Range *range_new(Table *table, Kind kind, CUdeviceptr start, size_t size)
{
    Range *range = calloc(1, sizeof *range);
    if (!range)
        abort();
    range->item.key = start;
    range->size = size;
    range->kind = kind;
    table_add(table, &range->item);
    return range;
}

void range_delete(Table *table, Range *range)
{
    table_remove(table, &range->item);
    free(range);
}

Range *range_at(const Table *table, CUdeviceptr address)
{
    Range *range = table_floor(table, address);
    return range && address < range_end(range) ? range : NULL;
}

bool range_overlaps(const Table *table, CUdeviceptr start, size_t size)
{
    const Range *range = table_floor(table, start + size - 1);
    return range && range_end(range) > start;
}

CUresult range_idle(const Range *range, const char *call)
{
    if (!range->pending)
        return CUDA_SUCCESS;
    Context *context = range->kind == MAPPED ? range->chunk->home : range->context;
    CUresult code = misuse(CUDA_ERROR_ILLEGAL_ADDRESS,
                           "%s: closed under a running copy: 0x%llx (%zu bytes) has %zu operations under way", call,
                           (CUdeviceptr)range->item.key, range->size, range->pending);
    return break_context(context, code);
}

/* Flushing what needs no flushing is the quickest way to ask: it fails where nothing is mapped. */
bool is_mapped(CUdeviceptr start, size_t size)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), skew = start & (page - 1);
    return !msync((void *)(uintptr_t)(start - skew), size + skew, MS_ASYNC) || errno != ENOMEM;
}

void *map_afresh(size_t size, size_t alignment, int protection, int flags, int fd)
{
    if (alignment < GRANULE)
        alignment = GRANULE;
    if (!driver.next_address)
        driver.next_address = FIRST_ADDRESS;
    for (;;) {
        driver.next_address = (driver.next_address + alignment - 1) & ~(CUdeviceptr)(alignment - 1);
        void *wanted = (void *)(uintptr_t)driver.next_address;
        driver.next_address += rounded(size) + (settings()->packed ? 0 : GRANULE); /* a gap: no two touch */
        void *memory = mmap(wanted, size, protection, flags | MAP_FIXED_NOREPLACE | MAP_NORESERVE, fd, 0);
        if (memory != MAP_FAILED || errno != EEXIST)
            return memory;
    }
}

uint64_t nonce_new(void)
{
    uint64_t nonce;
    if (getrandom(&nonce, sizeof nonce, 0) != sizeof nonce)
        abort();
    return nonce;
}

/* The real driver holds no descriptors; thousands of chunks must not fail for want of them. */
static int memfd_beyond_limit(const char *name)
{
    struct rlimit limit;
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd >= 0 || errno != EMFILE || getrlimit(RLIMIT_NOFILE, &limit))
        return fd;
    limit.rlim_cur = limit.rlim_max;
    return setrlimit(RLIMIT_NOFILE, &limit) ? -1 : memfd_create(name, MFD_CLOEXEC);
}

int memfd_new(const char *name, size_t size)
{
    int fd = memfd_beyond_limit(name);
    if (fd >= 0 && ftruncate(fd, (off_t)size)) {
        close(fd);
        return -1;
    }
    return fd;
}

static CUresult block_new(Context *context, size_t size, Block **made)
{
    if (size > settings()->memory_bytes || context->used_bytes + rounded(size) > settings()->memory_bytes)
        return CUDA_ERROR_OUT_OF_MEMORY;
    char name[64];
    uint64_t nonce = nonce_new();
    snprintf(name, sizeof name, "softcuda-%016lx", nonce);
    int fd = memfd_new(name, rounded(size));
    if (fd < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    void *memory = map_afresh(rounded(size), 0, PROT_READ | PROT_WRITE, MAP_SHARED, fd);
    if (memory == MAP_FAILED) {
        close(fd);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    madvise(memory, rounded(size), MADV_DONTFORK);
    if (settings()->poison)
        memset(memory, POISON, size);
    Block *block = calloc(1, sizeof *block);
    if (!block)
        abort();
    *block = (Block){.start = (uintptr_t)memory, .size = size, .nonce = nonce, .fd = fd};
    context->used_bytes += rounded(size);
    *made = block;
    return CUDA_SUCCESS;
}

/* Small ones share a block, if asked for, until it is full or all in it are freed. */
static CUresult block_for(Context *context, size_t size, Block **block)
{
    if (!settings()->small_block || size >= GRANULE)
        return block_new(context, size, block);
    Block **shared = &context->small;
    CUresult code = CUDA_SUCCESS;
    if (!*shared || size > (*shared)->size - (*shared)->used)
        code = block_new(context, GRANULE, shared);
    *block = *shared;
    return code;
}

static CUresult allocate(Context *context, CUdeviceptr *address, size_t size)
{
    Block *block;
    if (!size)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult code = block_for(context, size, &block);
    if (code)
        return code;
    Range *range = range_new(&driver.device, ALLOCATED, block->start + block->used, size);
    range->context = context;
    range->block = block;
    block->allocations++;
    block->used += (size + SMALL_ALIGNMENT - 1) & ~(size_t)(SMALL_ALIGNMENT - 1);
    driver.counters.live_allocations++;
    *address = range->item.key;
    return CUDA_SUCCESS;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size)
{
    Context *context;
    CUresult code = enter(&context);
    return code ? code : leave(allocate(context, address, size));
}

API CUresult cuMemAlloc(CUdeviceptr *address, size_t size) __attribute__((alias("cuMemAlloc_v2")));

void allocation_delete(Range *range)
{
    Block *block = range->block;
    if (!--block->allocations) {
        munmap((void *)(uintptr_t)block->start, rounded(block->size));
        close(block->fd);
        range->context->used_bytes -= rounded(block->size);
        if (range->context->small == block)
            range->context->small = NULL;
        free(block);
    }
    driver.counters.live_allocations--;
    range_delete(&driver.device, range);
}

static CUresult release(CUdeviceptr address)
{
    if (!address)
        return CUDA_SUCCESS;
    Range *range = table_find(&driver.device, address);
    if (!range || range->kind != ALLOCATED)
        return misuse(CUDA_ERROR_INVALID_VALUE, "cuMemFree: 0x%llx is no allocation: freed twice, or never made",
                      address);
    CUresult code = range_idle(range, "cuMemFree");
    if (!code)
        allocation_delete(range);
    return code;
}

API CUresult cuMemFree_v2(CUdeviceptr address)
{
    Context *context;
    CUresult code = enter(&context);
    return code ? code : leave(release(address));
}

API CUresult cuMemFree(CUdeviceptr address) __attribute__((alias("cuMemFree_v2")));

API CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    Context *context;
    CUresult code = enter(&context);
    if (code)
        return code;
    *total_bytes = settings()->memory_bytes;
    *free_bytes = *total_bytes - context->used_bytes;
    return leave(CUDA_SUCCESS);
}

API CUresult cuMemGetInfo(size_t *free_bytes, size_t *total_bytes) __attribute__((alias("cuMemGetInfo_v2")));
