//! Registers of config space, named as in Linux's `include/uapi/linux/pci_regs.h`: offsets in the header or from the start
//! of a capability, and their bits.

// Header of every function (PCI Express Base 6.0, 7.5.1.1).

/// Vendor ID; the device ID follows it.
pub const VENDOR_ID: u16 = 0x00;
/// Command.
pub const COMMAND: u16 = 0x04;
/// Decode port I/O.
pub const COMMAND_IO: u16 = 1 << 0;
/// Decode memory.
pub const COMMAND_MEMORY: u16 = 1 << 1;
/// Master the bus: DMA and MSI.
pub const COMMAND_MASTER: u16 = 1 << 2;
/// Respond to parity errors.
pub const COMMAND_PARITY: u16 = 1 << 6;
/// Report system errors.
pub const COMMAND_SERR: u16 = 1 << 8;
/// Don't assert INTx.
pub const COMMAND_INTX_DISABLE: u16 = 1 << 10;
/// Status.
pub const STATUS: u16 = 0x06;
/// There is a capability list.
pub const STATUS_CAP_LIST: u16 = 1 << 4;
/// Revision ID, and the class code above it.
pub const CLASS_REVISION: u16 = 0x08;
/// Cache line size.
pub const CACHE_LINE_SIZE: u16 = 0x0c;
/// Header type.
pub const HEADER_TYPE: u16 = 0x0e;
/// The type without the multifunction bit.
pub const HEADER_TYPE_MASK: u8 = 0x7f;
/// The device has several functions.
pub const HEADER_TYPE_MFD: u8 = 1 << 7;
/// The first base address register.
pub const BASE_ADDRESS_0: u16 = 0x10;
/// It is port I/O.
pub const BASE_ADDRESS_SPACE_IO: u32 = 1 << 0;
/// It has 64 bits and takes two registers.
pub const BASE_ADDRESS_MEM_TYPE_64: u32 = 0b100;
/// Both bits of the width.
pub const BASE_ADDRESS_MEM_TYPE_MASK: u32 = 0b110;
/// Reads have no side effects.
pub const BASE_ADDRESS_MEM_PREFETCH: u32 = 1 << 3;
/// The address.
pub const BASE_ADDRESS_MEM_MASK: u32 = !0xf;
/// The port.
pub const BASE_ADDRESS_IO_MASK: u32 = !0b11;
/// Subsystem vendor ID, and the subsystem ID above it.
pub const SUBSYSTEM_VENDOR_ID: u16 = 0x2c;
/// Expansion ROM base address.
pub const ROM_ADDRESS: u16 = 0x30;
/// The ROM is decoded.
pub const ROM_ADDRESS_ENABLE: u32 = 1 << 0;
/// The address.
pub const ROM_ADDRESS_MASK: u32 = !0x7ff;
/// Where the capability list begins.
pub const CAPABILITY_LIST: u16 = 0x34;
/// Interrupt line.
pub const INTERRUPT_LINE: u16 = 0x3c;
/// Interrupt pin: 1 to 4 for INTA to INTD, 0 for none.
pub const INTERRUPT_PIN: u16 = 0x3d;

// Header of a bridge (PCI Express Base 6.0, 7.5.1.3).

/// Bus number above.
pub const PRIMARY_BUS: u16 = 0x18;
/// Bus number right below.
pub const SECONDARY_BUS: u16 = 0x19;
/// First port that is forwarded.
pub const IO_BASE: u16 = 0x1c;
/// Last such port.
pub const IO_LIMIT: u16 = 0x1d;
/// First address that is forwarded below 4 GiB.
pub const MEMORY_BASE: u16 = 0x20;
/// Last such address.
pub const MEMORY_LIMIT: u16 = 0x22;
/// First address of prefetchable memory.
pub const PREF_MEMORY_BASE: u16 = 0x24;
/// Last such address.
pub const PREF_MEMORY_LIMIT: u16 = 0x26;
/// Upper half of the first address of prefetchable memory.
pub const PREF_BASE_UPPER32: u16 = 0x28;
/// Upper half of the last such address.
pub const PREF_LIMIT_UPPER32: u16 = 0x2c;
/// Bridge control.
pub const BRIDGE_CONTROL: u16 = 0x3e;
/// Forward messages of errors from the bus below.
pub const BRIDGE_CTL_SERR: u16 = 1 << 1;
/// Reset the bus below.
pub const BRIDGE_CTL_BUS_RESET: u16 = 1 << 6;

// Capabilities (PCI Code and ID Assignment 1.11, section 2).

/// Power management.
pub const CAP_ID_PM: u8 = 0x01;
/// Message signalled interrupts.
pub const CAP_ID_MSI: u8 = 0x05;
/// Vendor-specific.
pub const CAP_ID_VNDR: u8 = 0x09;
/// PCI Express.
pub const CAP_ID_EXP: u8 = 0x10;
/// MSI-X.
pub const CAP_ID_MSIX: u8 = 0x11;

// Extended capabilities (PCI Code and ID Assignment 1.11, section 3).

/// Advanced error reporting.
pub const EXT_CAP_ID_ERR: u16 = 0x0001;
/// Device serial number.
pub const EXT_CAP_ID_DSN: u16 = 0x0003;
/// Vendor-specific.
pub const EXT_CAP_ID_VNDR: u16 = 0x000b;
/// Access control services.
pub const EXT_CAP_ID_ACS: u16 = 0x000d;
/// Single root I/O virtualization.
pub const EXT_CAP_ID_SRIOV: u16 = 0x0010;
/// Resizable BARs (PCI Express Base 6.0, 7.8.6).
pub const EXT_CAP_ID_REBAR: u16 = 0x0015;
/// Designated vendor-specific (7.9.6).
pub const EXT_CAP_ID_DVSEC: u16 = 0x0023;

// Power management (PCI Bus Power Management Interface 1.2, 3.2).

/// Capabilities.
pub const PM_PMC: u16 = 2;
/// Control and status.
pub const PM_CTRL: u16 = 4;
/// The power state: 0 for D0.
pub const PM_CTRL_STATE_MASK: u16 = 0b11;
/// The power state D3hot.
pub const PM_CTRL_D3HOT: u16 = 3;
/// The function keeps what its registers hold on its way from D3hot to D0.
pub const PM_CTRL_NO_SOFT_RESET: u16 = 1 << 3;
/// It has asked for power; writing 1 clears it.
pub const PM_CTRL_PME_STATUS: u16 = 1 << 15;
/// PME_En.
pub const PM_CTRL_PME_ENABLE: u16 = 1 << 8;

// MSI (PCI Express Base 6.0, 7.7.1).

/// Message control.
pub const MSI_FLAGS: u16 = 2;
/// MSI is enabled.
pub const MSI_FLAGS_ENABLE: u16 = 1 << 0;
/// Logarithm of the vectors that the function can have; 6 and 7 are reserved.
pub const MSI_FLAGS_QMASK: u16 = 0b111 << 1;
/// Logarithm of the vectors that are enabled.
pub const MSI_FLAGS_QSIZE: u16 = 0b111 << 4;
/// Addresses have 64 bits.
pub const MSI_FLAGS_64BIT: u16 = 1 << 7;
/// Vectors can be masked.
pub const MSI_FLAGS_MASKBIT: u16 = 1 << 8;
/// Lower half of the message address.
pub const MSI_ADDRESS_LO: u16 = 4;
/// Upper half of the message address, where there is one.
pub const MSI_ADDRESS_HI: u16 = 8;
/// Message data after an address of 32 bits.
pub const MSI_DATA_32: u16 = 8;
/// Message data after an address of 64 bits.
pub const MSI_DATA_64: u16 = 12;
/// Mask bits, with a 64-bit address.
pub const MSI_MASK_64: u16 = 16;
/// Pending bits, with a 64-bit address.
pub const MSI_PENDING_64: u16 = 20;

// MSI-X (PCI Express Base 6.0, 7.7.2).

/// Message control.
pub const MSIX_FLAGS: u16 = 2;
/// Entries of the table, less one.
pub const MSIX_FLAGS_QSIZE: u16 = 0x7ff;
/// All vectors are masked.
pub const MSIX_FLAGS_MASKALL: u16 = 1 << 14;
/// MSI-X is enabled.
pub const MSIX_FLAGS_ENABLE: u16 = 1 << 15;
/// Where the table is: a BAR in the lowest three bits, and an offset.
pub const MSIX_TABLE: u16 = 4;
/// Where the pending bits are.
pub const MSIX_PBA: u16 = 8;
/// The BAR of [`MSIX_TABLE`] and [`MSIX_PBA`].
pub const MSIX_TABLE_BIR: u32 = 0b111;
/// Bytes of an entry of the table: address, data, vector control.
pub const MSIX_ENTRY_SIZE: u64 = 16;
/// Vector control in an entry.
pub const MSIX_ENTRY_VECTOR_CTRL: u64 = 12;
/// The vector is masked.
pub const MSIX_ENTRY_CTRL_MASKBIT: u8 = 1 << 0;

// PCI Express (PCI Express Base 6.0, 7.5.3).

/// Version and type of the function.
pub const EXP_FLAGS: u16 = 0x02;
/// Version.
pub const EXP_FLAGS_VERS: u16 = 0xf;
/// Type of the function or port.
pub const EXP_FLAGS_TYPE: u16 = 0xf << 4;
/// The port has a slot.
pub const EXP_FLAGS_SLOT: u16 = 1 << 8;
/// An endpoint.
pub const EXP_TYPE_ENDPOINT: u16 = 0;
/// A legacy endpoint.
pub const EXP_TYPE_LEG_END: u16 = 1;
/// A root port.
pub const EXP_TYPE_ROOT_PORT: u16 = 4;
/// A downstream port of a switch.
pub const EXP_TYPE_DOWNSTREAM: u16 = 6;
/// A PCI Express to PCI bridge.
pub const EXP_TYPE_PCI_BRIDGE: u16 = 7;
/// An endpoint integrated into the root complex.
pub const EXP_TYPE_RC_END: u16 = 9;
/// Device capabilities.
pub const EXP_DEVCAP: u16 = 0x04;
/// The function can be reset on its own.
pub const EXP_DEVCAP_FLR: u32 = 1 << 28;
/// Device control.
pub const EXP_DEVCTL: u16 = 0x08;
/// Report uncorrectable errors that are not fatal.
pub const EXP_DEVCTL_NFERE: u16 = 1 << 1;
/// Report fatal errors.
pub const EXP_DEVCTL_FERE: u16 = 1 << 2;
/// Reset the function; reads zero.
pub const EXP_DEVCTL_BCR_FLR: u16 = 1 << 15;
/// Device status.
pub const EXP_DEVSTA: u16 = 0x0a;
/// Link capabilities.
pub const EXP_LNKCAP: u16 = 0x0c;
/// The port reports whether the data link layer is active.
pub const EXP_LNKCAP_DLLLARC: u32 = 1 << 20;
/// Link control.
pub const EXP_LNKCTL: u16 = 0x10;
/// Link status.
pub const EXP_LNKSTA: u16 = 0x12;
/// The data link layer is active.
pub const EXP_LNKSTA_DLLLA: u16 = 1 << 13;
/// Slot capabilities.
pub const EXP_SLTCAP: u16 = 0x14;
/// An attention button.
pub const EXP_SLTCAP_ABP: u32 = 1 << 0;
/// A power indicator.
pub const EXP_SLTCAP_PIP: u32 = 1 << 4;
/// A device may go without a warning.
pub const EXP_SLTCAP_HPS: u32 = 1 << 5;
/// Hot-plug.
pub const EXP_SLTCAP_HPC: u32 = 1 << 6;
/// Commands complete at once, without a notice.
pub const EXP_SLTCAP_NCCS: u32 = 1 << 18;
/// Slot control.
pub const EXP_SLTCTL: u16 = 0x18;
/// Report that the attention button was pressed.
pub const EXP_SLTCTL_ABPE: u16 = 1 << 0;
/// Report that presence changed.
pub const EXP_SLTCTL_PDCE: u16 = 1 << 3;
/// Interrupt for hot-plug events.
pub const EXP_SLTCTL_HPIE: u16 = 1 << 5;
/// The power indicator.
pub const EXP_SLTCTL_PIC: u16 = 3 << 8;
/// It is on: the slot is in use.
pub const EXP_SLTCTL_PWR_IND_ON: u16 = 1 << 8;
/// It blinks: the slot is about to be in use, or not to be.
pub const EXP_SLTCTL_PWR_IND_BLINK: u16 = 2 << 8;
/// It is off: the slot is not in use.
pub const EXP_SLTCTL_PWR_IND_OFF: u16 = 3 << 8;
/// Report that the data link layer's state changed.
pub const EXP_SLTCTL_DLLSCE: u16 = 1 << 12;
/// Slot status.
pub const EXP_SLTSTA: u16 = 0x1a;
/// The attention button was pressed.
pub const EXP_SLTSTA_ABP: u16 = 1 << 0;
/// Presence changed.
pub const EXP_SLTSTA_PDC: u16 = 1 << 3;
/// Something is in the slot.
pub const EXP_SLTSTA_PDS: u16 = 1 << 6;
/// The data link layer's state changed.
pub const EXP_SLTSTA_DLLSC: u16 = 1 << 8;
/// Root control.
pub const EXP_RTCTL: u16 = 0x1c;
/// Device capabilities 2.
pub const EXP_DEVCAP2: u16 = 0x24;
/// Device control 2.
pub const EXP_DEVCTL2: u16 = 0x28;
/// Link capabilities 2.
pub const EXP_LNKCAP2: u16 = 0x2c;
/// Link control 2.
pub const EXP_LNKCTL2: u16 = 0x30;

// Advanced error reporting (PCI Express Base 6.0, 7.8.4).

/// Status of errors that were not corrected.
pub const ERR_UNCOR_STATUS: u16 = 0x04;
/// Which of them are not reported.
pub const ERR_UNCOR_MASK: u16 = 0x08;
/// Which of them are fatal.
pub const ERR_UNCOR_SEVER: u16 = 0x0c;
/// An internal error that was not corrected.
pub const ERR_UNC_INTN: u32 = 1 << 22;
/// Which corrected errors are not reported.
pub const ERR_COR_MASK: u16 = 0x14;
/// Capabilities and control, with the number of the first error.
pub const ERR_CAP: u16 = 0x18;
/// What a root port interrupts for.
pub const ERR_ROOT_COMMAND: u16 = 0x2c;
/// Corrected errors.
pub const ERR_ROOT_CMD_COR: u32 = 1 << 0;
/// Uncorrectable errors that are not fatal.
pub const ERR_ROOT_CMD_NONFATAL: u32 = 1 << 1;
/// Fatal errors.
pub const ERR_ROOT_CMD_FATAL: u32 = 1 << 2;
/// What messages a root port has received.
pub const ERR_ROOT_STATUS: u16 = 0x30;
/// Of an uncorrectable error.
pub const ERR_ROOT_UNCOR_RCV: u32 = 1 << 2;
/// Of more of them.
pub const ERR_ROOT_MULTI_UNCOR_RCV: u32 = 1 << 3;
/// The first of them was fatal.
pub const ERR_ROOT_FIRST_FATAL: u32 = 1 << 4;
/// Of one that is not fatal.
pub const ERR_ROOT_NONFATAL_RCV: u32 = 1 << 5;
/// Of one that is fatal.
pub const ERR_ROOT_FATAL_RCV: u32 = 1 << 6;
/// Who sent the first message: of a corrected error, and above it of an uncorrectable one.
pub const ERR_ROOT_ERR_SRC: u16 = 0x34;

// Access control services (PCI Express Base 6.0, 7.7.11).

/// Capabilities.
pub const ACS_CAP: u16 = 4;
/// Control.
pub const ACS_CTRL: u16 = 6;
/// Source validation.
pub const ACS_SV: u16 = 1 << 0;
/// Request redirect.
pub const ACS_RR: u16 = 1 << 2;
/// Completion redirect.
pub const ACS_CR: u16 = 1 << 3;
/// Upstream forwarding.
pub const ACS_UF: u16 = 1 << 4;
