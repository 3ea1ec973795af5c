/* What programs before vmaccel.h have in common: a call that fails ends them, and says why. */
#include <stdio.h>
#include <unistd.h>

#include <vmaccel.h>

#define CHECK(call)                                                                    \
    do {                                                                               \
        if ((call) != VMA_SUCCESS) {                                                   \
            fprintf(stderr, "%d: %s: %s\n", __LINE__, #call, vma_last_error());        \
            _exit(1);                                                                  \
        }                                                                              \
    } while (0)
