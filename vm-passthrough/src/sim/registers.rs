//! Registers of a simulated host's functions, as `resourceN` in sysfs shows them: bytes that nothing changes.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::FileExt as _;

use super::SimHost;
use crate::PciAddress;

impl SimHost {
    /// Gives BAR `bar` of a function `size` bytes, all zero but these 32-bit registers, as offset and value.
    ///
    /// # Errors
    /// When there is no such function, or the file system refuses.
    pub fn set_registers(
        &self,
        address: PciAddress,
        bar: u8,
        size: u64,
        registers: &[(u64, u32)],
    ) -> io::Result<()> {
        let path = self.device_dir(address)?.join(format!("resource{bar}"));
        let file = OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
        file.set_len(size)?;
        registers.iter().try_for_each(|(offset, value)| file.write_all_at(&value.to_le_bytes(), *offset))
    }
}
