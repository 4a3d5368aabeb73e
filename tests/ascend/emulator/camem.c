/* The memory pool of vLLM-Ascend's sleep mode, on the virtual memory of cann.c.
 *
 * The functions that torch_npu's pluggable allocator calls, and those that map and unmap an
 * allocation by itself. Fresh memory is filled with a pattern, so that whatever was not saved is
 * lost; memory that is not mapped cannot be read. An allocation is known to Python by its device,
 * size, address and the place of its physical handle.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int status;
enum { GARBAGE = 0xC7 };
static const size_t GRANULARITY = (size_t)2 << 20;

status aclrtSetDevice(int device);
status aclrtReserveMemAddress(void **p, size_t n, size_t alignment, void *at, uint64_t flags);
status aclrtReleaseMemAddress(void *p);
status aclrtMallocPhysical(void **handle, size_t n, const void *property, uint64_t flags);
status aclrtFreePhysical(void *handle);
status aclrtMapMem(void *p, size_t n, size_t offset, void *handle, uint64_t flags);
status aclrtUnmapMem(void *p);

typedef void (*on_malloc)(uint64_t device, uint64_t size, uint64_t address, uint64_t handle);
typedef uint64_t (*on_free)(uint64_t address); /* returns the place of the physical handle */
static on_malloc tell_malloc;
static on_free tell_free;

void set_callbacks(on_malloc allocated, on_free freed) {
    tell_malloc = allocated;
    tell_free = freed;
}

status create_and_map(uint64_t device, uint64_t size, uint64_t address, uint64_t handle) {
    aclrtSetDevice(device);
    status failed = aclrtMallocPhysical((void **)handle, size, NULL, 0);
    if (!failed) failed = aclrtMapMem((void *)address, size, 0, *(void **)handle, 0);
    if (!failed) memset((void *)address, GARBAGE, size);
    return failed;
}

status unmap_and_release(uint64_t device, uint64_t size, uint64_t address, uint64_t handle) {
    status failed = aclrtUnmapMem((void *)address);
    return failed ? failed : aclrtFreePhysical(*(void **)handle);
}

void *my_malloc(ptrdiff_t size, int device, void *stream) {
    size_t whole = (size + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
    void *address, **handle = malloc(sizeof *handle);
    if (aclrtReserveMemAddress(&address, whole, 0, NULL, 0)) abort();
    tell_malloc(device, whole, (uint64_t)address, (uint64_t)handle);
    if (create_and_map(device, whole, (uint64_t)address, (uint64_t)handle)) abort();
    return address;
}

void my_free(void *address, ptrdiff_t size, int device, void *stream) {
    void **handle = (void **)tell_free((uint64_t)address);
    if (unmap_and_release(device, size, (uint64_t)address, (uint64_t)handle)) abort();
    aclrtReleaseMemAddress(address);
    free(handle);
}
