//! The driver's linker.

use std::ffi::c_void;
use std::ptr;

use vm_accel::{Error, Result};

use super::log::Log;
use super::{Context, ended};
use crate::sys::{CUdevice_attribute as Attribute, CUjit_option, CUjitInputType, CUlinkState, Driver};

/// A cubin of PTX, for a device of this process whose compute capability is written `number`, as in `90`.
pub(crate) fn link(driver: &'static Driver, number: &str, ptx: &[u8], level: u32) -> Result<Vec<u8>> {
    let mut device = None;
    let found = driver.device_count()?;
    for ordinal in 0..found {
        let candidate = driver.device(ordinal)?;
        let major = candidate.attribute(driver, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = candidate.attribute(driver, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if format!("{major}{minor}") == number {
            device = Some(candidate);
            break;
        }
    }
    let device = device.ok_or_else(|| Error::NoDevice { wanted: format!("of sm_{number}"), found })?;
    let context = Context::retain(driver, device)?;
    let _entered = context.enter()?;

    let mut text = ptx.to_vec();
    if text.last() != Some(&0) {
        text.push(0);
    }
    let mut log = Log::new().with(CUjit_option::CU_JIT_OPTIMIZATION_LEVEL, level as usize);
    let (count, options, values) = log.options();
    let mut state = ptr::null_mut();
    // SAFETY: the options and the log live until the state is destroyed, at the end of this function.
    unsafe { driver.cuLinkCreate_v2(count, options, values, &raw mut state) }?;
    let linked = complete(driver, state, &mut text);
    // SAFETY: nobody uses the state after this; the cubin was copied.
    ended(unsafe { driver.cuLinkDestroy(state) });
    linked.map_err(|error| match error {
        lost if lost.is_lost() => lost,
        error => Error::Load { kernel: "of the text".into(), reason: log.behind(&error) },
    })
}

fn complete(driver: &Driver, state: CUlinkState, text: &mut [u8]) -> Result<Vec<u8>> {
    // SAFETY: the state is live; the text ends with a zero byte, which its length counts.
    unsafe {
        driver.cuLinkAddData_v2(
            state,
            CUjitInputType::CU_JIT_INPUT_PTX,
            text.as_mut_ptr().cast(),
            text.len(),
            ptr::null(),
            0,
            ptr::null_mut(),
            ptr::null_mut(),
        )
    }?;
    let (mut cubin, mut bytes): (*mut c_void, usize) = (ptr::null_mut(), 0);
    // SAFETY: the state is live, the pointers are to locals.
    unsafe { driver.cuLinkComplete(state, &raw mut cubin, &raw mut bytes) }?;
    if cubin.is_null() {
        return Ok(Vec::new());
    }
    // SAFETY: the driver made that number of bytes there, which live as long as the state.
    Ok(unsafe { std::slice::from_raw_parts(cubin.cast::<u8>(), bytes) }.to_vec())
}
