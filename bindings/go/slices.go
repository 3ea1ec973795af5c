package vmaccel

// #include <stdlib.h>
// #include <vmkernels.h>
import "C"

import (
	"errors"
	"fmt"
	"runtime"
	"unsafe"
)

// Float is what the functions over slices compute with.
type Float interface {
	float32 | BF16 | F16
}

var errNoElements = errors.New("vmaccel: there is no such function of these elements")

// UseCPU has the functions over slices compute on the CPU, also where there is a GPU, which does not reach slices.
func UseCPU() error {
	return callKernel(func() C.vmk_status { return C.vmk_use(C.VMK_CPU) })
}

// callKernel runs a function of the library, whose text of an error is the thread's.
func callKernel(f func() C.vmk_status) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if status := f(); status != C.VMK_SUCCESS {
		return &Error{Status(status), C.GoString(C.vmk_last_error())}
	}
	return nil
}

// suffix is what a function's name ends with for elements.
func suffix[T Float]() string {
	var t T
	switch any(t).(type) {
	case BF16:
		return "_bf16"
	case F16:
		return "_f16"
	}
	return ""
}

// extent is a slice's name and bytes.
type extent struct {
	name  string
	bytes uint64
}

func sizeOf[T any](values []T) uint64 {
	var t T
	return uint64(len(values)) * uint64(unsafe.Sizeof(t))
}

// checkSizes says that each slice is as long as the function needs it.
func checkSizes(function string, words []uint64, given []extent) error {
	name := C.CString(function)
	defer C.free(unsafe.Pointer(name))
	needed := make([]uint64, len(words))
	err := callKernel(func() C.vmk_status {
		return C.vmk_buffer_sizes(name, (*C.uint64_t)(address(words)), C.int32_t(len(words)), (*C.uint64_t)(address(needed)))
	})
	if err != nil {
		return err
	}
	for at, slice := range given {
		if slice.bytes < needed[at] && slice.name != "" {
			text := fmt.Sprintf("%s: %s has %d bytes, %d are needed", function, slice.name, slice.bytes, needed[at])
			return &Error{StatusInvalidValue, text}
		}
	}
	return nil
}

// workspace gives memory for a function to work in, as much as it tells.
func workspace(bytes func(*C.size_t) C.vmk_status) ([]uint64, error) {
	var needed C.size_t
	if err := callKernel(func() C.vmk_status { return bytes(&needed) }); err != nil {
		return nil, err
	}
	// What it begins with is a multiple of 16.
	space := make([]uint64, needed/8+2)
	if len(space) > 2 && uintptr(address(space))%16 != 0 {
		space = space[1:]
	}
	return space, nil
}

func given[T any](values []T) uint64 {
	if values == nil {
		return 0
	}
	return 1
}

func flag(value bool) uint64 {
	if value {
		return 1
	}
	return 0
}
