/* What an address is. Asking about any address is allowed: these are no misuse. */
#include "internal.h"

static CUresult address_range(CUdeviceptr *base, size_t *size, CUdeviceptr address)
{
    const Range *range = range_at(&driver.device, address);
    if (!range)
        return CUDA_ERROR_NOT_FOUND;
    if (base)
        *base = range->item.key;
    if (size)
        *size = range->size;
    return CUDA_SUCCESS;
}

API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address)
{
    Context *context;
    CUresult code = enter(&context);
    return code ? code : leave(address_range(base, size, address));
}

API CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr address)
    __attribute__((alias("cuMemGetAddressRange_v2")));

static CUresult attribute_of_mapped(void *data, int attribute, const Range *range)
{
    const Context *home = range->kind == MAPPED ? range->chunk->home : range->home ? range->home : range->context;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)data = range->context;
        break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned int *)data = range->kind == REGISTERED ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)data = home->ordinal;
        break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *(int *)data = range->kind == ALLOCATED || range->kind == OPENED;
        break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        *(unsigned long long *)data = range->kind == MAPPED ? range->chunk->handle_types : 0;
        break;
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
        *(size_t *)data = range->size;
        break;
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
        *(CUdeviceptr *)data = range->item.key;
        break;
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

/* `range` is what can be used at the address, `whole` the reservation around it, where there is one. */
static CUresult attribute_of(void *data, int attribute, CUdeviceptr address)
{
    const Range *range = range_at(&driver.device, address);
    if (!range)
        range = range_at(&driver.host, address);
    const Range *whole = range_at(&driver.reserved, address);
    if (!whole)
        whole = range;
    if (!whole)
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)data = whole->item.key;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)data = whole->size;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPED:
        *(int *)data = range != NULL;
        return CUDA_SUCCESS;
    default:
        return range ? attribute_of_mapped(data, attribute, range) : CUDA_ERROR_INVALID_VALUE;
    }
}

API CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address)
{
    CUresult code = enter_any();
    return code ? code : leave(data ? attribute_of(data, attribute, address) : CUDA_ERROR_INVALID_VALUE);
}
