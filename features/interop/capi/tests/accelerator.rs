//! `vmaccel.h` on the CPU, or the device that VMA_TEST_DEVICE names: what each function refuses, and what memory, kernels, events and jobs do.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_void};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::ptr::{from_mut, from_ref, null, null_mut};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Barrier, Mutex};

use vmkernels::sys::accelerator::*;

/// A second, in which all here is done many times.
const SECOND: u64 = 1_000_000_000;
const LONG: u64 = 60 * SECOND;

const SOURCE: &str = "vir 1
kernel @add(@x: view<f32, [n], read>, @y: view<f32, [n], readwrite>, %by: f32) at 0x1000 block(64) {
  %i = global_id.x : i64
  %n = extent @x, 0 : i64
  %in = lt.s %i, %n : bool
  if %in {
    %a = load @x[%i] : f32
    %b = load @y[%i] : f32
    %c = mul %a, %by : f32
    %sum = add %b, %c : f32
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
kernel @rows(@x: view<f32, [?, 4], read, align 16>, @y: view<f32, [?, ?], write>) at 0x3000 block(1) {
}
";

/// Calls a function with pointers to memory of the test's own.
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: what pointers point to is the test's own, of as many bytes as are said.
        unsafe { $function($($argument),*) }
    };
}

/// The text of this thread's last error.
fn last() -> String {
    // SAFETY: it is a string until the next call.
    unsafe { CStr::from_ptr(vma_last_error()) }.to_str().unwrap().to_owned()
}

fn ok(status: vma_status) {
    assert_eq!(status, VMA_SUCCESS, "{}", last());
}

fn fails(status: vma_status, wanted: vma_status, part: &str) {
    let said = last();
    assert!(status == wanted && said.contains(part), "{status}: {said:?}, not {wanted} with {part:?}");
}

/// What a function gives by its last parameter.
fn given<T: Default>(f: impl FnOnce(*mut T) -> vma_status) -> T {
    let mut value = T::default();
    ok(f(from_mut(&mut value)));
    value
}

fn text(text: &str) -> CString {
    CString::new(text).unwrap()
}

fn device() -> vma_device {
    let spec = text(&std::env::var("VMA_TEST_DEVICE").unwrap_or_else(|_| "cpu".into()));
    given(|device| call!(vma_device_open(spec.as_ptr(), device)))
}

fn start(device: vma_device) -> vma_worker {
    given(|worker| call!(vma_worker_start(device, null(), worker)))
}

fn memory(worker: vma_worker, kind: vma_memory_kind, bytes: u64) -> vma_memory {
    given(|memory| call!(vma_memory_allocate(worker, kind, bytes, memory)))
}

fn load(worker: vma_worker) -> vma_module {
    given(|module| call!(vma_module_load(worker, SOURCE.as_ptr().cast(), SOURCE.len() as u64, module)))
}

fn kernel(module: vma_module, name: &str) -> vma_kernel {
    let name = text(name);
    given(|kernel| call!(vma_module_find_kernel(module, name.as_ptr(), kernel)))
}

fn view(memory: vma_memory) -> vma_argument {
    vma_argument { kind: VMA_VIEW, memory, ..Default::default() }
}

fn number(type_: vma_type, bits: u64) -> vma_argument {
    vma_argument { kind: VMA_SCALAR, type_, bits, ..Default::default() }
}

fn launch(kernel: vma_kernel, grid: u32, arguments: &[vma_argument]) -> vma_status {
    call!(vma_launch(kernel, grid, 1, 1, arguments.as_ptr(), arguments.len() as u32, null()))
}

fn write(memory: vma_memory, values: &[f32]) {
    ok(call!(vma_write(memory, 0, values.as_ptr().cast(), 4 * values.len() as u64)));
}

fn read(memory: vma_memory, count: usize) -> Vec<f32> {
    let mut values = vec![0.0f32; count];
    ok(call!(vma_read(memory, 0, values.as_mut_ptr().cast(), 4 * count as u64)));
    values
}

unsafe extern "C" fn nothing(_: *mut c_void) -> i32 {
    7
}

unsafe extern "C" fn reached(_: *mut c_void, _: u64, _: u64) -> i32 {
    1
}

unsafe extern "C" fn signalled(_: *mut c_void, _: u64) -> i32 {
    0
}

const CALLBACKS: Callbacks = Callbacks {
    vma_function: Some(nothing),
    vma_wait_function: Some(reached),
    vma_signal_function: Some(signalled),
    vma_release_function: Some(nothing),
};

fn timeline() -> vma_timeline {
    given(|timeline| call!(vma_timeline_create(timeline)))
}

/// One of each, and words with which each function succeeds.
struct Fixture {
    handles: Vec<(&'static str, u64)>,
    /// Of each kind one that was freed.
    freed: Vec<(&'static str, u64)>,
    arguments: [vma_argument; 3],
    /// A worker of the processor, whose link and resource it is.
    host: vma_worker,
    external: Box<vma_external_memory>,
    texts: Vec<(&'static str, CString)>,
    /// Where results go, and what is read and written.
    room: Box<[u64; 512]>,
    _file: tempfile::NamedTempFile,
    _shared: OwnedFd,
}

impl Fixture {
    fn new() -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), SOURCE).unwrap();
        let shared = shared();
        let (kind, fd) = (VMA_HOST_FD, shared.as_raw_fd());
        let external =
            vma_external_memory { kind, fd, allocation_bytes: 64, bytes: 64, ..Default::default() };
        let on = given(|device| call!(vma_device_open(c"cpu".as_ptr(), device)));
        let host = start(on);
        let handles = || {
            let on = device();
            let worker = start(on);
            let module = load(worker);
            let event = given(|event| call!(vma_event_record(worker, event)));
            ok(call!(vma_event_synchronize(event, LONG)));
            let job = given(|job| call!(vma_submit(worker, Some(nothing), null_mut(), job)));
            ok(call!(vma_job_wait(job, LONG, null_mut())));
            let graphics = timeline();
            // Whatever is waited for has been reached.
            ok(call!(vma_timeline_signal(graphics, u64::MAX)));
            let link = given(|link| call!(vma_link_create(host, graphics, timeline(), link)));
            let resource = given(|resource| {
                call!(vma_resource_register(host, c"x".as_ptr(), &raw const external, resource))
            });
            vec![
                ("vma_device", on),
                ("vma_worker", worker),
                ("vma_memory", memory(worker, VMA_PINNED_MEMORY, 64)),
                ("vma_module", module),
                ("vma_kernel", kernel(module, "add")),
                ("vma_event", event),
                ("vma_job", job),
                ("vma_timeline", graphics),
                ("vma_link", link),
                ("vma_resource", resource),
            ]
        };
        let (handles, freed) = (handles(), handles());
        free(&freed);
        let other = memory(handles[1].1, VMA_DEVICE_MEMORY, 64);
        let arguments = [view(handles[2].1), view(other), number(VMA_F32, 0)];
        let path = file.path().to_str().unwrap();
        let texts = [("spec", "cpu"), ("path", path), ("name", "add")].map(|(of, value)| (of, text(value)));
        let (texts, room, external) = (texts.into(), Box::new([0; 512]), Box::new(external));
        Self { handles, freed, arguments, host, external, texts, room, _file: file, _shared: shared }
    }

    fn of<'a>(handles: &'a [(&'static str, u64)], kind: &str) -> Option<&'a u64> {
        handles.iter().find(|(of, _)| *of == kind).map(|(_, handle)| handle)
    }

    /// What a function succeeds with.
    fn word(&mut self, function: &str, kind: &str, name: &str) -> u64 {
        if name == "target" {
            return self.arguments[1].memory;
        }
        match (function, name) {
            ("vma_link_create" | "vma_resource_register", "worker") => return self.host,
            (_, "computed") => return timeline(),
            _ => {}
        }
        if let Some(handle) = Self::of(&self.handles, kind) {
            return *handle;
        }
        let pointer = |at: *const c_void| at.expose_provenance() as u64;
        match (kind, name) {
            ("const char *", _) => {
                pointer(self.texts.iter().find(|(of, _)| *of == name).unwrap().1.as_ptr().cast())
            }
            ("const vma_external_memory *", _) => pointer((&raw const *self.external).cast()),
            ("const vma_argument *", _) => pointer(self.arguments.as_ptr().cast()),
            ("const void *", "code") => pointer(SOURCE.as_ptr().cast()),
            ("uint64_t", "bytes") if function == "vma_module_load" => SOURCE.len() as u64,
            ("uint64_t", "bytes") => 64,
            ("uint32_t", "count") => 3,
            ("uint32_t", "index") | (_, "options" | "limits") => 0,
            ("uint32_t" | "uint8_t", _) => 1,
            (_, "timeout_ns") => LONG,
            ("int32_t", "fd") => u64::MAX,
            ("uint64_t" | "vma_memory_kind", _) => 0,
            (kind, _) if kind.ends_with("_function") => 1,
            _ => pointer(self.room.as_mut_ptr().cast()),
        }
    }

    /// Has the resource be in the state that a function wants.
    fn bring(&self, function: &str) {
        let resource = *Self::of(&self.handles, "vma_resource").unwrap();
        let state: vma_resource_state = given(|state| call!(vma_resource_get_state(resource, state)));
        let wanted = if function == "vma_resource_unmap" { VMA_MAPPED } else { VMA_REGISTERED };
        if state != wanted && wanted == VMA_MAPPED {
            let link = *Self::of(&self.handles, "vma_link").unwrap();
            let _: vma_memory = given(|memory| call!(vma_resource_map(resource, link, 0, memory)));
        } else if state != wanted {
            let _: u64 = given(|value| call!(vma_resource_unmap(resource, value)));
        }
    }
}

/// Host memory that may be shared.
fn shared() -> OwnedFd {
    let memfd = rustix::fs::memfd_create("shared", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&memfd, 64).unwrap();
    rustix::fs::fcntl_add_seals(&memfd, rustix::fs::SealFlags::SHRINK).unwrap();
    memfd
}

/// Frees one of each kind.
fn free(handles: &[(&'static str, u64)]) {
    let of = |kind| *Fixture::of(handles, kind).unwrap();
    ok(call!(vma_resource_unregister(of("vma_resource"))));
    ok(call!(vma_link_free(of("vma_link"))));
    ok(call!(vma_timeline_free(of("vma_timeline"))));
    ok(call!(vma_job_free(of("vma_job"))));
    ok(call!(vma_event_free(of("vma_event"))));
    ok(call!(vma_module_free(of("vma_module"))));
    ok(call!(vma_memory_free(of("vma_memory"))));
    ok(call!(vma_worker_free(of("vma_worker"))));
    ok(call!(vma_device_close(of("vma_device"))));
}

#[test]
fn every_function_refuses() {
    let mut fixture = Fixture::new();
    let run = |function: &str, words: &[u64]| {
        // SAFETY: pointers are NULL, askew, or to the fixture's own.
        unsafe { call_accelerator(function, words, &CALLBACKS) }.unwrap()
    };
    for (function, parameters) in ACCELERATOR {
        let words = |fixture: &mut Fixture| -> Vec<u64> {
            parameters.iter().map(|(kind, name, _)| fixture.word(function, kind, name)).collect()
        };
        for (at, (kind, name, optional)) in parameters.iter().enumerate() {
            let given = words(&mut fixture);
            let with = |word: u64| {
                let mut given = given.clone();
                given[at] = word;
                fixture.bring(function);
                run(function, &given)
            };
            let refused = |word: u64, wanted: vma_status| {
                fails(with(word), wanted, &format!("{function}: {name}"));
            };
            let handle = Fixture::of(&fixture.handles, kind).is_some();
            match *kind {
                _ if handle => {
                    let others = fixture.handles.iter().filter(|(of, _)| of != kind).map(|(_, other)| *other);
                    let freed = *Fixture::of(&fixture.freed, kind).unwrap();
                    for word in
                        others.chain([0, 1, u64::MAX, given[at] + (1 << 40), given[at] ^ 1 << 56, freed])
                    {
                        refused(word, VMA_INVALID_HANDLE);
                    }
                    refused(freed, VMA_INVALID_HANDLE);
                    assert!(last().ends_with("that was freed"), "{}", last());
                }
                "const char *" => {
                    refused(0, VMA_INVALID_VALUE);
                    refused(c"\xff".as_ptr().expose_provenance() as u64, VMA_INVALID_VALUE);
                }
                kind if kind.ends_with("_function") && *optional => ok(with(0)),
                kind if kind.ends_with("_function") => refused(0, VMA_INVALID_VALUE),
                "void *" if *optional => ok(with(0)),
                kind if kind.ends_with('*') => {
                    if *optional {
                        ok(with(0));
                    } else {
                        refused(0, VMA_INVALID_VALUE);
                    }
                    if !kind.contains("void *") || kind.contains("void **") {
                        refused(fixture.room.as_ptr().expose_provenance() as u64 + 1, VMA_INVALID_VALUE);
                    }
                }
                // A number: it is taken or refused, with a text.
                _ => {
                    for word in [u64::MAX, u64::MAX - 7, 1 << 63, 1 << 40, 0] {
                        let status = with(word);
                        assert!(
                            status == VMA_SUCCESS || last().starts_with(function),
                            "{status}: {}",
                            last()
                        );
                    }
                }
            }
        }
        // With what it wants it succeeds, also after all that.
        let given = words(&mut fixture);
        fixture.bring(function);
        if let [(kind, _, _)] = parameters
            && Fixture::of(&fixture.handles, kind).is_some()
            && ["_free", "_close", "_unregister"].iter().any(|end| function.ends_with(end))
        {
            ok(run(function, &given));
            fails(run(function, &given), VMA_INVALID_HANDLE, "that was freed");
            fixture = Fixture::new();
        } else if *function == "vma_stop" {
            ok(run(function, &given));
            fixture = Fixture::new();
        } else {
            ok(run(function, &given));
        }
    }
}

#[test]
fn sizes_and_kinds_that_can_not_be() {
    let worker = start(device());
    let (x, mut bytes) = (memory(worker, VMA_DEVICE_MEMORY, 64), [0u8; 128]);
    let (from, to) = (bytes.as_ptr().cast(), bytes.as_mut_ptr().cast());
    let mut made = 0u64;
    let allocate = |kind, bytes, made: &mut u64| call!(vma_memory_allocate(worker, kind, bytes, made));
    fails(allocate(0, 0, &mut made), VMA_INVALID_VALUE, "vma_memory_allocate: bytes is 0");
    for huge in [u64::MAX, 1 << 63, 1 << 62, 1 << 50] {
        fails(allocate(0, huge, &mut made), VMA_OUT_OF_MEMORY, " memory");
    }
    fails(allocate(3, 64, &mut made), VMA_INVALID_VALUE, "kind is 3: VMA_DEVICE_MEMORY");
    fails(allocate(-1, 64, &mut made), VMA_INVALID_VALUE, "kind is -1");
    for (offset, bytes) in [(0, 65), (64, 1), (65, 0), (u64::MAX, 1), (1, u64::MAX >> 1)] {
        let refused = |status, function: &str| {
            let said = last();
            assert!(status == VMA_INVALID_VALUE && said.starts_with(function), "{status}: {said}");
        };
        refused(call!(vma_write(x, offset, from, bytes)), "vma_write: ");
        refused(call!(vma_read(x, offset, to, bytes)), "vma_read: ");
        refused(call!(vma_fill(x, offset, bytes, 1)), "vma_fill: ");
        refused(call!(vma_copy(x, offset, x, 0, bytes)), "vma_copy: ");
        refused(call!(vma_copy(x, 0, x, offset, bytes)), "vma_copy: ");
    }
    ok(call!(vma_write(x, 64, null(), 0)));
    ok(call!(vma_read(x, 0, null_mut(), 0)));
    let mut options = vma_worker_options { capacity: u32::MAX, ..Default::default() };
    let status = call!(vma_worker_start(device(), &raw const options, &raw mut made));
    fails(status, VMA_INVALID_VALUE, "vma_worker_start: capacity is 4294967295: at most 65536");
    (options.capacity, options.memory_bytes) = (1, 4096);
    let small = given(|worker| call!(vma_worker_start(device(), &raw const options, worker)));
    fails(
        call!(vma_memory_allocate(small, 0, 8192, &raw mut made)),
        VMA_OUT_OF_MEMORY,
        "limit of 4096 bytes",
    );
    let mut count = 0;
    ok(call!(vma_device_count(&raw mut count)));
    fails(call!(vma_device_at(count, &raw mut made)), VMA_INVALID_VALUE, "vma_device_at: index is");
    for (spec, status, part) in [
        ("gpu", VMA_INVALID_VALUE, "\"gpu\" names no accelerator"),
        ("cpu:1", VMA_NOT_AVAILABLE, "there is no processor 1"),
        ("ffff:00:00.0", VMA_NOT_AVAILABLE, "ffff:00:00.0 can't be opened"),
    ] {
        let spec = text(spec);
        fails(call!(vma_device_open(spec.as_ptr(), &raw mut made)), status, part);
    }
    ok(call!(vma_worker_free(worker)));
    // What is left of it is there to be freed.
    fails(call!(vma_fill(x, 0, 64, 1)), VMA_STOPPED, "vma_fill: the worker has stopped");
    ok(call!(vma_memory_free(x)));
    ok(call!(vma_worker_free(small)));
}

#[test]
fn modules_that_are_none() {
    let worker = start(device());
    let mut module = 0;
    for (code, part) in [
        (&b"vir 1\nkernel @x("[..], "vma_module_load: "),
        (b"", "vma_module_load: "),
        (b"\xff\xfe", "neither binary nor text"),
        (b"\0vir\xff\xff\xff", "vma_module_load: "),
        (b"\0", "vma_module_load: "),
        (b"vir 1\nkernel @x(@x: view<f32, [?], read>) at 0 block(1) {\n  %i = const 0 : i64\n  store @x[%i], %i\n}\n", "x"),
    ] {
        let status = call!(vma_module_load(worker, code.as_ptr().cast(), code.len() as u64, &raw mut module));
        fails(status, VMA_COMPILE_FAILED, part);
    }
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    for (path, part) in [
        ("/nonexistent", "cannot be read"),
        ("/dev/zero", "not a regular file"),
        ("/", "not a regular file"),
        (fifo.to_str().unwrap(), "not a regular file"),
    ] {
        let path = text(path);
        let status = call!(vma_module_load_file(worker, path.as_ptr(), &raw mut module));
        fails(status, VMA_INVALID_VALUE, part);
    }
    // The same module as text and as binary.
    let binary = vm_ir::binary::encode(&vm_ir::text::parse(SOURCE).unwrap(), vm_ir::binary::Lines::Strip);
    let loaded =
        given(|module| call!(vma_module_load(worker, binary.as_ptr().cast(), binary.len() as u64, module)));
    let count: u32 = given(|count| call!(vma_module_get_kernel_count(loaded, count)));
    assert_eq!(count, 3);
    fails(
        call!(vma_module_get_kernel(loaded, 3, &raw mut module)),
        VMA_INVALID_VALUE,
        "index is 3: the module has 3",
    );
    let name = text("product");
    let status = call!(vma_module_find_kernel(loaded, name.as_ptr(), &raw mut module));
    fails(status, VMA_INVALID_VALUE, "name is \"product\": the module has add, spin, rows");
    // A module's kernels end with it.
    let add = kernel(loaded, "add");
    ok(call!(vma_module_free(loaded)));
    fails(launch(add, 1, &[]), VMA_INVALID_HANDLE, "a kernel that was freed");
    ok(call!(vma_worker_free(worker)));
}

#[test]
fn kernels_and_what_launches_refuse() {
    let worker = start(device());
    let module = load(worker);
    let (add, spin, rows) = (kernel(module, "add"), kernel(module, "spin"), kernel(module, "rows"));
    let info: vma_kernel_info = given(|info| call!(vma_kernel_get_info(add, info)));
    assert_eq!((info.parameters, info.block, info.cluster), (3, [64, 1, 1], 1));
    let parameter = |kernel, index| given(|told| call!(vma_kernel_get_parameter(kernel, index, told)));
    let told: vma_parameter = parameter(rows, 0);
    assert_eq!((told.kind, told.type_, told.bytes, told.rank), (VMA_VIEW, VMA_F32, 4, 2));
    assert_eq!((told.align, told.writes, told.extents), (16, 0, [0, 4, 0, 0]));
    assert_eq!(
        (parameter(add, 2).kind, parameter(add, 2).bytes, parameter(add, 1).writes),
        (VMA_SCALAR, 4, 1)
    );

    let [x, y] = [VMA_DEVICE_MEMORY, VMA_UNIFIED_MEMORY].map(|kind| memory(worker, kind, 400));
    let values: Vec<f32> = (0..100u8).map(f32::from).collect();
    write(x, &values);
    write(y, &[1.0; 100]);
    let by = number(VMA_F32, 2.5f32.to_bits().into());
    ok(launch(add, 2, &[view(x), view(y), by]));
    assert_eq!(read(y, 100), values.iter().map(|x| 1.0 + 2.5 * x).collect::<Vec<_>>());
    // A part of each, by extents.
    let part =
        |memory, offset, count| vma_argument { offset, rank: 1, extents: [count, 0, 0, 0], ..view(memory) };
    ok(launch(add, 1, &[part(x, 40, 5), part(y, 0, 5), by]));
    assert_eq!(read(y, 5), [26.0, 31.0, 36.0, 41.0, 46.0]);

    let other = start(device());
    let theirs = memory(other, VMA_DEVICE_MEMORY, 400);
    let half = vma_argument { bytes: 200, ..view(x) };
    let shaped = |stride: u64| {
        let (extents, strides) = ([3, 4, 0, 0], [stride, 0, 0]);
        vma_argument { rank: 2, extents, strided: 1, strides, ..view(x) }
    };
    let check = |kernel, grid, arguments: &[vma_argument], status, part: &str| {
        fails(launch(kernel, grid, arguments), status, part);
    };
    let bad = VMA_INVALID_VALUE;
    check(add, 2, &[view(x), view(y)], bad, "count is 2: add has 3 parameters");
    check(add, 2, &[by; 4], bad, "count is 4");
    check(add, 0, &[view(x), view(y), by], bad, "no blocks along x");
    check(add, u32::MAX, &[view(x), view(y), by], bad, "takes at most");
    check(add, 2, &[view(x), view(x), by], bad, "overlap");
    check(add, 2, &[half, view(y), by], bad, "parameter y");
    check(add, 2, &[view(x), view(theirs), by], bad, "belongs to another worker");
    check(add, 2, &[view(0), view(y), by], VMA_INVALID_HANDLE, "arguments[0].memory is 0");
    check(add, 2, &[view(add), view(y), by], VMA_INVALID_HANDLE, "a kernel: memory is needed");
    check(add, 2, &[view(x), view(y), number(VMA_F64, 0)], bad, "parameter by");
    check(add, 2, &[view(x), view(y), number(VMA_ANY, 0)], bad, "arguments[2].type is VMA_ANY");
    check(add, 2, &[view(x), view(y), number(99, 0)], bad, "arguments[2].type is 99");
    check(add, 2, &[view(x), view(y), view(x)], bad, "parameter by");
    check(add, 2, &[by, view(y), by], bad, "parameter x");
    check(add, 2, &[vma_argument { kind: 5, ..by }, view(y), by], bad, "arguments[0].kind is 5");
    check(
        add,
        2,
        &[vma_argument { type_: VMA_U32, ..view(x) }, view(y), by],
        bad,
        "elements of f32 are wanted, u32",
    );
    check(add, 2, &[vma_argument { rank: 5, ..view(x) }, view(y), by], bad, "arguments[0].rank is 5");
    check(add, 2, &[vma_argument { rank: u32::MAX, ..view(x) }, view(y), by], bad, "rank is");
    check(add, 2, &[vma_argument { offset: 401, ..view(x) }, view(y), by], bad, "do not lie in a buffer");
    check(add, 2, &[vma_argument { offset: u64::MAX, bytes: 8, ..view(x) }, view(y), by], bad, "do not lie");
    check(add, 2, &[vma_argument { offset: 2, bytes: 4, ..view(x) }, view(y), by], bad, "parameter x");
    check(add, 2, &[part(x, 0, u64::MAX), view(y), by], bad, "");
    check(add, 2, &[part(x, 0, 101), part(y, 0, 101), by], bad, "reach over 404 bytes");
    check(rows, 1, &[shaped(24), view(y)], bad, "no multiple of 16");
    check(rows, 1, &[shaped(u64::MAX - 15), view(y)], bad, "");

    // It can be stopped, and what comes behind runs.
    let limits = vma_limits { fuel: 1000, time_ns: LONG };
    ok(call!(vma_fill(x, 0, 4, 0)));
    let word = vma_argument { bytes: 4, ..view(x) };
    ok(call!(vma_launch(spin, 1, 1, 1, &raw const word, 1, &raw const limits)));
    fails(call!(vma_synchronize(worker, LONG)), VMA_KERNEL_STOPPED, "more than 1000 iterations");
    ok(launch(add, 1, &[part(x, 40, 5), part(y, 0, 5), by]));
    ok(call!(vma_synchronize(worker, LONG)));
    ok(call!(vma_worker_free(worker)));
    ok(call!(vma_worker_free(other)));
    for memory in [x, y, theirs] {
        ok(call!(vma_memory_free(memory)));
    }
    ok(call!(vma_module_free(module)));
}

#[test]
fn several_workers() {
    let on = device();
    let [one, other] = [start(on), start(on)];
    let [x, y] = [memory(one, VMA_PINNED_MEMORY, 5 << 20), memory(other, VMA_DEVICE_MEMORY, 5 << 20)];
    ok(call!(vma_fill(x, 0, 5 << 20, 0x3f)));
    ok(call!(vma_copy(y, 16, x, 0, (5 << 20) - 16)));
    ok(call!(vma_fill(y, 0, 16, 0)));
    let found = read(y, 5 << 18);
    assert_eq!((found[3], found[4], *found.last().unwrap()), (0.0, f32::from_bits(0x3f3f_3f3f), found[4]));
    let pointer = call_pointer(x);
    ok(call!(vma_synchronize(one, LONG)));
    // SAFETY: it is the memory's, which nobody writes now.
    assert_eq!(unsafe { *pointer }, 0x3f);
    let mut none: *mut c_void = null_mut();
    let status = call!(vma_memory_get_host_pointer(memory(other, 0, 1), &raw mut none));
    assert!(
        status == VMA_SUCCESS || status == VMA_INVALID_VALUE,
        "the CPU's memory is all the host's: {status}"
    );

    let event = |worker| given(|event| call!(vma_event_record(worker, event)));
    let (first, second, theirs): (vma_event, vma_event, vma_event) = (event(one), event(one), event(other));
    ok(call!(vma_event_wait(other, second)));
    ok(call!(vma_event_synchronize(second, LONG)));
    let reached: i32 = given(|reached| call!(vma_event_query(second, reached)));
    let time: u64 = given(|time| call!(vma_event_elapsed(first, second, time)));
    assert!(reached == 1 && time < LONG);
    let mut time = 0;
    fails(
        call!(vma_event_elapsed(first, theirs, &raw mut time)),
        VMA_INVALID_VALUE,
        "to is an event of another worker",
    );
    for event in [first, second, theirs] {
        ok(call!(vma_event_free(event)));
    }
    let info: vma_memory_info = given(|info| call!(vma_get_memory_info(one, info)));
    assert!(info.used_bytes >= 5 << 20 && info.total_bytes >= info.free_bytes, "{info:?}");
    ok(call!(vma_memory_free(x)));
    ok(call!(vma_trim(one)));
    let info: vma_memory_info = given(|info| call!(vma_get_memory_info(one, info)));
    assert_eq!((info.used_bytes, info.kept_bytes), (0, 0));
    ok(call!(vma_stop(one, LONG)));
    ok(call!(vma_stop(one, LONG)));
    ok(call!(vma_worker_free(one)));
    ok(call!(vma_worker_free(other)));
}

fn call_pointer(memory: vma_memory) -> *const u8 {
    let mut pointer: *mut c_void = null_mut();
    ok(call!(vma_memory_get_host_pointer(memory, &raw mut pointer)));
    pointer.cast()
}

/// A job that says that it runs, and waits until it is told to end.
struct Held {
    runs: Sender<()>,
    end: Mutex<Receiver<()>>,
}

unsafe extern "C" fn hold(data: *mut c_void) -> i32 {
    // SAFETY: who submits it gives a `Held` that lives longer.
    let held = unsafe { &*data.cast::<Held>() };
    held.runs.send(()).unwrap();
    held.end.lock().unwrap().recv().unwrap();
    11
}

#[test]
fn jobs_are_waited_for_and_taken_back() {
    let worker = start(device());
    let ((runs, does_run), (end, ends)) = (channel(), channel());
    let held = Held { runs, end: Mutex::new(ends) };
    let data = from_ref(&held).cast_mut().cast::<c_void>();
    let running = given(|job| call!(vma_submit(worker, Some(hold), data, job)));
    let waiting = given(|job| call!(vma_submit(worker, Some(nothing), null_mut(), job)));
    let last_one = given(|job| call!(vma_submit(worker, Some(nothing), null_mut(), job)));
    does_run.recv().unwrap();
    let query = |job| given::<i32>(|ended| call!(vma_job_query(job, ended)));
    let cancel = |job| given::<i32>(|cancelled| call!(vma_job_cancel(job, cancelled)));
    let mut result = 0;
    assert_eq!((query(running), query(waiting)), (0, 0));
    fails(
        call!(vma_job_wait(running, 0, &raw mut result)),
        VMA_TIMEOUT,
        "vma_job_wait: the job did not come in time",
    );
    fails(call!(vma_job_wait(running, 1000, &raw mut result)), VMA_TIMEOUT, "in time");
    // What has not started is taken back.
    let status = call!(vma_submit_and_wait(worker, Some(nothing), null_mut(), 1000, &raw mut result));
    fails(status, VMA_TIMEOUT, "vma_submit_and_wait: ");
    fails(call!(vma_synchronize(worker, 1000)), VMA_TIMEOUT, "vma_synchronize: ");
    assert_eq!((cancel(running), cancel(waiting), cancel(waiting), query(waiting)), (0, 1, 0, 1));
    fails(call!(vma_job_wait(waiting, LONG, &raw mut result)), VMA_CANCELLED, "cancelled");
    let waits = || {
        let mut result = 0;
        ok(call!(vma_job_wait(running, LONG, &raw mut result)));
        assert_eq!(result, 11);
    };
    std::thread::scope(|scope| {
        (0..4).for_each(|_| drop(scope.spawn(waits)));
        end.send(()).unwrap();
    });
    waits();
    ok(call!(vma_job_wait(last_one, LONG, &raw mut result)));
    assert_eq!(result, 7);
    // A stop runs what was given.
    let behind = given(|job| call!(vma_submit(worker, Some(nothing), null_mut(), job)));
    ok(call!(vma_stop(worker, LONG)));
    ok(call!(vma_job_wait(behind, 0, &raw mut result)));
    let status = call!(vma_submit(worker, Some(nothing), null_mut(), null_mut()));
    fails(status, VMA_STOPPED, "vma_submit: the worker has stopped");
    let status = call!(vma_submit_and_wait(worker, Some(nothing), null_mut(), LONG, null_mut()));
    fails(status, VMA_STOPPED, "the worker has stopped");
    for job in [running, waiting, last_one, behind] {
        ok(call!(vma_job_free(job)));
    }
    ok(call!(vma_worker_free(worker)));
}

/// Calls its own worker in every way.
unsafe extern "C" fn inside(data: *mut c_void) -> i32 {
    // SAFETY: who submits it gives a worker's handle that lives longer.
    let worker = unsafe { *data.cast::<vma_worker>() };
    let x = memory(worker, VMA_DEVICE_MEMORY, 256);
    let module = load(worker);
    write(x, &[3.0; 64]);
    ok(launch(
        kernel(module, "add"),
        1,
        &[
            vma_argument { bytes: 128, ..view(x) },
            vma_argument { offset: 128, ..view(x) },
            number(VMA_F32, 1.0f32.to_bits().into()),
        ],
    ));
    assert_eq!(read(x, 64)[32..], [6.0; 32]);
    ok(call!(vma_synchronize(worker, LONG)));
    let event = given(|event| call!(vma_event_record(worker, event)));
    ok(call!(vma_event_synchronize(event, LONG)));
    let (mut result, mut job) = (0, 0);
    ok(call!(vma_submit_and_wait(worker, Some(nothing), null_mut(), 0, &raw mut result)));
    ok(call!(vma_submit(worker, Some(nothing), null_mut(), &raw mut job)));
    ok(call!(vma_job_wait(job, 0, &raw mut result)));
    assert_eq!(result, 7);
    fails(
        call!(vma_stop(worker, LONG)),
        VMA_INVALID_VALUE,
        "vma_stop: worker is that of the job which calls",
    );
    fails(call!(vma_worker_free(worker)), VMA_INVALID_VALUE, "vma_worker_free: worker is that of the job");
    ok(call!(vma_event_free(event)));
    ok(call!(vma_job_free(job)));
    ok(call!(vma_memory_free(x)));
    ok(call!(vma_module_free(module)));
    5
}

#[test]
fn jobs_call_their_own_worker() {
    let worker = start(device());
    let data = from_ref(&worker).cast_mut().cast::<c_void>();
    let mut result = 0;
    ok(call!(vma_submit_and_wait(worker, Some(inside), data, LONG, &raw mut result)));
    assert_eq!(result, 5);
    ok(call!(vma_worker_free(worker)));
}

/// A job that waits for the other's worker, while the other waits for this one's.
struct Crossing {
    other: vma_worker,
    both: &'static Barrier,
}

unsafe extern "C" fn cross(data: *mut c_void) -> i32 {
    // SAFETY: who submits it gives a `Crossing` that lives longer.
    let crossing = unsafe { &*data.cast::<Crossing>() };
    crossing.both.wait();
    call!(vma_submit_and_wait(crossing.other, Some(nothing), null_mut(), SECOND / 20, null_mut()))
}

#[test]
fn jobs_that_wait_for_each_other_end() {
    let both: &'static Barrier = Box::leak(Box::new(Barrier::new(2)));
    let workers = [start(device()), start(device())];
    let crossings = [Crossing { other: workers[1], both }, Crossing { other: workers[0], both }];
    let jobs: Vec<vma_job> = workers
        .iter()
        .zip(&crossings)
        .map(|(worker, crossing)| {
            let data = from_ref(crossing).cast_mut().cast::<c_void>();
            given(|job| call!(vma_submit(*worker, Some(cross), data, job)))
        })
        .collect();
    let results: Vec<i32> =
        jobs.iter().map(|job| given(|result| call!(vma_job_wait(*job, LONG, result)))).collect();
    // The first to give up runs the other's.
    assert!(results.contains(&VMA_TIMEOUT), "{results:?}");
    assert!(results.iter().all(|status| [VMA_TIMEOUT, VMA_SUCCESS].contains(status)), "{results:?}");
    workers.iter().for_each(|worker| ok(call!(vma_worker_free(*worker))));
}

/// What a job counts in: the number that it expects, and how often that was wrong.
struct Ordered {
    next: AtomicI32,
    wrong: AtomicI32,
}

struct Turn<'a>(&'a Ordered, i32);

unsafe extern "C" fn turn(data: *mut c_void) -> i32 {
    // SAFETY: who submits it gives a `Turn` that lives longer.
    let Turn(ordered, number) = unsafe { &*data.cast::<Turn<'_>>() };
    let found = ordered.next.fetch_add(1, Ordering::Relaxed);
    ordered.wrong.fetch_add((found != *number).into(), Ordering::Relaxed);
    *number
}

/// 32 threads, each of which submits in order, waits, allocates, writes, launches and reads on one worker.
#[test]
fn many_threads() {
    let worker = start(device());
    let module = load(worker);
    let add = kernel(module, "add");
    std::thread::scope(|scope| {
        for thread in 0..32u16 {
            scope.spawn(move || {
                let ordered = Ordered { next: AtomicI32::new(0), wrong: AtomicI32::new(0) };
                let turns: Vec<Turn<'_>> = (0..40).map(|number| Turn(&ordered, number)).collect();
                let mut jobs = Vec::new();
                for (number, turn_of) in turns.iter().enumerate() {
                    let data = from_ref(turn_of).cast_mut().cast::<c_void>();
                    if number % 4 == 3 {
                        let mut result = -1;
                        ok(call!(vma_submit_and_wait(worker, Some(turn), data, LONG, &raw mut result)));
                        assert_eq!(result, number as i32);
                    } else {
                        jobs.push(given::<vma_job>(|job| call!(vma_submit(worker, Some(turn), data, job))));
                    }
                    let [x, y] = [0, 1].map(|_| memory(worker, VMA_DEVICE_MEMORY, 256));
                    write(x, &[thread.into(); 64]);
                    write(y, &[1.0; 64]);
                    ok(launch(add, 1, &[view(x), view(y), number_of(number)]));
                    // Freed memory is another's only behind what was given.
                    ok(call!(vma_memory_free(x)));
                    let wanted = 1.0 + f32::from(thread) * number as f32;
                    assert_eq!(read(y, 64), [wanted; 64]);
                    ok(call!(vma_memory_free(y)));
                }
                for job in jobs {
                    ok(call!(vma_job_wait(job, LONG, null_mut())));
                    ok(call!(vma_job_free(job)));
                }
                assert_eq!((ordered.next.into_inner(), ordered.wrong.into_inner()), (40, 0));
            });
        }
    });
    ok(call!(vma_module_free(module)));
    ok(call!(vma_worker_free(worker)));
}

fn number_of(value: usize) -> vma_argument {
    number(VMA_F32, (value as f32).to_bits().into())
}

/// Handles that are freed by one thread while others use them: each call succeeds or says what the handle is.
#[test]
fn frees_beside_calls() {
    let worker = start(device());
    let module = load(worker);
    let add = kernel(module, "add");
    for _ in 0..50 {
        let [x, y] = [0, 1].map(|_| memory(worker, VMA_DEVICE_MEMORY, 256));
        let barrier = Barrier::new(5);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    barrier.wait();
                    for _ in 0..20 {
                        let status = launch(add, 1, &[view(x), view(y), number_of(1)]);
                        assert!([VMA_SUCCESS, VMA_INVALID_HANDLE].contains(&status), "{}", last());
                        let status = call!(vma_fill(x, 0, 256, 0));
                        assert!([VMA_SUCCESS, VMA_INVALID_HANDLE].contains(&status), "{}", last());
                    }
                });
            }
            barrier.wait();
            ok(call!(vma_memory_free(x)));
            ok(call!(vma_memory_free(y)));
        });
    }
    ok(call!(vma_synchronize(worker, LONG)));
    ok(call!(vma_module_free(module)));
    ok(call!(vma_worker_free(worker)));
}
