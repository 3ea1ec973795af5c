//! What is answered. Arguments are words: numbers of 32 bits are their lower half, and a null pointer is looked for before all else is done.

use vm_bridge::say;
use vm_bridge::wire::facts::{Device, uuid_text};

use crate::errors::Error;
use crate::forward;
use crate::state::{self, device, facts};
use crate::sys::{caller, driver};

/// As many arguments as are passed in registers, which is all that an answer needs.
pub(crate) type Words = [usize; 6];
type Answer = Result<(), Error>;

/// What is not answered here: the server's NVML is asked, or it is not supported.
pub(crate) fn other(name: &str, words: &Words) -> Answer {
    facts()?;
    forward::by_name(name, words)?.ok_or_else(|| {
        say::once(&format!("{name} is not supported"));
        Error::NotSupported
    })
}

pub(crate) fn init(_: &Words) -> Answer {
    state::init()
}

pub(crate) fn shutdown(_: &Words) -> Answer {
    state::shutdown()
}

/// A pointer that the caller must pass.
fn to(pointer: usize) -> Result<usize, Error> {
    if pointer == 0 { Err(Error::InvalidArgument) } else { Ok(pointer) }
}

fn write_number(pointer: usize, number: u32) -> Answer {
    caller::write(to(pointer)?, &number.to_ne_bytes());
    Ok(())
}

/// Writes a text with its zero, if there is room for all of it.
fn write_text(pointer: usize, room: usize, text: &str) -> Answer {
    let pointer = to(pointer)?;
    if (room as u32 as usize) <= text.len() {
        return Err(Error::InsufficientSize);
    }
    caller::write(pointer, &[text.as_bytes(), &[0]].concat());
    Ok(())
}

pub(crate) fn driver_version([text, room, ..]: &Words) -> Answer {
    write_text(*text, *room, &facts()?.driver)
}

/// As NVIDIA's has it: the major version of CUDA, and the driver's.
pub(crate) fn nvml_version([text, room, ..]: &Words) -> Answer {
    let facts = facts()?;
    write_text(*text, *room, &format!("{}.{}", facts.cuda / 1000, facts.driver))
}

pub(crate) fn cuda_version([number, ..]: &Words) -> Answer {
    write_number(*number, facts()?.cuda)
}

pub(crate) fn count([number, ..]: &Words) -> Answer {
    write_number(*number, facts()?.devices.len() as u32)
}

/// Writes the handle of a device, if there is one.
fn give(handle: usize, found: Option<usize>, otherwise: Error) -> Answer {
    caller::write(to(handle)?, &state::handle(found.ok_or(otherwise)?).to_ne_bytes());
    Ok(())
}

pub(crate) fn by_index([index, handle, ..]: &Words) -> Answer {
    let (index, count) = (*index as u32 as usize, facts()?.devices.len());
    give(*handle, Some(index).filter(|index| *index < count), Error::InvalidArgument)
}

pub(crate) fn by_uuid([text, handle, ..]: &Words) -> Answer {
    let facts = facts()?;
    let text = caller::text(to(*text)?);
    to(*handle)?;
    let is_it = |device: &Device| uuid_text(device.uuid).as_bytes().eq_ignore_ascii_case(text);
    give(*handle, facts.devices.iter().position(is_it), Error::NotFound)
}

pub(crate) fn by_bus_id([text, handle, ..]: &Words) -> Answer {
    let facts = facts()?;
    let text = str::from_utf8(caller::text(to(*text)?)).map_err(|_| Error::InvalidArgument)?;
    to(*handle)?;
    let place = place(text).ok_or(Error::InvalidArgument)?;
    give(*handle, facts.devices.iter().position(|device| device.place == place), Error::NotFound)
}

/// Domain, bus and device of `0000:65:00.0`, where the domain may have eight digits or be left out. Functions but the first are no devices.
fn place(text: &str) -> Option<[u32; 3]> {
    let number = |text: &str, digits: usize| {
        let is_number =
            (1..=digits).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        if is_number { u32::from_str_radix(text, 16).ok() } else { None }
    };
    let text = text.strip_suffix(".0").unwrap_or(text);
    let mut parts = text.rsplit(':');
    let (device, bus) = (number(parts.next()?, 2)?, number(parts.next()?, 2)?);
    let domain = parts.next().map_or(Some(0), |domain| number(domain, 8))?;
    parts.next().is_none().then_some([domain, bus, device])
}

pub(crate) fn name([handle, text, room, ..]: &Words) -> Answer {
    write_text(*text, *room, &device(*handle)?.name)
}

pub(crate) fn uuid([handle, text, room, ..]: &Words) -> Answer {
    write_text(*text, *room, &uuid_text(device(*handle)?.uuid))
}

pub(crate) fn index([handle, number, ..]: &Words) -> Answer {
    write_number(*number, state::index(*handle)?.0 as u32)
}

/// An address on PCI with so many digits of its domain, in so many bytes.
fn bus_id([domain, bus, device]: [u32; 3], digits: usize, len: usize) -> Vec<u8> {
    let mut text = format!("{domain:0digits$X}:{bus:02X}:{device:02X}.0").into_bytes();
    text.truncate(len - 1);
    text.resize(len, 0);
    text
}

/// Bytes of `busIdLegacy`, and of `busId`.
const LEGACY: usize = 16;
const BUS_ID: usize = 32;

/// Numbers of its place, then those of what it is.
fn numbers(device: &Device) -> impl Iterator<Item = u8> {
    device.place.into_iter().chain(device.ids).flat_map(u32::to_ne_bytes)
}

/// `nvmlPciInfo_t`.
pub(crate) fn pci_info([handle, info, ..]: &Words) -> Answer {
    let device = device(*handle)?;
    let mut bytes = bus_id(device.place, 4, LEGACY);
    bytes.extend(numbers(&device));
    bytes.extend(bus_id(device.place, 8, BUS_ID));
    caller::write(to(*info)?, &bytes);
    Ok(())
}

/// `nvmlPciInfo_v2_t`: as much of it as its first form has, too.
pub(crate) fn pci_info_old([handle, info, ..]: &Words) -> Answer {
    let device = device(*handle)?;
    let mut bytes = bus_id(device.place, 4, LEGACY);
    bytes.extend(numbers(&device).take(16));
    caller::write(to(*info)?, &bytes);
    Ok(())
}

/// The version that a structure of so many bytes says.
fn versioned(pointer: usize, bytes: u32, version: u32) -> Result<usize, Error> {
    let pointer = to(pointer)?;
    if caller::number(pointer) == bytes | version << 24 { Ok(pointer) } else { Err(Error::VersionMismatch) }
}

/// `nvmlMemory_t`: total, free, used.
pub(crate) fn memory([handle, memory, ..]: &Words) -> Answer {
    let uuid = device(*handle)?.uuid;
    let to = to(*memory)?;
    let driver::Memory { total, free, .. } = driver::memory(uuid)?;
    caller::write(to, [total, free, total - free].map(u64::to_ne_bytes).as_flattened());
    Ok(())
}

/// `nvmlMemory_v2_t`: version, total, reserved, free, used. What is reserved is not in the total.
pub(crate) fn memory_v2([handle, memory, ..]: &Words) -> Answer {
    let uuid = device(*handle)?.uuid;
    let to = versioned(*memory, 40, 2)?;
    let driver::Memory { total, free, .. } = driver::memory(uuid)?;
    caller::write(to + 8, [total, 0, free, total - free].map(u64::to_ne_bytes).as_flattened());
    Ok(())
}

pub(crate) fn capability([handle, major, minor, ..]: &Words) -> Answer {
    let [of_device, minor_of_device] = device(*handle)?.capability;
    to(*minor)?;
    write_number(*major, of_device)?;
    write_number(*minor, minor_of_device)
}

/// `nvmlDeviceGetP2PStatus`: whether one device reads and writes the memory of another; where there is no other NVML, as CUDA has it.
pub(crate) fn peer_status(words: &Words) -> Answer {
    if forward::by_name("nvmlDeviceGetP2PStatus", words)?.is_some() {
        return Ok(());
    }
    let [handle, other, index, status, ..] = words;
    /// `NVML_P2P_CAPS_INDEX_READ` and `_WRITE`, and the last of them; `NVML_P2P_STATUS_NOT_SUPPORTED`.
    const READ: u32 = 0;
    const WRITE: u32 = 1;
    const LAST: u32 = 4;
    const NONE: u32 = 5;
    let (at, facts) = state::index(*handle)?;
    let (of, _) = state::index(*other)?;
    let reaches = at == of || facts.devices.get(at).is_some_and(|device| device.peers >> of & 1 != 0);
    match *index as u32 {
        READ | WRITE => write_number(*status, if reaches { 0 } else { NONE }),
        index if index <= LAST => write_number(*status, NONE),
        _ => Err(Error::InvalidArgument),
    }
}

/// CUDA does not know it: `NVML_BRAND_UNKNOWN`.
pub(crate) fn brand(words: &Words) -> Answer {
    if forward::by_name("nvmlDeviceGetBrand", words)?.is_some() {
        return Ok(());
    }
    let [handle, number, ..] = words;
    device(*handle)?;
    write_number(*number, 0)
}

/// `NVML_DEVICE_ARCH_…`.
fn architecture_of([major, minor]: [u32; 2]) -> u32 {
    match (major, minor) {
        (3, _) => 2,
        (5, _) => 3,
        (6, _) => 4,
        (7, 0..=4) => 5,
        (7, _) => 6,
        (8, 9) => 8,
        (8, _) => 7,
        (9, _) => 9,
        (10..=12, _) => 10,
        _ => u32::MAX,
    }
}

pub(crate) fn architecture(words: &Words) -> Answer {
    if forward::by_name("nvmlDeviceGetArchitecture", words)?.is_some() {
        return Ok(());
    }
    let [handle, number, ..] = words;
    write_number(*number, architecture_of(device(*handle)?.capability))
}

pub(crate) fn compute_mode([handle, number, ..]: &Words) -> Answer {
    write_number(*number, device(*handle)?.compute_mode)
}

/// Writes how many processes there are, and them, where there is room for so many.
fn give_processes(count: usize, infos: usize, process: Option<&[u8]>) -> Answer {
    let room = caller::number(to(count)?);
    write_number(count, process.is_some().into())?;
    match process {
        None => Ok(()),
        Some(_) if room == 0 => Err(Error::InsufficientSize),
        Some(process) => {
            caller::write(to(infos)?, process);
            Ok(())
        }
    }
}

/// This process as `nvmlProcessInfo_t`, up to so many bytes, if it uses a device. How much memory it has there is not known.
fn own_process(uuid: [u8; 16], len: usize) -> Result<Option<Vec<u8>>, Error> {
    const UNKNOWN: [u8; 16] = [0xff; 16];
    let uses = driver::memory(uuid)?.is_used;
    let info = [u64::from(std::process::id()).to_ne_bytes().as_slice(), &UNKNOWN].concat();
    Ok(uses.then(|| info[..len].to_vec()))
}

/// Of this program alone: what others do on the server's devices is no matter of its.
pub(crate) fn processes([handle, count, infos, ..]: &Words) -> Answer {
    let uuid = device(*handle)?.uuid;
    to(*count)?;
    give_processes(*count, *infos, own_process(uuid, 24)?.as_deref())
}

/// The first form, without the instances of a device.
pub(crate) fn processes_old([handle, count, infos, ..]: &Words) -> Answer {
    let uuid = device(*handle)?.uuid;
    to(*count)?;
    give_processes(*count, *infos, own_process(uuid, 16)?.as_deref())
}

pub(crate) fn no_processes([handle, count, infos, ..]: &Words) -> Answer {
    device(*handle)?;
    give_processes(*count, *infos, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_on_pci_are_read() {
        let check = |text: &str, expect: Option<[u32; 3]>| assert_eq!(place(text), expect, "{text}");
        check("0000:65:00.0", Some([0, 0x65, 0]));
        check("00010000:C1:1f.0", Some([0x1_0000, 0xc1, 0x1f]));
        check("65:00", Some([0, 0x65, 0]));
        for text in
            ["", "65", "0000:65:00.1", "1:2:3:4", "+1:2:3", "000000000:65:00.0", "0000:65:000.0", "a:b:x"]
        {
            check(text, None);
        }
    }

    #[test]
    fn a_place_is_written_as_it_is_read() {
        for place_of in [[0, 1, 0], [0x1_0000, 0xff, 0x1f]] {
            let text = bus_id(place_of, 8, BUS_ID);
            let end = text.iter().position(|byte| *byte == 0).expect("its end");
            assert_eq!(place(str::from_utf8(&text[..end]).expect("a text")), Some(place_of));
        }
        assert_eq!(bus_id([0, 0x65, 0], 4, LEGACY), b"0000:65:00.0\0\0\0\0");
    }
}
