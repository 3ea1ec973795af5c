/* Programs that share memory and events: `give` gives a buffer and an event as two lines, and tells what it finds in the buffer whenever it reads a line;
 * `take MEMORY EVENT` does something with them. It runs on any driver. */
#define ON_FAILURE exit(1)
#include <stdlib.h>
#include <string.h>
#include "../../../hook/preload/tests/driver.h"

typedef struct {
    unsigned char bytes[64];
} shared;

static void put(shared *handle) {
    for (int i = 0; i < 64; i++) printf("%02x", handle->bytes[i]);
    printf("\n");
}

static shared get(const char *text) {
    shared handle = {{0}};
    for (int i = 0; i < 64; i++) {
        unsigned byte = 0;
        sscanf(text + 2 * i, "%2x", &byte);
        handle.bytes[i] = byte;
    }
    return handle;
}

static int give(void) {
    begin();
    void *event = NULL, *stream = NULL;
    shared memory, record = {{0}}, again;
    ptr at = allocate(4 * mib);
    CALL("cuStreamCreate", (void **, unsigned), &stream, 1);
    CALL("cuIpcGetMemHandle", (shared *, ptr), &memory, at);
    CALL("cuIpcGetMemHandle", (shared *, ptr), &again, at);
    /* A confined worker of NVIDIA's driver shares no events. */
    int code = TRY("cuEventCreate", (void **, unsigned), &event, 2 | 4);
    if (!code) CALL("cuIpcGetEventHandle", (shared *, void *), &record, event);
    CALL("cuMemsetD32Async", (ptr, unsigned, size_t, void *), at, 1234, mib, stream);
    if (!code) CALL("cuEventRecord", (void *, void *), event, stream);
    else CALL("cuStreamSynchronize", (void *), stream);
    put(&memory);
    put(&record);
    /* Neither an address that is none, nor an event that was not made for it. */
    void *plain = NULL;
    CALL("cuEventCreate", (void **, unsigned), &plain, 0);
    if (code) printf("no events: %d, ", code);
    printf("wrong: %d %d\n", TRY("cuIpcGetMemHandle", (shared *, ptr), &again, 64) != 0,
           TRY("cuIpcGetEventHandle", (shared *, void *), &again, plain) != 0);
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        if (!strncmp(line, "free", 4)) CALL("cuMemFree_v2", (ptr), at);
        else printf("found: %u\n", word(at + 4096));
    }
    return 0;
}

static int take(const char *memory_text, const char *event_text) {
    begin();
    shared memory = get(memory_text), record = get(event_text);
    void *event = NULL, *stream = NULL;
    ptr at = 0, twice = 0;
    CALL("cuIpcOpenMemHandle_v2", (ptr *, shared, unsigned), &at, memory, 1);
    CALL("cuIpcOpenMemHandle_v2", (ptr *, shared, unsigned), &twice, memory, 1);
    CALL("cuStreamCreate", (void **, unsigned), &stream, 1);
    if (memcmp(&record, &(shared){{0}}, sizeof record)) {
        CALL("cuIpcOpenEventHandle", (void **, shared), &event, record);
        CALL("cuStreamWaitEvent", (void *, void *, unsigned), stream, event, 0);
        CALL("cuStreamSynchronize", (void *), stream);
        CALL("cuEventSynchronize", (void *), event);
    }
    printf("opened: %d %u %u\n", at == twice, word(at), word(at + 4 * mib - 4));
    CALL("cuIpcCloseMemHandle", (ptr), twice);
    CALL("cuMemsetD32_v2", (ptr, unsigned, size_t), at, 4321, mib);
    CALL("cuCtxSynchronize", (void));
    printf("written\n");
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        uint32_t value = 77;
        CALL("cuMemcpyHtoD_v2", (ptr, const void *, size_t), at + 4096, &value, 4);
        printf("still: %u %u\n", word(at), word(at + 4096));
    }
    CALL("cuIpcCloseMemHandle", (ptr), at);
    uint32_t value = 0;
    printf("closed: %d %d\n", TRY("cuIpcCloseMemHandle", (ptr), at) != 0, TRY("cuMemcpyDtoH_v2", (void *, ptr, size_t), &value, at, 4) != 0);
    return 0;
}

/* What a handle that was made up is refused with: of memory, and of an event. */
static int forge(const char *memory_text, const char *event_text) {
    begin();
    ptr at = 0;
    void *event = NULL;
    int memory = TRY("cuIpcOpenMemHandle_v2", (ptr *, shared, unsigned), &at, get(memory_text), 1);
    printf("refused: %d %d\n", memory, TRY("cuIpcOpenEventHandle", (void **, shared), &event, get(event_text)));
    return 0;
}

int main(int count, char **arguments) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (count == 2 && !strcmp(arguments[1], "give")) return give();
    if (count == 4 && !strcmp(arguments[1], "take")) return take(arguments[2], arguments[3]);
    if (count == 4 && !strcmp(arguments[1], "forge")) return forge(arguments[2], arguments[3]);
    return 2;
}
