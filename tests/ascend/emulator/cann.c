/* The part of the CANN runtime that must do something: memory, devices, events.
 *
 * "Device" memory is host memory, work is done at once, and there are eight devices. Every other
 * symbol that torch_npu needs is generated (build.py): it returns 0, which is success, and does
 * nothing. Signatures: acl/acl_rt.h of CANN. Types are reduced to what the calling convention sees.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef int status; /* aclError; 0 is success */
enum { UNSUPPORTED = 207000, OUT_OF_MEMORY = 207001, INVALID_DEVICE = 107001, NO_CONTEXT = 107002, DRIVER_ERROR = 507899 };
enum { DEVICES = 8, ALIGNMENT = 512 };
static const size_t TOTAL_BYTES = (size_t)61 << 30;

/* ---- devices ---- */
static __thread int current_device = 0;
static char contexts[DEVICES];

/* What may be wrong with a machine, by the environment of the process; see README.md. */
static long setting(const char *name, long usual) {
    const char *given = getenv(name);
    return given && *given ? atol(given) : usual;
}
static int devices(void) { return setting("EMULATED_NPU_DEVICES", DEVICES); }
static int driver_code(void) { return setting("EMULATED_NPU_DRIVER_CODE", 0); }

int drvGetDevNum(uint32_t *count) { *count = devices(); return driver_code(); }
status aclrtGetDeviceCount(uint32_t *count) {
    *count = devices();
    return driver_code() ? DRIVER_ERROR : 0;
}
status aclrtSetDevice(int device) {
    if (device < 0 || device >= devices()) return INVALID_DEVICE;
    status code = setting("EMULATED_NPU_SET_DEVICE_CODE", 0);
    if (!code) current_device = device;
    return code;
}
status aclrtGetDevice(int *device) {
    if (setting("EMULATED_NPU_SET_DEVICE_CODE", 0)) return NO_CONTEXT; /* none was ever set */
    *device = current_device;
    return 0;
}
status aclrtGetCurrentContext(void **context) { *context = &contexts[current_device]; return 0; }
status aclrtSetCurrentContext(void *context) { current_device = (char *)context - contexts; return 0; }
status aclrtGetPrimaryCtxState(int device, uint32_t *flags, int *active) { *active = 1; return 0; }
status aclrtDeviceCanAccessPeer(int *can, int device, int peer) { *can = 0; return 0; }
const char *aclrtGetSocName(void) { return "Ascend910B2"; }
const char *aclGetRecentErrMsg(void) { return "emulated CANN"; }

/* ---- memory: sizes are counted per device, so that what the driver reports is true ---- */
struct header { size_t bytes; int device; };
static size_t used_bytes[DEVICES];
static size_t pinned_bytes; /* of the host */

static status take(void **pointer, size_t bytes, int device) {
    if (device >= 0 && used_bytes[device] + bytes > TOTAL_BYTES) return OUT_OF_MEMORY;
    size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    char *block = aligned_alloc(ALIGNMENT, rounded + ALIGNMENT);
    if (!block) return OUT_OF_MEMORY;
    struct header *header = (struct header *)block;
    header->bytes = bytes;
    header->device = device;
    __atomic_add_fetch(device >= 0 ? &used_bytes[device] : &pinned_bytes, bytes, __ATOMIC_RELAXED);
    *pointer = block + ALIGNMENT;
    return 0;
}

static status give(void *pointer) {
    if (!pointer) return 0;
    struct header *header = (struct header *)((char *)pointer - ALIGNMENT);
    size_t *used = header->device >= 0 ? &used_bytes[header->device] : &pinned_bytes;
    __atomic_sub_fetch(used, header->bytes, __ATOMIC_RELAXED);
    free(header);
    return 0;
}

status aclrtMalloc(void **p, size_t n, int policy) { return take(p, n, current_device); }
status aclrtMallocAlign32(void **p, size_t n, int policy) { return take(p, n, current_device); }
status aclrtMallocHost(void **p, size_t n) { return take(p, n, -1); }
status aclrtFree(void *p) { return give(p); }
status aclrtFreeHost(void *p) { return give(p); }
size_t emulated_pinned_bytes(void) { return pinned_bytes; } /* for tests; CANN has no such call */
status aclrtGetMemInfo(int attribute, size_t *free_bytes, size_t *total) {
    size_t taken = (size_t)setting("EMULATED_NPU_TAKEN_MIB", 0) << 20; /* by another process */
    *free_bytes = TOTAL_BYTES - taken - used_bytes[current_device];
    *total = TOTAL_BYTES;
    return 0;
}
status aclrtMemcpy(void *to, size_t limit, const void *from, size_t n, int kind) {
    memcpy(to, from, n);
    return 0;
}
status aclrtMemcpyAsync(void *to, size_t limit, const void *from, size_t n, int kind, void *stream) {
    memcpy(to, from, n);
    return 0;
}
status aclrtMemset(void *to, size_t limit, int value, size_t n) { memset(to, value, n); return 0; }
status aclrtMemsetAsync(void *to, size_t limit, int value, size_t n, void *stream) {
    memset(to, value, n);
    return 0;
}
/* Virtual memory: addresses are reserved, and files in memory are mapped into them. This is what
 * expandable segments need; vLLM-Ascend's camem is an extension of its own. */
struct physical { int file, device; size_t bytes; };
struct mapping { void *at; size_t bytes; struct mapping *next; };
static struct mapping *mappings; /* of reserved addresses and of what is mapped there */

static void remember(void *at, size_t bytes) {
    struct mapping *new = malloc(sizeof *new);
    *new = (struct mapping){at, bytes, mappings};
    mappings = new;
}
static size_t forget(void *at) {
    for (struct mapping **slot = &mappings; *slot; slot = &(*slot)->next) {
        struct mapping *found = *slot;
        if (found->at != at) continue;
        size_t bytes = found->bytes;
        *slot = found->next;
        free(found);
        return bytes;
    }
    return 0;
}
static void *reserved(void *at, size_t n, int flags) {
    return mmap(at, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
}

status aclrtReserveMemAddress(void **p, size_t n, size_t alignment, void *at, uint64_t flags) {
    if ((*p = reserved(at, n, 0)) == MAP_FAILED) return OUT_OF_MEMORY;
    remember(*p, n);
    return 0;
}
status aclrtReleaseMemAddress(void *p) { return munmap(p, forget(p)) ? UNSUPPORTED : 0; }
status aclrtMallocPhysical(void **handle, size_t n, const void *property, uint64_t flags) {
    if (used_bytes[current_device] + n > TOTAL_BYTES) return OUT_OF_MEMORY;
    int file = memfd_create("npu", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, n)) return OUT_OF_MEMORY;
    struct physical *memory = malloc(sizeof *memory);
    *memory = (struct physical){file, current_device, n};
    __atomic_add_fetch(&used_bytes[current_device], n, __ATOMIC_RELAXED);
    *handle = memory;
    return 0;
}
status aclrtFreePhysical(void *handle) {
    struct physical *memory = handle;
    __atomic_sub_fetch(&used_bytes[memory->device], memory->bytes, __ATOMIC_RELAXED);
    close(memory->file);
    free(memory);
    return 0;
}
status aclrtMapMem(void *p, size_t n, size_t offset, void *handle, uint64_t flags) {
    int file = ((struct physical *)handle)->file;
    void *at = mmap(p, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, offset);
    if (at == MAP_FAILED) return OUT_OF_MEMORY;
    remember(p, n);
    return 0;
}
status aclrtUnmapMem(void *p) { return reserved(p, forget(p), MAP_FIXED) == p ? 0 : UNSUPPORTED; }

/* ---- streams and events: everything has happened when it is asked for ---- */
struct event { struct timespec at; };

static status make(void **object) { *object = calloc(1, sizeof(struct event)); return *object ? 0 : OUT_OF_MEMORY; }
status aclrtCreateStream(void **stream) { return make(stream); }
status aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags) { return make(stream); }
status aclrtDestroyStream(void *stream) { free(stream); return 0; }
status aclrtDestroyStreamForce(void *stream) { free(stream); return 0; }
status aclrtStreamQuery(void *stream, int *done) { *done = 1; return 0; }
status aclrtCreateEventWithFlag(void **event, uint32_t flag) { return make(event); }
status aclrtCreateEventExWithFlag(void **event, uint32_t flag) { return make(event); }
status aclrtDestroyEvent(void *event) { free(event); return 0; }
status aclrtRecordEvent(void *event, void *stream) {
    clock_gettime(CLOCK_MONOTONIC, &((struct event *)event)->at);
    return 0;
}
status aclrtQueryEventStatus(void *event, int *done) { *done = 1; return 0; }
status aclrtQueryEventWaitStatus(void *event, int *done) { *done = 1; return 0; }
status aclrtEventElapsedTime(float *ms, void *start, void *end) {
    struct timespec a = ((struct event *)start)->at, b = ((struct event *)end)->at;
    *ms = (b.tv_sec - a.tv_sec) * 1e3f + (b.tv_nsec - a.tv_nsec) * 1e-6f;
    return 0;
}

/* ---- profiler: there are settings, and nothing of a device is recorded ---- */
void *aclprofCreateConfig(uint32_t *devices, uint32_t count, int metrics, void *events, uint64_t data) {
    return calloc(1, sizeof(char));
}
status aclprofDestroyConfig(void *config) { free(config); return 0; }

/* ---- options of the operator compiler ---- */
size_t aclGetCompileoptSize(int option) { return 64; }
status aclGetCompileopt(int option, char *value, size_t length) {
    memset(value, 0, length);
    value[0] = '0';
    return 0;
}

/* Kernels of the old operator interface: one that is not emulated must fail, not do nothing. */
status aclopCompileAndExecute() { return UNSUPPORTED; }
status aclopCompileAndExecuteV2() { return UNSUPPORTED; }
