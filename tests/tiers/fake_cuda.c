/* A driver library without a device: the functions that hicache.tiers.cuda_driver calls, with the signatures of CUDA's
 * cuda.h.
 *
 * Copies are made at once. Calls that the driver rejects, by its documentation or as observed, are rejected: calls
 * without a context, copies in the legacy stream, a batch across two registrations of host memory, memory that is
 * registered twice, and registrations above a size. `fake_fail` lets the n-th call of a function from now on fail.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef REAL_HEADER /* then a declaration that differs from it does not compile */
#include <cuda.h>
#include <cudaTypedefs.h>
_Static_assert(sizeof(CUmemcpyAttributes) == 24 && offsetof(CUmemcpyAttributes, flags) == 20, "attributes");
_Static_assert(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM == 1 && CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE == 1, "flags");
_Static_assert(CU_MEMHOSTREGISTER_PORTABLE == 1 && CU_STREAM_NON_BLOCKING == 1 && CU_EVENT_DISABLE_TIMING == 2, "flags");
_Static_assert(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM == 91, "attribute");
_Static_assert(CUDA_ERROR_NOT_READY == 600 && CUDA_SUCCESS == 0, "errors");
#else
typedef int CUresult;
typedef int CUdevice;
typedef int CUdevice_attribute;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef uint64_t cuuint64_t;
typedef int CUdriverProcAddressQueryResult;
typedef struct { int type, id; } CUmemLocation;
typedef struct {
    int srcAccessOrder;
    CUmemLocation srcLocHint, dstLocHint;
    unsigned int flags;
} CUmemcpyAttributes;
#endif

enum { INVALID_VALUE = 1, INVALID_CONTEXT = 201, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, NOT_READY = 600 };

#define REGISTRATIONS 64
static struct { uintptr_t at; size_t size; } registered[REGISTRATIONS];
static size_t register_max = SIZE_MAX;
static __thread CUcontext current, pushed[8];
static __thread int depth;
static char failing[64];
static int fails_in, fails_with, sleeps_us;
static int batches, batched, loops;
static CUmemcpyAttributes seen;
static int not_ready;
static unsigned stream_flags, event_flags;
static int streams, events, foreign_waits, without_host_pointers;

/* Handles have all 64 bits of a pointer. */
#define CONTEXT ((CUcontext)(uintptr_t)0x7f1122334455)

static int failed(const char *name)
{
    if (strcmp(name, failing) == 0 && --fails_in == 0)
        return fails_with;
    return 0;
}

#define CALL(name)                                                                                                     \
    do {                                                                                                               \
        int status_ = failed(#name);                                                                                   \
        if (sleeps_us)                                                                                                 \
            usleep((unsigned)sleeps_us);                                                                               \
        if (status_)                                                                                                   \
            return status_;                                                                                            \
    } while (0)
#define NEEDS_CONTEXT()                                                                                                \
    do {                                                                                                               \
        if (current != CONTEXT)                                                                                        \
            return INVALID_CONTEXT;                                                                                    \
    } while (0)
/* A handle knows its context, but the calling thread must have some context. */
#define NEEDS_ANY_CONTEXT()                                                                                            \
    do {                                                                                                               \
        if (!current)                                                                                                  \
            return INVALID_CONTEXT;                                                                                    \
    } while (0)

/* State that a test sets and reads. */

void fake_reset(void)
{
    memset(registered, 0, sizeof registered);
    register_max = SIZE_MAX;
    failing[0] = 0;
    fails_in = fails_with = sleeps_us = batches = batched = loops = not_ready = streams = events = foreign_waits = without_host_pointers = 0;
    current = NULL;
    depth = 0;
}
void fake_fail(const char *name, int in, int with)
{
    strncpy(failing, name, sizeof failing - 1);
    fails_in = in;
    fails_with = with;
}
void fake_limit(size_t size) { register_max = size; }
void fake_sleep(int us) { sleeps_us = us; }
void fake_not_ready(int value) { not_ready = value; }
void fake_without_host_pointers(void) { without_host_pointers = 1; }
int fake_number(const char *name)
{
    if (strcmp(name, "registered") == 0) {
        int count = 0;
        for (int i = 0; i < REGISTRATIONS; i++)
            count += registered[i].size != 0;
        return count;
    }
    return strcmp(name, "batches") == 0 ? batches : strcmp(name, "batched") == 0 ? batched
        : strcmp(name, "loops") == 0 ? loops : strcmp(name, "order") == 0 ? (int)seen.srcAccessOrder
        : strcmp(name, "flags") == 0 ? (int)seen.flags : strcmp(name, "stream flags") == 0 ? (int)stream_flags
        : strcmp(name, "event flags") == 0 ? (int)event_flags : strcmp(name, "streams") == 0 ? streams
        : strcmp(name, "events") == 0 ? events : strcmp(name, "depth") == 0 ? depth
        : strcmp(name, "foreign waits") == 0 ? foreign_waits : strcmp(name, "context") == 0 ? current != NULL : -1;
}

/* The driver. */

CUresult cuInit(unsigned int flags)
{
    CALL(cuInit);
    return flags ? INVALID_VALUE : 0;
}
CUresult cuGetErrorString(CUresult error, const char **text)
{
    *text = (int)error == INVALID_VALUE ? "invalid argument" : (int)error == 2 ? "out of memory" : NULL;
    return *text ? 0 : INVALID_VALUE;
}
CUresult cuDeviceGet(CUdevice *device, int number)
{
    CALL(cuDeviceGet);
    *device = number;
    return number < 2 ? 0 : 101;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    CALL(cuDeviceGetAttribute);
    (void)device;
    *value = !without_host_pointers;
    return attribute == 91 ? 0 : INVALID_VALUE;
}
CUresult cuDeviceGetPCIBusId(char *id, int size, CUdevice device)
{
    CALL(cuDeviceGetPCIBusId);
    (void)device;
    strncpy(id, "0000:3B:00.0", (size_t)size);
    return 0;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    CALL(cuDevicePrimaryCtxRetain);
    (void)device;
    *context = CONTEXT;
    return 0;
}
CUresult cuCtxSetCurrent(CUcontext context)
{
    CALL(cuCtxSetCurrent);
    current = context;
    return 0;
}
CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    CALL(cuCtxPushCurrent_v2);
    pushed[depth++] = current;
    current = context;
    return 0;
}
CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    CALL(cuCtxPopCurrent_v2);
    *context = current;
    current = pushed[--depth];
    return 0;
}
CUresult cuMemHostRegister_v2(void *address, size_t size, unsigned int flags)
{
    CALL(cuMemHostRegister_v2);
    NEEDS_CONTEXT();
    if (flags != 1 || size > register_max)
        return INVALID_VALUE;
    int free_entry = -1;
    for (int i = 0; i < REGISTRATIONS; i++) {
        if (!registered[i].size)
            free_entry = i;
        else if ((uintptr_t)address < registered[i].at + registered[i].size
            && registered[i].at < (uintptr_t)address + size)
            return ALREADY_REGISTERED;
    }
    registered[free_entry].at = (uintptr_t)address;
    registered[free_entry].size = size;
    return 0;
}
CUresult cuMemHostUnregister(void *address)
{
    CALL(cuMemHostUnregister);
    NEEDS_CONTEXT();
    for (int i = 0; i < REGISTRATIONS; i++)
        if (registered[i].size && registered[i].at == (uintptr_t)address) {
            registered[i].size = 0;
            return 0;
        }
    return NOT_REGISTERED;
}
CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority)
{
    CALL(cuStreamCreateWithPriority);
    NEEDS_CONTEXT();
    (void)priority;
    stream_flags = flags;
    *stream = (CUstream)(uintptr_t)(0x500000000000 + ++streams);
    return 0;
}
CUresult cuStreamDestroy_v2(CUstream stream)
{
    CALL(cuStreamDestroy_v2);
    NEEDS_ANY_CONTEXT();
    streams--;
    return stream ? 0 : INVALID_VALUE;
}
CUresult cuStreamSynchronize(CUstream stream)
{
    CALL(cuStreamSynchronize);
    NEEDS_ANY_CONTEXT();
    return stream ? 0 : INVALID_VALUE;
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags)
{
    CALL(cuStreamWaitEvent);
    NEEDS_ANY_CONTEXT();
    if (!stream && current != CONTEXT)
        foreign_waits++; /* on the default stream of another device */
    return event && !flags ? 0 : INVALID_VALUE;
}
CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
    CALL(cuEventCreate);
    NEEDS_CONTEXT();
    event_flags = flags;
    *event = (CUevent)(uintptr_t)(0x600000000000 + ++events);
    return 0;
}
CUresult cuEventDestroy_v2(CUevent event)
{
    CALL(cuEventDestroy_v2);
    NEEDS_ANY_CONTEXT();
    events--;
    return event ? 0 : INVALID_VALUE;
}
CUresult cuEventRecord(CUevent event, CUstream stream)
{
    CALL(cuEventRecord);
    NEEDS_ANY_CONTEXT();
    return stream && event ? 0 : INVALID_VALUE;
}
CUresult cuEventQuery(CUevent event)
{
    CALL(cuEventQuery);
    NEEDS_ANY_CONTEXT();
    return !event ? INVALID_VALUE : not_ready ? NOT_READY : 0;
}
CUresult cuEventElapsedTime(float *milliseconds, CUevent begin, CUevent end)
{
    CALL(cuEventElapsedTime);
    NEEDS_ANY_CONTEXT();
    *milliseconds = 2.5f;
    return begin && end ? 0 : INVALID_VALUE;
}
CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t size, CUstream stream)
{
    CALL(cuMemcpyAsync);
    NEEDS_ANY_CONTEXT();
    if (!stream)
        return INVALID_VALUE;
    memcpy((void *)(uintptr_t)target, (const void *)(uintptr_t)source, size);
    loops++;
    return 0;
}

#ifndef WITHOUT_PROC_ADDRESS
static int registration_of(uintptr_t at, size_t size)
{
    for (int i = 0; i < REGISTRATIONS; i++)
        if (registered[i].size && at >= registered[i].at && at + size <= registered[i].at + registered[i].size)
            return i;
    return -1;
}
/* The form of CUDA 12.8, which newer drivers keep. */
static CUresult batch(CUdeviceptr *targets, CUdeviceptr *sources, size_t *sizes, size_t count, CUmemcpyAttributes *attrs,
    size_t *attrs_index, size_t attrs_count, size_t *failed_index, CUstream stream)
{
    *failed_index = SIZE_MAX;
    CALL(cuMemcpyBatchAsync);
    NEEDS_ANY_CONTEXT();
    if (!stream || !count || attrs_count != 1 || attrs_index[0] != 0)
        return INVALID_VALUE;
    int known[2] = {-1, -1};
    for (size_t i = 0; i < count; i++) {
        const uintptr_t ends[2] = {targets[i], sources[i]};
        for (int side = 0; side < 2; side++) {
            int found = registration_of(ends[side], sizes[i]);
            if (found >= 0 && known[side] >= 0 && found != known[side]) {
                *failed_index = i;
                return INVALID_VALUE;
            }
            known[side] = found >= 0 ? found : known[side];
        }
    }
    for (size_t i = 0; i < count; i++)
        memcpy((void *)(uintptr_t)targets[i], (const void *)(uintptr_t)sources[i], sizes[i]);
    seen = *attrs;
    batches++;
    batched += (int)count;
    return 0;
}
CUresult cuGetProcAddress_v2(
    const char *name, void **address, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *found)
{
    CALL(cuGetProcAddress_v2);
    (void)flags;
#ifdef WITHOUT_BATCH
    version = 0;
#endif
    int known = strcmp(name, "cuMemcpyBatchAsync") == 0 && version == 12080;
    *address = known ? (void *)batch : NULL;
    *found = !known;
    return 0;
}
#endif

#ifdef REAL_HEADER
PFN_cuMemcpyBatchAsync_v12080 same_as_the_drivers = batch;
#endif
