/* What a program may tell the memory hook of its memory. It need not be linked: without the hook the function is not there.
 *
 *     #include <dlfcn.h>
 *     #include "vmhook.h"
 *
 *     vmhook_tag_function tag = (vmhook_tag_function)dlsym(RTLD_DEFAULT, "vmhook_tag");
 *     if (tag) tag((unsigned long long)pointer, "cache", VMHOOK_DROPPABLE);
 */
#ifndef VMHOOK_H
#define VMHOOK_H

#ifdef __cplusplus
extern "C" {
#endif

/* The contents need not outlive a pause: they are not copied, and zero when the program is resumed. */
#define VMHOOK_DROPPABLE 1u

/* Names the device memory that begins at an address, of at most 64 bytes; a later name replaces it. 0, or CUDA_ERROR_INVALID_VALUE (1) where no
 * allocation begins, or for flags that are not known. */
int vmhook_tag(unsigned long long address, const char *name, unsigned flags);
typedef int (*vmhook_tag_function)(unsigned long long, const char *, unsigned);

#ifdef __cplusplus
}
#endif

#endif
