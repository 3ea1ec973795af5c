/* Graphs whose nodes are made by hand, copies that are few programs' own, the compiler's logs, and peers: each tells what comes of it, which is the same on
 * every driver. Its argument says which. */
#define ON_FAILURE exit(1)
#include <stdlib.h>
#include <string.h>
#include "../../hook-preload/tests/driver.h"

/* The first line is for the fake driver, which has these kernels. */
static const char *ptx =
    "// vm-cuda-fake\n"
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry add(.param .u64 d, .param .u64 a, .param .u64 b, .param .u64 n) {\n"
    ".reg .pred %p; .reg .b32 %r<8>; .reg .b64 %x<10>;\n"
    "ld.param.u64 %x1, [d]; ld.param.u64 %x2, [a]; ld.param.u64 %x3, [b]; ld.param.u64 %x4, [n];\n"
    "mov.u32 %r3, %tid.x; cvt.u64.u32 %x5, %r3; setp.ge.u64 %p, %x5, %x4; @%p bra end;\n"
    "shl.b64 %x5, %x5, 2; add.u64 %x1, %x1, %x5; add.u64 %x2, %x2, %x5; add.u64 %x3, %x3, %x5;\n"
    "ld.global.u32 %r4, [%x2]; ld.global.u32 %r5, [%x3]; add.u32 %r4, %r4, %r5; st.global.u32 [%x1], %r4;\n"
    "end: ret;\n}\n"
    ".visible .entry store(.param .u64 d, .param .u32 v) {\n"
    ".reg .b32 %r<4>; .reg .b64 %x<4>;\n"
    "ld.param.u64 %x1, [d]; ld.param.u32 %r1, [v]; st.global.u32 [%x1], %r1; ret;\n}\n";

typedef void *handle;
typedef struct {
    handle function;
    unsigned grid[3], block[3], shared;
    void **parameters, **extra;
    handle kernel, context;
} kernel_node;
typedef struct {
    ptr at;
    size_t pitch;
    unsigned value, unit;
    size_t width, height;
} fill_node;
typedef struct {
    void (*function)(void *);
    void *data;
} host_node;
typedef struct {
    size_t x, y, z, lod;
    unsigned kind;
    const void *host;
    ptr device;
    handle array, context;
    size_t pitch, height;
} end3;
typedef struct {
    end3 from, to;
    size_t width, height, depth;
} copy3;
typedef struct {
    int kind, reserved[3];
    union {
        long long words[29];
        kernel_node kernel;
        host_node host;
        struct {
            fill_node fill;
            handle context;
        } fill;
        struct {
            int flags, reserved;
            handle context;
            copy3 copy;
        } copy;
        handle handle;
    } of;
    long long last;
} any_node;
_Static_assert(sizeof(any_node) == 256, "as the driver has it");

enum { N = 64 };
static handle module, add, store, stream;
static ptr x, y, z;
static uint32_t *host, *back;

static handle function(const char *name) {
    handle found = NULL;
    CALL("cuModuleGetFunction", (handle *, handle, const char *), &found, module, name);
    return found;
}

static void prepare(void) {
    begin();
    CALL("cuModuleLoadData", (handle *, const void *), &module, ptx);
    add = function("add"), store = function("store");
    CALL("cuStreamCreate", (handle *, unsigned), &stream, 1);
    x = allocate(4 * N), y = allocate(4 * N), z = allocate(4 * N);
    CALL("cuMemHostAlloc", (void **, size_t, unsigned), (void **)&host, 4 * N, 0);
    CALL("cuMemHostAlloc", (void **, size_t, unsigned), (void **)&back, 4 * N, 0);
    for (int i = 0; i < N; i++) host[i] = i, back[i] = 0;
}

static unsigned long sum;
static unsigned calls;
static void add_up(void *argument) {
    sum = 0, calls++;
    for (int i = 0; i < N; i++) sum += back[i] * (unsigned long)(uintptr_t)argument;
}
static unsigned ended;
static void end(void *argument) { ended += (unsigned)(uintptr_t)argument; }

static handle new_graph(void) {
    handle graph = NULL;
    CALL("cuGraphCreate", (handle *, unsigned), &graph, 0);
    return graph;
}

static copy3 to_device(ptr to, const void *from) {
    return (copy3){.from = {.kind = 1, .host = from, .pitch = 4 * N}, .to = {.kind = 2, .device = to, .pitch = 4 * N}, .width = 4 * N, .height = 1, .depth = 1};
}
static copy3 to_host(void *to, ptr from) {
    return (copy3){.from = {.kind = 2, .device = from, .pitch = 4 * N}, .to = {.kind = 1, .host = to, .pitch = 4 * N}, .width = 4 * N, .height = 1, .depth = 1};
}

static void run(handle exec, const char *what) {
    sum = 0;
    CALL("cuGraphLaunch", (handle, handle), exec, stream);
    CALL("cuStreamSynchronize", (handle), stream);
    printf("%s: sum %lu, first %u, last %u, z %u\n", what, sum, back[0], back[N - 1], word(z));
}

#define ADD_TYPES (handle *, handle, const handle *, size_t, const void *)
#define ADD_TYPES_IN (handle *, handle, const handle *, size_t, const void *, handle)

static handle stored, fill_of, copied, added, returned, summed, nothing, inner, recorded, waited;

static uint64_t count = N;
static handle make(void) {
    handle graph = new_graph(), child = new_graph();
    uint32_t value = 77;
    void *to_store[] = {&z, &value};
    kernel_node kernel = {.function = store, .grid = {1, 1, 1}, .block = {1, 1, 1}, .parameters = to_store};
    CALL("cuGraphAddKernelNode_v2", ADD_TYPES, &stored, child, NULL, 0, &kernel);
    value = 1; /* It was read. */
    fill_node fill = {.at = x, .value = 3, .unit = 4, .width = N, .height = 1};
    copy3 in = to_device(y, host), out = to_host(back, z);
    /* In an order that is not that of their dependencies, which come after them. */
    host_node sums = {add_up, (void *)2};
    CALL("cuGraphAddHostNode", ADD_TYPES, &summed, graph, NULL, 0, &sums);
    CALL("cuGraphAddMemcpyNode", ADD_TYPES_IN, &returned, graph, NULL, 0, &out, context);
    ptr d = z, a = x, b = y;
    void *to_add[] = {&d, &a, &b, &count};
    kernel = (kernel_node){.function = add, .grid = {1, 1, 1}, .block = {N, 1, 1}, .parameters = to_add};
    CALL("cuGraphAddKernelNode_v2", ADD_TYPES, &added, graph, NULL, 0, &kernel);
    CALL("cuGraphAddMemsetNode", ADD_TYPES_IN, &fill_of, graph, NULL, 0, &fill, context);
    CALL("cuGraphAddMemcpyNode", ADD_TYPES_IN, &copied, graph, NULL, 0, &in, context);
    handle from[] = {fill_of, copied, added, returned}, to[] = {added, added, returned, summed};
    CALL("cuGraphAddDependencies", (handle, const handle *, const handle *, size_t), graph, from, to, 4);
    CALL("cuGraphAddEmptyNode", (handle *, handle, const handle *, size_t), &nothing, graph, &summed, 1);
    CALL("cuGraphAddChildGraphNode", ADD_TYPES, &inner, graph, &nothing, 1, child);
    CALL("cuGraphDestroy", (handle), child); /* The node has its own. */
    handle event = NULL;
    CALL("cuEventCreate", (handle *, unsigned), &event, 0);
    CALL("cuGraphAddEventRecordNode", ADD_TYPES, &recorded, graph, &inner, 1, event);
    any_node any = {.kind = 6, .of.handle = event};
    CALL("cuGraphAddNode", ADD_TYPES, &waited, graph, &recorded, 1, &any);
    return graph;
}

static void look(handle graph) {
    size_t nodes = 0, edges = 0, roots = 0;
    CALL("cuGraphGetNodes", (handle, handle *, size_t *), graph, NULL, &nodes);
    CALL("cuGraphGetEdges", (handle, handle *, handle *, size_t *), graph, NULL, NULL, &edges);
    CALL("cuGraphGetRootNodes", (handle, handle *, size_t *), graph, NULL, &roots);
    handle all[32] = {0}, from[32] = {0}, to[32] = {0};
    size_t room = 32;
    CALL("cuGraphGetNodes", (handle, handle *, size_t *), graph, all, &room);
    int kinds[16] = {0};
    for (size_t i = 0; i < nodes; i++) {
        int kind = -1;
        CALL("cuGraphNodeGetType", (handle, int *), all[i], &kind);
        if (kind >= 0 && kind < 16) kinds[kind]++;
    }
    printf("%zu nodes (%zu), %zu edges, %zu roots, kinds", nodes, room, edges, roots);
    for (int i = 0; i < 8; i++) printf(" %d", kinds[i]);
    room = 32;
    CALL("cuGraphGetEdges", (handle, handle *, handle *, size_t *), graph, from, to, &room);
    int found = 0;
    for (size_t i = 0; i < room; i++) found += (from[i] == added && to[i] == returned) || (from[i] == returned && to[i] == summed);
    size_t before = 0, behind = 0;
    CALL("cuGraphNodeGetDependencies", (handle, handle *, size_t *), added, NULL, &before);
    CALL("cuGraphNodeGetDependentNodes", (handle, handle *, size_t *), added, NULL, &behind);
    printf(", found %d, before %zu, behind %zu\n", found, before, behind);
}

static void show(void) {
    kernel_node kernel = {0};
    CALL("cuGraphKernelNodeGetParams_v2", (handle, kernel_node *), added, &kernel);
    void **kept = kernel.parameters;
    printf("kernel: %d, %u blocks of %u, parameters %d%d%d %llu\n", (kernel.function ? kernel.function : kernel.kernel) == add, kernel.grid[0], kernel.block[0],
           *(ptr *)kept[0] == z, *(ptr *)kept[1] == x, *(ptr *)kept[2] == y, *(unsigned long long *)kept[3]);
    CALL("cuGraphKernelNodeGetParams_v2", (handle, kernel_node *), added, &kernel);
    printf("again: %d %llu\n", kernel.parameters == kept, *(unsigned long long *)kept[3]);
    fill_node fill = {0};
    CALL("cuGraphMemsetNodeGetParams", (handle, fill_node *), fill_of, &fill);
    printf("fill: %d %u %u %zu %zu\n", fill.at == x, fill.value, fill.unit, fill.width, fill.height);
    copy3 copy = {0};
    CALL("cuGraphMemcpyNodeGetParams", (handle, copy3 *), copied, &copy);
    printf("copy: %d %zu %zu %zu\n", copy.to.device == y, copy.width, copy.height, copy.depth);
    host_node call = {0};
    CALL("cuGraphHostNodeGetParams", (handle, host_node *), summed, &call);
    printf("function: %d %d\n", call.function == add_up, call.data == (void *)2);
    handle child = NULL, event = NULL, other = NULL;
    size_t nodes = 0;
    CALL("cuGraphChildGraphNodeGetGraph", (handle, handle *), inner, &child);
    CALL("cuGraphGetNodes", (handle, handle *, size_t *), child, NULL, &nodes);
    CALL("cuGraphEventRecordNodeGetEvent", (handle, handle *), recorded, &event);
    CALL("cuGraphEventWaitNodeGetEvent", (handle, handle *), waited, &other);
    printf("graph: %zu, event: %d\n", nodes, event == other && event);
}

static void change(handle graph) {
    handle exec = NULL;
    CALL("cuGraphInstantiateWithFlags", (handle *, handle, unsigned long long), &exec, graph, 0);
    run(exec, "made");
    /* The graph that runs alone, then all that there is of the other. */
    ptr d = z, a = x, b = x;
    uint64_t half = N / 2;
    void *doubled[] = {&d, &a, &b, &half};
    kernel_node kernel = {.function = add, .grid = {1, 1, 1}, .block = {N, 1, 1}, .parameters = doubled};
    CALL("cuGraphExecKernelNodeSetParams_v2", (handle, handle, const kernel_node *), exec, added, &kernel);
    fill_node fill = {.at = x, .value = 5, .unit = 4, .width = N, .height = 1};
    CALL("cuGraphExecMemsetNodeSetParams", (handle, handle, const fill_node *, handle), exec, fill_of, &fill, context);
    host_node sums = {add_up, (void *)1};
    CALL("cuGraphExecHostNodeSetParams", (handle, handle, const host_node *), exec, summed, &sums);
    run(exec, "changed");
    any_node any = {.kind = 2, .of.fill = {{.at = x, .value = 7, .unit = 4, .width = N, .height = 1}, context}};
    CALL("cuGraphExecNodeSetParams", (handle, handle, const any_node *), exec, fill_of, &any);
    run(exec, "by any");
    unsigned enabled = 9;
    CALL("cuGraphNodeSetEnabled", (handle, handle, unsigned), exec, fill_of, 0);
    CALL("cuGraphNodeGetEnabled", (handle, handle, unsigned *), exec, fill_of, &enabled);
    CALL("cuMemsetD32_v2", (ptr, unsigned, size_t), x, 100, N);
    CALL("cuCtxSynchronize", (void));
    run(exec, "not filled");
    printf("enabled: %u\n", enabled);
    fill.value = 11;
    CALL("cuGraphMemsetNodeSetParams", (handle, const fill_node *), fill_of, &fill);
    copy3 other = to_host(back, x);
    CALL("cuGraphMemcpyNodeSetParams", (handle, const copy3 *), returned, &other);
    CALL("cuGraphHostNodeSetParams", (handle, const host_node *), summed, &sums);
    CALL("cuGraphKernelNodeSetParams_v2", (handle, const kernel_node *), added, &kernel);
    show();
    struct {
        unsigned result;
        handle node, from;
    } info = {9, NULL, NULL};
    CALL("cuGraphExecUpdate_v2", (handle, handle, void *), exec, graph, &info);
    printf("updated: %u\n", info.result);
    run(exec, "updated");
    /* One node less is another graph. */
    handle clone = NULL, node = NULL;
    CALL("cuGraphClone", (handle *, handle), &clone, graph);
    CALL("cuGraphNodeFindInClone", (handle *, handle, handle), &node, waited, clone);
    CALL("cuGraphDestroyNode", (handle), node);
    int code = TRY("cuGraphExecUpdate_v2", (handle, handle, void *), exec, clone, &info);
    printf("refused: %d %d\n", code, info.result != 0);
    size_t nodes = 0;
    CALL("cuGraphGetNodes", (handle, handle *, size_t *), clone, NULL, &nodes);
    printf("clone: %zu, gone: %d\n", nodes, TRY("cuGraphNodeFindInClone", (handle *, handle, handle), &node, waited, clone) != 0);
    struct {
        unsigned long long flags;
        handle stream, node;
        unsigned result;
    } params = {2, stream, NULL, 9};
    handle second = NULL;
    CALL("cuGraphInstantiateWithParams", (handle *, handle, void *), &second, clone, &params);
    CALL("cuGraphUpload", (handle, handle), second, stream);
    unsigned long long flags = 0;
    CALL("cuGraphExecGetFlags", (handle, unsigned long long *), second, &flags);
    printf("with: %u, flags %llu\n", params.result, flags);
    run(second, "second");
    CALL("cuGraphExecDestroy", (handle), second);
    CALL("cuGraphDestroy", (handle), clone);
    handle from[] = {fill_of}, to[] = {added};
    CALL("cuGraphRemoveDependencies", (handle, const handle *, const handle *, size_t), graph, from, to, 1);
    look(graph);
    CALL("cuGraphExecDestroy", (handle), exec);
}

static void graphs(void) {
    prepare();
    handle graph = make();
    look(graph);
    show();
    change(graph);
    char path[] = "/tmp/graph-XXXXXX", text[8] = "";
    int file = mkstemp(path);
    CALL("cuGraphDebugDotPrint", (handle, const char *, unsigned), graph, path, 0);
    ssize_t len = pread(file, text, 7, 0);
    unlink(path);
    printf("printed: %zd %s\n", len, text);
    /* Objects live as long as a graph or what runs of it. */
    handle object = NULL, exec = NULL;
    CALL("cuUserObjectCreate", (handle *, void *, void (*)(void *), unsigned, unsigned), &object, (void *)5, end, 1, 1);
    CALL("cuGraphRetainUserObject", (handle, handle, unsigned, unsigned), graph, object, 1, 1);
    CALL("cuGraphInstantiateWithFlags", (handle *, handle, unsigned long long), &exec, graph, 0);
    CALL("cuGraphDestroy", (handle), graph);
    unsigned before = ended;
    CALL("cuGraphExecDestroy", (handle), exec);
    for (int i = 0; i < 1000 && !__atomic_load_n(&ended, __ATOMIC_SEQ_CST); i++) usleep(1000);
    printf("object: %u, then %u\n", before, ended);
    /* What a capture recorded is known as what is made by hand. */
    CALL("cuStreamBeginCapture_v2", (handle, int), stream, 2);
    uint32_t value = 4321;
    void *to_store[] = {&z, &value};
    CALL("cuLaunchKernel", (handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, handle, void **, void **), store, 1, 1, 1, 1, 1, 1, 0, stream,
         to_store, NULL);
    CALL("cuLaunchHostFunc", (handle, void (*)(void *), void *), stream, end, (void *)100);
    CALL("cuStreamEndCapture", (handle, handle *), stream, &graph);
    handle nodes[4] = {0}, launch = NULL, call = NULL;
    size_t room = 4;
    CALL("cuGraphGetNodes", (handle, handle *, size_t *), graph, nodes, &room);
    for (size_t i = 0; i < room; i++) {
        int kind = -1;
        CALL("cuGraphNodeGetType", (handle, int *), nodes[i], &kind);
        if (kind == 0) launch = nodes[i];
        if (kind == 3) call = nodes[i];
    }
    kernel_node kernel = {0};
    host_node host_call = {0};
    CALL("cuGraphKernelNodeGetParams_v2", (handle, kernel_node *), launch, &kernel);
    CALL("cuGraphHostNodeGetParams", (handle, host_node *), call, &host_call);
    printf("captured: %zu, %u, %d %d\n", room, *(uint32_t *)kernel.parameters[1], host_call.function == end, host_call.data == (void *)100);
    value = 1234;
    kernel.parameters = to_store;
    CALL("cuGraphKernelNodeSetParams_v2", (handle, const kernel_node *), launch, &kernel);
    CALL("cuGraphInstantiateWithFlags", (handle *, handle, unsigned long long), &exec, graph, 0);
    CALL("cuGraphLaunch", (handle, handle), exec, stream);
    CALL("cuGraphLaunch", (handle, handle), exec, stream);
    CALL("cuStreamSynchronize", (handle), stream);
    printf("launched: %u, called to %u\n", word(z), ended);
    printf("wrong: %d %d %d\n", TRY("cuGraphExecGetFlags", (handle, unsigned long long *), NULL, &(unsigned long long){0}) != 0, TRY("cuGraphNodeGetType", (handle, int *), NULL, &(int){0}) != 0,
           TRY("cuGraphAddKernelNode_v2", ADD_TYPES, &launch, graph, NULL, 0, NULL) != 0);
}

/* A node keeps memory that only the program has: a driver of this process can copy it, the bridge says that it can't. */
static void own(void) {
    prepare();
    uint32_t *private = malloc(4 * N);
    copy3 in = to_device(y, private);
    handle node = NULL;
    printf("own: %d\n", TRY("cuGraphAddMemcpyNode", ADD_TYPES_IN, &node, new_graph(), NULL, 0, &in, context));
}

/* Copies between arrays, the program's memory (its own, and that of both sides) and a device's; on a stream, and without. */
static void copies(void) {
    prepare();
    struct {
        size_t width, height;
        unsigned format, channels;
    } line = {1 << 15, 0, 0x20, 1}, plane = {40, 6, 0x20, 1};
    enum { BYTES = 4 << 15, PART = 4 * N };
    handle array = NULL, other = NULL, flat = NULL;
    CALL("cuArrayCreate_v2", (handle *, void *), &array, &line);
    CALL("cuArrayCreate_v2", (handle *, void *), &other, &line);
    CALL("cuArrayCreate_v2", (handle *, void *), &flat, &plane);
    uint32_t *private = malloc(BYTES), *returned = calloc(1, BYTES);
    for (int i = 0; i < BYTES / 4; i++) private[i] = 3 * i;
    CALL("cuMemcpyHtoA_v2", (handle, size_t, const void *, size_t), array, 0, private, BYTES);
    CALL("cuMemcpyAtoA_v2", (handle, size_t, handle, size_t, size_t), other, 8, array, 0, BYTES - 8);
    CALL("cuMemcpyAtoH_v2", (void *, handle, size_t, size_t), returned, other, 8, BYTES - 8);
    printf("private: %d, last %u\n", memcmp(private, returned, BYTES - 8), returned[BYTES / 4 - 3]);
    CALL("cuMemcpyHtoAAsync_v2", (handle, size_t, const void *, size_t, handle), array, 16, host, PART, stream);
    CALL("cuMemcpyAtoHAsync_v2", (void *, handle, size_t, size_t, handle), back, array, 12, PART, stream);
    CALL("cuMemcpyAtoHAsync_v2", (void *, handle, size_t, size_t, handle), returned, array, 16, PART, stream);
    CALL("cuStreamSynchronize", (handle), stream);
    printf("of both: %u %u %u, %u\n", back[0], back[1], back[N - 1], returned[N - 1]);
    CALL("cuMemcpyAtoD_v2", (ptr, handle, size_t, size_t), x, array, 16, PART);
    CALL("cuMemcpyDtoA_v2", (handle, size_t, ptr, size_t), other, 4, x + 4, PART - 4);
    CALL("cuMemcpyAtoH_v2", (void *, handle, size_t, size_t), returned, other, 0, PART);
    printf("of the device: %u, %u, then %u\n", word(x + 4 * (N - 1)), returned[1], returned[N - 1]);
    copy3 in = {.from = {.kind = 1, .host = private, .pitch = 160}, .to = {.kind = 3, .array = flat}, .width = 160, .height = 6, .depth = 1};
    copy3 out = {.from = {.kind = 3, .array = flat, .x = 4, .y = 2}, .to = {.kind = 1, .host = returned, .pitch = 40}, .width = 40, .height = 3, .depth = 1};
    CALL("cuMemcpy3D_v2", (copy3 *), &in);
    CALL("cuMemcpy3D_v2", (copy3 *), &out);
    printf("of a plane: %u %u\n", returned[0], returned[29]);
    printf("too far: %d\n", TRY("cuMemcpyAtoH_v2", (void *, handle, size_t, size_t), returned, array, BYTES, 4) != 0);
    struct {
        int order;
        int rest[5];
    } attributes[2] = {{1, {0}}, {2, {0}}};
    ptr to[] = {y, z, (ptr)returned}, from[] = {(ptr)private, (ptr)host, x};
    size_t sizes[] = {PART, PART, PART}, places[] = {0, 2};
    memset(returned, 0, PART);
#define BATCH (ptr *, ptr *, size_t *, size_t, void *, size_t *, size_t, handle)
    CALL("cuMemcpyBatchAsync_v2", BATCH, to, from, sizes, 3, attributes, places, 2, stream);
    CALL("cuStreamSynchronize", (handle), stream);
    printf("batch: %u %u %u\n", word(y + 4 * (N - 1)), word(z + 4 * (N - 1)), returned[N - 1]);
    printf("no stream: %d\n", TRY("cuMemcpyBatchAsync_v2", BATCH, to, from, sizes, 3, attributes, places, 2, NULL) != 0);
}

/* Why a text is no module: as much of that as there is room for. */
static void logs(void) {
    prepare();
    static const char *wrong = "no module\n";
    for (int room = 200; room > 0; room -= 180) {
        char error[256], info[256];
        memset(error, 'x', sizeof error), memset(info, 'x', sizeof info);
        unsigned options[] = {5, 6, 3, 4};
        void *values[] = {error, (void *)(uintptr_t)room, info, (void *)(uintptr_t)room};
        handle loaded = NULL;
        int code = TRY("cuModuleLoadDataEx", (handle *, const void *, unsigned, unsigned *, void **), &loaded, wrong, 4, options, values);
        error[room] = error[room] == 'x' ? 0 : '!';
        printf("%d: %s: %zu, %u %u, %c\n", room, error, strlen(error), (unsigned)(uintptr_t)values[1], (unsigned)(uintptr_t)values[3], info[room]);
        code |= TRY("cuLibraryLoadData", (handle *, const void *, unsigned *, void **, unsigned, void *, void *, unsigned), &loaded, wrong, options, values, 4, NULL, NULL, 0);
        printf("refused: %d\n", code != 0);
    }
    char error[256] = "", info[256] = "";
    unsigned options[] = {5, 6, 3, 4};
    void *values[] = {error, (void *)255, info, (void *)255}, *made = NULL;
    size_t size = 0;
    handle linker = NULL, loaded = NULL;
    CALL("cuLinkCreate_v2", (unsigned, unsigned *, void **, handle *), 4, options, values, &linker);
    CALL("cuLinkAddData_v2", (handle, int, const void *, size_t, const char *, unsigned, unsigned *, void **), linker, 1, ptx, strlen(ptx) + 1, "text", 0, NULL, NULL);
    CALL("cuLinkComplete", (handle, void **, size_t *), linker, &made, &size);
    CALL("cuModuleLoadData", (handle *, const void *), &loaded, made);
    printf("linked: %d, %s\n", size > 0 && loaded, error);
    CALL("cuLinkDestroy", (handle), linker);
    CALL("cuLinkCreate_v2", (unsigned, unsigned *, void **, handle *), 4, options, values, &linker);
    int code = TRY("cuLinkAddData_v2", (handle, int, const void *, size_t, const char *, unsigned, unsigned *, void **), linker, 1, wrong, strlen(wrong) + 1, "text", 0, NULL, NULL);
    if (!code) code = TRY("cuLinkComplete", (handle, void **, size_t *), linker, &made, &size);
    if (!code) code = TRY("cuModuleLoadData", (handle *, const void *), &loaded, made);
    printf("not linked: %d, %s\n", code != 0, error);
}

/* Two devices that reach each other's memory. */
static void peers(void) {
    prepare();
    int devices = 0, reaches = 0, second = 0, attribute = 0;
    CALL("cuDeviceGetCount", (int *), &devices);
    if (devices < 2) {
        printf("one device\n");
        return;
    }
    CALL("cuDeviceGet", (int *, int), &second, 1);
    CALL("cuDeviceCanAccessPeer", (int *, int, int), &reaches, 0, second);
    CALL("cuDeviceGetP2PAttribute", (int *, int, int, int), &attribute, 2, 0, second);
    handle other = NULL;
    CALL("cuDevicePrimaryCtxRetain", (handle *, int), &other, second);
    CALL("cuCtxSetCurrent", (handle), other);
    ptr far = allocate(4 * N);
    CALL("cuMemsetD32_v2", (ptr, unsigned, size_t), far, 6, N);
    CALL("cuCtxSynchronize", (void));
    CALL("cuCtxSetCurrent", (handle), context);
    CALL("cuMemcpyPeer", (ptr, handle, ptr, handle, size_t), x, context, far, other, 4 * N);
    CALL("cuMemsetD32_v2", (ptr, unsigned, size_t), y, 8, N);
    CALL("cuCtxSynchronize", (void));
    CALL("cuMemcpyPeerAsync", (ptr, handle, ptr, handle, size_t, handle), far, other, y, context, 4, stream);
    copy3 copy = {.from = {.kind = 2, .device = far, .context = other, .pitch = 16}, .to = {.kind = 2, .device = z, .context = context, .pitch = 16}, .width = 12, .height = 4, .depth = 1};
    CALL("cuMemcpy3DPeerAsync", (copy3 *, handle), &copy, stream);
    CALL("cuStreamSynchronize", (handle), stream);
    printf("reaches: %d %d, copied: %u, back: %u %u\n", reaches, attribute, word(x + 4 * (N - 1)), word(z), word(z + 4));
    printf("enabled: %d", TRY("cuCtxEnablePeerAccess", (handle, unsigned), other, 0));
    printf(", again: %d", TRY("cuCtxEnablePeerAccess", (handle, unsigned), other, 0));
    uint32_t value = 99;
    void *to_store[] = {&far, &value};
    CALL("cuLaunchKernel", (handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, handle, void **, void **), store, 1, 1, 1, 1, 1, 1, 0, stream,
         to_store, NULL);
    CALL("cuStreamSynchronize", (handle), stream);
    CALL("cuMemcpyPeer", (ptr, handle, ptr, handle, size_t), x, context, far, other, 4);
    printf(", stored: %u", word(x));
    printf(", disabled: %d", TRY("cuCtxDisablePeerAccess", (handle), other));
    printf(", again: %d\n", TRY("cuCtxDisablePeerAccess", (handle), other));
}

static size_t shared_of(int threads) {
    return 64 * (size_t)threads;
}

/* The block with which most threads are resident. */
static void occupancy(void) {
    prepare();
    for (int limit = 0; limit <= 300; limit += 100) {
        int grid[3] = {0}, block[3] = {0};
        CALL("cuOccupancyMaxPotentialBlockSize", (int *, int *, handle, size_t (*)(int), size_t, int), grid, block, add, NULL, 0, limit);
        CALL("cuOccupancyMaxPotentialBlockSize", (int *, int *, handle, size_t (*)(int), size_t, int), grid + 1, block + 1, add, shared_of, 7, limit);
        CALL("cuOccupancyMaxPotentialBlockSizeWithFlags", (int *, int *, handle, size_t (*)(int), size_t, int, unsigned), grid + 2, block + 2, add, NULL, 40 << 10, limit, 1);
        printf("%d: %d %d, %d %d, %d %d\n", limit, grid[0], block[0], grid[1], block[1], grid[2], block[2]);
    }
    int grid = 0;
    printf("wrong: %d\n", TRY("cuOccupancyMaxPotentialBlockSize", (int *, int *, handle, size_t (*)(int), size_t, int), &grid, NULL, add, NULL, 0, 0));
}

int main(int argc, char **arguments) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    const char *what = argc > 1 ? arguments[1] : "";
    if (!strcmp(what, "graphs")) graphs();
    else if (!strcmp(what, "own")) own();
    else if (!strcmp(what, "copies")) copies();
    else if (!strcmp(what, "logs")) logs();
    else if (!strcmp(what, "peers")) peers();
    else if (!strcmp(what, "occupancy")) occupancy();
    else return 2;
    (void)mib;
    return 0;
}
