//! Expansion ROMs: what is in one, so that a file can take the place of a function's own.
//!
//! A ROM holds one image or several, in units of 512 bytes: a header that begins with 0x55AA and points to a data structure
//! `PCIR`, which says whose it is, how long, and whether it is the last (PCI Firmware Specification 3.3, 5.1). Vendors put
//! images of formats of their own behind those.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use thiserror::Error;

use super::PciIds;

/// The most bytes of a ROM. Real ones have no more than 2 MiB.
pub const MAX_ROM: u64 = 16 << 20;
/// The least that a ROM's BAR decodes (PCI Local Bus 3.0, 6.2.5.2).
const MIN_ROM: u64 = 2048;
/// The unit of an image's length.
const UNIT: usize = 512;
/// Bytes of the data structure that every revision has.
const DATA: usize = 0x18;
/// Most further device IDs that are looked at.
const MAX_DEVICES: usize = 256;

/// The content of an expansion ROM, for a guest to read in the place of the device's own
/// ([`Rom::Image`](crate::guest::Rom::Image)).
#[derive(Clone, PartialEq, Eq)]
pub struct RomImage {
    bytes: Arc<[u8]>,
    vendor: u16,
    /// Its device first, then others that it is for.
    devices: Vec<u16>,
}

impl std::fmt::Debug for RomImage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RomImage({} bytes for {:04x}:{:04x?})", self.bytes.len(), self.vendor, self.devices)
    }
}

/// Why bytes are no ROM. Offsets are from their start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RomError {
    /// They can't be read.
    #[error("can't be read at offset {offset:#x}: {source}")]
    Read {
        /// Where.
        offset: u64,
        /// Why not.
        source: io::Error,
    },
    /// There are none, or too many.
    #[error("has {}; a ROM has from {UNIT} bytes to 16 MiB", if *.len > MAX_ROM { "more than 16 MiB".to_owned() } else { format!("{} bytes", .len) })]
    Size {
        /// How many were read.
        len: u64,
    },
    /// An image does not begin as one.
    #[error(
        "has {found:02x?} at offset {offset:#x}, where an image begins with [55, aa]; {}",
        match .begins { Some(at) => format!("one begins at offset {at:#x}: cut off what is before it (dd bs={at} skip=1)"), None => "it is no expansion ROM".into() }
    )]
    Signature {
        /// Where.
        offset: usize,
        /// What is there.
        found: [u8; 2],
        /// Where an image begins, if there is one further on: tools of vendors put headers of their own before it.
        begins: Option<usize>,
    },
    /// The data structure of an image is not where its header says.
    #[error(
        "has no PCIR structure at offset {at:#x}, where the image at offset {offset:#x} says that it is; the file is damaged"
    )]
    Data {
        /// Where the image begins.
        offset: usize,
        /// Where the structure should be.
        at: usize,
    },
    /// An image ends behind the last byte, or where it begins.
    #[error(
        "ends at offset {len:#x}, and the image at offset {offset:#x} at {end:#x}; read the ROM once more"
    )]
    Length {
        /// Where the image begins.
        offset: usize,
        /// Where it says that it ends.
        end: usize,
        /// How many bytes there are.
        len: usize,
    },
}

/// One image.
struct Image {
    /// Where its data structure is.
    data: usize,
    end: usize,
    is_last: bool,
}

impl RomImage {
    /// Checks the bytes of a ROM.
    ///
    /// # Errors
    /// When they are none: what is wrong, and at which offset.
    pub fn parse(bytes: Vec<u8>) -> Result<Self, RomError> {
        let len = bytes.len() as u64;
        if len < UNIT as u64 || len > MAX_ROM {
            return Err(RomError::Size { len });
        }
        let first = Image::at(&bytes, 0).map_err(|error| match error {
            RomError::Signature { offset, found, .. } => {
                let begins =
                    (4..bytes.len() - UNIT).step_by(4).find(|&at| Image::at(&bytes[at..], 0).is_ok());
                RomError::Signature { offset, found, begins }
            }
            error => error,
        })?;
        let (mut is_last, mut end) = (first.is_last, first.end);
        // Each takes at least one unit. What begins otherwise is of a format that is only its vendor's.
        while !is_last && bytes.get(end..end + 2) == Some(&SIGNATURE) {
            let image = Image::at(&bytes, end)?;
            (is_last, end) = (image.is_last, image.end);
        }
        let word = |at: usize| word(&bytes, at).unwrap_or(0);
        let mut devices = vec![word(first.data + 6)];
        // Revision 3 points to a list of further IDs, which ends with 0; revision 0 to vital product data.
        let list = word(first.data + 8);
        if list != 0 && bytes.get(first.data + 0xc).is_some_and(|&revision| revision >= 3) {
            let places = (first.data + usize::from(list)..).step_by(2).take(MAX_DEVICES);
            devices.extend(places.map(word).take_while(|&device| device != 0));
        }
        Ok(Self { vendor: word(first.data + 4), devices, bytes: bytes.into() })
    }

    /// Reads a ROM from a regular file, from its beginning.
    ///
    /// # Errors
    /// When it can't be read, or is no ROM.
    pub fn read(file: &File) -> Result<Self, RomError> {
        let (mut bytes, mut piece) = (Vec::new(), vec![0; 1 << 16]);
        loop {
            let offset = bytes.len() as u64;
            match file.read_at(&mut piece, offset) {
                Ok(0) => return Self::parse(bytes),
                Ok(_) if offset >= MAX_ROM => return Err(RomError::Size { len: offset + 1 }),
                Ok(count) => bytes.extend_from_slice(&piece[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(RomError::Read { offset, source }),
            }
        }
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Size of the BAR that it takes, a power of two. What lies behind the last byte reads as ones.
    pub fn bar_size(&self) -> u64 {
        (self.bytes.len() as u64).next_power_of_two().max(MIN_ROM)
    }

    /// Whose it is, if that is not a function with these IDs: vendor and device.
    pub fn other_than(&self, ids: &PciIds) -> Option<(u16, u16)> {
        let is_its = self.vendor == ids.vendor && self.devices.contains(&ids.device);
        (!is_its).then(|| (self.vendor, self.devices.first().copied().unwrap_or(0)))
    }
}

const SIGNATURE: [u8; 2] = [0x55, 0xaa];

impl Image {
    fn at(bytes: &[u8], offset: usize) -> Result<Self, RomError> {
        let found = bytes.get(offset..offset + 2).map_or([0xff; 2], |found| [found[0], found[1]]);
        if found != SIGNATURE {
            return Err(RomError::Signature { offset, found, begins: None });
        }
        let data = offset + usize::from(word(bytes, offset + 0x18).unwrap_or(u16::MAX));
        let structure = bytes.get(data..data + DATA).filter(|structure| structure.starts_with(b"PCIR"));
        let structure = structure.ok_or(RomError::Data { offset, at: data })?;
        let units = usize::from(word(structure, 0x10).unwrap_or(0));
        let (end, len) = (offset + units * UNIT, bytes.len());
        if units == 0 || end > len {
            return Err(RomError::Length { offset, end, len });
        }
        Ok(Self { data, end, is_last: structure[0x15] & 0x80 != 0 })
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// An image of N units, its data structure at 0x1c.
    fn image(units: u16, ids: (u16, u16), is_last: bool) -> Vec<u8> {
        let mut bytes = vec![0x11; usize::from(units) * UNIT];
        bytes[..2].copy_from_slice(&SIGNATURE);
        bytes[0x18..0x1a].copy_from_slice(&[0x1c, 0]);
        let mut data = b"PCIR".to_vec();
        data.extend(ids.0.to_le_bytes().into_iter().chain(ids.1.to_le_bytes()));
        data.extend([0x18, 0, 0x18, 0, 3, 0, 0, 3]);
        data.extend(units.to_le_bytes());
        data.extend([0, 0, 0, if is_last { 0x80 } else { 0 }, 0, 0]);
        // The list of further devices.
        data.extend([0x34, 0x12, 0, 0]);
        bytes[0x1c..0x1c + data.len()].copy_from_slice(&data);
        bytes
    }

    fn ids(vendor: u16, device: u16) -> PciIds {
        PciIds { vendor, device, subsystem_vendor: 0, subsystem_device: 0, revision: 0 }
    }

    #[test]
    fn a_rom_says_whose_it_is() {
        let rom = RomImage::parse(image(2, (0x1002, 0x5159), true)).unwrap();
        assert_eq!((rom.bytes().len(), rom.bar_size()), (1024, 2048));
        assert_eq!(rom.other_than(&ids(0x1002, 0x5159)), None);
        assert_eq!(rom.other_than(&ids(0x1002, 0x1234)), None, "it is in the list");
        assert_eq!(rom.other_than(&ids(0x1002, 0x5158)), Some((0x1002, 0x5159)));
        assert_eq!(rom.other_than(&ids(0x10de, 0x5159)), Some((0x1002, 0x5159)));
        // A second image, and then one of a vendor's own format.
        let several = [image(3, (1, 2), false), image(2, (1, 2), false), vec![0x56; 100]].concat();
        assert_eq!(RomImage::parse(several).unwrap().bar_size(), 4096);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_offset() {
        fn check(bytes: Vec<u8>, expect: &str) {
            let error = RomImage::parse(bytes).unwrap_err().to_string();
            assert_eq!(error, expect);
        }
        let good = || image(2, (1, 2), true);
        let with = |at: usize, value: u8| {
            let mut bytes = good();
            bytes[at] = value;
            bytes
        };
        check(vec![], "has 0 bytes; a ROM has from 512 bytes to 16 MiB");
        check(vec![0; (16 << 20) + 1], "has more than 16 MiB; a ROM has from 512 bytes to 16 MiB");
        check(
            with(1, 0xab),
            "has [55, ab] at offset 0x0, where an image begins with [55, aa]; it is no expansion ROM",
        );
        check(
            [b"NVGI".to_vec(), vec![0; 0x5fc], good()].concat(),
            "has [4e, 56] at offset 0x0, where an image begins with [55, aa]; one begins at offset 0x600: cut off what is before \
             it (dd bs=1536 skip=1)",
        );
        let no_data =
            "structure at offset 0xffff, where the image at offset 0x0 says that it is; the file is damaged";
        let mut far = good();
        far[0x18..0x1a].fill(0xff);
        check(far, &format!("has no PCIR {no_data}"));
        check(
            with(0x1c, b'Q'),
            "has no PCIR structure at offset 0x1c, where the image at offset 0x0 says that it is; the file is damaged",
        );
        check(
            with(0x2c, 3),
            "ends at offset 0x400, and the image at offset 0x0 at 0x600; read the ROM once more",
        );
        check(
            with(0x2c, 0),
            "ends at offset 0x400, and the image at offset 0x0 at 0x0; read the ROM once more",
        );
        let second = [image(2, (1, 2), false), image(4, (1, 2), true)[..1024].to_vec()].concat();
        check(second, "ends at offset 0x800, and the image at offset 0x400 at 0xc00; read the ROM once more");
    }

    #[test]
    fn a_file_is_read_no_further_than_a_rom_can_be() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("rom");
        let read = || RomImage::read(&File::open(&path).unwrap());
        std::fs::write(&path, image(200, (1, 2), true)).unwrap();
        assert_eq!(read().unwrap().bar_size(), 128 << 10);
        File::options().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
        assert!(matches!(read(), Err(RomError::Size { .. })));
        assert!(matches!(RomImage::read(&File::open(directory.path()).unwrap()), Err(RomError::Read { .. })));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_rom_or_an_error(
            mut bytes in prop::collection::vec(any::<u8>(), 0..4096),
            changes in prop::collection::vec((0usize..0x40, any::<u8>()), 0..8),
            units in 1u16..6,
        ) {
            let _ = RomImage::parse(bytes.clone()).map_err(|error| error.to_string());
            let mut image = [image(units, (1, 2), false), image(1, (1, 2), true)].concat();
            changes.into_iter().for_each(|(at, value)| image[at] = value);
            image.append(&mut bytes);
            match RomImage::parse(image.clone()) {
                Ok(rom) => {
                    prop_assert_eq!(rom.bytes(), &image[..]);
                    prop_assert!(rom.bar_size() >= image.len() as u64 && rom.bar_size().is_power_of_two());
                }
                Err(error) => prop_assert!(error.to_string().contains("offset")),
            }
        }
    }
}
