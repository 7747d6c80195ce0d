/* Every function of the driver API that softcuda has. They are known here by name alone: their types are their own. */
#include "internal.h"

/* Name, the version that brought this form, and the form. A name may stand here twice, oldest form first. */
#define FOR_EACH_FUNCTION(X)                                                                          \
    X(cuGetErrorString, 6000, cuGetErrorString)                                                      \
    X(cuGetErrorName, 6000, cuGetErrorName)                                                          \
    X(cuInit, 2000, cuInit)                                                                          \
    X(cuDriverGetVersion, 2020, cuDriverGetVersion)                                                  \
    X(cuGetProcAddress, 11030, cuGetProcAddress)                                                     \
    X(cuGetProcAddress, 12000, cuGetProcAddress_v2)                                                  \
    X(cuDeviceGet, 2000, cuDeviceGet)                                                                \
    X(cuDeviceGetCount, 2000, cuDeviceGetCount)                                                      \
    X(cuDeviceGetName, 2000, cuDeviceGetName)                                                        \
    X(cuDeviceGetUuid, 9020, cuDeviceGetUuid)                                                        \
    X(cuDeviceGetUuid, 11040, cuDeviceGetUuid_v2)                                                    \
    X(cuDeviceGetAttribute, 2000, cuDeviceGetAttribute)                                              \
    X(cuDeviceTotalMem, 3020, cuDeviceTotalMem_v2)                                                   \
    X(cuDevicePrimaryCtxRetain, 7000, cuDevicePrimaryCtxRetain)                                      \
    X(cuDevicePrimaryCtxRelease, 7000, cuDevicePrimaryCtxRelease)                                    \
    X(cuDevicePrimaryCtxRelease, 11000, cuDevicePrimaryCtxRelease_v2)                                \
    X(cuCtxSetCurrent, 4000, cuCtxSetCurrent)                                                        \
    X(cuCtxGetCurrent, 4000, cuCtxGetCurrent)                                                        \
    X(cuCtxPushCurrent, 4000, cuCtxPushCurrent_v2)                                                   \
    X(cuCtxPopCurrent, 4000, cuCtxPopCurrent_v2)                                                     \
    X(cuCtxGetDevice, 2000, cuCtxGetDevice)                                                          \
    X(cuCtxGetDevice, 13000, cuCtxGetDevice_v2)                                                      \
    X(cuCtxSynchronize, 2000, cuCtxSynchronize)                                                      \
    X(cuCtxSynchronize, 13000, cuCtxSynchronize_v2)                                                  \
    X(cuMemAlloc, 3020, cuMemAlloc_v2)                                                               \
    X(cuMemFree, 3020, cuMemFree_v2)                                                                 \
    X(cuMemGetInfo, 3020, cuMemGetInfo_v2)                                                           \
    X(cuMemGetAddressRange, 3020, cuMemGetAddressRange_v2)                                           \
    X(cuPointerGetAttribute, 4000, cuPointerGetAttribute)                                            \
    X(cuIpcGetMemHandle, 4010, cuIpcGetMemHandle)                                                    \
    X(cuIpcOpenMemHandle, 4010, cuIpcOpenMemHandle)                                                  \
    X(cuIpcOpenMemHandle, 11000, cuIpcOpenMemHandle_v2)                                              \
    X(cuIpcCloseMemHandle, 4010, cuIpcCloseMemHandle)                                                \
    X(cuMemHostRegister, 4000, cuMemHostRegister)                                                    \
    X(cuMemHostRegister, 6050, cuMemHostRegister_v2)                                                 \
    X(cuMemHostUnregister, 4000, cuMemHostUnregister)                                                \
    X(cuThreadExchangeStreamCaptureMode, 10010, cuThreadExchangeStreamCaptureMode)                   \
    X(cuMemHostGetDevicePointer, 3020, cuMemHostGetDevicePointer_v2)                                 \
    X(cuStreamCreate, 2000, cuStreamCreate)                                                          \
    X(cuStreamCreateWithPriority, 5050, cuStreamCreateWithPriority)                                  \
    X(cuStreamDestroy, 4000, cuStreamDestroy_v2)                                                     \
    X(cuStreamSynchronize, 2000, cuStreamSynchronize)                                                \
    X(cuStreamQuery, 2000, cuStreamQuery)                                                            \
    X(cuStreamWriteValue64, 9000, cuStreamWriteValue64)                                              \
    X(cuStreamWriteValue64, 11070, cuStreamWriteValue64_v2)                                          \
    X(cuEventCreate, 2000, cuEventCreate)                                                            \
    X(cuEventRecord, 2000, cuEventRecord)                                                            \
    X(cuEventQuery, 2000, cuEventQuery)                                                              \
    X(cuEventSynchronize, 2000, cuEventSynchronize)                                                  \
    X(cuEventDestroy, 4000, cuEventDestroy_v2)                                                       \
    X(cuMemcpyHtoD, 3020, cuMemcpyHtoD_v2)                                                           \
    X(cuMemcpyDtoH, 3020, cuMemcpyDtoH_v2)                                                           \
    X(cuMemcpyDtoD, 3020, cuMemcpyDtoD_v2)                                                           \
    X(cuMemcpyHtoDAsync, 3020, cuMemcpyHtoDAsync_v2)                                                 \
    X(cuMemcpyDtoHAsync, 3020, cuMemcpyDtoHAsync_v2)                                                 \
    X(cuMemcpyAsync, 4000, cuMemcpyAsync)                                                            \
    X(cuMemcpy2DAsync, 3020, cuMemcpy2DAsync_v2)                                                     \
    X(cuMemcpy3DBatchAsync, 12080, cuMemcpy3DBatchAsync)                                             \
    X(cuMemcpy3DBatchAsync, 13000, cuMemcpy3DBatchAsync_v2)                                          \
    X(cuMemcpyBatchAsync, 12080, cuMemcpyBatchAsync)                                                 \
    X(cuMemcpyBatchAsync, 13000, cuMemcpyBatchAsync_v2)                                              \
    X(cuMemsetD8, 3020, cuMemsetD8_v2)                                                               \
    X(cuMemsetD8Async, 3020, cuMemsetD8Async)                                                        \
    X(cuMemGetAllocationGranularity, 10020, cuMemGetAllocationGranularity)                           \
    X(cuMemCreate, 10020, cuMemCreate)                                                               \
    X(cuMemRelease, 10020, cuMemRelease)                                                             \
    X(cuMemAddressReserve, 10020, cuMemAddressReserve)                                               \
    X(cuMemAddressFree, 10020, cuMemAddressFree)                                                     \
    X(cuMemMap, 10020, cuMemMap)                                                                     \
    X(cuMemUnmap, 10020, cuMemUnmap)                                                                 \
    X(cuMemSetAccess, 10020, cuMemSetAccess)                                                         \
    X(cuMemExportToShareableHandle, 10020, cuMemExportToShareableHandle)                             \
    X(cuMemImportFromShareableHandle, 10020, cuMemImportFromShareableHandle)                         \
    X(cuMemRetainAllocationHandle, 11000, cuMemRetainAllocationHandle)                               \
    X(cuMemGetAllocationPropertiesFromHandle, 10020, cuMemGetAllocationPropertiesFromHandle)

#define AS_DECLARATION(name, version, function) void function(void);
FOR_EACH_FUNCTION(AS_DECLARATION)
#undef AS_DECLARATION

#define AS_ENTRY(name, version, function) {#name, version, function},
const Entry FUNCTIONS[] = {FOR_EACH_FUNCTION(AS_ENTRY)};
#undef AS_ENTRY
const size_t FUNCTION_COUNT = sizeof FUNCTIONS / sizeof *FUNCTIONS;
