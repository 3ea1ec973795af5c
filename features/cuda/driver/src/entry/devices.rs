//! Initialisation, devices, errors' names, and addresses of functions.

use super::{Out, api, give, put, text};
use crate::{
    device, error,
    error::{Error, describe},
    names::{self, Status},
    pool, state, sys, tables,
};
use std::ffi::{CString, c_char};

/// Writes a text into the caller's `len` bytes.
fn put_text(at: *mut u8, len: i32, text: String) -> error::Result {
    let text = CString::new(text).map_err(|_| Error::Unknown)?;
    let len = usize::try_from(len).ok().filter(|len| *len > 0 && !at.is_null()).ok_or(Error::InvalidValue)?;
    sys::write_text(at, len, &text);
    Ok(())
}

api! {
    2000 fn cuInit(flags: u32) { device::init(flags) }
    2020 fn cuDriverGetVersion(version: Out<i32>) { give(version, || Ok(state::config().settings.version)) }
    2000 fn cuDeviceGetCount(count: Out<i32>) { give(count, device::count) }
    2000 fn cuDeviceGet(device: Out<i32>, ordinal: i32) { give(device, || device::get(ordinal)) }
    2000 fn cuDeviceGetName(name: *mut u8, len: i32, device: i32) {
        device::get(device)?;
        put_text(name, len, state::config().settings.name.to_owned())
    }
    2000 fn cuDeviceTotalMem(bytes: Out<u32>, device: i32) { give(bytes, || Ok(device::total(device)? as u32)) }
    3020 fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: i32) { give(bytes, || device::total(device)) }
    2000 fn cuDeviceGetAttribute(value: Out<i32>, attribute: i32, device: i32) {
        give(value, || device::attribute(attribute, device))
    }
    2000 fn cuDeviceComputeCapability(major: Out<i32>, minor: Out<i32>, device: i32) {
        give(major, || device::attribute(75, device))?;
        give(minor, || device::attribute(76, device))
    }
    9020 fn cuDeviceGetUuid(uuid: Out<[u8; 16]>, device: i32) { give(uuid, || device::uuid(device)) }
    11040 fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: i32) { give(uuid, || device::uuid(device)) }
    4010 fn cuDeviceGetPCIBusId(id: *mut u8, len: i32, device: i32) { put_text(id, len, device::bus_id(device)?) }
    4010 fn cuDeviceGetByPCIBusId(device: Out<i32>, id: *const c_char) {
        give(device, || device::by_bus_id(&text(id)?))
    }
    11020 fn cuDeviceGetDefaultMemPool(pool: Out<u64>, device: i32) { give(pool, || pool::of_device(device, true)) }
    11020 fn cuDeviceGetMemPool(pool: Out<u64>, device: i32) { give(pool, || pool::of_device(device, false)) }
    11020 fn cuDeviceSetMemPool(device: i32, pool: u64) { pool::set(device, pool) }
    6000 fn cuGetErrorName(error: i32, name: Out<u64>) {
        give(name, || Ok(describe(error).ok_or(Error::InvalidValue)?.0.as_ptr().expose_provenance() as u64))
    }
    6000 fn cuGetErrorString(error: i32, name: Out<u64>) {
        give(name, || Ok(describe(error).ok_or(Error::InvalidValue)?.1.as_ptr().expose_provenance() as u64))
    }
    3000 fn cuGetExportTable(table: Out<u64>, id: *const [u8; 16]) { give(table, || tables::find(id)) }
    11030 fn cuGetProcAddress(symbol: *const c_char, function: Out<usize>, version: i32, flags: u64) {
        let (address, _) = names::find(&text(symbol)?, version, flags)?;
        give(function, || Ok(address))?;
        if address == 0 { Err(Error::NotFound) } else { Ok(()) }
    }
    12000 fn cuGetProcAddress_v2(
        symbol: *const c_char, function: Out<usize>, version: i32, flags: u64, status: Out<i32>
    ) {
        let (address, found): (usize, Status) = names::find(&text(symbol)?, version, flags)?;
        give(function, || Ok(address))?;
        put(status, found as i32);
        Ok(())
    }
}
