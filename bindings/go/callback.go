package vmaccel

// #include <stdint.h>
import "C"

import (
	"fmt"
	"runtime/cgo"
	"unsafe"
)

// vmaccelRun runs a job of [Worker.Do]. No panic leaves it.
//
//export vmaccelRun
func vmaccelRun(data unsafe.Pointer) C.int32_t {
	handle := cgo.Handle(uintptr(data))
	given := handle.Value().(job)
	handle.Delete()
	defer func() {
		if panicked := recover(); panicked != nil {
			given.done <- fmt.Errorf("the function that the worker ran panicked: %v", panicked)
		}
	}()
	given.done <- given.run()
	return 0
}
