//! The slot of a root port, as QEMU emulates it: its power, and what is in it (PCI Express Base 6.0, 7.5.3.10).

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use anyhow::{Context, Result, bail};

use super::Function;

/// Of Slot Control: no power, the power indicator's place and that it is on or off, and interrupts for hot-plug events.
const POWER_OFF: u16 = 1 << 10;
const INDICATOR: u16 = 3 << 8;
const INDICATOR_ON: u16 = 1 << 8;
const INTERRUPT: u16 = 1 << 5;

/// The slot that a function is in.
#[derive(Debug)]
pub struct PortSlot {
    config: File,
    /// Where Slot Control is in the port's config space.
    control: u64,
}

impl PortSlot {
    /// That of the port right above a function.
    ///
    /// # Errors
    /// When it is behind none.
    pub fn of(function: &Function) -> Result<Self> {
        const CAPABILITIES: u64 = 0x34;
        const EXPRESS: u8 = 0x10;
        const SLOT_CONTROL: u64 = 0x18;
        let port = function.path().canonicalize()?.parent().context("it is behind no port")?.join("config");
        let config = File::options().read(true).write(true).open(&port)?;
        let byte = |at: u64| -> Result<u8> {
            let mut byte = [0];
            config.read_exact_at(&mut byte, at)?;
            Ok(byte[0])
        };
        let mut at = u64::from(byte(CAPABILITIES)?);
        for _ in 0..48 {
            if at != 0 && byte(at)? == EXPRESS {
                return Ok(Self { config, control: at + SLOT_CONTROL });
            }
            at = byte(at + 1)?.into();
        }
        bail!("{} has no PCI Express capability", port.display())
    }

    /// Switches the power of what is in the slot behind the back of Linux, which goes on to see it there. Without it answers
    /// nothing, and with it it has forgotten all.
    ///
    /// # Errors
    /// When config space can't be accessed.
    pub fn set_power(&self, on: bool) -> Result<()> {
        let control = self.control()? & !(POWER_OFF | INDICATOR);
        self.write(control | INDICATOR_ON | if on { 0 } else { POWER_OFF })
    }

    /// Pulls what is in the slot, in the middle of all.
    ///
    /// # Errors
    /// When config space can't be accessed.
    pub fn pull(&self) -> Result<()> {
        // QEMU takes out what has neither power nor light.
        let control = self.control()?;
        self.write((control | POWER_OFF | INDICATOR) & !INTERRUPT)?;
        self.write(control)
    }

    fn control(&self) -> Result<u16> {
        let mut control = [0; 2];
        self.config.read_exact_at(&mut control, self.control)?;
        Ok(u16::from_le_bytes(control))
    }

    fn write(&self, control: u16) -> Result<()> {
        Ok(self.config.write_all_at(&control.to_le_bytes(), self.control)?)
    }
}
