//! Initialisation, addresses of functions, errors' names.

use std::sync::atomic::Ordering;

use vm_bridge::wire::code;
use vm_cuda_api::names::{self, Status};

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
        Err(code::UNAVAILABLE | code::NO_DEVICE | code::NOT_INITIALIZED) => {
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
            code::NOT_SUPPORTED => "operation not supported",
            _ => return None,
        })
    })
}
