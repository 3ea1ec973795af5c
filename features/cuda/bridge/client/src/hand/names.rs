//! Initialisation, addresses of functions, errors' names.

use std::sync::atomic::Ordering;

use vm_bridge::wire::code;
use vm_cuda_api::names::{self, Status};
use vm_cuda_api::tables::{Device, Question, answer};

use super::the;
use crate::client::client;
use crate::sys::{caller, symbols, tables};
use crate::{forward, pack};

pub(crate) fn cuInit(number: usize, words: &[usize]) -> Result<(), u32> {
    let client = client()?;
    forward::ask(number, words)?;
    client.ready.store(true, Ordering::Relaxed);
    Ok(())
}

/// The server's driver's version of CUDA.
fn version() -> Result<i32, u32> {
    let mut version = 0i32;
    forward::keep(the("cuDriverGetVersion")?, &[&raw mut version as usize])?;
    Ok(version)
}

fn find(words: &[usize]) -> Result<(usize, Status), u32> {
    let [name, function, asked, flags, ..] = *words else { return Err(code::INVALID_VALUE) };
    let name = caller::text(name).and_then(|name| std::str::from_utf8(&name[..name.len() - 1]).ok());
    let (Some(name), true) = (name, function != 0) else { return Err(code::INVALID_VALUE) };
    let (found, status) = names::find(symbols(), version()?, name, asked as i32, flags as u64)
        .map_err(|_| code::INVALID_VALUE)?;
    caller::write(function, found.unwrap_or(0) as u64);
    Ok((found.unwrap_or(0), status))
}

pub(crate) fn cuGetProcAddress(_: usize, words: &[usize]) -> Result<(), u32> {
    match find(words)? {
        (0, _) => Err(code::NOT_FOUND),
        _ => Ok(()),
    }
}

pub(crate) fn cuGetProcAddress_v2(_: usize, words: &[usize]) -> Result<(), u32> {
    let (address, status) = find(words)?;
    caller::write_half(words[4], status as u32);
    if address == 0 { Err(code::NOT_FOUND) } else { Ok(()) }
}

pub(crate) fn cuGetExportTable(_: usize, words: &[usize]) -> Result<(), u32> {
    let [to, id] = *words else { return Err(code::INVALID_VALUE) };
    let id: [u8; 16] = *caller::bytes(id, 16).first_chunk().ok_or(code::INVALID_VALUE)?;
    if to == 0 {
        return Err(code::INVALID_VALUE);
    }
    let table = tables::find(&id);
    caller::write(to, table.unwrap_or(0) as u64);
    table.map(drop).ok_or(code::INVALID_VALUE)
}

/// The name or the text of an error: of the server's driver, and of what this side itself says where there is none.
fn describe(number: usize, words: &[usize], own: fn(u32) -> Option<&'static str>) -> Result<(), u32> {
    let [error, to] = *words else { return Err(code::INVALID_VALUE) };
    match forward::keep(number, words) {
        Err(code::UNAVAILABLE | code::NO_DEVICE | code::NOT_INITIALIZED | code::LAUNCH_TIMEOUT) => {
            let text = own(error as u32).ok_or(code::INVALID_VALUE)?;
            caller::write(to, pack::kept(text.as_bytes()) as u64);
            Ok(())
        }
        other => other,
    }
}

pub(crate) fn cuGetErrorName(number: usize, words: &[usize]) -> Result<(), u32> {
    describe(number, words, |error| {
        Some(match error {
            0 => "CUDA_SUCCESS",
            code::NOT_INITIALIZED => "CUDA_ERROR_NOT_INITIALIZED",
            code::UNAVAILABLE => "CUDA_ERROR_DEVICE_UNAVAILABLE",
            code::NO_DEVICE => "CUDA_ERROR_NO_DEVICE",
            code::LAUNCH_TIMEOUT => "CUDA_ERROR_LAUNCH_TIMEOUT",
            code::NOT_SUPPORTED => "CUDA_ERROR_NOT_SUPPORTED",
            _ => return None,
        })
    })
}

pub(crate) fn cuGetErrorString(number: usize, words: &[usize]) -> Result<(), u32> {
    describe(number, words, |error| {
        Some(match error {
            0 => "no error",
            code::NOT_INITIALIZED => "initialization error",
            code::UNAVAILABLE => "the server of this program's GPU is gone",
            code::NO_DEVICE => "no CUDA-capable device is detected",
            code::LAUNCH_TIMEOUT => "the launch timed out and was terminated",
            code::NOT_SUPPORTED => "operation not supported",
            _ => return None,
        })
    })
}

/// The answer to the runtime's check, which is of this process and of the server's devices.
pub(crate) fn check(question: Question) -> Result<[u64; 2], u32> {
    /// `CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID`, `…_BUS_ID`, `…_DEVICE_ID`.
    const PLACE: [usize; 3] = [50, 33, 34];
    let mut count = 0i32;
    forward::keep(the("cuDeviceGetCount")?, &[&raw mut count as usize])?;
    let mut devices = vec![Device::default(); count.max(0) as usize];
    for (device, found) in devices.iter_mut().enumerate() {
        forward::keep(the("cuDeviceGetUuid_v2")?, &[found.uuid.as_mut_ptr() as usize, device])?;
        for (attribute, place) in PLACE.iter().zip(&mut found.place) {
            let words = [&raw mut *place as usize, *attribute, device];
            forward::keep(the("cuDeviceGetAttribute")?, &words)?;
        }
    }
    Ok(answer(&Question { driver: version()? as u32, ..question }, &devices))
}

/// `CU_DEVICE_ATTRIBUTE_…` of what does not cross: memory of the program that is registered or reached as it is, launches on several devices, handles that others open, other devices that reach the memory, arrays that are mapped in parts, multicast, decompression, physical memory
/// and pools of the host.
const ABSENT: [u32; 27] = [
    88, 91, 96, 99, 100, 101, 110, 112, 113, 114, 116, 119, 121, 124, 128, 129, 132, 135, 136, 137, 138, 141,
    142, 143, 144, 145, 146,
];

pub(crate) fn cuDeviceGetAttribute(number: usize, words: &[usize]) -> Result<(), u32> {
    forward::keep(number, words)?;
    /// `CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY`, `…_MANAGED_MEMORY` and `…_CONCURRENT_MANAGED_ACCESS`.
    const SHARED: [u32; 3] = [19, 83, 89];
    let attribute = words[1] as u32;
    if ABSENT.contains(&attribute) || SHARED.contains(&attribute) && !client()?.shares_memory() {
        caller::write_half(words[0], 0);
    }
    Ok(())
}
