// Code generated from features/interop/capi by its build script; DO NOT EDIT.
// VMK_WRITE_HEADER=1 cargo test --package vm-capi --test header

package vmaccel

// #include <vmaccel.h>
import "C"

import "unsafe"

// Status: What a function returns: 0, or below 0 with a text from vma_last_error.
type Status int32

const (
	// It is done, or was given to the worker.
	StatusSuccess Status = 0
	// The device or its driver is not there, or the process ends, or is the fork of one that had devices.
	StatusNotAvailable Status = -1
	// A parameter has a value that it can't have. Nothing was started.
	StatusInvalidValue Status = -2
	// The driver or the host failed; a bug of the library, too.
	StatusFailed Status = -3
	// There is not enough memory.
	StatusOutOfMemory Status = -4
	// A handle is none, was freed, or is one of something else.
	StatusInvalidHandle Status = -5
	// A wait ended before what it waited for.
	StatusTimeout Status = -6
	// The worker was stopped.
	StatusStopped Status = -7
	// The device's context is lost by a fault: nothing on it can be used again. Start again in a new process.
	StatusLost Status = -8
	// The job was taken back before it started.
	StatusCancelled Status = -9
	// The module is not valid, or can't be compiled or loaded for the device.
	StatusCompileFailed Status = -10
	// A kernel was stopped: it used up its fuel or its time.
	StatusKernelStopped Status = -11
	// The worker's queue stayed full.
	StatusQueueFull Status = -12
	// The device can't do this.
	StatusNotSupported Status = -13
	// What a handle is of is in a state in which this can't be: as a resource that is mapped twice, or used by a kernel while graphics has it.
	StatusInvalidState Status = -14
)

// MemoryKind: Where memory lies, and who reaches it.
type MemoryKind int32

const (
	// On the device, which alone reaches it.
	DeviceMemory MemoryKind = 0
	// On the host, locked in place: both reach it.
	PinnedMemory MemoryKind = 1
	// Wherever it is used: both reach it. Not all devices have it.
	UnifiedMemory MemoryKind = 2
)

// Type: What an element of a view or a number is. Kernels don't tell signed integers from unsigned ones.
type Type int32

const (
	// Not said: of a view any elements will do.
	TypeAny Type = 0
	// Any 8 bits.
	TypeU8 Type = 1
	// An integer of 16 bits.
	TypeU16 Type = 2
	// An integer of 32 bits.
	TypeU32 Type = 3
	// An integer of 64 bits.
	TypeU64 Type = 4
	// IEEE 754 binary16.
	TypeF16 Type = 5
	// bfloat16.
	TypeBf16 Type = 6
	// IEEE 754 binary32.
	TypeF32 Type = 7
	// IEEE 754 binary64.
	TypeF64 Type = 8
)

// ParameterKind: What a parameter of a kernel is.
type ParameterKind int32

const (
	// A view of memory.
	ParameterView ParameterKind = 0
	// A number.
	ParameterScalar ParameterKind = 1
)

// ExternalKind: What a descriptor of shared memory is.
type ExternalKind int32

const (
	// The driver's own, as of VK_KHR_external_memory_fd; only drivers of the same device know what is in it.
	OpaqueFd ExternalKind = 0
	// A buffer of the Linux kernel's dma-buf.
	DmaBuf ExternalKind = 1
	// Host memory, for the processor: a memfd that is sealed against shrinking (F_SEAL_SHRINK).
	HostFd ExternalKind = 2
)

// ResourceState: Who uses a resource now.
type ResourceState int32

const (
	// Graphics.
	Registered ResourceState = 0
	// Kernels.
	Mapped ResourceState = 1
)

func vmaHandleCount(count *C.uint64_t) error {
	return call(func() C.vma_status { return C.vma_handle_count(count) })
}

func vmaDeviceCount(count *C.uint32_t) error {
	return call(func() C.vma_status { return C.vma_device_count(count) })
}

func vmaDeviceAt(index C.uint32_t, device *C.vma_device) error {
	return call(func() C.vma_status { return C.vma_device_at(index, device) })
}

func vmaDeviceOpen(spec *C.char, device *C.vma_device) error {
	return call(func() C.vma_status { return C.vma_device_open(spec, device) })
}

func vmaDeviceGetInfo(device C.vma_device, info *C.vma_device_info) error {
	return call(func() C.vma_status { return C.vma_device_get_info(device, info) })
}

func vmaDeviceClose(device C.vma_device) error {
	return call(func() C.vma_status { return C.vma_device_close(device) })
}

func vmaWorkerStart(device C.vma_device, options *C.vma_worker_options, worker *C.vma_worker) error {
	return call(func() C.vma_status { return C.vma_worker_start(device, options, worker) })
}

func vmaSynchronize(worker C.vma_worker, timeoutNs C.uint64_t) error {
	return call(func() C.vma_status { return C.vma_synchronize(worker, timeoutNs) })
}

func vmaGetMemoryInfo(worker C.vma_worker, info *C.vma_memory_info) error {
	return call(func() C.vma_status { return C.vma_get_memory_info(worker, info) })
}

func vmaTrim(worker C.vma_worker) error {
	return call(func() C.vma_status { return C.vma_trim(worker) })
}

func vmaStop(worker C.vma_worker, timeoutNs C.uint64_t) error {
	return call(func() C.vma_status { return C.vma_stop(worker, timeoutNs) })
}

func vmaWorkerFree(worker C.vma_worker) error {
	return call(func() C.vma_status { return C.vma_worker_free(worker) })
}

func vmaMemoryAllocate(worker C.vma_worker, kind C.vma_memory_kind, bytes C.uint64_t, memory *C.vma_memory) error {
	return call(func() C.vma_status { return C.vma_memory_allocate(worker, kind, bytes, memory) })
}

func vmaMemoryGetSize(memory C.vma_memory, bytes *C.uint64_t) error {
	return call(func() C.vma_status { return C.vma_memory_get_size(memory, bytes) })
}

func vmaMemoryGetKind(memory C.vma_memory, kind *C.vma_memory_kind) error {
	return call(func() C.vma_status { return C.vma_memory_get_kind(memory, kind) })
}

func vmaMemoryGetHostPointer(memory C.vma_memory, pointer *unsafe.Pointer) error {
	return call(func() C.vma_status { return C.vma_memory_get_host_pointer(memory, pointer) })
}

func vmaMemoryFree(memory C.vma_memory) error {
	return call(func() C.vma_status { return C.vma_memory_free(memory) })
}

func vmaWrite(memory C.vma_memory, offset C.uint64_t, data unsafe.Pointer, bytes C.uint64_t) error {
	return call(func() C.vma_status { return C.vma_write(memory, offset, data, bytes) })
}

func vmaRead(memory C.vma_memory, offset C.uint64_t, data unsafe.Pointer, bytes C.uint64_t) error {
	return call(func() C.vma_status { return C.vma_read(memory, offset, data, bytes) })
}

func vmaCopy(target C.vma_memory, targetOffset C.uint64_t, source C.vma_memory, sourceOffset C.uint64_t, bytes C.uint64_t) error {
	return call(func() C.vma_status { return C.vma_copy(target, targetOffset, source, sourceOffset, bytes) })
}

func vmaFill(memory C.vma_memory, offset C.uint64_t, bytes C.uint64_t, value C.uint8_t) error {
	return call(func() C.vma_status { return C.vma_fill(memory, offset, bytes, value) })
}

func vmaEventRecord(worker C.vma_worker, event *C.vma_event) error {
	return call(func() C.vma_status { return C.vma_event_record(worker, event) })
}

func vmaEventWait(worker C.vma_worker, event C.vma_event) error {
	return call(func() C.vma_status { return C.vma_event_wait(worker, event) })
}

func vmaEventQuery(event C.vma_event, reached *C.int32_t) error {
	return call(func() C.vma_status { return C.vma_event_query(event, reached) })
}

func vmaEventSynchronize(event C.vma_event, timeoutNs C.uint64_t) error {
	return call(func() C.vma_status { return C.vma_event_synchronize(event, timeoutNs) })
}

func vmaEventElapsed(from C.vma_event, to C.vma_event, nanoseconds *C.uint64_t) error {
	return call(func() C.vma_status { return C.vma_event_elapsed(from, to, nanoseconds) })
}

func vmaEventFree(event C.vma_event) error {
	return call(func() C.vma_status { return C.vma_event_free(event) })
}

func vmaModuleLoad(worker C.vma_worker, code unsafe.Pointer, bytes C.uint64_t, module *C.vma_module) error {
	return call(func() C.vma_status { return C.vma_module_load(worker, code, bytes, module) })
}

func vmaModuleLoadFile(worker C.vma_worker, path *C.char, module *C.vma_module) error {
	return call(func() C.vma_status { return C.vma_module_load_file(worker, path, module) })
}

func vmaModuleGetKernelCount(module C.vma_module, count *C.uint32_t) error {
	return call(func() C.vma_status { return C.vma_module_get_kernel_count(module, count) })
}

func vmaModuleGetKernel(module C.vma_module, index C.uint32_t, kernel *C.vma_kernel) error {
	return call(func() C.vma_status { return C.vma_module_get_kernel(module, index, kernel) })
}

func vmaModuleFindKernel(module C.vma_module, name *C.char, kernel *C.vma_kernel) error {
	return call(func() C.vma_status { return C.vma_module_find_kernel(module, name, kernel) })
}

func vmaModuleFree(module C.vma_module) error {
	return call(func() C.vma_status { return C.vma_module_free(module) })
}

func vmaKernelGetInfo(kernel C.vma_kernel, info *C.vma_kernel_info) error {
	return call(func() C.vma_status { return C.vma_kernel_get_info(kernel, info) })
}

func vmaKernelGetParameter(kernel C.vma_kernel, index C.uint32_t, parameter *C.vma_parameter) error {
	return call(func() C.vma_status { return C.vma_kernel_get_parameter(kernel, index, parameter) })
}

func vmaLaunch(kernel C.vma_kernel, gridX C.uint32_t, gridY C.uint32_t, gridZ C.uint32_t, arguments *C.vma_argument, count C.uint32_t, limits *C.vma_limits) error {
	return call(func() C.vma_status { return C.vma_launch(kernel, gridX, gridY, gridZ, arguments, count, limits) })
}

func vmaSubmitAndWait(worker C.vma_worker, function C.vma_function, data unsafe.Pointer, timeoutNs C.uint64_t, result *C.int32_t) error {
	return call(func() C.vma_status { return C.vma_submit_and_wait(worker, function, data, timeoutNs, result) })
}

func vmaSubmit(worker C.vma_worker, function C.vma_function, data unsafe.Pointer, job *C.vma_job) error {
	return call(func() C.vma_status { return C.vma_submit(worker, function, data, job) })
}

func vmaSubmitWithin(worker C.vma_worker, function C.vma_function, data unsafe.Pointer, timeoutNs C.uint64_t, result *C.int32_t, job *C.vma_job) error {
	return call(func() C.vma_status { return C.vma_submit_within(worker, function, data, timeoutNs, result, job) })
}

func vmaJobWait(job C.vma_job, timeoutNs C.uint64_t, result *C.int32_t) error {
	return call(func() C.vma_status { return C.vma_job_wait(job, timeoutNs, result) })
}

func vmaJobQuery(job C.vma_job, ended *C.int32_t) error {
	return call(func() C.vma_status { return C.vma_job_query(job, ended) })
}

func vmaJobCancel(job C.vma_job, cancelled *C.int32_t) error {
	return call(func() C.vma_status { return C.vma_job_cancel(job, cancelled) })
}

func vmaJobFree(job C.vma_job) error {
	return call(func() C.vma_status { return C.vma_job_free(job) })
}

func vmaTimelineCreate(timeline *C.vma_timeline) error {
	return call(func() C.vma_status { return C.vma_timeline_create(timeline) })
}

func vmaTimelineImport(fd C.int32_t, wait C.vma_wait_function, signal C.vma_signal_function, release C.vma_release_function, data unsafe.Pointer, timeline *C.vma_timeline) error {
	return call(func() C.vma_status { return C.vma_timeline_import(fd, wait, signal, release, data, timeline) })
}

func vmaTimelineWait(timeline C.vma_timeline, value C.uint64_t, timeoutNs C.uint64_t) error {
	return call(func() C.vma_status { return C.vma_timeline_wait(timeline, value, timeoutNs) })
}

func vmaTimelineSignal(timeline C.vma_timeline, value C.uint64_t) error {
	return call(func() C.vma_status { return C.vma_timeline_signal(timeline, value) })
}

func vmaTimelineFree(timeline C.vma_timeline) error {
	return call(func() C.vma_status { return C.vma_timeline_free(timeline) })
}

func vmaLinkCreate(worker C.vma_worker, graphics C.vma_timeline, computed C.vma_timeline, link *C.vma_link) error {
	return call(func() C.vma_status { return C.vma_link_create(worker, graphics, computed, link) })
}

func vmaLinkFree(link C.vma_link) error {
	return call(func() C.vma_status { return C.vma_link_free(link) })
}

func vmaResourceRegister(worker C.vma_worker, name *C.char, memory *C.vma_external_memory, resource *C.vma_resource) error {
	return call(func() C.vma_status { return C.vma_resource_register(worker, name, memory, resource) })
}

func vmaResourceGetState(resource C.vma_resource, state *C.vma_resource_state) error {
	return call(func() C.vma_status { return C.vma_resource_get_state(resource, state) })
}

func vmaResourceMap(resource C.vma_resource, link C.vma_link, value C.uint64_t, memory *C.vma_memory) error {
	return call(func() C.vma_status { return C.vma_resource_map(resource, link, value, memory) })
}

func vmaResourceUnmap(resource C.vma_resource, value *C.uint64_t) error {
	return call(func() C.vma_status { return C.vma_resource_unmap(resource, value) })
}

func vmaResourceUnregister(resource C.vma_resource) error {
	return call(func() C.vma_status { return C.vma_resource_unregister(resource) })
}

func vmaReset(worker C.vma_worker) error {
	return call(func() C.vma_status { return C.vma_reset(worker) })
}
