package vmaccel

import (
	"context"
	"errors"
	"math"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

const source = `vir 1
kernel @axpy(@x: view<f32, [n], read>, @y: view<f32, [n], readwrite>, %a: f32) at 0x1000 block(64) {
  %i = global_id.x : i64
  %n = extent @x, 0 : i64
  %in = lt.s %i, %n : bool
  if %in {
    %x = load @x[%i] : f32
    %y = load @y[%i] : f32
    %ax = mul %a, %x : f32
    %sum = add %ax, %y : f32
    store @y[%i], %sum
  }
}
kernel @spin(@x: view<i32, [1], readwrite>) at 0x2000 block(1) {
  %i = const 0 : i64
  %zero = const 0 : i32
  while {
    %a = load @x[%i] : i32
    %on = eq %a, %zero : bool
    yield %on
  } do {
    store @x[%i], %zero
  }
}
`

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

// soon is a context in which all here is done many times.
func soon(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func worker(t *testing.T) *Worker {
	device := must(Open("cpu"))
	w := must(device.Start(WorkerOptions{}))
	t.Cleanup(func() {
		for _, err := range []error{w.Close(), device.Close()} {
			if err != nil {
				t.Error(err)
			}
		}
	})
	return w
}

func load(w *Worker, name string) (*Module, *Kernel) {
	module := must(w.Load([]byte(source)))
	return module, must(module.Kernel(name))
}

// fails says that an error has a status and a text.
func fails(t *testing.T, err error, status Status, part string) {
	t.Helper()
	if !errors.Is(err, &Error{Status: status}) || !strings.Contains(err.Error(), part) {
		t.Errorf("%v, not %d with %q", err, status, part)
	}
}

func TestLaunch(t *testing.T) {
	w := worker(t)
	module, axpy := load(w, "axpy")
	defer module.Close()
	x, y := must(Upload(w, []float32{1, 2, 3, 4})), must(Upload(w, []float32{1, 1, 1, 1}))
	before := must(w.Record())
	if err := axpy.Launch([3]uint32{1, 1, 1}, x, y, float32(0.5)); err != nil {
		t.Fatal(err)
	}
	if err := axpy.Launch([3]uint32{1, 1, 1}, x.View(2, 2), y.View(0, 2), float32(1)); err != nil {
		t.Fatal(err)
	}
	after := must(w.Record())
	if found := must(y.Download()); found[0] != 4.5 || found[1] != 6 || found[3] != 3 {
		t.Error(found)
	}
	if err := after.Wait(soon(t)); err != nil {
		t.Error(err)
	}
	if time := must(after.Since(before)); time < 0 {
		t.Error(time)
	}
	parameters := must(axpy.Parameters())
	if len(parameters) != 3 || parameters[0].Name != "x" || !parameters[1].Writes || parameters[2].View {
		t.Error(parameters)
	}
	grid := [3]uint32{1, 1, 1}
	doubles := must(Allocate[float64](w, DeviceMemory, 4))
	for _, refused := range []struct {
		err    error
		status Status
		part   string
	}{
		{axpy.Launch(grid, x, y), StatusInvalidValue, "count is 2: axpy has 3 parameters"},
		{axpy.Launch(grid, x, x, float32(1)), StatusInvalidValue, "overlap"},
		{axpy.Launch(grid, doubles, y, float32(1)), StatusInvalidValue, "elements of f32 are wanted, f64"},
		{axpy.Launch(grid, x, y, 1.0), StatusInvalidValue, "parameter a"},
		{axpy.Launch(grid, x, y, "one"), StatusInvalidValue, "argument 2: string is neither memory nor a number"},
		{axpy.Launch(grid, x, y, 1), StatusInvalidValue, "argument 2: int is neither"},
		{axpy.Launch([3]uint32{}, x, y, float32(1)), StatusInvalidValue, "no blocks along x"},
		{axpy.Launch(grid, x.View(0, 5), y.View(0, 5), float32(1)), StatusInvalidValue, "reach over"},
		{axpy.Launch(grid, x.View(-1, 1), y, float32(1)), StatusInvalidValue, "0 elements from -1 on"},
		{axpy.Launch(grid, x.View(0), y, float32(1)), StatusInvalidValue, "1 to 4 dimensions, not 0"},
		{axpy.Launch(grid, x.View(0, -1), y, float32(1)), StatusInvalidValue, "extent 0 of a view is -1"},
		{x.Read(0, make([]float32, 5)), StatusInvalidValue, "5 elements from 0 on are not in memory of 4"},
		{x.Write(4, make([]float32, 1)), StatusInvalidValue, "1 elements from 4 on"},
		{x.Write(-1, nil), StatusInvalidValue, "from -1"},
		{Copy(x, 0, y, 0, -1), StatusInvalidValue, "-1 elements"},
		{Copy(x, 1, y, 0, 4), StatusInvalidValue, "4 elements from 1 on"},
		{func() error { _, err := Allocate[float32](w, DeviceMemory, 0); return err }(), StatusInvalidValue, "bytes is 0"},
		{func() error { _, err := Allocate[float32](w, DeviceMemory, -1); return err }(), StatusInvalidValue, "-1"},
		{func() error { _, err := Allocate[float64](w, DeviceMemory, math.MaxInt); return err }(), StatusInvalidValue, ""},
		{func() error { _, err := Open("gpu"); return err }(), StatusInvalidValue, "names no accelerator"},
		{func() error { _, err := module.Kernel("none"); return err }(), StatusInvalidValue, "the module has axpy"},
		{func() error { _, err := w.Load([]byte("vir 2")); return err }(), StatusCompileFailed, "vma_module_load"},
	} {
		fails(t, refused.err, refused.status, refused.part)
	}
	if err := Copy(x, 0, y, 0, 4); err != nil {
		t.Error(err)
	}
	for range [2]int{} {
		if err := x.Close(); err != nil {
			t.Error(err)
		}
	}
	fails(t, x.Read(0, make([]float32, 4)), StatusInvalidHandle, "memory is 0")
	fails(t, axpy.Launch(grid, x, y, float32(1)), StatusInvalidHandle, "arguments[0].memory is 0")
}

func TestWaits(t *testing.T) {
	w := worker(t)
	module, spin := load(w, "spin")
	defer module.Close()
	x := must(Upload(w, []int32{0}))
	limits := Limits{Fuel: math.MaxUint64, Time: 300 * time.Millisecond}
	if err := spin.LaunchWithin(limits, [3]uint32{1, 1, 1}, x); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	if err := w.Synchronize(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	fails(t, w.Synchronize(soon(t)), StatusKernelStopped, "took longer than 300ms")
	if err := w.Synchronize(soon(t)); err != nil {
		t.Error(err)
	}

	runs, end := make(chan struct{}), make(chan struct{})
	ended := make(chan error)
	go func() {
		ended <- w.Do(soon(t), func() error {
			close(runs)
			<-end
			// Calls of its own worker happen at once.
			if err := x.Write(0, []int32{7}); err != nil {
				return err
			}
			fails(t, w.Close(), StatusInvalidValue, "worker is that of the job which calls")
			return w.Do(context.Background(), func() error { return errors.New("mine") })
		})
	}()
	<-runs
	late, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	if err := w.Do(late, func() error { t.Error("it was taken back"); return nil }); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	close(end)
	if err := <-ended; err == nil || err.Error() != "mine" {
		t.Error(err)
	}
	if found := must(x.Download()); found[0] != 7 {
		t.Error(found)
	}
	if err := w.Do(soon(t), func() error { panic("at the disco") }); err == nil || !strings.Contains(err.Error(), "at the disco") {
		t.Error(err)
	}
	if err := w.Do(late, func() error { return nil }); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
}

func TestManyGoroutines(t *testing.T) {
	w := worker(t)
	module, axpy := load(w, "axpy")
	defer module.Close()
	var all sync.WaitGroup
	sum := 0
	for number := 0; number < 64; number++ {
		all.Add(1)
		go func(number int) {
			defer all.Done()
			for turn := 0; turn < 20; turn++ {
				// Only the worker's thread touches it.
				if err := w.Do(soon(t), func() error { sum++; return nil }); err != nil {
					t.Error(err)
				}
				x, y := must(Upload(w, []float32{float32(number)})), must(Upload(w, []float32{1}))
				if err := axpy.Launch([3]uint32{1, 1, 1}, x, y, float32(turn)); err != nil {
					t.Error(err)
				}
				x.Close()
				if found := must(y.Download()); found[0] != float32(number*turn+1) {
					t.Error(number, turn, found)
				}
				y.Close()
			}
		}(number)
	}
	all.Wait()
	if sum != 64*20 {
		t.Error(sum)
	}
}

func TestTheCollectorFreesWhatIsLeft(t *testing.T) {
	before := must(HandleCount())
	func() {
		for _, device := range must(Devices()) {
			if info := must(device.Info()); info.Name == "" || info.ComputeUnits == 0 {
				t.Error(info)
			}
		}
		w := must(must(Open("cpu")).Start(WorkerOptions{Capacity: 16, Zero: true}))
		must(Upload(w, []F16{1, 2}))
		must(w.Record())
		load(w, "axpy")
		if info := must(w.Memory()); info.Used == 0 {
			t.Error(info)
		}
	}()
	deadline := time.Now().Add(time.Minute)
	for must(HandleCount()) > before {
		if time.Now().After(deadline) {
			t.Fatalf("%d handles are left", must(HandleCount()))
		}
		runtime.GC()
		time.Sleep(time.Millisecond)
	}
}

func TestSlices(t *testing.T) {
	if err := UseCPU(); err != nil {
		t.Fatal(err)
	}
	x, y := []float32{1, 2, 3, 4, 5, 6}, make([]float32, 6)
	if err := Softmax(x, y, 2, 3); err != nil || math.Abs(float64(y[0]+y[1]+y[2]-1)) > 1e-6 {
		t.Error(y, err)
	}
	c := make([]float32, 4)
	if err := Gemm(x, x, c, 2, 2, 3, 1, 0); err != nil || c[0] != 22 || c[3] != 64 {
		t.Error(c, err)
	}
	// With memory to work in, which is allocated for the call.
	at := make([]int32, 2)
	if err := Argmax(x, at, 2, 3); err != nil || at[0] != 2 || at[1] != 2 {
		t.Error(at, err)
	}
	norm := make([]float32, 1)
	if err := GradClip([]float32{3, 4}, norm, 10, 2); err != nil || math.Abs(float64(norm[0]-5)) > 1e-6 {
		t.Error(norm, err)
	}
	half := make([]BF16, 2)
	if err := Add([]BF16{0x3f80, 0x4000}, []BF16{0x3f80, 0x3f80}, half, 2); err != nil || half[0] != 0x4000 {
		t.Error(half, err)
	}
	// A slice that may be nil.
	if err := Linear(x, x, c, nil, 2, 3, 2); err != nil || c[0] != 14 {
		t.Error(c, err)
	}
	for _, refused := range []struct {
		err  error
		part string
	}{
		{Softmax(x, y[:5], 2, 3), "cuda_softmax: output has 20 bytes, 24 are needed"},
		{Softmax(x[:2], y, 2, 3), "cuda_softmax: input has 8 bytes, 24 are needed"},
		{Softmax(nil, y, 2, 3), "cuda_softmax: input has 0 bytes"},
		{Gemm(x, x, c[:3], 2, 2, 3, 1, 0), "cuda_gemm: c has 12 bytes, 16 are needed"},
		{Gemm(x, x, c, -1, 2, 3, 1, 0), "M is -1: it must not be negative"},
		{Linear(x, x, c, []float32{1}, 2, 3, 2), "cuda_linear: bias has 4 bytes, 8 are needed"},
		{Add([]F16{1}, []F16{1}, []F16{}, 1), "cuda_add_f16: output has 0 bytes, 2 are needed"},
		{Softmax(x, x, 2, 3), "overlap"},
		{Gemm(x, x, c, math.MaxInt32, math.MaxInt32, math.MaxInt32, 1, 0), ""},
	} {
		fails(t, refused.err, StatusInvalidValue, refused.part)
	}
}
