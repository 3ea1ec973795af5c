//! What is known of the server's driver and devices: the answer to [`control::FACTS`](super::control::FACTS).

use std::fmt::Write as _;

use super::{Malformed, Reader, put, put_bytes};

/// The most bytes of them.
pub const MOST: usize = 64 << 10;
/// The most devices.
pub const DEVICES: usize = 64;
/// The most bytes of a text.
pub const TEXT: usize = 255;

/// The driver, and its devices by their PCI addresses.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Facts {
    /// The driver's version of CUDA: 13000 is 13.0.
    pub cuda: u32,
    /// The driver's own version, as in `580.95.05`.
    pub driver: String,
    /// Its devices.
    pub devices: Vec<Device>,
}

/// A device.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Device {
    /// What names it everywhere.
    pub uuid: [u8; 16],
    /// Its product's name.
    pub name: String,
    /// Domain, bus and device on PCI.
    pub place: [u32; 3],
    /// The numbers of vendor and device, and those of the subsystem, each two in a word; 0 where the driver does not know them.
    pub ids: [u32; 2],
    /// The compute capability.
    pub capability: [u32; 2],
    /// `CUcomputemode`.
    pub compute_mode: u32,
    /// Bytes of its memory.
    pub memory: u64,
    /// Which devices' memory its kernels reach (`cuDeviceCanAccessPeer`): a bit for each, in the order of [`Facts::devices`].
    pub peers: u64,
}

/// A device's UUID as NVIDIA's tools write it.
#[must_use]
pub fn uuid_text(uuid: [u8; 16]) -> String {
    let mut text = String::from("GPU");
    for (at, byte) in uuid.iter().enumerate() {
        let dash = if [0, 4, 6, 8, 10].contains(&at) { "-" } else { "" };
        // Into a string it never fails.
        let _ = write!(text, "{dash}{byte:02x}");
    }
    text
}

impl Facts {
    /// As they are sent; what is too much is left out.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let devices = &self.devices[..self.devices.len().min(DEVICES)];
        let mut bytes = Vec::new();
        put(&mut bytes, self.cuda.into());
        put_text(&mut bytes, &self.driver);
        put(&mut bytes, devices.len() as u64);
        for device in devices {
            bytes.extend_from_slice(&device.uuid);
            put_text(&mut bytes, &device.name);
            let numbers = device
                .place
                .iter()
                .chain(&device.ids)
                .chain(&device.capability)
                .chain([&device.compute_mode]);
            numbers.for_each(|number| put(&mut bytes, u64::from(*number)));
            put(&mut bytes, device.memory);
            put(&mut bytes, device.peers);
        }
        bytes
    }

    /// As they came.
    ///
    /// # Errors
    /// When they are none.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Malformed> {
        let reader = &mut Reader(bytes);
        let (cuda, driver) = (number(reader)?, text(reader)?);
        let count = reader.word()?;
        if count > DEVICES as u64 {
            return Err(Malformed);
        }
        let devices = (0..count).map(|_| device(reader)).collect::<Result<_, _>>()?;
        if reader.0.is_empty() { Ok(Self { cuda, driver, devices }) } else { Err(Malformed) }
    }
}

fn device(reader: &mut Reader<'_>) -> Result<Device, Malformed> {
    Ok(Device {
        uuid: *reader.bytes(16)?.first_chunk().ok_or(Malformed)?,
        name: text(reader)?,
        place: [number(reader)?, number(reader)?, number(reader)?],
        ids: [number(reader)?, number(reader)?],
        capability: [number(reader)?, number(reader)?],
        compute_mode: number(reader)?,
        memory: reader.word()?,
        peers: reader.word()?,
    })
}

/// Up to the first zero, as C has it, and up to [`TEXT`].
fn put_text(to: &mut Vec<u8>, text: &str) {
    let text = text.split('\0').next().unwrap_or_default();
    let text = &text.as_bytes()[..text.floor_char_boundary(TEXT)];
    put(to, text.len() as u64);
    put_bytes(to, text);
}

fn text(reader: &mut Reader<'_>) -> Result<String, Malformed> {
    let len = usize::try_from(reader.word()?).ok().filter(|len| *len <= TEXT).ok_or(Malformed)?;
    let text = std::str::from_utf8(reader.bytes(len)?).map_err(|_| Malformed)?;
    if text.contains('\0') { Err(Malformed) } else { Ok(text.to_owned()) }
}

fn number(reader: &mut Reader<'_>) -> Result<u32, Malformed> {
    u32::try_from(reader.word()?).map_err(|_| Malformed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(devices: usize) -> Facts {
        let device = |at: usize| Device {
            uuid: [at as u8; 16],
            name: format!("NVIDIA H100 {at}"),
            place: [0x1_0000, 0x65, at as u32],
            ids: [0x2330_10de, 0x16c1_10de],
            capability: [9, 0],
            compute_mode: 3,
            memory: 85 << 30,
            peers: 5_u64.rotate_left(at as u32),
        };
        Facts { cuda: 13000, driver: "580.95.05".into(), devices: (0..devices).map(device).collect() }
    }

    #[test]
    fn facts_come_as_they_were_sent() {
        for devices in [0, 1, DEVICES] {
            let facts = facts(devices);
            let bytes = facts.to_bytes();
            assert!(bytes.len() <= MOST);
            assert_eq!(Facts::from_bytes(&bytes), Ok(facts));
        }
        let long = Facts { driver: "é".repeat(200), devices: facts(DEVICES + 1).devices, cuda: 1 };
        let came = Facts::from_bytes(&long.to_bytes()).expect("facts");
        assert_eq!((came.driver.len(), came.devices.len()), (TEXT - 1, DEVICES));
    }

    #[test]
    fn uuids_are_written_as_the_tools_do() {
        let uuid = std::array::from_fn(|at| 0x11 * at as u8);
        assert_eq!(uuid_text(uuid), "GPU-00112233-4455-6677-8899-aabbccddeeff");
    }

    #[test]
    fn what_is_cut_or_changed_breaks_nothing() {
        let bytes = facts(2).to_bytes();
        for len in 0..bytes.len() {
            assert_eq!(Facts::from_bytes(&bytes[..len]), Err(Malformed), "{len}");
        }
        for at in 0..bytes.len() {
            let mut bytes = bytes.clone();
            bytes[at] ^= 0xff;
            // Whatever it says, what is read can be sent.
            if let Ok(facts) = Facts::from_bytes(&bytes) {
                assert_eq!(Facts::from_bytes(&facts.to_bytes()), Ok(facts));
            }
        }
    }
}
