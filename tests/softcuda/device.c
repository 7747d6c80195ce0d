/* The devices: as many as asked for, all alike. */
#include <stdio.h>
#include <string.h>

#include "internal.h"

/* Attributes that differ from 0; their numbers are NVIDIA's. */
static const struct {
    int attribute, value;
} ATTRIBUTES[] = {
    {1, 1024},      /* MAX_THREADS_PER_BLOCK */
    {10, 32},       /* WARP_SIZE */
    {11, PITCH_MAX}, /* MAX_PITCH */
    {13, 1980000},  /* CLOCK_RATE */
    {16, 132},      /* MULTIPROCESSOR_COUNT */
    {19, 1},        /* CAN_MAP_HOST_MEMORY */
    {31, 1},        /* CONCURRENT_KERNELS */
    {40, 3},        /* ASYNC_ENGINE_COUNT */
    {41, 1},        /* UNIFIED_ADDRESSING */
    {75, 9},        /* COMPUTE_CAPABILITY_MAJOR */
    {78, 1},        /* STREAM_PRIORITIES_SUPPORTED */
    {91, 1},        /* CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM */
    {99, 1},        /* HOST_REGISTER_SUPPORTED */
    {102, 1},       /* VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED */
    {103, 1},       /* HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED */
    {122, 1},       /* CAN_USE_64_BIT_STREAM_MEM_OPS */
    {134, -1},      /* HOST_NUMA_ID */
};

enum { PCI_BUS_ID = 33, HOST_POINTERS = 91, STREAM_WRITES = 122, ATTRIBUTE_MAX = 162 };

static CUresult enter_device(CUdevice device)
{
    if (driver.forked || !__atomic_load_n(&driver.initialised, __ATOMIC_ACQUIRE))
        return CUDA_ERROR_NOT_INITIALIZED;
    return device >= 0 && device < settings()->visible_count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

API CUresult cuDriverGetVersion(int *version)
{
    *version = (int)settings()->driver_version;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetCount(int *count)
{
    CUresult code = enter_device(0);
    if (!code)
        *count = settings()->visible_count;
    return code;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    CUresult code = enter_device(ordinal);
    if (!code)
        *device = ordinal;
    return code;
}

API CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    CUresult code = enter_device(device);
    if (!code)
        snprintf(name, (size_t)length, "softcuda device %d", driver.contexts[device].device);
    return code;
}

CUuuid uuid_of(int device)
{
    CUuuid uuid = {"softcuda-device"};
    uuid.bytes[15] = (char)device;
    return uuid;
}

API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    CUresult code = enter_device(device);
    if (!code)
        *uuid = uuid_of(driver.contexts[device].device);
    return code;
}

API CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) __attribute__((alias("cuDeviceGetUuid_v2")));

API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    CUresult code = enter_device(device);
    if (code)
        return code;
    if (attribute < 1 || attribute >= ATTRIBUTE_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    *value = attribute == PCI_BUS_ID ? driver.contexts[device].device + 1 : 0;
    for (size_t i = 0; i < sizeof ATTRIBUTES / sizeof *ATTRIBUTES; i++)
        if (ATTRIBUTES[i].attribute == attribute)
            *value = ATTRIBUTES[i].value;
    if ((attribute == HOST_POINTERS && settings()->no_host_pointers) ||
        (attribute == STREAM_WRITES && settings()->no_stream_writes))
        *value = 0;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    CUresult code = enter_device(device);
    if (!code)
        *bytes = settings()->memory_bytes;
    return code;
}

API CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) __attribute__((alias("cuDeviceTotalMem_v2")));
