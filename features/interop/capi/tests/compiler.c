/* The compiler of a driver that is none: it works until what it has asked for at the end has run. */
#include <stdlib.h>

static volatile int ended;

static void end(void) { ended = 1; }

__attribute__((constructor)) static void begin(void) { atexit(end); }

void compile(void) {
    if (ended) abort();
}
