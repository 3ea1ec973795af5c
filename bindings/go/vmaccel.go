// Package vmaccel runs kernels on accelerators: GPUs of NVIDIA's and AMD's, and the CPU. It is vmaccel.h and vmkernels.h of libvmkernels, which is linked
// statically: docs/c-api.md says how to build and install it, and what it promises.
//
// A [Worker] is a stream of a device, with memory and kernels of its own. Any goroutine may call it, and what it is given runs in that
// order. What can be wrong with a call is refused by an [Error] before anything is started.
//
// Close frees a thing at once, once; what is left is freed when the garbage collector finds it.
//
// Functions such as [Softmax] compute on slices, on the CPU. They check that each slice is long enough.
package vmaccel

// #cgo pkg-config: vmkernels-static
// #include <stdlib.h>
// #include <vmaccel.h>
//
// int32_t vmaccelRun(void *job);
//
// static vma_status vmaccelSubmit(vma_worker worker, uintptr_t job, vma_job *handle) {
//     return vma_submit(worker, vmaccelRun, (void *)job, handle);
// }
import "C"

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/cgo"
	"sync/atomic"
	"time"
	"unsafe"
)

// Error is what the library says: a status, and which function and parameter is wrong and what to do.
type Error struct {
	Status Status
	Text   string
}

func (err *Error) Error() string { return err.Text }

// Is tells that an error has the status of another, as errors.Is asks.
func (err *Error) Is(target error) bool {
	other, same := target.(*Error)
	return same && other.Status == err.Status && other.Text == ""
}

// call runs a function of the library, whose text of an error is the thread's.
func call(f func() C.vma_status) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if status := f(); status != C.VMA_SUCCESS {
		return &Error{Status(status), C.GoString(C.vma_last_error())}
	}
	return nil
}

// handle is a number of the library's that is given up once. Calls of the library refuse 0.
type handle struct{ number atomic.Uint64 }

func (h *handle) get() C.uint64_t { return C.uint64_t(h.number.Load()) }

func (h *handle) close(free func(C.uint64_t) error) error {
	if number := h.number.Swap(0); number != 0 {
		return free(C.uint64_t(number))
	}
	return nil
}

// Device is a GPU, or the CPU.
type Device struct{ handle }

func device(number C.vma_device) *Device {
	d := &Device{}
	d.number.Store(uint64(number))
	runtime.SetFinalizer(d, (*Device).Close)
	return d
}

// Open gives the device that a text names: auto, cpu, cuda:0, rocm:0, guest, or a PCI address as in 0000:65:00.0.
func Open(spec string) (*Device, error) {
	text := C.CString(spec)
	defer C.free(unsafe.Pointer(text))
	var number C.vma_device
	if err := vmaDeviceOpen(text, &number); err != nil {
		return nil, err
	}
	return device(number), nil
}

// Devices gives all devices: GPUs of NVIDIA's, then of AMD's, then the CPU.
func Devices() ([]*Device, error) {
	var count C.uint32_t
	if err := vmaDeviceCount(&count); err != nil {
		return nil, err
	}
	devices := make([]*Device, count)
	for at := range devices {
		var number C.vma_device
		if err := vmaDeviceAt(C.uint32_t(at), &number); err != nil {
			return nil, err
		}
		devices[at] = device(number)
	}
	return devices, nil
}

// DeviceInfo is what a device is.
type DeviceInfo struct {
	Name, Backend, Target, Address, Driver string
	MemoryBytes                            uint64
	ComputeUnits, WarpSize, BlockThreads   uint32
	Block, Grid                            [3]uint32
	SharedBytes, ParameterBytes            uint32
	Unified                                bool
}

// Info tells what the device is.
func (d *Device) Info() (DeviceInfo, error) {
	defer runtime.KeepAlive(d)
	var info C.vma_device_info
	if err := vmaDeviceGetInfo(d.get(), &info); err != nil {
		return DeviceInfo{}, err
	}
	three := func(of [3]C.uint32_t) [3]uint32 { return [3]uint32{uint32(of[0]), uint32(of[1]), uint32(of[2])} }
	return DeviceInfo{
		Name: C.GoString(&info.name[0]), Backend: C.GoString(&info.backend[0]), Target: C.GoString(&info.target[0]),
		Address: C.GoString(&info.address[0]), Driver: C.GoString(&info.driver[0]),
		MemoryBytes: uint64(info.memory_bytes), ComputeUnits: uint32(info.compute_units), WarpSize: uint32(info.warp_size),
		BlockThreads: uint32(info.block_threads), Block: three(info.block), Grid: three(info.grid),
		SharedBytes: uint32(info.shared_bytes), ParameterBytes: uint32(info.parameter_bytes), Unified: info.unified != 0,
	}, nil
}

// Close gives the device up; its workers go on.
func (d *Device) Close() error { return d.close(vmaDeviceClose) }

// WorkerOptions say how a worker is started. What is zero is as if it was not said.
type WorkerOptions struct {
	// The most bytes of memory that it holds.
	MemoryBytes uint64
	// How long a call waits where it must and no context says.
	Timeout time.Duration
	// What a launch may take that is given no limits: iterations of each thread's loops, and time.
	Fuel uint64
	Time time.Duration
	// How many commands may wait.
	Capacity uint32
	// All memory is set to zero before it is given.
	Zero bool
}

// Worker is a stream of a device, with memory and kernels of its own.
type Worker struct{ handle }

// Start starts a worker.
func (d *Device) Start(options WorkerOptions) (*Worker, error) {
	defer runtime.KeepAlive(d)
	given := C.vma_worker_options{
		memory_bytes: C.uint64_t(options.MemoryBytes), timeout_ns: nanoseconds(options.Timeout),
		fuel: C.uint64_t(options.Fuel), time_ns: nanoseconds(options.Time), capacity: C.uint32_t(options.Capacity),
	}
	if options.Zero {
		given.zero = 1
	}
	var number C.vma_worker
	if err := vmaWorkerStart(d.get(), &given, &number); err != nil {
		return nil, err
	}
	w := &Worker{}
	w.number.Store(uint64(number))
	// It may take as long as what it was given.
	runtime.SetFinalizer(w, func(w *Worker) { go w.Close() })
	return w, nil
}

func nanoseconds(d time.Duration) C.uint64_t {
	if d < 0 {
		return 0
	}
	return C.uint64_t(d)
}

// Close runs what was given, and ends the worker. In a function that the worker runs it is refused.
func (w *Worker) Close() error {
	number := w.number.Load()
	err := w.close(vmaWorkerFree)
	if errors.Is(err, &Error{Status: StatusInvalidValue}) {
		w.number.Store(number)
	}
	return err
}

// poll asks done again and again, less and less often, until it is so or the context ends.
func poll(ctx context.Context, done func() (bool, error)) error {
	for rest := 10 * time.Microsecond; ; rest = min(2*rest, time.Millisecond) {
		if ended, err := done(); ended || err != nil {
			return err
		}
		timer := time.NewTimer(rest)
		select {
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-timer.C:
		}
	}
}

func min(a, b time.Duration) time.Duration {
	if a < b {
		return a
	}
	return b
}

// Synchronize waits until the device has done all that was given so far, and tells what of it failed first.
func (w *Worker) Synchronize(ctx context.Context) error {
	defer runtime.KeepAlive(w)
	event, err := w.Record()
	if err != nil {
		return err
	}
	defer event.Close()
	if err := event.Wait(ctx); err != nil {
		return err
	}
	return vmaSynchronize(w.get(), nanoseconds(time.Minute))
}

// MemoryInfo is how full the memory is: the device's, and what the worker uses and keeps of it.
type MemoryInfo struct{ Free, Total, Used, Kept uint64 }

// Memory tells how full the memory is.
func (w *Worker) Memory() (MemoryInfo, error) {
	defer runtime.KeepAlive(w)
	var info C.vma_memory_info
	err := vmaGetMemoryInfo(w.get(), &info)
	return MemoryInfo{uint64(info.free_bytes), uint64(info.total_bytes), uint64(info.used_bytes), uint64(info.kept_bytes)}, err
}

// Trim waits for the device, then releases to it the memory that was freed.
func (w *Worker) Trim() error {
	defer runtime.KeepAlive(w)
	return vmaTrim(w.get())
}

// job is a function that a worker runs, and where its error goes.
type job struct {
	run  func() error
	done chan error
}

// Do runs a function on the worker's thread, behind what it was given so far, and gives what it returns. In it, calls of the worker happen at
// once. If the context ends first, a function that has not started never does; one that runs goes on.
func (w *Worker) Do(ctx context.Context, f func() error) error {
	defer runtime.KeepAlive(w)
	if err := ctx.Err(); err != nil {
		return err
	}
	given := job{f, make(chan error, 1)}
	data := cgo.NewHandle(given)
	var number C.vma_job
	err := call(func() C.vma_status { return C.vmaccelSubmit(w.get(), C.uintptr_t(data), &number) })
	if err != nil {
		data.Delete()
		return err
	}
	defer vmaJobFree(number)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case err := <-given.done:
			return err
		case <-ctx.Done():
			var cancelled C.int32_t
			if err := vmaJobCancel(number, &cancelled); err == nil && cancelled != 0 {
				data.Delete()
			}
			return ctx.Err()
		case <-tick.C:
			// A worker that is lost does not run it.
			var ended C.int32_t
			if err := vmaJobQuery(number, &ended); err != nil || ended == 0 {
				continue
			}
			select {
			case err := <-given.done:
				return err
			default:
				data.Delete()
				return vmaJobWait(number, 0, nil)
			}
		}
	}
}

// Event is a point in a worker's stream.
type Event struct{ handle }

// Record makes an event behind all that was given so far.
func (w *Worker) Record() (*Event, error) {
	defer runtime.KeepAlive(w)
	var number C.vma_event
	if err := vmaEventRecord(w.get(), &number); err != nil {
		return nil, err
	}
	e := &Event{}
	e.number.Store(uint64(number))
	runtime.SetFinalizer(e, (*Event).Close)
	return e, nil
}

// WaitFor lets what the worker is given from now on begin when an event has been reached, which may be another worker's.
func (w *Worker) WaitFor(e *Event) error {
	defer runtime.KeepAlive(w)
	defer runtime.KeepAlive(e)
	return vmaEventWait(w.get(), e.get())
}

// Reached tells whether the event has been reached.
func (e *Event) Reached() (bool, error) {
	defer runtime.KeepAlive(e)
	var reached C.int32_t
	err := vmaEventQuery(e.get(), &reached)
	return reached != 0, err
}

// Wait waits until the event has been reached.
func (e *Event) Wait(ctx context.Context) error { return poll(ctx, e.Reached) }

// Since gives the device's time from an event before to this one, of the same worker.
func (e *Event) Since(before *Event) (time.Duration, error) {
	defer runtime.KeepAlive(e)
	defer runtime.KeepAlive(before)
	var time_ns C.uint64_t
	err := vmaEventElapsed(before.get(), e.get(), &time_ns)
	return time.Duration(time_ns), err
}

// Close gives the event up.
func (e *Event) Close() error { return e.close(vmaEventFree) }

// HandleCount tells how many things of the library there are that were not freed.
func HandleCount() (uint64, error) {
	var count C.uint64_t
	err := vmaHandleCount(&count)
	return uint64(count), err
}

// fits says that so many elements from one on are there.
func fits(from, count, length int) error {
	if from < 0 || from > length || count > length-from {
		return &Error{StatusInvalidValue, fmt.Sprintf("%d elements from %d on are not in memory of %d", count, from, length)}
	}
	return nil
}
