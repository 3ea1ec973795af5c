//! Devices: how many, and what they say of themselves.

use crate::{
    error::{Error, Result},
    state,
};

/// `cuInit`.
pub(crate) fn init(flags: u32) -> Result {
    let mut state = state::lock();
    if flags != 0 {
        return Err(Error::InvalidValue);
    }
    if state.devices.is_empty() {
        return Err(Error::NoDevice);
    }
    state.initialized = true;
    state::begin();
    Ok(())
}

/// `cuDeviceGetCount`.
pub(crate) fn count() -> Result<i32> {
    let state = state::lock();
    if state.initialized { Ok(state.devices.len() as i32) } else { Err(Error::NotInitialized) }
}

/// The device, if there is one of this ordinal.
pub(crate) fn get(ordinal: i32) -> Result<i32> {
    state::lock().device(ordinal).map(|_| ordinal)
}

/// `cuDeviceTotalMem`.
pub(crate) fn total(device: i32) -> Result<usize> {
    let state = state::lock();
    state.device(device)?;
    Ok(state.memory as usize)
}

/// `cuDeviceGetUuid`.
pub(crate) fn uuid(device: i32) -> Result<[u8; 16]> {
    let mut uuid = *b"vm-cuda-fake\0\0\0\0";
    uuid[15] = get(device)? as u8;
    Ok(uuid)
}

/// `cuDeviceGetPCIBusId`.
pub(crate) fn bus_id(device: i32) -> Result<String> {
    Ok(format!("0000:{:02X}:00.0", get(device)? + 1))
}

/// `cuDeviceGetByPCIBusId`.
pub(crate) fn by_bus_id(text: &str) -> Result<i32> {
    let matches =
        |device: &i32| bus_id(*device).is_ok_and(|id| id.eq_ignore_ascii_case(text) || id[5..] == *text);
    (0..count()?).find(matches).ok_or(Error::InvalidDevice)
}

/// `cuDeviceGetAttribute`: 0 where nothing else is said here.
pub(crate) fn attribute(attribute: i32, device: i32) -> Result<i32> {
    get(device)?;
    Ok(match attribute {
        // Threads of a block, its sides, and those of a grid.
        1..=3 => 1024,
        4 => 64,
        5 => i32::MAX,
        6 | 7 => 65535,
        // Shared memory, constant memory, warp, pitch, registers, clock, alignment.
        8 => 48 << 10,
        81 => 228 << 10,
        97 => 227 << 10,
        9 => 64 << 10,
        10 => 32,
        11 => i32::MAX,
        12 | 82 => 65536,
        13 => 1_000_000,
        14 => 512,
        // Processors, and threads of each.
        16 => 4,
        39 => 2048,
        // Mapped host memory, concurrent kernels, PCI's bus, engines, unified addressing, priorities.
        19 | 31 | 41 | 78 => 1,
        33 => device + 1,
        40 => 2,
        36 => 1_000_000,
        37 => 256,
        38 => 1 << 20,
        // Compute capability 9.0.
        75 => 9,
        // Managed memory, cooperative launches, registered host memory, memory operations of streams.
        83 | 89 | 90 | 91 | 92 | 93 | 94 | 95 | 98 | 99 | 122 | 123 => 1,
        // Virtual memory, and POSIX descriptors for it.
        102 | 103 => 1,
        // Pools.
        115 => 1,
        _ if (1..=160).contains(&attribute) => state::config().tests.attributes,
        _ => return Err(Error::InvalidValue),
    })
}
