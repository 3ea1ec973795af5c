package vmaccel

// #include <stdlib.h>
// #include <vmaccel.h>
import "C"

import (
	"fmt"
	"math"
	"runtime"
	"time"
	"unsafe"
)

// Module is kernels that were compiled for a worker's device, and loaded.
type Module struct {
	handle
	worker *Worker
}

// Load compiles a module of the IR, text or binary. It may be from anywhere: all is checked.
func (w *Worker) Load(code []byte) (*Module, error) {
	defer runtime.KeepAlive(w)
	var number C.vma_module
	if err := vmaModuleLoad(w.get(), address(code), C.uint64_t(len(code)), &number); err != nil {
		return nil, err
	}
	m := &Module{worker: w}
	m.number.Store(uint64(number))
	runtime.SetFinalizer(m, (*Module).Close)
	return m, nil
}

// Close ends the module and its kernels; launches that were given run.
func (m *Module) Close() error { return m.close(vmaModuleFree) }

// Kernel is a kernel of a module.
type Kernel struct {
	number C.vma_kernel
	module *Module
}

// Kernel gives the kernel of a name.
func (m *Module) Kernel(name string) (*Kernel, error) {
	defer runtime.KeepAlive(m)
	text := C.CString(name)
	defer C.free(unsafe.Pointer(text))
	k := &Kernel{module: m}
	if err := vmaModuleFindKernel(m.get(), text, &k.number); err != nil {
		return nil, err
	}
	return k, nil
}

// Parameter is what a parameter of a kernel is.
type Parameter struct {
	Name string
	// Has it a view? Else it is a number.
	View bool
	// What elements a view has.
	Type Type
	// Bytes of an element, or of the number.
	Bytes uint32
	// Of a view: dimensions, what address and strides are multiples of, and whether it is written.
	Rank, Align uint32
	Writes      bool
}

// Parameters tells what the parameters are.
func (k *Kernel) Parameters() ([]Parameter, error) {
	defer runtime.KeepAlive(k)
	var info C.vma_kernel_info
	if err := vmaKernelGetInfo(k.number, &info); err != nil {
		return nil, err
	}
	parameters := make([]Parameter, info.parameters)
	for at := range parameters {
		var told C.vma_parameter
		if err := vmaKernelGetParameter(k.number, C.uint32_t(at), &told); err != nil {
			return nil, err
		}
		parameters[at] = Parameter{
			C.GoString(&told.name[0]), told.kind == C.VMA_VIEW, Type(told._type), uint32(told.bytes),
			uint32(told.rank), uint32(told.align), told.writes != 0,
		}
	}
	return parameters, nil
}

// Argument is a view for a launch: memory, or what [Memory.View] gives.
type Argument interface {
	argument() (C.vma_argument, error)
}

// View is a part of memory with extents.
type View[T Element] struct {
	memory  *Memory[T]
	offset  int
	extents []int
}

// View gives the elements from one on, of these extents, slowest dimension first, one row behind the other.
func (m *Memory[T]) View(from int, extents ...int) View[T] { return View[T]{m, from, extents} }

func (m *Memory[T]) argument() (C.vma_argument, error) {
	var t T
	kind, _ := typeOf(t)
	return C.vma_argument{kind: C.VMA_VIEW, _type: C.vma_type(kind), memory: m.get()}, nil
}

func (v View[T]) argument() (C.vma_argument, error) {
	given, err := v.memory.argument()
	if err == nil {
		err = fits(v.offset, 0, v.memory.length)
	}
	if err == nil && (len(v.extents) == 0 || len(v.extents) > len(given.extents)) {
		err = &Error{StatusInvalidValue, fmt.Sprintf("a view has 1 to %d dimensions, not %d", len(given.extents), len(v.extents))}
	}
	if err != nil {
		return given, err
	}
	var t T
	given.offset = C.uint64_t(v.offset * int(unsafe.Sizeof(t)))
	given.rank = C.uint32_t(len(v.extents))
	for at, extent := range v.extents {
		if extent < 0 {
			return given, &Error{StatusInvalidValue, fmt.Sprintf("extent %d of a view is %d", at, extent)}
		}
		given.extents[at] = C.uint64_t(extent)
	}
	return given, nil
}

// number gives the argument of a number.
func number(value any) (C.vma_argument, error) {
	kind, known := typeOf(value)
	if !known {
		return C.vma_argument{}, &Error{StatusInvalidValue, fmt.Sprintf("%T is neither memory nor a number of a kernel's: give an int32, a float32 or the like", value)}
	}
	var bits uint64
	switch value := value.(type) {
	case bool:
		bits = flag(value)
	case int8:
		bits = uint64(uint8(value))
	case uint8:
		bits = uint64(value)
	case int16:
		bits = uint64(uint16(value))
	case uint16:
		bits = uint64(value)
	case int32:
		bits = uint64(uint32(value))
	case uint32:
		bits = uint64(value)
	case int64:
		bits = uint64(value)
	case uint64:
		bits = value
	case F16:
		bits = uint64(value)
	case BF16:
		bits = uint64(value)
	case float32:
		bits = uint64(math.Float32bits(value))
	case float64:
		bits = math.Float64bits(value)
	}
	return C.vma_argument{kind: C.VMA_SCALAR, _type: C.vma_type(kind), bits: C.uint64_t(bits)}, nil
}

// Limits are what a launch may take until it is stopped.
type Limits struct {
	// How often each thread may begin the body of a loop.
	Fuel uint64
	Time time.Duration
}

// Launch launches the kernel over a grid of blocks with an argument for each parameter: memory, views, or numbers. It is queued.
func (k *Kernel) Launch(grid [3]uint32, arguments ...any) error {
	return k.launch(grid, nil, arguments)
}

// LaunchWithin does the same, with limits.
func (k *Kernel) LaunchWithin(limits Limits, grid [3]uint32, arguments ...any) error {
	given := C.vma_limits{fuel: C.uint64_t(limits.Fuel), time_ns: nanoseconds(limits.Time)}
	return k.launch(grid, &given, arguments)
}

func (k *Kernel) launch(grid [3]uint32, limits *C.vma_limits, arguments []any) error {
	defer runtime.KeepAlive(k)
	defer runtime.KeepAlive(arguments)
	given := make([]C.vma_argument, len(arguments))
	for at, argument := range arguments {
		var err error
		if view, is := argument.(Argument); is {
			given[at], err = view.argument()
		} else {
			given[at], err = number(argument)
		}
		if err != nil {
			return fmt.Errorf("argument %d: %w", at, err)
		}
	}
	var first *C.vma_argument
	if len(given) > 0 {
		first = &given[0]
	}
	return vmaLaunch(k.number, C.uint32_t(grid[0]), C.uint32_t(grid[1]), C.uint32_t(grid[2]), first, C.uint32_t(len(given)), limits)
}
