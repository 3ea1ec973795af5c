//! What is told of the driver and its devices without a call of the program's: no context is made for it.

use super::nvml;
use super::reach::Checked;
use super::session::Session;
use super::sys::Word;
use crate::wire::facts::{DEVICES, Device, Facts, TEXT};
use crate::wire::{code, control};

/// `CU_DEVICE_ATTRIBUTE_…`: `PCI_DOMAIN_ID`, `PCI_BUS_ID`, `PCI_DEVICE_ID`, `COMPUTE_CAPABILITY_MAJOR`, `…_MINOR`, `COMPUTE_MODE`.
const ATTRIBUTES: [u64; 6] = [50, 33, 34, 75, 76, 20];
/// `CU_DEVICE_ATTRIBUTE_GPU_PCI_DEVICE_ID` and `…_SUBSYSTEM_ID`, which drivers from CUDA 12.8 on have.
const IDS: [u64; 2] = [139, 140];

/// Asks for words, by a function that writes them first, as it answers under the session's quota.
fn ask<const N: usize>(session: &Session, name: &str, more: &[u64]) -> Result<[u64; N], u32> {
    let mut memory = [0; N];
    let words: Vec<_> = [Word::At(0)].into_iter().chain(more.iter().map(|word| Word::Is(*word))).collect();
    let number = vm_cuda_api::number(name).ok_or(code::NOT_SUPPORTED)?;
    match session.quota().make(session.driver(), Checked::of_server(number, &words), &mut memory) {
        0 => Ok(memory),
        code => Err(code),
    }
}

/// A number of 32 bits, which is the first half of the word.
fn number(session: &Session, name: &str, more: &[u64]) -> Result<u32, u32> {
    ask::<1>(session, name, more).map(|[word]| word as u32)
}

/// Starts the driver, has something done with its devices counted, and then no longer does what only that takes.
fn start<T>(session: &Session, act: impl FnOnce(u32) -> Result<T, u32>) -> Result<T, u32> {
    match session.driver().start() {
        0 => {
            let done =
                number(session, "cuDeviceGetCount", &[]).and_then(|count| act(count.min(DEVICES as u32)));
            match session.started() {
                0 => done,
                code => Err(code),
            }
        }
        code::NO_DEVICE => act(0),
        code => Err(code),
    }
}

/// Starts the driver, and counts its devices.
fn count(session: &Session) -> Result<u32, u32> {
    start(session, Ok)
}

/// Starts the driver, and finds its devices by their UUIDs.
pub(super) fn find<T: FromIterator<U>, U>(session: &Session, find: impl Fn([u8; 16]) -> U) -> Result<T, u32> {
    start(session, |count| (0..count).map(|at| uuid(session, at).map(|uuid| find(bytes_of(uuid)))).collect())
}

fn uuid(session: &Session, device: u32) -> Result<[u64; 2], u32> {
    ask(session, "cuDeviceGetUuid_v2", &[device.into()])
}

fn bytes_of(uuid: [u64; 2]) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(uuid.map(u64::to_ne_bytes).as_flattened());
    bytes
}

fn device(session: &Session, device: u32) -> Result<Device, u32> {
    const WORDS: usize = (TEXT + 1) / 8;
    let name = ask::<WORDS>(session, "cuDeviceGetName", &[TEXT as u64, device.into()])?;
    let name: Vec<u8> =
        name.iter().flat_map(|word| word.to_ne_bytes()).take_while(|byte| *byte != 0).collect();
    let mut numbers = [0; ATTRIBUTES.len()];
    for (attribute, number_of) in ATTRIBUTES.iter().zip(&mut numbers) {
        *number_of = number(session, "cuDeviceGetAttribute", &[*attribute, device.into()])?;
    }
    let [domain, bus, place, major, minor, compute_mode] = numbers;
    Ok(Device {
        uuid: bytes_of(uuid(session, device)?),
        name: String::from_utf8_lossy(&name).into_owned(),
        place: [domain, bus, place],
        ids: IDS.map(|id| number(session, "cuDeviceGetAttribute", &[id, device.into()]).unwrap_or(0)),
        capability: [major, minor],
        compute_mode,
        memory: ask::<1>(session, "cuDeviceTotalMem_v2", &[device.into()])?[0],
        peers: 0,
    })
}

/// What is known of the driver.
pub(super) fn facts(session: &Session) -> Result<Facts, u32> {
    let count = count(session)?;
    let mut devices = (0..count).map(|at| Ok((at, device(session, at)?))).collect::<Result<Vec<_>, u32>>()?;
    devices.sort_by_key(|(_, device)| device.place);
    let ordinals: Vec<u32> = devices.iter().map(|(ordinal, _)| *ordinal).collect();
    for (from, device) in &mut devices {
        let reaches =
            |to: u32| number(session, "cuDeviceCanAccessPeer", &[(*from).into(), to.into()]) == Ok(1);
        let bits = ordinals.iter().enumerate().map(|(at, to)| u64::from(to != from && reaches(*to)) << at);
        device.peers = bits.sum();
    }
    let devices = devices.into_iter().map(|(_, device)| device).collect();
    let cuda = number(session, "cuDriverGetVersion", &[])?;
    let version = || format!("{}.{}", cuda / 1000, cuda % 1000 / 10);
    Ok(Facts { cuda, driver: session.driver().version().map_or_else(version, str::to_owned), devices })
}

/// The memory of a device, how much of it is free, and whether this process has a primary context of it.
pub(super) fn memory(session: &Session, wanted: [u64; 2]) -> Result<[u64; control::MEMORY_WORDS], u32> {
    let driver = session.driver();
    let theirs = match driver.version() {
        Some(_) => nvml::free(session, bytes_of(wanted)),
        // Drivers other than NVIDIA's have memory of each process alone, and without a context it has taken none.
        None => Ok(u64::MAX),
    };
    let is_it = |device: &u32| uuid(session, *device) == Ok(wanted);
    let device = (0..count(session)?).find(is_it).ok_or(code::NOT_FOUND)?;
    let [total] = ask::<1>(session, "cuDeviceTotalMem_v2", &[device.into()])?;
    let is_active = driver.has_primary(device.into()) == Ok(true);
    let free = if is_active { in_primary(session, device)? } else { theirs? };
    Ok([total, free.min(total).min(session.quota().left()), is_active.into()])
}

/// What is free, as a context says that is there already.
fn in_primary(session: &Session, device: u32) -> Result<u64, u32> {
    let driver = session.driver();
    let mut context = [0];
    // It is given back below: the quota does not hear of it.
    let retained =
        driver.named("cuDevicePrimaryCtxRetain", &[Word::At(0), Word::Is(device.into())], &mut context);
    if retained != 0 {
        return Err(retained);
    }
    let pushed = driver.named("cuCtxPushCurrent_v2", &[Word::Is(context[0])], &mut []);
    let mut memory = [0; 2];
    let result = match pushed {
        0 => driver.named("cuMemGetInfo_v2", &[Word::At(0), Word::At(1)], &mut memory),
        code => code,
    };
    if pushed == 0 {
        // It was pushed just now.
        let _ = driver.named("cuCtxPopCurrent_v2", &[Word::At(0)], &mut [0]);
    }
    // It was retained just now.
    let _ = driver.named("cuDevicePrimaryCtxRelease_v2", &[Word::Is(device.into())], &mut []);
    if result == 0 { Ok(memory[0]) } else { Err(result) }
}
