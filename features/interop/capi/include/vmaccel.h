/* Accelerators for C and C++: memory, kernels and workers on GPUs, and on the CPU. docs/c-api.md says how to build, link and call it.
 *
 * Generated from features/interop/capi/accelerator.txt; don't edit. A test says so when it is out of date:
 *   VMK_WRITE_HEADER=1 cargo test --package vm-capi --test header
 *
 * Every function may be called from any thread, also in a job of a worker. What a function is given is looked at before anything is done:
 * handles that were freed are refused. It is not: whether pointers point to as much as is said.
 */

#ifndef VMACCEL_H
#define VMACCEL_H

#include <stdint.h>

#define VMA_VERSION_MAJOR 0
#define VMA_VERSION_MINOR 1
#define VMA_VERSION_PATCH 0
#define VMA_VERSION (10000 * VMA_VERSION_MAJOR + 100 * VMA_VERSION_MINOR + VMA_VERSION_PATCH)

#ifdef __cplusplus
extern "C" {
#endif

/* What a function returns: 0, or below 0 with a text from vma_last_error. */
typedef int32_t vma_status;
enum {
    /* It is done, or was given to the worker. */
    VMA_SUCCESS = 0,
    /* The device or its driver is not there, or the process ends, or is the fork of one that had devices. */
    VMA_NOT_AVAILABLE = -1,
    /* A parameter has a value that it can't have. Nothing was started. */
    VMA_INVALID_VALUE = -2,
    /* The driver or the host failed; a bug of the library, too. */
    VMA_FAILED = -3,
    /* There is not enough memory. */
    VMA_OUT_OF_MEMORY = -4,
    /* A handle is none, was freed, or is one of something else. */
    VMA_INVALID_HANDLE = -5,
    /* A wait ended before what it waited for. */
    VMA_TIMEOUT = -6,
    /* The worker was stopped. */
    VMA_STOPPED = -7,
    /* The device's context is lost by a fault: nothing on it can be used again. Start again in a new process. */
    VMA_LOST = -8,
    /* The job was taken back before it started. */
    VMA_CANCELLED = -9,
    /* The module is not valid, or can't be compiled or loaded for the device. */
    VMA_COMPILE_FAILED = -10,
    /* A kernel was stopped: it used up its fuel or its time. */
    VMA_KERNEL_STOPPED = -11,
    /* The worker's queue stayed full. */
    VMA_QUEUE_FULL = -12,
    /* The device can't do this. */
    VMA_NOT_SUPPORTED = -13,
    /* What a handle is of is in a state in which this can't be: as a resource that is mapped twice, or used by a kernel while graphics has it. */
    VMA_INVALID_STATE = -14
};

/* Where memory lies, and who reaches it. */
typedef int32_t vma_memory_kind;
enum {
    /* On the device, which alone reaches it. */
    VMA_DEVICE_MEMORY = 0,
    /* On the host, locked in place: both reach it. */
    VMA_PINNED_MEMORY = 1,
    /* Wherever it is used: both reach it. Not all devices have it. */
    VMA_UNIFIED_MEMORY = 2
};

/* What an element of a view or a number is. Kernels don't tell signed integers from unsigned ones. */
typedef int32_t vma_type;
enum {
    /* Not said: of a view any elements will do. */
    VMA_ANY = 0,
    /* Any 8 bits. */
    VMA_U8 = 1,
    /* An integer of 16 bits. */
    VMA_U16 = 2,
    /* An integer of 32 bits. */
    VMA_U32 = 3,
    /* An integer of 64 bits. */
    VMA_U64 = 4,
    /* IEEE 754 binary16. */
    VMA_F16 = 5,
    /* bfloat16. */
    VMA_BF16 = 6,
    /* IEEE 754 binary32. */
    VMA_F32 = 7,
    /* IEEE 754 binary64. */
    VMA_F64 = 8
};

/* What a parameter of a kernel is. */
typedef int32_t vma_parameter_kind;
enum {
    /* A view of memory. */
    VMA_VIEW = 0,
    /* A number. */
    VMA_SCALAR = 1
};

/* What a descriptor of shared memory is. */
typedef int32_t vma_external_kind;
enum {
    /* The driver's own, as of VK_KHR_external_memory_fd; only drivers of the same device know what is in it. */
    VMA_OPAQUE_FD = 0,
    /* A buffer of the Linux kernel's dma-buf. */
    VMA_DMA_BUF = 1,
    /* Host memory, for the processor: a memfd that is sealed against shrinking (F_SEAL_SHRINK). */
    VMA_HOST_FD = 2
};

/* Who uses a resource now. */
typedef int32_t vma_resource_state;
enum {
    /* Graphics. */
    VMA_REGISTERED = 0,
    /* Kernels. */
    VMA_MAPPED = 1
};

/* A device. */
typedef uint64_t vma_device;

/* A thread that owns a stream of a device, with memory and kernels of its own. What it is given runs in that order, whoever gave it. */
typedef uint64_t vma_worker;

/* Memory of a worker. */
typedef uint64_t vma_memory;

/* Kernels that were compiled for a worker's device, and loaded. */
typedef uint64_t vma_module;

/* A kernel of a module, which is one as long as the module is there. */
typedef uint64_t vma_kernel;

/* A point in a worker's stream. */
typedef uint64_t vma_event;

/* A function that was submitted to a worker. */
typedef uint64_t vma_job;

/* A timeline semaphore: a number that only grows. */
typedef uint64_t vma_timeline;

/* How a worker and graphics take turns: by two timelines. */
typedef uint64_t vma_link;

/* Memory of graphics that a worker uses in turns with it. */
typedef uint64_t vma_resource;

/* What a worker runs for its caller. It returns what is then given to who waits for it. It must neither throw nor end the thread. */
typedef int32_t (*vma_function)(void *data);

/* Waits until a timeline has reached a value, for timeout_ns at most: 1 if it has, 0 if not. What is below 0 says that it can't be told
   any more, as when its device is lost. The library's threads call it, at the same time as others do. It must neither throw nor end the thread. */
typedef int32_t (*vma_wait_function)(void *data, uint64_t value, uint64_t timeout_ns);

/* Sets a timeline to a value, unless it has got so far: 0, or below 0 if it can't. Else as vma_wait_function. */
typedef int32_t (*vma_signal_function)(void *data, uint64_t value);

/* Says that a timeline's data is not used any more: once, by any thread, and nothing of the library may be called there. What it returns is not
   looked at. */
typedef int32_t (*vma_release_function)(void *data);

/* What a device is. Names are cut to their field, and end with a zero. */
typedef struct vma_device_info {
    /* The product's name. */
    char name[128];
    /* The driver's interface: cpu, cuda, rocm, guest. */
    char backend[16];
    /* What code is compiled for, as in sm_90. */
    char target[32];
    /* The PCI address, as in 0000:65:00.0; empty for what is no PCI device. */
    char address[32];
    /* The driver's version. */
    char driver[64];
    /* Bytes of its memory. */
    uint64_t memory_bytes;
    /* SMs, CUs or cores. */
    uint32_t compute_units;
    /* Threads that run in step. */
    uint32_t warp_size;
    /* The most threads of a block. */
    uint32_t block_threads;
    /* The most threads along each dimension of a block. */
    uint32_t block[3];
    /* The most blocks along each dimension of a grid. */
    uint32_t grid[3];
    /* The most bytes of shared memory of a block. */
    uint32_t shared_bytes;
    /* The most bytes of a kernel's parameters. */
    uint32_t parameter_bytes;
    /* Is there unified memory? */
    int32_t unified;
} vma_device_info;

/* How a worker is started. What is 0 is as if it was not said. */
typedef struct vma_worker_options {
    /* The most bytes of memory that it holds; as many as there are. */
    uint64_t memory_bytes;
    /* How long a call waits for room in its queue or for the device where it must; 30 s. */
    uint64_t timeout_ns;
    /* What a launch may take that is given no limits of its own: how often each thread may begin the body of a loop; 2^40. */
    uint64_t fuel;
    /* The same in time; 10 s. */
    uint64_t time_ns;
    /* How many commands may wait, up to 65536; 512. */
    uint32_t capacity;
    /* Not 0: all memory is set to zero before it is given. Else it has whatever was there. */
    int32_t zero;
} vma_worker_options;

/* How full a device's memory is. */
typedef struct vma_memory_info {
    /* Bytes of the device that are free for anybody. */
    uint64_t free_bytes;
    /* Bytes of the device. */
    uint64_t total_bytes;
    /* Bytes of the worker's memory that is in use. */
    uint64_t used_bytes;
    /* Bytes that it has freed and keeps for what comes next; vma_trim releases them. */
    uint64_t kept_bytes;
} vma_memory_info;

/* What a kernel is. */
typedef struct vma_kernel_info {
    /* Its name. */
    char name[72];
    /* How many parameters it has. */
    uint32_t parameters;
    /* Threads along each dimension of its blocks. */
    uint32_t block[3];
    /* What a grid is a multiple of along x. */
    uint32_t cluster;
} vma_kernel_info;

/* What a parameter of a kernel is. */
typedef struct vma_parameter {
    /* Its name. */
    char name[72];
    /* A view or a number. */
    vma_parameter_kind kind;
    /* Of a view, its elements. */
    vma_type type;
    /* Bytes of an element, or of the number. */
    uint32_t bytes;
    /* Of a view, how many dimensions it has. */
    uint32_t rank;
    /* Of a view, what its address and its strides are multiples of. */
    uint32_t align;
    /* Of a view, not 0 if the kernel writes through it. Such a view overlaps no other of the launch. */
    int32_t writes;
    /* Of a view, the extents that it must have, slowest dimension first; 0 where any, or another's, will do. */
    uint64_t extents[4];
} vma_parameter;

/* An argument of a launch. */
typedef struct vma_argument {
    /* A view or a number. */
    vma_parameter_kind kind;
    /* Of a view, what its elements are, or VMA_ANY; what the number is. */
    vma_type type;
    /* The number, in the low bits: a float's are its own, an integer's are its two's complement. */
    uint64_t bits;
    /* Of a view, its memory. */
    vma_memory memory;
    /* The byte of the memory that it begins with. */
    uint64_t offset;
    /* How many bytes it has; 0 for all that come behind. */
    uint64_t bytes;
    /* How many dimensions it has, up to 4; 0 for all of its bytes in the shape that the kernel wants. */
    uint32_t rank;
    /* Not 0: strides are given. Else its rows lie one behind the other. */
    int32_t strided;
    /* Its extents in elements, slowest dimension first. */
    uint64_t extents[4];
    /* For each dimension but the last the bytes from one of its elements to the next. */
    uint64_t strides[3];
} vma_argument;

/* What a launch may take until it is stopped. */
typedef struct vma_limits {
    /* How often each thread may begin the body of a loop. */
    uint64_t fuel;
    /* How long it may run. */
    uint64_t time_ns;
} vma_limits;

/* Memory of another API, or a part of it. */
typedef struct vma_external_memory {
    /* What the descriptor is. */
    vma_external_kind kind;
    /* The descriptor, which stays the caller's to close, at any time. */
    int32_t fd;
    /* The bytes of the whole allocation. */
    uint64_t allocation_bytes;
    /* The first byte that kernels are to reach. */
    uint64_t offset;
    /* How many bytes they are to reach, at least 1. */
    uint64_t bytes;
    /* Not 0: the allocation is for one buffer or image alone (VkMemoryDedicatedAllocateInfo). */
    int32_t dedicated;
} vma_external_memory;

/* What was wrong with the calling thread's last call that failed: which function and parameter, and what to do. Valid until the thread's next call. */
const char *vma_last_error(void);

/* The version of the library that runs, as VMA_VERSION is that of the header: 10000 major + 100 minor + patch. */
int32_t vma_version(void);

/* How many handles there are that were not freed yet, those of a module's kernels among them. */
vma_status vma_handle_count(uint64_t *count);

/* How many devices there are: GPUs of NVIDIA's, then of AMD's, then the processor. They are found by the process's first call, and stay. */
vma_status vma_device_count(uint32_t *count);

/* The device of a number, from 0 on. */
vma_status vma_device_at(uint32_t index, vma_device *device);

/* The device that a text names: auto for the first one, cpu, cuda:0, rocm:0, guest for the one that the host shares with this guest, or a PCI address as in 0000:65:00.0. */
vma_status vma_device_open(const char *spec, vma_device *device);

/* What a device is. */
vma_status vma_device_get_info(vma_device device, vma_device_info *info);

/* Ends a handle. Workers of the device go on. */
vma_status vma_device_close(vma_device device);

/* Starts a worker of a device. Each is a stream of its own: what must run at the same time is given to several. */
vma_status vma_worker_start(vma_device device, const vma_worker_options *options, vma_worker *worker);

/* Waits until the device has done all that the worker was given so far, and tells what of it failed first. */
vma_status vma_synchronize(vma_worker worker, uint64_t timeout_ns);

/* How full the memory is. */
vma_status vma_get_memory_info(vma_worker worker, vma_memory_info *info);

/* Waits for the device, then releases to it the memory that was freed. */
vma_status vma_trim(vma_worker worker);

/* Takes no more commands, and waits until those given have run and the thread has ended. Its handles stay, to be freed; memory is then no
   longer there. In a job of this worker it is refused. */
vma_status vma_stop(vma_worker worker, uint64_t timeout_ns);

/* Stops a worker and ends its handle, also if it does not end in its options' timeout, which is then said: it ends by itself later. */
vma_status vma_worker_free(vma_worker worker);

/* Allocates memory of at least one byte, aligned to 256. */
vma_status vma_memory_allocate(vma_worker worker, vma_memory_kind kind, uint64_t bytes, vma_memory *memory);

/* How many bytes memory has. */
vma_status vma_memory_get_size(vma_memory memory, uint64_t *bytes);

/* Where memory lies. */
vma_status vma_memory_get_kind(vma_memory memory, vma_memory_kind *kind);

/* Where the host reaches pinned or unified memory. It is there until the memory is freed or the worker stopped. What the device writes is
   there when a wait has ended. */
vma_status vma_memory_get_host_pointer(vma_memory memory, void **pointer);

/* Frees memory, behind all that the worker was given so far: nobody waits. */
vma_status vma_memory_free(vma_memory memory);

/* Copies from the host to memory, behind what its worker was given so far. data is the caller's again when this returns. */
vma_status vma_write(vma_memory memory, uint64_t offset, const void *data, uint64_t bytes);

/* Copies from memory to the host, behind what its worker was given so far, and tells what of that failed. */
vma_status vma_read(vma_memory memory, uint64_t offset, void *data, uint64_t bytes);

/* Copies from memory to memory. Of one worker, it is queued. Of two, it goes by way of the host, and is done when this returns. */
vma_status vma_copy(vma_memory target, uint64_t target_offset, vma_memory source, uint64_t source_offset, uint64_t bytes);

/* Sets bytes of memory; it is queued. */
vma_status vma_fill(vma_memory memory, uint64_t offset, uint64_t bytes, uint8_t value);

/* Makes an event behind all that a worker was given so far. */
vma_status vma_event_record(vma_worker worker, vma_event *event);

/* Lets what a worker is given from now on begin when an event has been reached, which may be another worker's of the same kind of device. */
vma_status vma_event_wait(vma_worker worker, vma_event event);

/* Whether an event has been reached: 1 or 0. */
vma_status vma_event_query(vma_event event, int32_t *reached);

/* Waits on the calling thread until an event has been reached. */
vma_status vma_event_synchronize(vma_event event, uint64_t timeout_ns);

/* The device's time between two events of a worker, which have both been reached. */
vma_status vma_event_elapsed(vma_event from, vma_event to, uint64_t *nanoseconds);

/* Ends an event. */
vma_status vma_event_free(vma_event event);

/* Compiles a module of the IR, text or binary, for a worker's device, and loads its kernels. All is checked, and the kernels check their accesses
   and can be stopped: code from anywhere may be given. */
vma_status vma_module_load(vma_worker worker, const void *code, uint64_t bytes, vma_module *module);

/* The same from a file. */
vma_status vma_module_load_file(vma_worker worker, const char *path, vma_module *module);

/* How many kernels a module has. */
vma_status vma_module_get_kernel_count(vma_module module, uint32_t *count);

/* The kernel of a number, from 0 on. Its handle ends with the module. */
vma_status vma_module_get_kernel(vma_module module, uint32_t index, vma_kernel *kernel);

/* The kernel of a name. Its handle ends with the module. */
vma_status vma_module_find_kernel(vma_module module, const char *name, vma_kernel *kernel);

/* Ends a module and its kernels. Launches that were given run. */
vma_status vma_module_free(vma_module module);

/* What a kernel is. */
vma_status vma_kernel_get_info(vma_kernel kernel, vma_kernel_info *info);

/* What a parameter of a kernel is, of a number from 0 on. */
vma_status vma_kernel_get_parameter(vma_kernel kernel, uint32_t index, vma_parameter *parameter);

/* Launches a kernel on its module's worker, over a grid of blocks, with an argument for each parameter; it is queued. What does not fit, lies outside
   of its memory or overlaps what is written is refused. That it was stopped the next wait says. */
vma_status vma_launch(vma_kernel kernel, uint32_t grid_x, uint32_t grid_y, uint32_t grid_z, const vma_argument *arguments, uint32_t count, const vma_limits *limits);

/* Runs a function on a worker's thread, behind what it was given so far, and waits for its result. What has not started in time is taken back;
   what has started is waited for: a thread that must never hang calls vma_submit_within. In a job of the same worker it runs at once. */
vma_status vma_submit_and_wait(vma_worker worker, vma_function function, void *data, uint64_t timeout_ns, int32_t *result);

/* The same without waiting: job is a handle to wait for, unless it is NULL. data must stay until the job has ended. Jobs that a stop finds
   waiting are run. */
vma_status vma_submit(vma_worker worker, vma_function function, void *data, vma_job *job);

/* The same for no longer than timeout_ns, whatever the function and the worker do: for threads that must never hang, as those that draw a user interface. With
   VMA_TIMEOUT job is 0 if the function was taken back before it started; else it runs, job is a handle to wait for, and data must stay until it
   has ended. In all other cases job is 0, and nothing is left that uses data. */
vma_status vma_submit_within(vma_worker worker, vma_function function, void *data, uint64_t timeout_ns, int32_t *result, vma_job *job);

/* Waits for a job. It may be waited for again, and by several threads. A job that runs is not ended by the end of a wait. */
vma_status vma_job_wait(vma_job job, uint64_t timeout_ns, int32_t *result);

/* Whether a job has ended: 1 or 0. */
vma_status vma_job_query(vma_job job, int32_t *ended);

/* Takes a job back that has not started; cancelled is 1 if it was, and waits then end with VMA_CANCELLED. */
vma_status vma_job_cancel(vma_job job, int32_t *cancelled);

/* Ends the handle of a job, which runs all the same. */
vma_status vma_job_free(vma_job job);

/* Makes a timeline of the library's own, at 0: for workers of the processor. Others refuse to link it. */
vma_status vma_timeline_create(vma_timeline *timeline);

/* Makes a timeline of one that the caller has, as a VkSemaphore of the type VK_SEMAPHORE_TYPE_TIMELINE: its descriptor (opaque, of
   VK_KHR_external_semaphore_fd), by which a GPU waits and signals, or -1 without one, and functions that do the same on the host. Workers of the
   processor use these; others signal by them what the device does not signal any more. fd stays the caller's to close. data is used until release was
   called; if this fails, it is not used, and release not called. */
vma_status vma_timeline_import(int32_t fd, vma_wait_function wait, vma_signal_function signal, vma_release_function release, void *data, vma_timeline *timeline);

/* Waits on the calling thread until a timeline has reached a value; with a timeout of 0 it only looks. */
vma_status vma_timeline_wait(vma_timeline timeline, uint64_t value, uint64_t timeout_ns);

/* Sets a timeline to a value on the host, unless it has got so far. One that a worker signals is refused. */
vma_status vma_timeline_signal(vma_timeline timeline, uint64_t value);

/* Ends the handle of a timeline. Links go on with it. */
vma_status vma_timeline_free(vma_timeline timeline);

/* Links a worker with graphics. Graphics alone signals the first timeline, which may be that of several links; this worker alone the second one,
   which was never linked. Whatever vma_resource_unmap has promised is reached: when the device is lost, and at the latest when the worker has ended. */
vma_status vma_link_create(vma_worker worker, vma_timeline graphics, vma_timeline computed, vma_link *link);

/* Ends the handle of a link. Resources that are mapped by it stay so, and what was promised is kept. */
vma_status vma_link_free(vma_link link);

/* Registers memory of graphics with a worker, by a name for errors. It is graphics' until it is mapped. */
vma_status vma_resource_register(vma_worker worker, const char *name, const vma_external_memory *memory, vma_resource *resource);

/* Who uses a resource now. What another thread is about to change is as before. */
vma_status vma_resource_get_state(vma_resource resource, vma_resource_state *state);

/* Gives a resource to kernels: what its worker is given from here on begins when the link's first timeline has reached a value. Nobody waits on the host.
   memory is its memory, for all functions that take some, with the same handle each time. It is refused while the resource is not mapped. */
vma_status vma_resource_map(vma_resource resource, vma_link link, uint64_t value, vma_memory *memory);

/* Gives a resource back to graphics, as soon as the link's second timeline has reached value, behind all that its worker was given. Nobody waits on the host. */
vma_status vma_resource_unmap(vma_resource resource, uint64_t *value);

/* Ends a resource and its memory, once the device has done what its worker was given so far. It is graphics' alone when this returns. One that is mapped is
   refused; else the handle ends in any case, and an error says why the device has not let go of it yet, or never will. */
vma_status vma_resource_unregister(vma_resource resource);

/* Waits for the device and lets go of all that was freed: resources, timelines of links, then memory. While a resource is registered it is refused, with
   the names and states of all that are. A worker that was stopped, or is lost, can't begin again: free it, and start another. */
vma_status vma_reset(vma_worker worker);

#ifdef __cplusplus
}
#endif

#endif
