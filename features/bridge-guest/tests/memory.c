/* Takes device memory: all that it gets (`fill`), or 40 MiB until its standard input ends (`hold`). */
#define ON_FAILURE exit(1)
#include <stdlib.h>
#include <string.h>
#include "../../hook-preload/tests/driver.h"

int main(int count, char **arguments) {
    if (count < 2) return 2;
    begin();
    if (!strcmp(arguments[1], "hold")) {
        allocate(40 * mib);
        printf("holds\n");
        fflush(stdout);
        return getchar() != EOF;
    }
    int made = 0, code = 0;
    for (ptr at; !code && made < 100; made += !code) code = TRY("cuMemAlloc_v2", (ptr *, size_t), &at, 8 * mib);
    size_t left = 0, total = 0;
    CALL("cuMemGetInfo_v2", (size_t *, size_t *), &left, &total);
    printf("made %d, then %d, of %zu MiB\n", made, code, total / mib);
    return left >= 8 * mib;
}
