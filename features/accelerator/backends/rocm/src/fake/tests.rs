//! The fake notes what it is there to note.

use std::ffi::c_void;
use std::ptr;

use super::*;
use crate::result::Device;
use crate::sys::Hip;

/// Acts on a device of its own, and looks what was noted and left.
fn check(act: impl FnOnce(&Hip, &Fake), faults: &[&str], left: usize) {
    let fake = Fake::new(FakeOptions::default());
    let hip: &'static Hip = Box::leak(Box::new(calls::table()));
    let _entered = Device::new(hip, fake.0.ordinal as u32).enter().unwrap();
    act(hip, &fake);
    let noted = fake.faults();
    assert_eq!(noted.len(), faults.len(), "{noted:?}, not {faults:?}");
    noted.iter().zip(faults).for_each(|(noted, part)| assert!(noted.contains(part), "{noted}, not {part}"));
    assert_eq!(fake.left().len(), left, "{:?}", fake.left());
}

fn allocated(hip: &Hip, bytes: usize) -> *mut c_void {
    let mut at = ptr::null_mut();
    // SAFETY: the pointer is to a local.
    unsafe { hip.hipMalloc(&raw mut at, bytes) }.unwrap();
    at
}

fn stream(hip: &Hip) -> crate::sys::Stream {
    let mut stream = ptr::null_mut();
    // SAFETY: the pointer is to a local.
    unsafe { hip.hipStreamCreateWithFlags(&raw mut stream, 0) }.unwrap();
    stream
}

#[test]
#[allow(clippy::multiple_unsafe_ops_per_block)]
fn wrong_use_is_noted() {
    let twice = |hip: &Hip, _: &Fake| {
        let at = allocated(hip, 64);
        // SAFETY: the fake takes any handle.
        let (first, second) = unsafe { (hip.hipFree(at), hip.hipFree(at)) };
        assert!(first.is_ok() && second.is_err());
    };
    check(twice, &["hipFree: 0x"], 0);
    let beyond = |hip: &Hip, _: &Fake| {
        let (at, stream) = (allocated(hip, 64), stream(hip));
        // SAFETY: the fake takes any address.
        unsafe {
            assert!(hip.hipMemsetD8Async(at, 1, 64, stream).is_ok());
            assert!(hip.hipMemsetD8Async(at, 1, 65, stream).is_err());
            assert!(hip.hipMemcpyAsync(at.wrapping_byte_add(1), at, 64, 4, stream).is_err());
        }
    };
    check(beyond, &["65 bytes at", "64 bytes at"], 2);
    let in_use = |hip: &Hip, fake: &Fake| {
        let (at, stream) = (allocated(hip, 64), stream(hip));
        fake.hold(true);
        // SAFETY: the fake takes any address.
        unsafe {
            hip.hipMemsetD8Async(at, 1, 64, stream).unwrap();
            assert!(hip.hipFree(at).is_err());
        }
        fake.hold(false);
    };
    check(in_use, &["is used by a command that has not run"], 2);
    let ended = |hip: &Hip, _: &Fake| {
        let stream = stream(hip);
        // SAFETY: the fake takes any handle.
        unsafe {
            hip.hipStreamDestroy(stream).unwrap();
            assert!(hip.hipStreamDestroy(stream).is_err());
            assert!(hip.hipStreamBeginCapture(stream, 1).is_err());
            assert!(hip.hipEventQuery(stream).is_err());
        }
    };
    check(ended, &["hipStreamDestroy", "hipStreamBeginCapture", "hipEventQuery"], 0);
    let other_kind = |hip: &Hip, _: &Fake| {
        // SAFETY: the fake takes any address.
        unsafe { assert!(hip.hipHostFree(allocated(hip, 64)).is_err()) };
    };
    check(other_kind, &["hipHostFree"], 1);
}
