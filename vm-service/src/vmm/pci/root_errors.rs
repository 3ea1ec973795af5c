//! The errors that a root port reports: messages of what is behind it, in its Advanced Error Reporting capability (PCI Express Base
//! 6.0, 6.2.6 and 7.8.4). The port itself has none.

use vm_passthrough::pci::regs;
use vm_passthrough::vfio::ErrorSeverity;

use super::ConfigSpace;

/// Where the capability is: the first of the extended ones.
pub(super) const AER: u16 = 0x100;

/// Adds the capability, version 2, the last of the list.
pub(super) fn add(config: &mut ConfigSpace) {
    config.set(AER, &(u32::from(regs::EXT_CAP_ID_ERR) | 2 << 16).to_le_bytes());
    for offset in [regs::ERR_UNCOR_MASK, regs::ERR_UNCOR_SEVER] {
        config.allow(AER + offset, &0x07ff_f030u32.to_le_bytes());
    }
    config.allow(AER + regs::ERR_COR_MASK, &0xf1c1u32.to_le_bytes());
    let reports = regs::ERR_ROOT_CMD_COR | regs::ERR_ROOT_CMD_NONFATAL | regs::ERR_ROOT_CMD_FATAL;
    config.allow(AER + regs::ERR_ROOT_COMMAND, &reports.to_le_bytes());
    // The number of its interrupt's message, above, is 0.
    config.allow_clearing(AER + regs::ERR_ROOT_STATUS, &0x7fu32.to_le_bytes());
}

/// Receives the message of an error from the function with the requester ID `source`, unless the port does not forward them.
pub(super) fn receive(config: &mut ConfigSpace, source: u16, severity: ErrorSeverity) {
    if config.u16(regs::BRIDGE_CONTROL) & regs::BRIDGE_CTL_SERR == 0 {
        return;
    }
    let mut status = config.u32(AER + regs::ERR_ROOT_STATUS);
    let is_first = status & regs::ERR_ROOT_UNCOR_RCV == 0;
    status |= match severity {
        ErrorSeverity::NonFatal => regs::ERR_ROOT_NONFATAL_RCV,
        ErrorSeverity::Fatal if is_first => regs::ERR_ROOT_FATAL_RCV | regs::ERR_ROOT_FIRST_FATAL,
        ErrorSeverity::Fatal => regs::ERR_ROOT_FATAL_RCV,
    };
    status |= if is_first { regs::ERR_ROOT_UNCOR_RCV } else { regs::ERR_ROOT_MULTI_UNCOR_RCV };
    config.set(AER + regs::ERR_ROOT_STATUS, &status.to_le_bytes());
    if is_first {
        // The upper half is of what can't be corrected.
        config.set(AER + regs::ERR_ROOT_ERR_SRC + 2, &source.to_le_bytes());
    }
}

/// Whether the port is to interrupt for what it has received.
pub(super) fn is_due(config: &ConfigSpace) -> bool {
    let (command, status) =
        (config.u32(AER + regs::ERR_ROOT_COMMAND), config.u32(AER + regs::ERR_ROOT_STATUS));
    command & regs::ERR_ROOT_CMD_NONFATAL != 0 && status & regs::ERR_ROOT_NONFATAL_RCV != 0
        || command & regs::ERR_ROOT_CMD_FATAL != 0 && status & regs::ERR_ROOT_FATAL_RCV != 0
}

#[cfg(test)]
mod tests {
    use vm_passthrough::vfio::ErrorSeverity::{Fatal, NonFatal};

    use super::*;

    const STATUS: u16 = AER + regs::ERR_ROOT_STATUS;

    #[test]
    fn messages_are_collected_until_the_guest_clears_them() {
        fn check(messages: &[(u16, ErrorSeverity)], command: u32, status: u32, source: u32, due: bool) {
            let mut config = ConfigSpace::new();
            config.set(regs::BRIDGE_CONTROL, &regs::BRIDGE_CTL_SERR.to_le_bytes());
            add(&mut config);
            config.write(AER + regs::ERR_ROOT_COMMAND, &command.to_le_bytes());
            for &(source, severity) in messages {
                receive(&mut config, source, severity);
            }
            assert_eq!(config.u32(STATUS), status, "{messages:?}");
            assert_eq!(config.u32(AER + regs::ERR_ROOT_ERR_SRC), source, "{messages:?}");
            assert_eq!(is_due(&config), due, "{messages:?}, {command:#x}");
            config.write(STATUS, &status.to_le_bytes());
            assert!(config.u32(STATUS) == 0 && !is_due(&config), "{messages:?}");
        }
        check(&[], 7, 0, 0, false);
        check(&[(0x0100, NonFatal)], 7, 0x24, 0x0100_0000, true);
        check(&[(0x0100, NonFatal)], 4, 0x24, 0x0100_0000, false);
        check(&[(0x0203, Fatal)], 7, 0x54, 0x0203_0000, true);
        check(&[(0x0203, Fatal)], 3, 0x54, 0x0203_0000, false);
        // The first names the source.
        check(&[(0x0100, NonFatal), (0x0101, Fatal)], 7, 0x6c, 0x0100_0000, true);
        check(&[(0x0100, Fatal), (0x0101, Fatal)], 7, 0x5c, 0x0100_0000, true);
    }

    #[test]
    fn a_port_that_forwards_none_receives_none() {
        let mut config = ConfigSpace::new();
        add(&mut config);
        receive(&mut config, 0x0100, Fatal);
        assert_eq!(config.u32(STATUS), 0);
    }
}
