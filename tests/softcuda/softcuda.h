/* The part of NVIDIA's public driver API that softcuda offers: types and error codes, laid out as the real library's
 * callers expect them, and the extras that only tests call.
 */
#ifndef SOFTCUDA_H
#define SOFTCUDA_H

#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))

#define FOR_EACH_ERROR(X)                                                                     \
    X(CUDA_SUCCESS, 0, "no error")                                                            \
    X(CUDA_ERROR_INVALID_VALUE, 1, "invalid argument")                                        \
    X(CUDA_ERROR_OUT_OF_MEMORY, 2, "out of memory")                                           \
    X(CUDA_ERROR_NOT_INITIALIZED, 3, "initialization error")                                  \
    X(CUDA_ERROR_NO_DEVICE, 100, "no CUDA-capable device is detected")                        \
    X(CUDA_ERROR_INVALID_DEVICE, 101, "invalid device ordinal")                               \
    X(CUDA_ERROR_INVALID_IMAGE, 200, "device kernel image is invalid")                        \
    X(CUDA_ERROR_INVALID_CONTEXT, 201, "invalid device context")                              \
    X(CUDA_ERROR_MAP_FAILED, 205, "mapping of buffer object failed")                          \
    X(CUDA_ERROR_ALREADY_MAPPED, 208, "resource already mapped")                              \
    X(CUDA_ERROR_NOT_MAPPED, 211, "resource not mapped")                                      \
    X(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, 217, "peer access is not supported")                \
    X(CUDA_ERROR_OPERATING_SYSTEM, 304, "OS call failed or operation not supported")          \
    X(CUDA_ERROR_INVALID_HANDLE, 400, "invalid resource handle")                              \
    X(CUDA_ERROR_ILLEGAL_STATE, 401, "the operation cannot be performed in the present state") \
    X(CUDA_ERROR_NOT_FOUND, 500, "named symbol not found")                                    \
    X(CUDA_ERROR_NOT_READY, 600, "device not ready")                                          \
    X(CUDA_ERROR_ILLEGAL_ADDRESS, 700, "an illegal memory access was encountered")            \
    X(CUDA_ERROR_CONTEXT_IS_DESTROYED, 709, "context is destroyed")                           \
    X(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, 712, "part or all of the memory is already registered") \
    X(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, 713, "pointer does not correspond to a registered memory region") \
    X(CUDA_ERROR_NOT_SUPPORTED, 801, "operation not supported")

#define AS_ENUM(name, value, text) name = value,
typedef enum { FOR_EACH_ERROR(AS_ENUM) } CUresult;
#undef AS_ENUM

typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct Context *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef unsigned long long CUmemGenericAllocationHandle;

typedef struct {
    char bytes[16];
} CUuuid;

typedef struct {
    char reserved[64];
} CUipcMemHandle;

enum { CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1 };
enum { CU_MEMORYTYPE_HOST = 1, CU_MEMORYTYPE_DEVICE = 2, CU_MEMORYTYPE_ARRAY = 3, CU_MEMORYTYPE_UNIFIED = 4 };
enum { CU_MEMCPY_OPERAND_TYPE_POINTER = 1, CU_MEMCPY_OPERAND_TYPE_ARRAY = 2 };
enum { CU_MEM_ALLOCATION_TYPE_PINNED = 1 };
enum { CU_MEM_LOCATION_TYPE_DEVICE = 1 };
enum { CU_MEM_HANDLE_TYPE_NONE = 0, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1, CU_MEM_HANDLE_TYPE_FABRIC = 8 };
enum { CU_MEM_ACCESS_FLAGS_PROT_NONE = 0, CU_MEM_ACCESS_FLAGS_PROT_READ = 1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3 };
enum {
    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1,
    CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL = 2,
    CU_MEMCPY_SRC_ACCESS_ORDER_ANY = 3
};
enum {
    CU_GET_PROC_ADDRESS_SUCCESS = 0,
    CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND = 1,
    CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT = 2
};
enum {
    CU_POINTER_ATTRIBUTE_CONTEXT = 1,
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
    CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10,
    CU_POINTER_ATTRIBUTE_RANGE_START_ADDR = 11,
    CU_POINTER_ATTRIBUTE_RANGE_SIZE = 12,
    CU_POINTER_ATTRIBUTE_MAPPED = 13,
    CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES = 14,
    CU_POINTER_ATTRIBUTE_MAPPING_SIZE = 18,
    CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR = 19
};

typedef struct {
    int type;
    int id;
} CUmemLocation;

typedef struct {
    int type;
    int requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType;
        unsigned char gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;

typedef struct {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;

typedef struct {
    int srcAccessOrder;
    CUmemLocation srcLocHint;
    CUmemLocation dstLocHint;
    unsigned int flags;
} CUmemcpyAttributes;

typedef struct {
    size_t srcXInBytes, srcY;
    int srcMemoryType;
    const void *srcHost;
    CUdeviceptr srcDevice;
    void *srcArray;
    size_t srcPitch;
    size_t dstXInBytes, dstY;
    int dstMemoryType;
    void *dstHost;
    CUdeviceptr dstDevice;
    void *dstArray;
    size_t dstPitch;
    size_t WidthInBytes, Height;
} CUDA_MEMCPY2D;

typedef struct {
    int type;
    union {
        struct {
            CUdeviceptr ptr;
            size_t rowLength, layerHeight;
            CUmemLocation locHint;
        } ptr;
        struct {
            void *array;
            size_t offset[3];
        } array;
    } op;
} CUmemcpy3DOperand;

typedef struct {
    size_t width, height, depth;
} CUextent3D;

typedef struct {
    CUmemcpy3DOperand src, dst;
    CUextent3D extent;
    int srcAccessOrder;
    unsigned int flags;
} CUDA_MEMCPY3D_BATCH_OP;

_Static_assert(sizeof(CUDA_MEMCPY3D_BATCH_OP) == 112, "as in cuda.h");
_Static_assert(sizeof(CUDA_MEMCPY2D) == 128, "as in cuda.h");
_Static_assert(sizeof(CUmemAllocationProp) == 32, "as in cuda.h");
_Static_assert(sizeof(CUmemAccessDesc) == 12, "as in cuda.h");
_Static_assert(sizeof(CUmemcpyAttributes) == 24, "as in cuda.h");

/* What the process has done so far, and what it holds now. tests/softcuda/__init__.py has the same list. */
struct softcuda_counters {
    uint64_t copies, batches, pitched, pitched_batches, bytes_to_device, bytes_to_host, bytes_within_device;
    uint64_t handles_opened, handles_closed;
    uint64_t live_allocations, live_opened, live_mappings, live_reservations, live_registrations;
    uint64_t live_streams, live_events, misuses, staged_copies, engine_batches;
};

/* The stream is busy for so long, as with a kernel: its later operations wait. */
API CUresult softcuda_delay(CUstream stream, uint64_t ns);
/* The stream waits until the word is at least `value`. */
API CUresult softcuda_spin_until(CUstream stream, const uint64_t *word, uint64_t value);
API void softcuda_counters(struct softcuda_counters *counters);

#endif
