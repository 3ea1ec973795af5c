//! Advanced Error Reporting (PCI Express Base 6.0, 7.8.4) of an endpoint, as its guest sees it.
//!
//! The device's own registers are handled by the Linux kernel of the host, which clears what they show. The guest's are emulated: they
//! show an Uncorrectable Internal Error for each error that is [reported](ConfigSpace::report_error), and no other. Hardware has
//! that error masked by default; here it is not, as nobody else would see it.

use super::{Builder, ConfigSpace, EXTENDED_CONFIG_SIZE, Register};
use crate::pci::regs;
use crate::vfio::ErrorSeverity;

/// Uncorrectable errors that exist.
const UNCORRECTABLE: u32 = 0x07ff_f030;
/// Those that are fatal by default: of the data link, of flow control, a receiver's overflow, a malformed TLP, an internal error.
const FATAL: u32 = 0x0046_2030;
/// Correctable errors that exist, and the one that is masked by default, an advisory one.
const CORRECTABLE: u32 = 0xf1c1;
const ADVISORY: u32 = 1 << 13;

const REGISTERS: &[Register] = &[
    Register { offset: regs::ERR_UNCOR_STATUS, acknowledge: regs::ERR_UNC_INTN, ..Register::NONE },
    Register { offset: regs::ERR_UNCOR_MASK, writable: UNCORRECTABLE, ..Register::NONE },
    Register { offset: regs::ERR_UNCOR_SEVER, writable: UNCORRECTABLE, ..Register::NONE },
    Register { offset: regs::ERR_COR_MASK, writable: CORRECTABLE, ..Register::NONE },
];

pub(super) fn add(builder: &mut Builder<'_>, offset: usize) -> bool {
    // Up to the end of the header log.
    if builder.space.errors.is_some() || !builder.take(offset, 0x2c, EXTENDED_CONFIG_SIZE) {
        return false;
    }
    builder.rows(offset, REGISTERS);
    builder.put(offset + usize::from(regs::ERR_UNCOR_SEVER), 4, FATAL);
    builder.put(offset + usize::from(regs::ERR_COR_MASK), 4, ADVISORY);
    builder.space.errors = Some(offset as u16);
    true
}

impl ConfigSpace {
    /// Shows the guest an error of this severity. Answers whether the function sends a message of it (6.2.6): the guest has not
    /// masked it, and wants such messages.
    pub(in crate::guest) fn report_error(&mut self, severity: ErrorSeverity) -> bool {
        let Some(at) = self.errors else { return false };
        let error = regs::ERR_UNC_INTN;
        let severities = self.get32(at + regs::ERR_UNCOR_SEVER);
        let (severities, wanted) = match severity {
            ErrorSeverity::NonFatal => (severities & !error, regs::EXP_DEVCTL_NFERE),
            ErrorSeverity::Fatal => (severities | error, regs::EXP_DEVCTL_FERE),
        };
        self.set32(at + regs::ERR_UNCOR_SEVER, severities);
        // No other status bit is ever set.
        self.set32(at + regs::ERR_UNCOR_STATUS, error);
        // The First Error Pointer.
        self.set32(at + regs::ERR_CAP, error.trailing_zeros());
        let control = self.express.map_or(0, |express| self.get16(express + regs::EXP_DEVCTL));
        let is_wanted = control & wanted != 0 || self.get16(regs::COMMAND) & regs::COMMAND_SERR != 0;
        is_wanted && self.get32(at + regs::ERR_UNCOR_MASK) & error == 0
    }
}
