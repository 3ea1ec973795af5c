//! The Linux boot parameters (Documentation/arch/x86/zero-page.rst), as far as they matter here.

use crate::sys;

const ACPI_RSDP_ADDR: u64 = 0x70;
const CMD_LINE_PTR: u64 = 0x228;
const MAX_COMMAND_LINE: usize = 2048;

/// The boot parameters that the VMM passed in RSI.
#[derive(Clone, Copy)]
pub struct BootParams(u64);

impl BootParams {
    /// The parameters at guest-physical address `address`.
    pub fn at(address: u64) -> Self {
        Self(address)
    }

    /// Where the ACPI root pointer is.
    pub fn rsdp(self) -> u64 {
        u64::from(sys::read32(self.0 + ACPI_RSDP_ADDR))
            | u64::from(sys::read32(self.0 + ACPI_RSDP_ADDR + 4)) << 32
    }

    /// The kernel command line.
    pub fn command_line(self) -> &'static [u8] {
        let start = u64::from(sys::read32(self.0 + CMD_LINE_PTR));
        let len =
            (0..MAX_COMMAND_LINE).find(|&i| sys::read8(start + i as u64) == 0).unwrap_or(MAX_COMMAND_LINE);
        sys::bytes(start, len)
    }
}

/// The value of a `name=VALUE` word, in decimal, or in hexadecimal after `0x`.
pub fn number(word: &[u8], name: &[u8]) -> Option<u64> {
    let value = word.strip_prefix(name)?.strip_prefix(b"=")?;
    let value = core::str::from_utf8(value).ok()?;
    match value.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => value.parse().ok(),
    }
}
