package vmaccel

// #include <vmaccel.h>
import "C"

import (
	"runtime"
	"unsafe"
)

// BF16 is the bits of a bfloat16.
type BF16 uint16

// F16 is the bits of an IEEE 754 half-precision number.
type F16 uint16

// Element is what memory has.
type Element interface {
	int8 | uint8 | int16 | uint16 | int32 | uint32 | int64 | uint64 | float32 | float64 | BF16 | F16
}

// typeOf tells what an element or a number is to a kernel.
func typeOf(value any) (Type, bool) {
	switch value.(type) {
	case int8, uint8, bool:
		return TypeU8, true
	case int16, uint16:
		return TypeU16, true
	case int32, uint32:
		return TypeU32, true
	case int64, uint64:
		return TypeU64, true
	case F16:
		return TypeF16, true
	case BF16:
		return TypeBf16, true
	case float32:
		return TypeF32, true
	case float64:
		return TypeF64, true
	}
	return TypeAny, false
}

// Memory is elements of a worker's.
type Memory[T Element] struct {
	handle
	worker *Worker
	length int
}

// Allocate gives memory of at least one element.
func Allocate[T Element](w *Worker, kind MemoryKind, length int) (*Memory[T], error) {
	defer runtime.KeepAlive(w)
	var t T
	size := uint64(unsafe.Sizeof(t))
	if length < 0 || uint64(length) > (1<<63)/size {
		return nil, fits(0, length, -1)
	}
	var number C.vma_memory
	if err := vmaMemoryAllocate(w.get(), C.vma_memory_kind(kind), C.uint64_t(uint64(length)*size), &number); err != nil {
		return nil, err
	}
	m := &Memory[T]{worker: w, length: length}
	m.number.Store(uint64(number))
	runtime.SetFinalizer(m, (*Memory[T]).Close)
	return m, nil
}

// Upload gives memory of the device with a copy of the values.
func Upload[T Element](w *Worker, values []T) (*Memory[T], error) {
	m, err := Allocate[T](w, DeviceMemory, len(values))
	if err != nil {
		return nil, err
	}
	if err := m.Write(0, values); err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

// Len tells how many elements there are.
func (m *Memory[T]) Len() int { return m.length }

// bytes gives the offset, address and length of values that lie from an element on.
func (m *Memory[T]) bytes(from int, values []T) (C.uint64_t, unsafe.Pointer, C.uint64_t, error) {
	var t T
	size := int(unsafe.Sizeof(t))
	if err := fits(from, len(values), m.length); err != nil {
		return 0, nil, 0, err
	}
	return C.uint64_t(from * size), address(values), C.uint64_t(len(values) * size), nil
}

// Write copies values to the elements from one on, behind what the worker was given so far.
func (m *Memory[T]) Write(from int, values []T) error {
	defer runtime.KeepAlive(m)
	offset, at, bytes, err := m.bytes(from, values)
	if err != nil {
		return err
	}
	return vmaWrite(m.get(), offset, at, bytes)
}

// Read copies elements from one on into values, behind what the worker was given so far, and tells what of that failed.
func (m *Memory[T]) Read(from int, values []T) error {
	defer runtime.KeepAlive(m)
	offset, at, bytes, err := m.bytes(from, values)
	if err != nil {
		return err
	}
	return vmaRead(m.get(), offset, at, bytes)
}

// Download gives all elements.
func (m *Memory[T]) Download() ([]T, error) {
	values := make([]T, m.length)
	return values, m.Read(0, values)
}

// Copy copies elements of one memory to another. Of one worker it is queued; of two it goes by way of the host.
func Copy[T Element](to *Memory[T], toFrom int, source *Memory[T], from, count int) error {
	defer runtime.KeepAlive(to)
	defer runtime.KeepAlive(source)
	for _, err := range []error{fits(0, count, count), fits(toFrom, count, to.length), fits(from, count, source.length)} {
		if err != nil {
			return err
		}
	}
	var t T
	size := int(unsafe.Sizeof(t))
	return vmaCopy(to.get(), C.uint64_t(toFrom*size), source.get(), C.uint64_t(from*size), C.uint64_t(count*size))
}

// Fill sets every byte; it is queued.
func (m *Memory[T]) Fill(value byte) error {
	defer runtime.KeepAlive(m)
	var t T
	return vmaFill(m.get(), 0, C.uint64_t(m.length*int(unsafe.Sizeof(t))), C.uint8_t(value))
}

// Close frees the memory, behind what the worker was given so far.
func (m *Memory[T]) Close() error { return m.close(vmaMemoryFree) }

// address is where a slice begins; nil without elements.
func address[T any](values []T) unsafe.Pointer {
	if len(values) == 0 {
		return nil
	}
	return unsafe.Pointer(&values[0])
}
