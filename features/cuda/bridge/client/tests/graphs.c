/* Graphs whose nodes are made by hand, copies that are few programs' own, the compiler's logs, and peers: each tells what comes of it, which is the same on
 * every driver. Its argument says which. */
#define ON_FAILURE exit(1)
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "../../../hook/preload/tests/driver.h"

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
    char path[] = "/tmp/graph-XXXXXX", text[8192] = "";
    int file = mkstemp(path);
    CALL("cuGraphDebugDotPrint", (handle, const char *, unsigned), graph, path, 0);
    ssize_t len = pread(file, text, sizeof text - 1, 0), verbose = 0;
    CALL("cuGraphDebugDotPrint", (handle, const char *, unsigned), graph, path, 1);
    verbose = pread(file, text, sizeof text - 1, 0);
    unlink(path);
    printf("printed: %.7s, names a kernel: %d, says more: %d\n", text, strstr(text, "\"add") != NULL, verbose > len);
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

/* Copies of memory that only the program has: read when the node runs, and written before anybody sees that it has. */
static uint32_t *mine, *theirs;
static void write_up(void *argument) {
    for (int i = 0; i < N; i++) mine[i] = i + (unsigned)(uintptr_t)argument;
}
static void add_theirs(void *argument) {
    sum = 0;
    for (int i = 0; i < N; i++) sum += theirs[i] * (unsigned long)(uintptr_t)argument;
}
static uint32_t *memory_of(size_t words, uint32_t first) {
    uint32_t *made = malloc(4 * words);
    for (size_t i = 0; i < words; i++) made[i] = first + i;
    return made;
}
static void launch(handle exec, const char *what) {
    sum = 0;
    CALL("cuGraphLaunch", (handle, handle), exec, stream);
    CALL("cuStreamSynchronize", (handle), stream);
    printf("%s: sum %lu, mine %u, theirs %u %u\n", what, sum, mine[0], theirs[0], theirs[N - 1]);
}
static handle runs(handle graph) {
    handle exec = NULL;
    CALL("cuGraphInstantiateWithFlags", (handle *, handle, unsigned long long), &exec, graph, 0);
    return exec;
}

static void hostmem(void) {
    prepare();
    mine = memory_of(N, 10), theirs = memory_of(N, 0);
    uint32_t *other = memory_of(N, 5000), *third = memory_of(N, 0);
    CALL("cuMemsetD32_v2", (ptr, unsigned, size_t), x, 7, N);
    CALL("cuCtxSynchronize", (void));
    /* A function writes what is there already, and another reads what is written before it. */
    handle graph = new_graph(), first = NULL, in_node = NULL, out_node = NULL, last = NULL;
    host_node writes = {write_up, (void *)10}, reads = {add_theirs, (void *)1};
    copy3 in = to_device(y, mine), out = to_host(theirs, z);
    CALL("cuGraphAddHostNode", ADD_TYPES, &first, graph, NULL, 0, &writes);
    CALL("cuGraphAddMemcpyNode", ADD_TYPES_IN, &in_node, graph, &first, 1, &in, context);
    void *to_add[] = {&z, &x, &y, &count};
    kernel_node kernel = {.function = add, .grid = {1, 1, 1}, .block = {N, 1, 1}, .parameters = to_add};
    CALL("cuGraphAddKernelNode_v2", ADD_TYPES, &added, graph, &in_node, 1, &kernel);
    any_node any = {.kind = 1, .of.copy = {0, 0, context, out}};
    CALL("cuGraphAddNode", ADD_TYPES, &out_node, graph, &added, 1, &any);
    CALL("cuGraphAddHostNode", ADD_TYPES, &last, graph, &out_node, 1, &reads);
    handle exec = runs(graph);
    launch(exec, "made");
    writes.data = (void *)100;
    CALL("cuGraphExecHostNodeSetParams", (handle, handle, const host_node *), exec, first, &writes);
    /* A driver may read it when the graph is launched, or when the node runs. */
    write_up((void *)100);
    launch(exec, "written anew");
    size_t nodes = 0;
    int kinds[2] = {-1, -1};
    copy3 shown = {0};
    CALL("cuGraphGetNodes", (handle, handle *, size_t *), graph, NULL, &nodes);
    CALL("cuGraphNodeGetType", (handle, int *), in_node, &kinds[0]);
    CALL("cuGraphNodeGetType", (handle, int *), out_node, &kinds[1]);
    CALL("cuGraphMemcpyNodeGetParams", (handle, copy3 *), in_node, &shown);
    printf("nodes: %zu, kinds %d %d, from %d, to %d, width %zu\n", nodes, kinds[0], kinds[1], shown.from.host == mine, shown.to.device == y, shown.width);
    handle child = NULL;
    printf("a graph in it: %d\n", TRY("cuGraphChildGraphNodeGetGraph", (handle, handle *), in_node, &child) != 0);
    /* Other memory, of what runs alone, then of the graph. */
    copy3 changed = to_device(y, other);
    CALL("cuGraphExecMemcpyNodeSetParams", (handle, handle, const copy3 *, handle), exec, in_node, &changed, context);
    launch(exec, "changed");
    copy3 to_third = to_host(third, z);
    CALL("cuGraphMemcpyNodeSetParams", (handle, const copy3 *), out_node, &to_third);
    launch(exec, "still");
    struct {
        unsigned result;
        handle node, from;
    } info = {9, NULL, NULL};
    CALL("cuGraphExecUpdate_v2", (handle, handle, void *), exec, graph, &info);
    memset(theirs, 0, 4 * N);
    write_up((void *)10);
    launch(exec, "updated");
    printf("third: %u %u\n", third[0], third[N - 1]);
    /* Several that run at once, of one graph, of its clone, and of one that it is in. */
    CALL("cuGraphMemcpyNodeSetParams", (handle, const copy3 *), out_node, &out);
    handle clone = NULL, found = NULL, outer = new_graph(), node = NULL, streams[3] = {0}, all[3];
    CALL("cuGraphClone", (handle *, handle), &clone, graph);
    CALL("cuGraphNodeFindInClone", (handle *, handle, handle), &found, out_node, clone);
    CALL("cuGraphNodeGetType", (handle, int *), found, &kinds[0]);
    CALL("cuGraphMemcpyNodeSetParams", (handle, const copy3 *), found, &to_third);
    CALL("cuGraphAddChildGraphNode", ADD_TYPES, &node, outer, NULL, 0, graph);
    CALL("cuGraphChildGraphNodeGetGraph", (handle, handle *), node, &child);
    handle inside[8] = {0};
    size_t room = 8;
    CALL("cuGraphGetNodes", (handle, handle *, size_t *), child, inside, &room);
    int copies_inside = 0;
    for (size_t i = 0; i < room; i++) {
        int kind = -1;
        CALL("cuGraphNodeGetType", (handle, int *), inside[i], &kind);
        copies_inside += kind == 1;
    }
    printf("clone: %d, inside: %zu %d\n", kinds[0], room, copies_inside);
    all[0] = runs(graph), all[1] = runs(clone), all[2] = runs(outer);
    CALL("cuGraphDestroy", (handle), clone);
    CALL("cuGraphDestroy", (handle), graph);
    CALL("cuGraphDestroy", (handle), outer);
    CALL("cuGraphExecDestroy", (handle), exec);
    for (int i = 0; i < 3; i++) CALL("cuStreamCreate", (handle *, unsigned), &streams[i], 1);
    for (int round = 0; round < 20; round++)
        for (int i = 0; i < 3; i++) CALL("cuGraphLaunch", (handle, handle), all[i], streams[i]);
    for (int i = 0; i < 3; i++) {
        CALL("cuGraphExecDestroy", (handle), all[i]);
        CALL("cuStreamSynchronize", (handle), streams[i]);
    }
    printf("at once: %u %u, %u %u\n", theirs[0], theirs[N - 1], third[0], third[N - 1]);
    /* As captures have them: of one dimension and two, and from the program's memory to the program's memory. */
    enum { WIDTH = 96, HEIGHT = 5 };
    unsigned char *plane = malloc(200 * HEIGHT), *back_plane = calloc(HEIGHT, 120);
    for (int i = 0; i < 200 * HEIGHT; i++) plane[i] = i * 7;
    ptr pitched = allocate(128 * HEIGHT);
    struct {
        size_t x, y;
        unsigned kind;
        const void *host;
        ptr device;
        handle array;
        size_t pitch, to_x, to_y;
        unsigned to_kind;
        const void *to_host;
        ptr to_device;
        handle to_array;
        size_t to_pitch, width, height;
    } in2 = {3, 1, 1, plane, 0, NULL, 200, 0, 0, 2, NULL, pitched, NULL, 128, WIDTH, HEIGHT - 1},
      out2 = {0, 0, 2, NULL, pitched, NULL, 128, 4, 0, 1, back_plane, 0, NULL, 120, WIDTH, HEIGHT - 1};
    CALL("cuStreamBeginCapture_v2", (handle, int), stream, 2);
    CALL("cuMemcpyHtoDAsync_v2", (ptr, const void *, size_t, handle), y, mine, 4 * N, stream);
    CALL("cuLaunchKernel", (handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, handle, void **, void **), add, 1, 1, 1, N, 1, 1, 0, stream, to_add,
         NULL);
    CALL("cuMemcpyDtoHAsync_v2", (void *, ptr, size_t, handle), theirs, z, 4 * N, stream);
    CALL("cuLaunchHostFunc", (handle, void (*)(void *), void *), stream, add_theirs, (void *)2);
    CALL("cuMemcpy2DAsync_v2", (void *, handle), &in2, stream);
    CALL("cuMemcpy2DAsync_v2", (void *, handle), &out2, stream);
    CALL("cuMemcpyAsync", (ptr, ptr, size_t, handle), (ptr)third, (ptr)theirs, 4 * N, stream);
    CALL("cuStreamEndCapture", (handle, handle *), stream, &graph);
    room = 8;
    CALL("cuGraphGetNodes", (handle, handle *, size_t *), graph, inside, &room);
    int kinds_inside[8] = {0};
    for (size_t i = 0; i < room; i++) CALL("cuGraphNodeGetType", (handle, int *), inside[i], &kinds_inside[i]);
    printf("captured: %zu,", room);
    int counts[5] = {0};
    for (size_t i = 0; i < room; i++) counts[kinds_inside[i] < 5 ? kinds_inside[i] : 4]++;
    printf(" kinds %d %d %d %d %d\n", counts[0], counts[1], counts[2], counts[3], counts[4]);
    exec = runs(graph);
    for (int round = 0; round < 3; round++) {
        write_up((void *)(uintptr_t)(1000 * round));
        launch(exec, "captured");
        int same = 0;
        for (int row = 0; row < HEIGHT - 1; row++) same += !memcmp(back_plane + 120 * row + 4, plane + 200 * (row + 1) + 3, WIDTH);
        printf("rows %d, gaps %d, third %u\n", same, back_plane[3] | back_plane[4 + WIDTH], third[N - 1]);
        memset(plane, round + 1, 200 * HEIGHT);
    }
    /* A copy behind the capture is none of it. */
    CALL("cuMemcpyHtoDAsync_v2", (ptr, const void *, size_t, handle), y, other, 4 * N, stream);
    CALL("cuStreamSynchronize", (handle), stream);
    printf("behind: %u\n", word(y));
    /* More than goes at once. */
    enum { LARGE = 5 << 20 };
    char *large = malloc(LARGE), *returned = calloc(1, LARGE);
    for (int i = 0; i < LARGE; i++) large[i] = i % 251;
    ptr far = allocate(LARGE);
    graph = new_graph();
    in = (copy3){.from = {.kind = 1, .host = large, .pitch = 1 << 20, .height = 5}, .to = {.kind = 2, .device = far, .pitch = 1 << 20, .height = 5}, .width = (1 << 20) - 8, .height = 5, .depth = 1};
    out = (copy3){.from = {.kind = 2, .device = far, .pitch = LARGE}, .to = {.kind = 1, .host = returned, .pitch = LARGE}, .width = LARGE, .height = 1, .depth = 1};
    CALL("cuMemsetD32_v2", (ptr, unsigned, size_t), far, 0, LARGE / 4);
    CALL("cuCtxSynchronize", (void));
    CALL("cuGraphAddMemcpyNode", ADD_TYPES_IN, &in_node, graph, NULL, 0, &in, context);
    CALL("cuGraphAddMemcpyNode", ADD_TYPES_IN, &out_node, graph, &in_node, 1, &out, context);
    exec = runs(graph);
    CALL("cuGraphLaunch", (handle, handle), exec, stream);
    CALL("cuStreamSynchronize", (handle), stream);
    int wrong = 0;
    for (int i = 0; i < LARGE; i++) wrong += returned[i] != (i % (1 << 20) < (1 << 20) - 8 ? large[i] : 0);
    printf("large: %d wrong\n", wrong);
    CALL("cuGraphExecDestroy", (handle), exec);
    CALL("cuGraphDestroy", (handle), graph);
}

/* Memory that is not there any more when its graph runs: through the bridge that is told. */
static void gone(void) {
    prepare();
    for (int writes = 0; writes < 2; writes++) {
        char *memory = mmap(NULL, 3 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        ptr far = allocate(3 << 20);
        copy3 copy = writes ? to_host(memory, far) : to_device(far, memory);
        copy.from.pitch = copy.to.pitch = copy.width = 3 << 20;
        handle graph = new_graph(), node = NULL;
        CALL("cuGraphAddMemcpyNode", ADD_TYPES_IN, &node, graph, NULL, 0, &copy, context);
        handle exec = runs(graph);
        CALL("cuGraphLaunch", (handle, handle), exec, stream);
        CALL("cuStreamSynchronize", (handle), stream);
        printf("there: 0\n");
        if (!writes) continue;
        munmap(memory + (2 << 20), 4096);
        int code = TRY("cuGraphLaunch", (handle, handle), exec, stream);
        if (!code) code = TRY("cuStreamSynchronize", (handle), stream);
        printf("gone: %d\n", code);
    }
}

/* Graphs that run as conditions say. Where the driver has a kernel that says so, a loop. */
static void conditional(void) {
    prepare();
    handle setter = NULL;
    int has_setter = !TRY("cuModuleGetFunction", (handle *, handle, const char *), &setter, module, "condition");
    for (int kind = 0; kind < 3; kind++)
        for (unsigned value = 0; value < 3; value++) {
            handle graph = new_graph(), node = NULL, *bodies = NULL;
            unsigned long long condition = 0;
            CALL("cuGraphConditionalHandleCreate", (unsigned long long *, handle, handle, unsigned, unsigned), &condition, graph, context, value, 1);
            struct {
                int kind, reserved[3];
                unsigned long long handle;
                unsigned type, size;
                handle *graphs, context;
                long long rest[26];
            } of = {.kind = 13, .handle = condition, .type = kind, .size = kind == 2 ? 3 : 1, .context = context};
            CALL("cuGraphAddNode", ADD_TYPES, &node, graph, NULL, 0, &of);
            bodies = of.graphs;
            for (unsigned i = 0; i < of.size; i++) {
                fill_node fill = {.at = x + 4 * i, .value = 100 + i, .unit = 4, .width = 1, .height = 1};
                handle filled = NULL, set = NULL;
                CALL("cuGraphAddMemsetNode", ADD_TYPES_IN, &filled, bodies[i], NULL, 0, &fill, context);
                if (kind != 1 || !has_setter) continue;
                unsigned zero = 0;
                void *to_set[] = {&condition, &zero};
                kernel_node kernel = {.function = setter, .grid = {1, 1, 1}, .block = {1, 1, 1}, .parameters = to_set};
                CALL("cuGraphAddKernelNode_v2", ADD_TYPES, &set, bodies[i], &filled, 1, &kernel);
            }
            /* A loop that nothing ends is none that a test runs. */
            if (kind == 1 && value && !has_setter) continue;
            int type = 0;
            CALL("cuGraphNodeGetType", (handle, int *), node, &type);
            CALL("cuMemsetD32_v2", (ptr, unsigned, size_t), x, 0, 3);
            CALL("cuCtxSynchronize", (void));
            handle exec = runs(graph);
            CALL("cuGraphLaunch", (handle, handle), exec, stream);
            CALL("cuStreamSynchronize", (handle), stream);
            printf("kind %d, condition %u: type %d, %u %u %u\n", kind, value, type, word(x), word(x + 4), word(x + 8));
            CALL("cuGraphExecDestroy", (handle), exec);
            CALL("cuGraphDestroy", (handle), graph);
        }
    handle graph = new_graph(), node = NULL;
    any_node wrong = {.kind = 13, .of.words = {0x12345, 1LL << 32, 0, 0}};
    printf("no condition: %d\n", TRY("cuGraphAddNode", ADD_TYPES, &node, graph, NULL, 0, &wrong) != 0);
}

/* Memory that graphs allocate, by nodes and in captures; what waits for values of memory, and attributes of kernels' nodes. */
static void allocs(void) {
    prepare();
    struct {
        int type, handles, location, device;
        void *security;
        size_t most;
        unsigned short usage;
        char reserved[54];
        void *access;
        size_t count, bytes;
        ptr at;
    } of = {.type = 1, .location = 1, .bytes = 4 * N};
    _Static_assert(sizeof of == 120, "as the driver has it");
    handle graph = new_graph(), made = NULL, filled = NULL, kept = NULL, freed = NULL;
    CALL("cuGraphAddMemAllocNode", ADD_TYPES, &made, graph, NULL, 0, &of);
    fill_node fill = {.at = of.at, .value = 55, .unit = 4, .width = N, .height = 1};
    CALL("cuGraphAddMemsetNode", ADD_TYPES_IN, &filled, graph, &made, 1, &fill, context);
    copy3 out = to_host(back, of.at);
    CALL("cuGraphAddMemcpyNode", ADD_TYPES_IN, &kept, graph, &filled, 1, &out, context);
    CALL("cuGraphAddMemFreeNode", (handle *, handle, const handle *, size_t, ptr), &freed, graph, &kept, 1, of.at);
    ptr where = 0, first = of.at;
    of.at = 0, of.bytes = 0;
    CALL("cuGraphMemAllocNodeGetParams", (handle, void *), made, &of);
    CALL("cuGraphMemFreeNodeGetParams", (handle, ptr *), freed, &where);
    int types[2];
    CALL("cuGraphNodeGetType", (handle, int *), made, &types[0]);
    CALL("cuGraphNodeGetType", (handle, int *), freed, &types[1]);
    printf("types %d %d, %zu bytes, the same: %d %d\n", types[0], types[1], of.bytes, of.at == first, where == first);
    handle exec = runs(graph);
    for (int round = 0; round < 2; round++) {
        back[N - 1] = 0;
        CALL("cuGraphLaunch", (handle, handle), exec, stream);
        CALL("cuStreamSynchronize", (handle), stream);
        printf("of the graph: %u\n", back[N - 1]);
    }
    CALL("cuGraphExecDestroy", (handle), exec);
    CALL("cuGraphDestroy", (handle), graph);
    /* What is not freed in the graph is the program's, until it frees it. */
    ptr ours = 0;
    CALL("cuStreamBeginCapture_v2", (handle, int), stream, 2);
    CALL("cuMemAllocAsync", (ptr *, size_t, handle), &ours, 4 * N, stream);
    CALL("cuMemsetD32Async", (ptr, unsigned, size_t, handle), ours, 66, N, stream);
    CALL("cuStreamEndCapture", (handle, handle *), stream, &graph);
    exec = runs(graph);
    for (int round = 0; round < 2; round++) {
        CALL("cuGraphLaunch", (handle, handle), exec, stream);
        CALL("cuStreamSynchronize", (handle), stream);
        printf("of the capture: %u\n", word(ours + 4 * (N - 1)));
        CALL("cuMemFreeAsync", (ptr, handle), ours, stream);
        CALL("cuStreamSynchronize", (handle), stream);
    }
    CALL("cuGraphExecDestroy", (handle), exec);
    CALL("cuGraphDestroy", (handle), graph);
    /* Values: a write, and a wait that has its value already. */
    struct {
        unsigned operation, pad;
        ptr at;
        uint64_t value;
        unsigned flags, pad2;
        ptr alias, rest;
    } operations[2] = {{.operation = 2, .at = x, .value = 91}, {.operation = 1, .at = x, .value = 91, .flags = 1}};
    struct {
        handle context;
        unsigned count;
        void *list;
        unsigned flags;
    } values = {context, 2, operations, 0};
    handle node = NULL, changed = NULL;
    graph = new_graph();
    CALL("cuGraphAddBatchMemOpNode", ADD_TYPES, &node, graph, NULL, 0, &values);
    exec = runs(graph);
    CALL("cuGraphLaunch", (handle, handle), exec, stream);
    CALL("cuStreamSynchronize", (handle), stream);
    printf("written: %u", word(x));
    operations[0].value = operations[1].value = 92;
    CALL("cuGraphExecBatchMemOpNodeSetParams", (handle, handle, const void *), exec, node, &values);
    CALL("cuGraphLaunch", (handle, handle), exec, stream);
    CALL("cuStreamSynchronize", (handle), stream);
    memset(&values, 0, sizeof values);
    CALL("cuGraphBatchMemOpNodeGetParams", (handle, void *), node, &values);
    printf(", then %u, %u operations, the first of %llu\n", word(x), values.count, *(unsigned long long *)((char *)values.list + 16));
    CALL("cuGraphExecDestroy", (handle), exec);
    /* Attributes: priority, then that it works with others. */
    ptr d = z;
    uint32_t value = 5;
    void *to_store[] = {&d, &value};
    kernel_node kernel = {.function = store, .grid = {1, 1, 1}, .block = {1, 1, 1}, .parameters = to_store};
    CALL("cuGraphAddKernelNode_v2", ADD_TYPES, &node, graph, NULL, 0, &kernel);
    CALL("cuGraphAddKernelNode_v2", ADD_TYPES, &changed, graph, NULL, 0, &kernel);
    union {
        char bytes[64];
        int number;
    } attribute = {{0}}, got = {{0}}, copied = {{0}};
    attribute.number = 1;
    CALL("cuGraphKernelNodeSetAttribute", (handle, int, const void *), node, 2, &attribute);
    CALL("cuGraphKernelNodeGetAttribute", (handle, int, void *), node, 2, &got);
    CALL("cuGraphKernelNodeCopyAttributes", (handle, handle), changed, node);
    CALL("cuGraphKernelNodeGetAttribute", (handle, int, void *), changed, 2, &copied);
    printf("attributes: %d %d, refused: %d\n", got.number, copied.number, TRY("cuGraphKernelNodeGetAttribute", (handle, int, void *), graph, 2, &got) != 0);
}

/* Kernels reach memory of the host that the driver has allocated. */
static void mapped(void) {
    prepare();
    ptr there = 0;
    CALL("cuMemHostGetDevicePointer_v2", (ptr *, void *, unsigned), &there, host, 0);
    uint32_t value = 77;
    ptr at = there + 4;
    void *to_store[] = {&at, &value};
    CALL("cuLaunchKernel", (handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, handle, void **, void **), store, 1, 1, 1, 1, 1, 1, 0, stream,
         to_store, NULL);
    ptr to = (ptr)back;
    void *to_add[] = {&to, &there, &there, &count};
    CALL("cuLaunchKernel", (handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, handle, void **, void **), add, 1, 1, 1, N, 1, 1, 0, stream, to_add,
         NULL);
    CALL("cuStreamSynchronize", (handle), stream);
    printf("mapped: %d, %u %u, %u %u\n", there == (ptr)host, host[0], host[1], back[1], back[N - 1]);
}

/* What kernels print is the program's, and is there once it has waited; an assertion that fails is told on standard error. */
static const char *printing =
    "// vm-cuda-fake\n"
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".extern .func (.param .b32 r) vprintf (.param .b64 f, .param .b64 a);\n"
    ".global .align 1 .b8 text[9] = {115, 97, 105, 100, 32, 37, 117, 10, 0};\n"
    ".visible .entry say(.param .u32 v) {\n"
    ".local .align 8 .b8 depot[8]; .reg .b64 %x<6>; .reg .b32 %r<4>;\n"
    "ld.param.u32 %r1, [v]; mov.u64 %x1, depot; cvta.local.u64 %x2, %x1; st.local.u32 [%x1], %r1;\n"
    "mov.u64 %x3, text; cvta.global.u64 %x4, %x3;\n"
    "{ .param .b64 p0; st.param.b64 [p0+0], %x4; .param .b64 p1; st.param.b64 [p1+0], %x2; .param .b32 q;\n"
    "call.uni (q), vprintf, (p0, p1); ld.param.b32 %r2, [q+0]; }\nret;\n}\n";
static const char *failing =
    "// vm-cuda-fake\n"
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".extern .func __assertfail (.param .b64 m, .param .b64 f, .param .b32 l, .param .b64 n, .param .b64 c);\n"
    ".global .align 1 .b8 right[6] = {114, 105, 103, 104, 116, 0};\n"
    ".global .align 1 .b8 file[8] = {115, 116, 111, 114, 101, 46, 99, 0};\n"
    ".global .align 1 .b8 name[5] = {102, 97, 105, 108, 0};\n"
    ".visible .entry fail() {\n"
    ".reg .b64 %x<8>; .reg .b32 %r<2>;\n"
    "mov.u64 %x1, right; cvta.global.u64 %x2, %x1; mov.u64 %x3, file; cvta.global.u64 %x4, %x3;\n"
    "mov.u64 %x5, name; cvta.global.u64 %x6, %x5; mov.u64 %x7, 1; mov.u32 %r1, 7;\n"
    "{ .param .b64 p0; st.param.b64 [p0+0], %x2; .param .b64 p1; st.param.b64 [p1+0], %x4; .param .b32 p2; st.param.b32 [p2+0], %r1;\n"
    ".param .b64 p3; st.param.b64 [p3+0], %x6; .param .b64 p4; st.param.b64 [p4+0], %x7;\n"
    "call.uni __assertfail, (p0, p1, p2, p3, p4); }\nret;\n}\n";

static void launch_one(handle of, void **parameters) {
    CALL("cuLaunchKernel", (handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, handle, void **, void **), of, 1, 1, 1, 1, 1, 1, 0, stream,
         parameters, NULL);
}
static void speak(void *argument) { printf("called with %u\n", (unsigned)(uintptr_t)argument); }

static void prints(void) {
    prepare();
    CALL("cuModuleLoadData", (handle *, const void *), &module, printing);
    handle say = function("say");
    unsigned value = 1;
    void *to_say[] = {&value};
    printf("before\n");
    launch_one(say, to_say);
    CALL("cuStreamSynchronize", (handle), stream);
    printf("between\n");
    for (value = 2; value < 5; value++) launch_one(say, to_say);
    CALL("cuCtxSynchronize", (void));
    printf("behind\n");
    launch_one(say, to_say);
    CALL("cuLaunchHostFunc", (handle, void (*)(void *), void *), stream, speak, (void *)6);
    CALL("cuStreamSynchronize", (handle), stream);
    for (value = 0; value < 3000; value++) launch_one(say, to_say);
    CALL("cuStreamSynchronize", (handle), stream);
    printf("many\n");
    fflush(stdout);
    if (TRY("cuModuleLoadData", (handle *, const void *), &module, failing)) {
        printf("no assertions\n");
        return;
    }
    launch_one(function("fail"), NULL);
    printf("asserted: %d\n", TRY("cuStreamSynchronize", (handle), stream));
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
    /* The same of three dimensions: two layers of three rows, from a corner of the program's memory and back, and on the device. */
    struct {
        struct {
            int type, pad;
            ptr at;
            size_t row, rows;
            int hint[2];
        } from, to;
        size_t extent[3];
        int order, flags;
    } operations[2] = {{{1, 0, (ptr)private, 64, 4, {0}}, {1, 0, x, 0, 0, {0}}, {24, 3, 2}, 1, 0}, {{1, 0, z, 128, 1, {0}}, {1, 0, y, 16, 1, {0}}, {16, 1, 2}, 1, 0}};
    _Static_assert(sizeof operations[0] == 112, "as the driver has it");
    if (dlsym(library, "cuMemcpy3DBatchAsync_v2")) {
        CALL("cuMemcpy3DBatchAsync_v2", (size_t, void *, unsigned long long, handle), 2, operations, 0, stream);
        CALL("cuStreamSynchronize", (handle), stream);
        printf("layers: %u %u %u, %u %u\n", word(x), word(x + 24), word(x + 24 * 3), word(y), word(y + 16));
    }
    handle attached = NULL;
    printf("attached: %d %d, ", TRY("cuCtxAttach", (handle *, unsigned), &attached, 0), attached == context);
    printf("%d\n", TRY("cuCtxAttach", (handle *, unsigned), &attached, 1));
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

/* A graph that becomes a node's own: it is no graph of the program's then, and ends with the graph that it is in. */
static void moved(void) {
    prepare();
    handle recorded;
    /* Programs record addresses that they replace in the executable graph. */
    CALL("cuStreamBeginCapture_v2", (handle, int), stream, 1);
    printf("recorded: %d\n", TRY("cuMemsetD8Async", (ptr, unsigned char, size_t, handle), 0x80, 0, 0x30, stream));
    CALL("cuStreamEndCapture", (handle, handle *), stream, &recorded);
    /* It has no edges. */
    printf("printed: %d\n", TRY("cuGraphDebugDotPrint", (handle, const char *, unsigned), recorded, "/dev/null", 0));
    CALL("cuGraphDestroy", (handle), recorded);
    for (int turn = 0; turn < 3; turn++) {
        handle graph = new_graph(), child = new_graph(), node, last, exec, found = NULL;
        any_node filled = {.kind = 2, .of.fill = {{.at = z, .value = 20 + turn, .unit = 4, .width = 1, .height = 1}, context}};
        CALL("cuGraphAddNode_v2", (handle *, handle, const handle *, const void *, size_t, any_node *), &node, child, NULL, NULL, 0, &filled);
        any_node own = {.kind = 4, .of.handle = child};
        own.of.words[1] = 1;
        CALL("cuGraphAddNode_v2", (handle *, handle, const handle *, const void *, size_t, any_node *), &node, graph, NULL, NULL, 0, &own);
        CALL("cuGraphChildGraphNodeGetGraph", (handle, handle *), node, &found);
        filled.of.fill.fill.value = 5, filled.of.fill.fill.at = z + 4;
        CALL("cuGraphAddNode_v2", (handle *, handle, const handle *, const void *, size_t, any_node *), &last, child, NULL, NULL, 0, &filled);
        int refused = TRY("cuGraphDestroy", (handle), child) != 0;
        refused += TRY("cuGraphAddNode_v2", (handle *, handle, const handle *, const void *, size_t, any_node *), &last, graph, NULL, NULL, 0, &own) != 0;
        own.of.words[1] = 7;
        refused += TRY("cuGraphAddNode_v2", (handle *, handle, const handle *, const void *, size_t, any_node *), &last, graph, NULL, NULL, 0, &own) != 0;
        CALL("cuGraphInstantiateWithFlags", (handle *, handle, unsigned long long), &exec, graph, 0);
        CALL("cuGraphLaunch", (handle, handle), exec, stream);
        CALL("cuStreamSynchronize", (handle), stream);
        printf("moved: %d, refused %d, z %u %u\n", found == child, refused, word(z), word(z + 4));
        CALL("cuGraphExecDestroy", (handle), exec);
        CALL("cuGraphDestroy", (handle), graph);
    }
}

int main(int argc, char **arguments) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    const char *what = argc > 1 ? arguments[1] : "";
    if (!strcmp(what, "graphs")) graphs();
    else if (!strcmp(what, "hostmem")) hostmem();
    else if (!strcmp(what, "conditional")) conditional();
    else if (!strcmp(what, "allocs")) allocs();
    else if (!strcmp(what, "prints")) prints();
    else if (!strcmp(what, "mapped")) mapped();
    else if (!strcmp(what, "gone")) gone();
    else if (!strcmp(what, "copies")) copies();
    else if (!strcmp(what, "logs")) logs();
    else if (!strcmp(what, "peers")) peers();
    else if (!strcmp(what, "occupancy")) occupancy();
    else if (!strcmp(what, "moved")) moved();
    else return 2;
    (void)mib;
    return 0;
}
