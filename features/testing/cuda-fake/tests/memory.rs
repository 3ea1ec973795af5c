//! Legacy memory, virtual memory, host memory and pools: what is counted, what is allowed, and what faults.

mod common;

use common::*;

#[test]
fn legacy_memory_is_counted_exactly() {
    alone("legacy_memory_is_counted_exactly", &[("VM_CUDA_FAKE_MEMORY", "8388608")], |driver| {
        let mut none = 0u64;
        driver.check(&[("cuMemAlloc_v2", &[at(&mut none), 512], 3), ("cuInit", &[0], 0)]);
        driver.check(&[("cuMemAlloc_v2", &[at(&mut none), 512], 201)]);
        driver.start(0);
        for (len, counted) in [(1, 512), (512, 512), (513, 1024), (MIB2, MIB2), (8 << 20, 8 << 20)] {
            let memory = driver.get("cuMemAlloc_v2", &[len]);
            assert_eq!(driver.used(), counted, "{len}");
            assert_eq!(memory % 512, 0);
            let (mut base, mut size) = (0u64, 0u64);
            driver.ok("cuMemGetAddressRange_v2", &[at(&mut base), at(&mut size), memory + len / 2]);
            assert_eq!((base, size), (memory, len));
            driver.check(&[
                ("cuMemFree_v2", &[memory + 256], INVALID_VALUE),
                ("cuMemFree_v2", &[memory], 0),
                ("cuMemFree_v2", &[memory], INVALID_VALUE),
            ]);
            assert_eq!(driver.used(), 0);
        }
        let memory = driver.get("cuMemAlloc_v2", &[4 << 20]);
        let out = at(&mut none);
        driver.check(&[
            ("cuMemAlloc_v2", &[out, (4 << 20) + 1], OUT_OF_MEMORY),
            ("cuMemAlloc_v2", &[out, u64::MAX], OUT_OF_MEMORY),
            ("cuMemAlloc_v2", &[out, 0], INVALID_VALUE),
            ("cuMemAlloc_v2", &[0, 512], INVALID_VALUE),
            ("cuMemFree_v2", &[0], 0),
            ("cuMemFree_v2", &[memory], 0),
            ("cuMemAlloc_v2", &[out, 8 << 20], 0),
        ]);
    });
}

#[test]
fn a_kernel_that_leaves_its_memory_ends_its_context() {
    alone("a_kernel_that_leaves_its_memory_ends_its_context", &[], |driver| {
        driver.start(0);
        let memory = driver.get("cuMemAlloc_v2", &[1024]);
        let fill = |driver: &Driver, to| driver.launch(driver.kernel("fill"), 0, vec![to, 256, 7]);
        assert_eq!((fill(driver, memory), driver.synchronize()), (0, 0));
        assert_eq!(fill(driver, memory + 512), 0);
        driver.check(&[
            ("cuCtxSynchronize", &[], ILLEGAL_ADDRESS),
            ("cuMemFree_v2", &[memory], ILLEGAL_ADDRESS),
            ("cuStreamQuery", &[0], ILLEGAL_ADDRESS),
            ("cuDevicePrimaryCtxReset_v2", &[0], 0),
            ("cuCtxSynchronize", &[], 0),
        ]);
        assert_eq!(driver.used(), 0, "a reset frees memory");
    });
}

#[test]
fn copies_and_memsets_beyond_an_allocation_are_invalid_values() {
    alone("copies_and_memsets_beyond_an_allocation_are_invalid_values", &[], |driver| {
        driver.start(0);
        let (first, memory) = (driver.get("cuMemAlloc_v2", &[MIB2]), driver.get("cuMemAlloc_v2", &[MIB2]));
        let pinned = driver.get("cuMemHostAlloc", &[MIB2, 0]);
        let stream = driver.get("cuStreamCreate", &[1]);
        // Read only if the copy is not refused.
        let mut own = [0u32; 4];
        let own = at(&mut own);
        let beyond = 2 * MIB2;
        let mut rows = [0u64; 16];
        // From the device, 2 MiB + 256 bytes in rows of 64 KiB, to the host.
        (rows[2], rows[4], rows[6]) = (2, memory, 1 << 16);
        (rows[9], rows[10], rows[13]) = (1, pinned, 1 << 16);
        (rows[14], rows[15]) = (256, 33);
        let rows = at(&mut rows);
        let freed = driver.get("cuMemAlloc_v2", &[MIB2]);
        driver.ok("cuMemFree_v2", &[freed]);
        let cases: &[(&str, &[u64])] = &[
            ("cuMemcpyHtoD_v2", &[memory, own, beyond]),
            ("cuMemcpyHtoDAsync_v2", &[memory, own, beyond, stream]),
            ("cuMemcpyDtoH_v2", &[own, memory, beyond]),
            ("cuMemcpyDtoHAsync_v2", &[own, memory, beyond, stream]),
            ("cuMemcpyDtoD_v2", &[memory, first, beyond]),
            ("cuMemcpyDtoDAsync_v2", &[first + 4096, memory, MIB2, stream]),
            ("cuMemcpy", &[memory, first, beyond]),
            ("cuMemcpyAsync", &[memory, own, beyond, stream]),
            ("cuMemcpy2D_v2", &[rows]),
            ("cuMemcpy2DAsync_v2", &[rows, stream]),
            ("cuMemsetD8_v2", &[memory, 1, beyond]),
            ("cuMemsetD32Async", &[memory + 4096, 1, MIB2 / 4, stream]),
            ("cuMemsetD2D32_v2", &[memory, 1 << 16, 1, 4, 33]),
            ("cuMemsetD8_v2", &[freed, 1, 1]),
            ("cuMemcpyHtoD_v2", &[freed, own, 4]),
            ("cuMemcpyHtoD_v2", &[memory, 0, 4]),
            // The host's own memory is no device's.
            ("cuMemcpyDtoH_v2", &[memory, own, 4]),
            ("cuMemcpyHtoD_v2", &[own, memory, 4]),
            ("cuMemsetD8_v2", &[own, 0, 4]),
        ];
        for (call, arguments) in cases {
            assert_eq!(driver.call(call, arguments), INVALID_VALUE, "{call} {arguments:x?}");
            assert_eq!(driver.synchronize(), 0, "{call}: the error is the call's alone");
        }
        driver.check(&[
            ("cuMemsetD8_v2", &[memory, 1, MIB2], 0),
            ("cuMemcpyDtoH_v2", &[pinned, memory, MIB2], 0),
            ("cuMemcpyDtoD_v2", &[memory + 16, memory + 4096, 512], 0),
            ("cuCtxSynchronize", &[], 0),
        ]);
    });
}

#[test]
fn virtual_memory_is_as_strict_as_the_driver() {
    alike("virtual_memory_is_as_strict_as_the_driver", &[("VM_CUDA_FAKE_MEMORY", "16777216")], |driver| {
        driver.start(0);
        let mut wanted = properties(0, 0);
        let (mut foreign, mut pageable) = (properties(7, 0), properties(0, 0));
        pageable[0] = 0;
        let mut none = 0u64;
        let (wanted, out) = (at(&mut wanted), at(&mut none));
        driver.check(&[
            ("cuMemGetAllocationGranularity", &[out, wanted, 0], 0),
            ("cuMemCreate", &[out, MIB2 - 1, wanted, 0], INVALID_VALUE),
            ("cuMemCreate", &[out, 0, wanted, 0], INVALID_VALUE),
            ("cuMemCreate", &[out, MIB2, wanted, 1], INVALID_VALUE),
            ("cuMemCreate", &[out, MIB2, at(&mut foreign), 0], 101),
            ("cuMemCreate", &[out, MIB2, at(&mut pageable), 0], INVALID_VALUE),
            ("cuMemAddressReserve", &[out, MIB2 + 4096, 0, 0, 0], INVALID_VALUE),
            ("cuMemAddressReserve", &[out, MIB2, 3, 0, 0], INVALID_VALUE),
            ("cuMemAddressReserve", &[out, MIB2, 0, 0, 1], INVALID_VALUE),
        ]);
        if driver.fake {
            driver.check(&[("cuMemCreate", &[out, 18 << 20, wanted, 0], OUT_OF_MEMORY)]);
        }
        let (two, one) = (driver.create(2 * MIB2, 0, 0), driver.create(MIB2, 0, 0));
        driver.uses(3 * MIB2);
        let range = driver.get("cuMemAddressReserve", &[4 * MIB2, 0, 0, 0]);
        driver.check(&[
            ("cuMemMap", &[range, MIB2, 0, two, 0], 801),
            ("cuMemMap", &[range, MIB2, MIB2, two, 0], 801),
            ("cuMemMap", &[range + 4096, 2 * MIB2, 0, two, 0], INVALID_VALUE),
            ("cuMemMap", &[range + 3 * MIB2, 2 * MIB2, 0, two, 0], INVALID_VALUE),
            ("cuMemMap", &[range, 2 * MIB2, 0, two, 1], INVALID_VALUE),
            ("cuMemMap", &[range, 2 * MIB2, 0, 77, 0], INVALID_VALUE),
            ("cuMemMap", &[range, 2 * MIB2, 0, two, 0], 0),
            ("cuMemMap", &[range + MIB2, MIB2, 0, one, 0], INVALID_VALUE),
            ("cuMemMap", &[range + 2 * MIB2, MIB2, 0, one, 0], 0),
            ("cuMemMap", &[range + 3 * MIB2, MIB2, 0, one, 0], 0),
            ("cuMemFree_v2", &[range], INVALID_VALUE),
            ("cuMemAddressFree", &[range, 4 * MIB2], INVALID_VALUE),
            ("cuMemUnmap", &[range, MIB2], INVALID_VALUE),
            ("cuMemUnmap", &[range + MIB2, MIB2], INVALID_VALUE),
        ]);
        // Access is of whole mappings, and the same memory is at two addresses.
        for (from, len, device, flags, expected) in [
            (range, MIB2, 0, 3, INVALID_VALUE),
            (range, 4 * MIB2, 7, 3, 101),
            (range, 4 * MIB2, 0, 2, INVALID_VALUE),
            (range, 4 * MIB2, 0, 3, 0),
        ] {
            assert_eq!(driver.access(from, len, device, flags), expected, "{from:x} {len} {device} {flags}");
        }
        driver.ok("cuMemsetD32_v2", &[range + 2 * MIB2, 5, 256]);
        assert_eq!(driver.words(range + 3 * MIB2, 256), [5; 256]);
        let mut device = [1i32, 0];
        assert_eq!(driver.get("cuMemGetAccess", &[at(&mut device), range]), 3);
        assert_eq!(driver.get("cuMemRetainAllocationHandle", &[range + 4096]), two);
        driver.check(&[
            ("cuMemRelease", &[two], 0),
            ("cuMemRelease", &[two], 0),
            ("cuMemRelease", &[two], INVALID_VALUE),
            ("cuMemRelease", &[one], 0),
        ]);
        driver.uses(3 * MIB2);
        driver.ok("cuMemUnmap", &[range + 2 * MIB2, MIB2]);
        driver.uses(3 * MIB2);
        driver.ok("cuMemUnmap", &[range + 3 * MIB2, MIB2]);
        driver.uses(2 * MIB2);
        driver.check(&[
            ("cuMemUnmap", &[range, 2 * MIB2], 0),
            ("cuMemUnmap", &[range, 2 * MIB2], INVALID_VALUE),
            ("cuMemAddressFree", &[range, 2 * MIB2], INVALID_VALUE),
            ("cuMemAddressFree", &[range, 4 * MIB2], 0),
            ("cuMemAddressFree", &[range, 4 * MIB2], INVALID_VALUE),
        ]);
        driver.uses(0);
        assert_eq!(
            driver.get("cuMemAddressReserve", &[MIB2, 0, range + MIB2, 0]),
            range + MIB2,
            "a hint that is free"
        );
    });
}

#[test]
fn virtual_memory_needs_access_each_time_it_is_mapped() {
    let devices = [("VM_CUDA_FAKE_DEVICES", "2")];
    alone("virtual_memory_needs_access_each_time_it_is_mapped", &devices, |driver| {
        driver.start(0);
        let range = driver.get("cuMemAddressReserve", &[MIB2, 0, 0, 0]);
        // What is done before the touch, by whom it is touched, and whether that faults.
        let cases: &[(&str, &[i32], u64, bool)] = &[
            ("no access", &[], 0, true),
            ("access", &[0], 0, false),
            ("access of the other device alone", &[1], 0, true),
            ("access of both", &[0, 1], 0, false),
            ("mapped again after access", &[], 0, true),
            ("access of the one, touched by the other", &[0], 1, true),
        ];
        for (name, devices, by, faults) in cases {
            let context = driver.get("cuDevicePrimaryCtxRetain", &[*by]);
            driver.ok("cuCtxSetCurrent", &[context]);
            let memory = driver.create(MIB2, 0, 0);
            driver.ok("cuMemMap", &[range, MIB2, 0, memory, 0]);
            devices.iter().for_each(|device| assert_eq!(driver.access(range, MIB2, *device, 3), 0));
            driver.call("cuMemsetD8_v2", &[range, 1, MIB2]);
            let expected = if *faults { ILLEGAL_ADDRESS } else { 0 };
            assert_eq!(driver.synchronize(), expected, "{name}");
            driver.ok("cuDevicePrimaryCtxReset_v2", &[*by]);
            driver.ok("cuMemUnmap", &[range, MIB2]);
            driver.ok("cuMemRelease", &[memory]);
        }
    });
}

#[test]
fn memory_can_be_exchanged_below_its_address() {
    alike("memory_can_be_exchanged_below_its_address", &[], |driver| {
        driver.start(0);
        let range = driver.get("cuMemAddressReserve", &[MIB2, 0, 0, 0]);
        let memories = [driver.create(MIB2, 0, 0), driver.create(MIB2, 0, 0)];
        for (turn, value) in [(0, 10), (1, 11), (0, 0), (1, 0)] {
            driver.ok("cuMemMap", &[range, MIB2, 0, memories[turn], 0]);
            assert_eq!(driver.access(range, MIB2, 0, 3), 0);
            if value != 0 {
                driver.ok("cuMemsetD32_v2", &[range, value, MIB2 / 4]);
            }
            assert_eq!(driver.words(range + MIB2 - 8, 2), [10 + turn as u32; 2]);
            driver.ok("cuMemUnmap", &[range, MIB2]);
        }
    });
}

#[test]
fn host_memory_is_the_devices_too() {
    alone("host_memory_is_the_devices_too", &[], |driver| {
        driver.start(0);
        let allocated = driver.get("cuMemHostAlloc", &[4096, 2]);
        let managed = driver.get("cuMemAllocManaged", &[4096, 1]);
        let mut own = vec![0u32; 1024];
        let own = at(own.as_mut_slice());
        driver.check(&[
            ("cuMemHostRegister_v2", &[own, 4096, 2], 0),
            ("cuMemHostRegister_v2", &[own + 8, 8, 2], 712),
            ("cuMemHostUnregister", &[own + 8], 713),
            ("cuMemFreeHost", &[own], INVALID_VALUE),
        ]);
        for memory in [allocated, managed, own] {
            assert_eq!(driver.launch(driver.kernel("fill"), 0, vec![memory, 1024, memory & 0xffff]), 0);
            assert_eq!(driver.synchronize(), 0);
            assert_eq!(driver.words(memory, 1024), [memory as u32 & 0xffff; 1024]);
        }
        // A copy to the host has arrived when it returns, wherever that is.
        driver.launch(driver.kernel("poll"), 0, vec![own, 0, 20_000]);
        driver.ok("cuMemcpyDtoH_v2", &[managed, allocated, 4096]);
        driver.ok("cuStreamQuery", &[0]);
        assert_eq!(driver.get("cuMemHostGetDevicePointer_v2", &[allocated, 0]), allocated);
        assert_eq!(driver.get("cuMemHostGetFlags", &[allocated]) as u32, 2);
        driver.check(&[
            ("cuMemFreeHost", &[allocated], 0),
            ("cuMemFreeHost", &[allocated], INVALID_VALUE),
            ("cuMemFree_v2", &[managed], 0),
            ("cuMemHostUnregister", &[own], 0),
            ("cuMemHostUnregister", &[own], 713),
        ]);
        // Not registered any more.
        driver.launch(driver.kernel("store"), 0, vec![own, 1]);
        assert_eq!(driver.synchronize(), ILLEGAL_ADDRESS);
    });
}

#[test]
fn only_mapped_memory_is_registered() {
    alone("only_mapped_memory_is_registered", &[], |driver| {
        driver.start(0);
        let mut own = vec![0u8; 1 << 20];
        let own = at(own.as_mut_slice());
        driver.check(&[
            ("cuMemHostRegister_v2", &[own, 1 << 50, 0], INVALID_VALUE),
            ("cuMemHostRegister_v2", &[own, 1 << 63, 0], INVALID_VALUE),
            ("cuMemHostRegister_v2", &[own, u64::MAX, 0], INVALID_VALUE),
            ("cuMemHostRegister_v2", &[0x100_0000_0000, 4096, 0], INVALID_VALUE),
            ("cuMemHostRegister_v2", &[own + 1, 1 << 19, 0], 0),
            ("cuMemHostUnregister", &[own + 1], 0),
        ]);
    });
}

#[test]
fn pools_free_in_the_order_of_a_stream() {
    alone("pools_free_in_the_order_of_a_stream", &[], |driver| {
        driver.start(0);
        let stream = driver.get("cuStreamCreate", &[1]);
        let flag = driver.get("cuMemHostAlloc", &[4, 0]);
        let memory = driver.get("cuMemAllocAsync", &[MIB2, stream]);
        assert_eq!(driver.launch(driver.kernel("poll"), stream, vec![flag, 1, 60_000_000]), 0);
        driver.ok("cuMemFreeAsync", &[memory, stream]);
        assert_eq!(driver.used(), MIB2, "the stream has not come to it");
        let pool = driver.get("cuDeviceGetDefaultMemPool", &[0]);
        let mut used = 0u64;
        driver.ok("cuMemPoolGetAttribute", &[pool, 7, at(&mut used)]);
        assert_eq!(used, MIB2);
        driver.ok("cuMemsetD32Async", &[flag, 1, 1, driver.get("cuStreamCreate", &[1])]);
        driver.ok("cuStreamSynchronize", &[stream]);
        assert_eq!(driver.used(), 0);
        driver.check(&[("cuMemPoolTrimTo", &[pool, 0], 0), ("cuMemPoolDestroy", &[pool], INVALID_VALUE)]);
    });
}

#[test]
fn pools_keep_what_their_threshold_lets_them() {
    alone("pools_keep_what_their_threshold_lets_them", &[("VM_CUDA_FAKE_MEMORY", "8388608")], |driver| {
        driver.start(0);
        let pool = driver.get("cuDeviceGetDefaultMemPool", &[0]);
        let held = |attribute| {
            let mut held = 0u64;
            driver.ok("cuMemPoolGetAttribute", &[pool, attribute, at(&mut held)]);
            held
        };
        let mut threshold = 3 * MIB2;
        driver.ok("cuMemPoolSetAttribute", &[pool, 4, at(&mut threshold)]);
        let memory = driver.get("cuMemAllocAsync", &[4 * MIB2, 0]);
        driver.check(&[("cuMemFreeAsync", &[memory, 0], 0), ("cuStreamSynchronize", &[0], 0)]);
        assert_eq!((driver.used(), held(5), held(7)), (3 * MIB2, 3 * MIB2, 0));
        // It gives that first.
        let memory = driver.get("cuMemAllocAsync", &[2 * MIB2, 0]);
        assert_eq!((driver.used(), held(5), held(7)), (3 * MIB2, 3 * MIB2, 2 * MIB2));
        driver.ok("cuMemPoolTrimTo", &[pool, 5 * MIB2 / 2]);
        assert_eq!(held(5), 5 * MIB2 / 2);
        // Who asks for more than is free gets that, too, and no more.
        let mut none = 0u64;
        driver.check(&[
            ("cuMemAllocAsync", &[at(&mut none), 3 * MIB2, 0], 2),
            ("cuMemAlloc_v2", &[at(&mut none), 2 * MIB2], 0),
        ]);
        assert_eq!((driver.used(), held(5)), (4 * MIB2, 2 * MIB2));
        driver.check(&[("cuMemFree_v2", &[memory], 0), ("cuMemFree_v2", &[none], 0)]);
        assert_eq!(driver.used(), 2 * MIB2);
    });
}

#[test]
fn a_pool_allocates_no_more_than_its_maximum() {
    alone("a_pool_allocates_no_more_than_its_maximum", &[], |driver| {
        driver.start(0);
        // CUmemPoolProps: pinned, of device 0, and 4 MiB at most.
        let mut properties = [0u64; 11];
        (properties[0], properties[1], properties[3]) = (1, 1 << 32, 2 * MIB2);
        properties[1] = 1;
        let pool = driver.get("cuMemPoolCreate", &[at(&mut properties)]);
        let mut none = 0u64;
        let memory = driver.get("cuMemAllocFromPoolAsync", &[MIB2, pool, 0]);
        driver.check(&[
            ("cuMemAllocFromPoolAsync", &[at(&mut none), 64 * MIB2, pool, 0], OUT_OF_MEMORY),
            ("cuMemAllocFromPoolAsync", &[at(&mut none), MIB2 + 1, pool, 0], OUT_OF_MEMORY),
            ("cuMemAllocFromPoolAsync", &[at(&mut none), MIB2, pool, 0], 0),
            ("cuMemAllocFromPoolAsync", &[at(&mut none), 1, pool, 0], OUT_OF_MEMORY),
            ("cuMemFreeAsync", &[memory, 0], 0),
            ("cuStreamSynchronize", &[0], 0),
            ("cuMemAllocFromPoolAsync", &[at(&mut none), MIB2, pool, 0], 0),
        ]);
    });
}

#[test]
fn arrays_take_what_their_descriptors_say() {
    alone("arrays_take_what_their_descriptors_say", &[], |driver| {
        driver.start(0);
        let mut array = 0u64;
        // Width, height, depth, format and channels, flags, levels; then the code and the bytes.
        let mut check =
            |sides: [u64; 3], format: u64, channels: u64, flags: u64, levels: u64, code: i32, bytes: u64| {
                let mut descriptor = [sides[0], sides[1], sides[2], channels << 32 | format, flags];
                let (make, end, arguments): (_, _, &[u64]) = match levels {
                    0 => ("cuArray3DCreate_v2", "cuArrayDestroy", &[at(&mut array), at(&mut descriptor)]),
                    _ => (
                        "cuMipmappedArrayCreate",
                        "cuMipmappedArrayDestroy",
                        &[at(&mut array), at(&mut descriptor), levels],
                    ),
                };
                assert_eq!(driver.call(make, arguments), code, "{sides:?} {flags}");
                if code == 0 {
                    assert_eq!(driver.used(), bytes, "{sides:?} {flags}");
                    let other = if levels == 0 { "cuMipmappedArrayDestroy" } else { "cuArrayDestroy" };
                    driver.check(&[(other, &[array], 400), (end, &[array], 0), (end, &[array], 400)]);
                }
                assert_eq!(driver.used(), 0);
            };
        check([1024, 0, 0], 0x20, 4, 0, 0, 0, 16 << 10);
        check([1024, 64, 0], 0x10, 1, 0, 0, 0, 128 << 10);
        check([64, 64, 64], 1, 1, 0, 0, 0, 64 << 12);
        check([64, 0, 64], 1, 1, 1, 0, 0, 64 << 6);
        check([64, 64, 6], 1, 1, 4, 0, 0, 6 << 12);
        check([64, 64, 0], 1, 2, 0, 99, 0, 11264);
        check([64, 64, 0], 1, 1, 0x40, 0, 0, 0);
        check([64, 64, 5], 1, 1, 4, 0, 1, 0);
        check([64, 0, 64], 1, 1, 0, 0, 1, 0);
        check([0, 64, 0], 1, 1, 0, 0, 1, 0);
        check([64, 64, 0], 1, 3, 0, 0, 1, 0);
        check([1 << 30, 1, 0], 0x20, 4, 0, 0, 2, 0);
        let mut flat = [1024u64, 512, 1 << 32 | 1];
        let context = driver.get("cuCtxCreate_v2", &[0, 0]);
        driver.ok("cuArrayCreate_v2", &[at(&mut array), at(&mut flat)]);
        assert_eq!(driver.used(), 512 << 10);
        // Held twice.
        assert_eq!(driver.get("cuCtxAttach", &[0]), context);
        driver.check(&[("cuCtxAttach", &[at(&mut array), 1], 1), ("cuCtxDetach", &[context], 0)]);
        assert_eq!(driver.used(), 512 << 10);
        driver.check(&[("cuCtxDetach", &[context], 0), ("cuCtxDetach", &[context], 201)]);
        assert_eq!(driver.used(), 0);
    });
}

#[test]
fn threads_work_at_once() {
    alone("threads_work_at_once", &[], |driver| {
        let context = driver.start(0);
        let work = &|thread: u64| {
            driver.ok("cuCtxSetCurrent", &[context]);
            let stream = driver.get("cuStreamCreate", &[thread % 2]);
            let range = driver.get("cuMemAddressReserve", &[MIB2, 0, 0, 0]);
            for turn in 1..=50 {
                let (value, memory) = (thread << 16 | turn, driver.create(MIB2, 0, 0));
                driver
                    .check(&[("cuMemMap", &[range, MIB2, 0, memory, 0], 0), ("cuMemRelease", &[memory], 0)]);
                assert_eq!(driver.access(range, MIB2, 0, 3), 0);
                let legacy = driver.get("cuMemAlloc_v2", &[1024]);
                driver.check(&[
                    ("cuMemsetD32Async", &[range, value, 256, stream], 0),
                    ("cuMemcpyDtoDAsync_v2", &[legacy, range, 1024, stream], 0),
                    ("cuStreamSynchronize", &[stream], 0),
                ]);
                assert_eq!(driver.words(legacy, 256), [value as u32; 256]);
                driver.check(&[("cuMemUnmap", &[range, MIB2], 0), ("cuMemFree_v2", &[legacy], 0)]);
            }
            driver.check(&[("cuMemAddressFree", &[range, MIB2], 0), ("cuStreamDestroy_v2", &[stream], 0)]);
        };
        std::thread::scope(|scope| (0..8).for_each(|thread| drop(scope.spawn(move || work(thread)))));
        assert_eq!(driver.used(), 0);
    });
}
