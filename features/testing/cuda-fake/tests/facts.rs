//! Contexts, attributes of addresses, copies of all shapes, names, other processes, and the environment.

#![allow(unsafe_code)]

mod common;

use common::*;
use object::Object;
use std::{fs, os::fd::AsRawFd};

#[test]
fn contexts_are_a_stack() {
    alone("contexts_are_a_stack", &[("VM_CUDA_FAKE_DEVICES", "2")], |driver| {
        let mut none = 0u64;
        let none = at(&mut none);
        driver.check(&[
            ("cuDeviceGetCount", &[none], 3),
            ("cuCtxGetCurrent", &[none], 3),
            ("cuInit", &[0], 0),
        ]);
        assert_eq!(driver.get("cuDeviceGetCount", &[]), 2);
        assert_eq!(driver.get("cuCtxGetCurrent", &[]), 0);
        driver.check(&[("cuCtxSynchronize", &[], 201), ("cuCtxPopCurrent_v2", &[none], 201)]);
        let first = driver.get("cuCtxCreate_v2", &[0, 0]);
        let second = driver.get("cuCtxCreate_v3", &[0, 0, 0, 1]);
        assert_eq!(driver.get("cuCtxGetDevice", &[]), 1);
        assert_eq!(driver.get("cuCtxPopCurrent_v2", &[]), second);
        assert_eq!(driver.get("cuCtxGetDevice", &[]), 0);
        driver.ok("cuCtxPushCurrent_v2", &[second]);
        let memory = driver.get("cuMemAlloc_v2", &[MIB2]);
        assert_eq!(driver.used(), MIB2);
        driver.check(&[
            ("cuCtxEnablePeerAccess", &[first, 0], 0),
            ("cuCtxEnablePeerAccess", &[first, 0], 704),
            ("cuCtxDisablePeerAccess", &[first], 0),
            ("cuCtxDisablePeerAccess", &[first], 705),
            ("cuCtxEnablePeerAccess", &[second, 0], 217),
            ("cuCtxDestroy_v2", &[second], 0),
            ("cuMemFree_v2", &[memory], INVALID_VALUE),
            ("cuCtxDestroy_v2", &[second], 201),
            ("cuCtxSetCurrent", &[second], 201),
        ]);
        assert_eq!(driver.get("cuCtxGetCurrent", &[]), first);
        let primary = driver.get("cuDevicePrimaryCtxRetain", &[1]);
        driver.check(&[("cuCtxSetCurrent", &[primary], 0), ("cuCtxDestroy_v2", &[primary], 201)]);
        assert_eq!(driver.used(), 0, "a context's memory goes with it");
        driver.check(&[
            ("cuDevicePrimaryCtxRelease_v2", &[1], 0),
            ("cuDevicePrimaryCtxRelease_v2", &[1], 201),
            ("cuMemGetInfo_v2", &[none, none], 709),
            ("cuDevicePrimaryCtxRetain", &[none, 2], 101),
        ]);
    });
}

#[test]
fn kernels_reach_peers_only_when_enabled() {
    alone("kernels_reach_peers_only_when_enabled", &[("VM_CUDA_FAKE_DEVICES", "2")], |driver| {
        let first = driver.start(0);
        let memory = driver.get("cuMemAlloc_v2", &[512]);
        let second = driver.start(1);
        let own = driver.get("cuMemAlloc_v2", &[512]);
        driver.ok("cuMemcpyPeer", &[own, second, memory, first, 512]);
        driver.ok("cuCtxEnablePeerAccess", &[first, 0]);
        driver.launch(driver.kernel("store"), 0, vec![memory, 5]);
        assert_eq!(driver.words(memory, 1), [5]);
        driver.ok("cuCtxDisablePeerAccess", &[first]);
        driver.launch(driver.kernel("store"), 0, vec![memory, 5]);
        assert_eq!(driver.synchronize(), ILLEGAL_ADDRESS);
        driver.ok("cuCtxSetCurrent", &[first]);
        assert_eq!(driver.synchronize(), 0, "the other context is well");
    });
}

#[test]
fn addresses_have_attributes() {
    alike("addresses_have_attributes", &[], |driver| {
        let context = driver.start(0);
        let legacy = driver.get("cuMemAlloc_v2", &[1000]);
        let range = driver.get("cuMemAddressReserve", &[2 * MIB2, 0, 0, 0]);
        driver.ok("cuMemMap", &[range, MIB2, 0, driver.create(MIB2, 0, 1), 0]);
        let host = driver.get("cuMemHostAlloc", &[64, 0]);
        let managed = driver.get("cuMemAllocManaged", &[64, 1]);
        let pooled = driver.get("cuMemAllocAsync", &[64, 0]);
        let pool = driver.get("cuDeviceGetDefaultMemPool", &[0]);
        const NONE: u64 = u64::MAX;
        let cases = [
            // The attribute, then of: legacy memory, virtual memory, host memory, managed memory, memory of a pool.
            (1, [context, 0, context, context, 0]),
            (2, [2, 2, 1, 2, 2]),
            // No device has been given access to the virtual memory.
            (3, [legacy, NONE, host, managed, pooled]),
            (4, [NONE, NONE, host, managed, NONE]),
            (6, [0, 0, 0, 1, 0]),
            (8, [0, 0, 0, 1, 0]),
            (9, [0, 0, 0, 0, 0]),
            (10, [1, 0, 0, 0, 0]),
            (11, [legacy, range, host, managed, pooled]),
            // Of virtual memory that of the reservation.
            (12, [1000, 2 * MIB2, 64, 64, 64]),
            (13, [1, 1, 1, 1, 1]),
            (14, [0, 1, 0, 0, 0]),
            (16, [3, 0, 3, 3, 3]),
            (17, [0, 0, 0, 0, pool]),
        ];
        let addresses = [legacy, range, host, managed, pooled];
        let mut wrong = Vec::new();
        for (attribute, expected) in cases {
            for (of, (address, expected)) in addresses.into_iter().zip(expected).enumerate() {
                let mut value = 0u64;
                let code = driver.call("cuPointerGetAttribute", &[at(&mut value), attribute, address]);
                let got = if code == INVALID_VALUE { NONE } else { value };
                if got != expected {
                    wrong.push(format!("attribute {attribute} of {of}: {got:#x}, not {expected:#x}"));
                }
            }
        }
        assert_eq!(wrong, Vec::<String>::new());
        let buffer = |address| driver.get("cuPointerGetAttribute", &[7, address]);
        assert_ne!(buffer(legacy), buffer(range));
        assert_eq!(buffer(legacy), buffer(legacy + 999));
        let mut on = 1u32;
        let on = at(&mut on);
        let mut none = 0u64;
        driver.check(&[
            ("cuPointerSetAttribute", &[on, 6, legacy], 0),
            ("cuPointerSetAttribute", &[on, 6, range], 801),
            ("cuPointerSetAttribute", &[on, 7, legacy], INVALID_VALUE),
            ("cuPointerGetAttribute", &[at(&mut none), 2, range + MIB2], INVALID_VALUE),
            ("cuPointerGetAttribute", &[at(&mut none), 99, legacy], INVALID_VALUE),
        ]);
        assert_eq!(driver.get("cuPointerGetAttribute", &[6, legacy]), 1);
        // Several at once: of an address that is not the driver's they are 0.
        for (address, expected) in [(legacy, [2, context]), (on, [0, 0])] {
            let (mut kind, mut of) = (0u64, 9u64);
            let (mut attributes, mut places) = ([2i32, 1], [at(&mut kind), at(&mut of)]);
            driver.ok("cuPointerGetAttributes", &[2, at(&mut attributes), at(&mut places), address]);
            assert_eq!([kind, of], expected);
        }
    });
}

#[test]
fn copies_have_all_shapes() {
    alike("copies_have_all_shapes", &[], |driver| {
        driver.start(0);
        let memory = driver.get("cuMemAlloc_v2", &[4096]);
        let mut host: Vec<u8> = (0..=255).collect();
        let host = at(host.as_mut_slice());
        // Rows of 8 bytes of 16, 4 of them, from column 2 and row 1, to rows of 32 bytes.
        let mut rows = [2, 1, 1, host, 0, 0, 16, 0, 0, 2, 0, memory, 0, 32, 8, 4u64];
        for name in ["cuMemcpy2D_v2", "cuMemcpy2DUnaligned_v2", "cuMemcpy2DAsync_v2", "cuMemcpy2D_v2_ptds"] {
            driver.ok("cuMemsetD8_v2", &[memory, 0, 256]);
            driver.ok(name, &[at(&mut rows), 0]);
            driver.ok("cuCtxSynchronize", &[]);
            let word = |first: u32| first | (first + 1) << 8 | (first + 2) << 16 | (first + 3) << 24;
            assert_eq!(driver.words(memory + 32, 3), [word(34), word(38), 0], "{name}");
            assert_eq!(driver.words(memory + 96, 1), [word(66)], "{name}");
        }
        // Two slices of two rows of 4 bytes.
        let source = [0, 0, 0, 0, 1, host, 0, 0, 0, 4, 4];
        let target = [0, 0, 0, 0, 2, 0, memory, 0, 0, 8, 2];
        let mut slices = [source.as_slice(), &target, &[4, 2, 2]].concat();
        driver.ok("cuMemcpy3D_v2", &[at(slices.as_mut_slice())]);
        assert_eq!(driver.words(memory + 16, 1), [0x1312_1110]);
        let sets: &[(&str, &[u64], [u32; 2])] = &[
            ("cuMemsetD8_v2", &[memory, 0x11, 8], [0x1111_1111; 2]),
            ("cuMemsetD16_v2", &[memory, 0x2233, 3], [0x2233_2233, 0x1111_2233]),
            ("cuMemsetD32_v2", &[memory, 7, 1], [7, 0x1111_2233]),
            ("cuMemsetD2D8_v2", &[memory, 4, 1, 1, 2], [1, 0x1111_2201]),
            ("cuMemsetD2D32_v2", &[memory, 4, 2, 1, 2], [2, 2]),
            ("cuMemsetD32Async", &[memory + 4, 3, 1, 0], [2, 3]),
            ("cuMemsetD8_v2_ptds", &[memory, 0, 1], [0, 3]),
        ];
        for (name, arguments, expected) in sets {
            driver.ok(name, arguments);
            assert_eq!(driver.words(memory, 2), expected, "{name}");
        }
        driver.check(&[
            ("cuMemsetD32_v2", &[memory + 2, 0, 1], INVALID_VALUE),
            ("cuMemcpyHtoD_v2", &[memory, host, 0], 0),
            ("cuMemcpy", &[memory, host, 4], 0),
        ]);
        assert_eq!(driver.words(memory, 1), [0x0302_0100]);
    });
}

#[test]
fn names_are_found_by_version() {
    alone("names_are_found_by_version", &[("VM_CUDA_FAKE_VERSION", "12000")], |driver| {
        assert_eq!(driver.get("cuDriverGetVersion", &[]), 12000);
        // The name, the version, flags, and what is found or why not.
        let cases: &[(&str, u64, u64, Result<&str, u64>)] = &[
            ("cuMemAlloc", 12000, 0, Ok("cuMemAlloc_v2")),
            ("cuMemAlloc", 2000, 0, Err(2)),
            ("cuMemcpyHtoD", 12000, 0, Ok("cuMemcpyHtoD_v2")),
            ("cuMemcpyHtoD", 12000, 1, Ok("cuMemcpyHtoD_v2")),
            ("cuMemcpyHtoD", 12000, 2, Ok("cuMemcpyHtoD_v2_ptds")),
            ("cuLaunchKernel", 12000, 2, Ok("cuLaunchKernel_ptsz")),
            ("cuMemFree", 12000, 2, Ok("cuMemFree_v2")),
            ("cuMemAllocAsync", 11010, 0, Err(2)),
            ("cuGetProcAddress", 11030, 0, Ok("cuGetProcAddress")),
            ("cuGetProcAddress", 12000, 0, Ok("cuGetProcAddress_v2")),
            ("cuStreamGetCaptureInfo", 10010, 0, Ok("cuStreamGetCaptureInfo")),
            ("cuStreamGetCaptureInfo", 12000, 0, Ok("cuStreamGetCaptureInfo_v2")),
            ("cuGraphInstantiate", 11000, 0, Ok("cuGraphInstantiate_v2")),
            ("cuGraphInstantiate", 12000, 0, Ok("cuGraphInstantiateWithFlags")),
            ("cuCtxSetFlags", 12000, 0, Err(1)),
            ("cuNothing", 12000, 0, Err(1)),
        ];
        for (name, version, flags, expected) in cases {
            let mut text = [name.as_bytes(), b"\0"].concat();
            let (mut found, mut status) = (9u64, 9u64);
            let text = at(text.as_mut_slice());
            driver.ok("cuGetProcAddress_v2", &[text, at(&mut found), *version, *flags, at(&mut status)]);
            let (address, why) = match expected {
                Ok(symbol) => (driver.symbol(symbol).expect("a symbol"), 0),
                Err(why) => (0, *why),
            };
            assert_eq!((found, status as u32), (address, why as u32), "{name} {version} {flags}");
            let code = driver.call("cuGetProcAddress", &[text, at(&mut found), *version, *flags]);
            assert_eq!((code, found), (if address == 0 { 500 } else { 0 }, address), "{name}");
        }
        let (mut name, mut found) = (*b"cuInit\0", 0u64);
        driver.check(&[
            ("cuGetProcAddress_v2", &[at(&mut name), at(&mut found), 12010, 0], INVALID_VALUE),
            ("cuGetProcAddress_v2", &[0, at(&mut found), 12000, 0], INVALID_VALUE),
            ("cuGetExportTable", &[at(&mut found), at(&mut name)], 500),
        ]);
    });
}

#[test]
fn no_function_crashes_on_nothing() {
    alone("no_function_crashes_on_nothing", &[], |driver| {
        let file = fs::read(library()).expect("the library");
        let file = object::File::parse(file.as_slice()).expect("ELF");
        let names = file.exports().expect("symbols");
        let names: Vec<&str> = names.iter().filter_map(|export| str::from_utf8(export.name()).ok()).collect();
        let names: Vec<&str> = names.into_iter().filter(|name| name.starts_with("cu")).collect();
        assert!(names.len() > 500, "{names:?}");
        // Before it is initialised, and with a context.
        for context in [false, true] {
            if context {
                driver.start(0);
            }
            // Null, and offsets from null.
            for (name, arguments) in names.iter().flat_map(|name| [(name, [0; 11]), (name, [8; 11])]) {
                let code = driver.call(name, &arguments);
                assert_ne!(code, 999, "{name}");
                if name == &"cuPointerGetAttribute"
                    || name.starts_with("cuIpcGet")
                    || name.starts_with("cuMemCreate")
                {
                    assert_ne!(code, 0, "{name}");
                }
            }
        }
    });
}

#[test]
fn memory_at_null_is_an_invalid_value() {
    /// `CUDA_MEMCPY2D` of a row between host memory and a device.
    fn row(host: u64, device: u64, to_host: bool) -> [u64; 16] {
        let (mut from, mut to) = ([0, 0, 1, host, 0, 0, 0], [0, 0, 2, 0, device, 0, 0]);
        if to_host {
            (from, to) = (to, from);
        }
        let mut copy = [0; 16];
        copy[..7].copy_from_slice(&from);
        copy[7..14].copy_from_slice(&to);
        (copy[14], copy[15]) = (16, 1);
        copy
    }

    alone("memory_at_null_is_an_invalid_value", &[], |driver| {
        let context = driver.start(0);
        let memory = driver.get("cuMemAlloc_v2", &[4096]);
        let stream = driver.get("cuStreamCreate", &[1]);
        let graph = driver.get("cuGraphCreate", &[0]);
        let mut node = 0u64;
        let node = at(&mut node);
        let mut own = [0u64; 64];
        let own = at(&mut own);
        for null in [0, 8, 4095] {
            for (dst, src) in [(null, memory), (memory, null), (null, own), (own, null), (null, null)] {
                driver.check(&[
                    ("cuMemcpy", &[dst, src, 16], INVALID_VALUE),
                    ("cuMemcpyAsync", &[dst, src, 16, stream], INVALID_VALUE),
                    ("cuMemcpy", &[dst, src, 0], 0),
                ]);
                let (mut dsts, mut srcs, mut sizes, mut places) = ([dst], [src], [16u64], [0u64]);
                let [dsts, srcs, sizes, places] = [&mut dsts, &mut srcs, &mut sizes, &mut places].map(at);
                let batch = [dsts, srcs, sizes, 1, own, places, 1, stream];
                driver.check(&[("cuMemcpyBatchAsync_v2", &batch, INVALID_VALUE)]);
            }
            driver.check(&[
                ("cuMemcpyHtoD_v2", &[memory, null, 16], INVALID_VALUE),
                ("cuMemcpyHtoDAsync_v2", &[memory, null, 16, stream], INVALID_VALUE),
                ("cuMemcpyDtoH_v2", &[null, memory, 16], INVALID_VALUE),
                ("cuMemcpyDtoHAsync_v2", &[null, memory, 16, stream], INVALID_VALUE),
                ("cuMemcpyDtoD_v2", &[null, memory, 16], INVALID_VALUE),
                ("cuMemsetD8_v2", &[null, 1, 16], INVALID_VALUE),
                ("cuMemHostRegister_v2", &[null, 4096, 0], INVALID_VALUE),
            ]);
            for to_host in [false, true] {
                // An origin that leads out of the first page makes no memory of it.
                for origin in [0, 4096] {
                    let mut two = row(null, memory, to_host);
                    two[if to_host { 7 } else { 0 }] = origin;
                    let mut three = [0u64; 25];
                    let (from, to) = (two[..7].to_vec(), two[7..14].to_vec());
                    for (start, end) in [(0, from), (11, to)] {
                        (three[start], three[start + 4]) = (end[0], end[2]);
                        (three[start + 5], three[start + 6]) = (end[3], end[4]);
                    }
                    (three[22], three[23], three[24]) = (16, 1, 1);
                    let (two, three) = (at(&mut two), at(&mut three));
                    driver.check(&[
                        ("cuMemcpy2D_v2", &[two], INVALID_VALUE),
                        ("cuMemcpy2DUnaligned_v2", &[two], INVALID_VALUE),
                        ("cuMemcpy2DAsync_v2", &[two, stream], INVALID_VALUE),
                        ("cuMemcpy3D_v2", &[three], INVALID_VALUE),
                        ("cuMemcpy3DAsync_v2", &[three, stream], INVALID_VALUE),
                        ("cuGraphAddMemcpyNode", &[node, graph, 0, 0, three, context], INVALID_VALUE),
                    ]);
                }
            }
            let (mut attribute, mut place) = (2u32, null);
            let (attribute, place) = (at(&mut attribute), at(&mut place));
            driver.check(&[
                ("cuPointerGetAttribute", &[null, 2, memory], INVALID_VALUE),
                ("cuPointerGetAttributes", &[1, attribute, place, memory], INVALID_VALUE),
                ("cuPointerGetAttributes", &[1, null, own, memory], INVALID_VALUE),
                ("cuPointerGetAttributes", &[1, attribute, null, memory], INVALID_VALUE),
                ("cuModuleLoadData", &[node, null], INVALID_VALUE),
                ("cuMemAlloc_v2", &[null, 512], INVALID_VALUE),
            ]);
            // The context and the stream still work.
            driver.check(&[("cuStreamSynchronize", &[stream], 0), ("cuCtxSynchronize", &[], 0)]);
        }
    });
}

#[test]
fn addresses_are_its_own_behind_a_hook() {
    // The hook is a copy of the library: all of the driver's names are there before the driver's.
    let folder = tempfile::tempdir().expect("a folder");
    let hook = folder.path().join("hook.so");
    fs::copy(library(), &hook).expect("a copy");
    let preload = [("LD_PRELOAD", hook.to_str().expect("UTF-8"))];
    alone("addresses_are_its_own_behind_a_hook", &preload, |driver| {
        let (mut name, mut found) = (*b"cuMemAlloc\0", 0u64);
        driver.ok("cuGetProcAddress_v2", &[at(&mut name), at(&mut found), 12000, 0, 0]);
        assert_eq!(Some(found), driver.symbol("cuMemAlloc_v2"));
    });
}

#[test]
fn a_forked_process_is_not_initialised() {
    alone("a_forked_process_is_not_initialised", &[], |driver| {
        driver.start(0);
        driver.check(&[("cuMemsetD8_v2", &[driver.get("cuMemAlloc_v2", &[512]), 1, 512], 0)]);
        // SAFETY: the child calls the driver, which locks nothing there, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = driver.call("cuCtxSynchronize", &[]);
            // SAFETY: it ends the child without what the parent has registered for its end.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        // SAFETY: the status is written to.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(libc::WEXITSTATUS(status), 3);
        assert_eq!(driver.synchronize(), 0);
    });
}

const HANDLE: &str = "VM_CUDA_FAKE_TEST_HANDLE";

/// The other process: opens what the variable names, checks the value there, and writes another.
fn other_process(driver: &Driver, text: &str) {
    driver.start(0);
    let (kind, value) = text.split_once(' ').expect("a kind");
    let memory = if kind == "ipc" {
        let bytes: Vec<u8> = value.split(',').map(|byte| byte.parse().expect("a byte")).collect();
        let handle = bytes.try_into().expect("64 bytes");
        let (mut memory, mut twice) = (0, 0);
        assert_eq!((driver.open(handle, &mut memory), driver.open(handle, &mut twice)), (0, 0));
        assert_eq!(memory, twice);
        memory
    } else {
        let file = fs::OpenOptions::new().read(true).write(true).open(value).expect("a file");
        let handle = driver.get("cuMemImportFromShareableHandle", &[file.as_raw_fd() as u64, 1]);
        let range = driver.get("cuMemAddressReserve", &[MIB2, 0, 0, 0]);
        driver.ok("cuMemMap", &[range, MIB2, 0, handle, 0]);
        assert_eq!(driver.access(range, MIB2, 0, 3), 0);
        range
    };
    assert_eq!(driver.used(), 0, "it is the other's memory");
    assert_eq!(driver.words(memory, 2), [41, 41]);
    driver.ok("cuMemsetD32_v2", &[memory, 42, 1]);
    assert_eq!(driver.synchronize(), 0);
    if kind == "ipc" {
        driver.check(&[
            ("cuMemFree_v2", &[memory], INVALID_VALUE),
            ("cuIpcCloseMemHandle", &[memory], 0),
            ("cuIpcCloseMemHandle", &[memory], 0),
            ("cuIpcCloseMemHandle", &[memory], INVALID_VALUE),
        ]);
    }
}

#[test]
fn memory_is_shared_with_other_processes() {
    alone("memory_is_shared_with_other_processes", &[], |driver| {
        if let Ok(text) = std::env::var(HANDLE) {
            return other_process(driver, &text);
        }
        driver.start(0);
        let legacy = driver.get("cuMemAlloc_v2", &[4096]);
        let memory = driver.create(MIB2, 0, 1);
        let range = driver.get("cuMemAddressReserve", &[MIB2, 0, 0, 0]);
        driver.ok("cuMemMap", &[range, MIB2, 0, memory, 0]);
        assert_eq!(driver.access(range, MIB2, 0, 3), 0);
        let mut handle = [0u8; 64];
        driver.check(&[
            ("cuIpcGetMemHandle", &[at(&mut handle), range], INVALID_VALUE),
            ("cuIpcGetMemHandle", &[at(&mut handle), legacy], 0),
        ]);
        let mut none = 0u64;
        assert_eq!(driver.open(handle, &mut none), 201, "not in its own process");
        assert_eq!(driver.open([0; 64], &mut none), INVALID_VALUE);
        let fd = driver.get("cuMemExportToShareableHandle", &[memory, 1, 0]);
        assert_eq!(driver.get("cuMemImportFromShareableHandle", &[fd, 1]), memory);
        let hidden = driver.create(MIB2, 0, 0);
        driver.check(&[
            ("cuMemExportToShareableHandle", &[at(&mut none), hidden, 1, 0], INVALID_VALUE),
            ("cuMemImportFromShareableHandle", &[at(&mut none), 0, 1], INVALID_VALUE),
        ]);
        let bytes: Vec<String> = handle.iter().map(u8::to_string).collect();
        let cases = [
            (legacy, format!("ipc {}", bytes.join(","))),
            (range, format!("fd /proc/{}/fd/{fd}", std::process::id())),
        ];
        for (memory, text) in cases {
            driver.ok("cuMemsetD32_v2", &[memory, 41, 2]);
            assert_eq!(driver.synchronize(), 0);
            let output = child("memory_is_shared_with_other_processes", &[(HANDLE, &text)]);
            assert!(output.status.success(), "{text}: {}", String::from_utf8_lossy(&output.stdout));
            assert_eq!(driver.words(memory, 2), [42, 41], "{text}");
        }
    });
}

#[test]
fn calls_fail_on_demand_and_are_traced() {
    let folder = tempfile::tempdir().expect("a folder");
    let trace = folder.path().join("trace");
    let variables = [
        ("VM_CUDA_FAKE_FAIL", "cuMemAlloc:2=2, cuMemFree_v2:1=999"),
        ("VM_CUDA_FAKE_TRACE", trace.to_str().expect("UTF-8")),
    ];
    alone("calls_fail_on_demand_and_are_traced", &variables, |driver| {
        driver.start(0);
        let mut memory = 0u64;
        let out = at(&mut memory);
        driver.check(&[
            ("cuMemAlloc_v2", &[out, 512], 0),
            ("cuMemAlloc_v2", &[out, 512], 2),
            ("cuMemAlloc_v2", &[out, 512], 0),
            ("cuMemFree_v2", &[memory], 999),
        ]);
        driver.ok("cuMemFree_v2", &[memory]);
        let freed = format!("cuMemFree_v2 dptr={memory:#x} -> 0");
        let mut properties = properties(0, 0);
        let properties = at(&mut properties);
        driver.check(&[("cuMemGetAllocationGranularity", &[out, properties, 0], 0)]);
        let granularity =
            format!("cuMemGetAllocationGranularity size={out:#x} prop={properties:#x} option=0 -> 0");
        let path = std::env::var("VM_CUDA_FAKE_TRACE").expect("a path");
        let trace = fs::read_to_string(path).expect("a trace");
        let lines: Vec<&str> = trace.lines().collect();
        assert_eq!(lines[0], "cuInit flags=0 -> 0");
        assert_eq!(lines[lines.len() - 2..], [freed, granularity]);
        assert_eq!(lines.iter().filter(|line| line.starts_with("cuMemAlloc_v2 ")).count(), 3);
        assert!(lines.iter().any(|line| line.ends_with("bytesize=512 -> 2")), "{trace}");
    });
}

#[test]
fn a_machine_without_devices_has_none() {
    alone("a_machine_without_devices_has_none", &[("VM_CUDA_FAKE_DEVICES", "0")], |driver| {
        driver.check(&[("cuInit", &[0], 100)]);
    });
}

#[test]
fn calls_return_the_drivers_error_codes() {
    alone("calls_return_the_drivers_error_codes", &[], |driver| {
        const FILE_NOT_FOUND: Code = 301;
        driver.start(0);
        let (mut out, mut path) = (0u64, *b"/nowhere/kernels.ptx\0");
        let kernel = driver.kernel("fill");
        driver.check(&[
            ("cuModuleLoad", &[at(&mut out), at(&mut path)], FILE_NOT_FOUND),
            ("cuLibraryLoadFromFile", &[at(&mut out), at(&mut path), 0, 0, 0, 0, 0, 0], FILE_NOT_FOUND),
            // Facts, an unknown attribute, and values that no device has.
            ("cuFuncSetAttribute", &[kernel, 0, 128], INVALID_VALUE),
            ("cuFuncSetAttribute", &[kernel, 99, 1], INVALID_VALUE),
            ("cuFuncSetAttribute", &[kernel, 8, 1 << 20], INVALID_VALUE),
            ("cuFuncSetAttribute", &[kernel, 8, u32::MAX.into()], INVALID_VALUE),
            ("cuFuncSetAttribute", &[kernel, 8, 64 << 10], 0),
            ("cuFuncSetAttribute", &[kernel, 9, 50], 0),
            ("cuDeviceGraphMemTrim", &[0], 0),
            ("cuDeviceGraphMemTrim", &[7], 101),
        ]);
    });
}

#[test]
fn hints_about_managed_memory_are_checked() {
    alone("hints_about_managed_memory_are_checked", &[], |driver| {
        const INVALID_DEVICE: Code = 101;
        driver.start(0);
        let managed = driver.get("cuMemAllocManaged", &[4096, 1]);
        let memory = driver.get("cuMemAlloc_v2", &[4096]);
        let host = u64::from(u32::MAX);
        let location = |kind: u64, id: u64| kind | id << 32;
        driver.check(&[
            ("cuMemPrefetchAsync", &[managed, 4096, 0, 0], 0),
            ("cuMemPrefetchAsync", &[managed + 4095, 1, host, 0], 0),
            ("cuMemPrefetchAsync", &[managed, 4096, 99, 0], INVALID_DEVICE),
            ("cuMemPrefetchAsync", &[managed, 4097, 0, 0], INVALID_VALUE),
            ("cuMemPrefetchAsync", &[managed, 0, 0, 0], INVALID_VALUE),
            ("cuMemPrefetchAsync", &[memory, 4096, 0, 0], INVALID_VALUE),
            ("cuMemPrefetchAsync_v2", &[managed, 4096, location(1, 0), 0, 0], 0),
            ("cuMemPrefetchAsync_v2", &[managed, 4096, location(2, 0), 0, 0], 0),
            ("cuMemPrefetchAsync_v2", &[managed, 4096, location(1, 99), 0, 0], INVALID_DEVICE),
            ("cuMemPrefetchAsync_v2", &[managed, 4096, location(9, 0), 0, 0], INVALID_VALUE),
            ("cuMemAdvise", &[managed, 4096, 3, 0], 0),
            ("cuMemAdvise", &[managed, 4096, 1, 99], 0),
            ("cuMemAdvise", &[managed, 4096, 3, 99], INVALID_DEVICE),
            ("cuMemAdvise", &[managed, 4096, 7, 0], INVALID_VALUE),
            ("cuMemAdvise_v2", &[managed, 4096, 5, location(1, 0)], 0),
            ("cuMemAdvise_v2", &[managed, 4096, 5, location(1, 99)], INVALID_DEVICE),
        ]);
    });
}

#[test]
fn pointers_are_known_without_a_context() {
    alone("pointers_are_known_without_a_context", &[], |driver| {
        let (mut kind, mut on_stack) = (7u32, 0u64);
        let (mut attribute, mut place) = (2u32, at(&mut kind));
        let asked = [1, at(&mut attribute), at(&mut place), at(&mut on_stack)];
        driver.check(&[
            ("cuPointerGetAttributes", &asked, 3),
            ("cuInit", &[0], 0),
            ("cuPointerGetAttributes", &asked, 0),
        ]);
        assert_eq!(kind, 0);
    });
}

#[test]
fn error_codes_have_names() {
    alike("error_codes_have_names", &[], |driver| {
        for (code, name, said) in [
            (0, "CUDA_SUCCESS", "no error"),
            (301, "CUDA_ERROR_FILE_NOT_FOUND", "file not found"),
            (710, "CUDA_ERROR_ASSERT", "device-side assert triggered"),
            (716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"),
            (719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"),
            (909, "CUDA_ERROR_TIMEOUT", "wait operation timed out"),
        ] {
            let mut place = 0u64;
            driver.ok("cuGetErrorName", &[code, at(&mut place)]);
            assert_eq!(string(place), name);
            driver.ok("cuGetErrorString", &[code, at(&mut place)]);
            assert_eq!(string(place), said);
        }
        let mut place = 0u64;
        assert_eq!(
            driver.call("cuGetErrorName", &[9, at(&mut place)]),
            INVALID_VALUE,
            "an error of the runtime"
        );
    });
}

/// A C string that stays.
fn string(at: u64) -> &'static str {
    // SAFETY: the driver returned it.
    unsafe { std::ffi::CStr::from_ptr(std::ptr::with_exposed_provenance(at as usize)) }
        .to_str()
        .expect("UTF-8")
}
