//! Config space as vfio-pci shows it: the bits that it reads from its own copy, and the writes that reach the hardware
//! (`drivers/vfio/pci/vfio_pci_config.c`, Linux 6.12).

use crate::pci::config::{CONFIG_SIZE, EXTENDED_CONFIG_SIZE, HEADER_SIZE};
use crate::pci::regs;

/// Bits of Power Management Capabilities and Control about PME, which vfio-pci hides.
const PM_PME_SUPPORT: u16 = 0xf800;
const PM_PME: u16 = regs::PM_CTRL_PME_ENABLE | regs::PM_CTRL_PME_STATUS;
/// Bits of Device Control: payload size and read request size, phantom functions.
const EXP_DEVCTL_PAYLOAD: u16 = 0x00e0;
const EXP_DEVCTL_READRQ: u16 = 0x7000;
const EXP_DEVCTL_PHANTOM: u16 = 0x0200;
/// The ARI forwarding bit of Device Control 2.
const EXP_DEVCTL2_ARI: u16 = 0x0020;
/// Conventional capabilities that have one length: `pci_cap_length`.
const LENGTHS: &[(u8, usize)] = &[(0x01, 8), (0x02, 12), (0x03, 8), (0x11, 12), (0x13, 6)];
/// Extended capabilities that have one length, as far as they are shown: `pci_ext_cap_length`.
const EXTENDED_LENGTHS: &[(u16, usize)] = &[
    (0x01, 0x2c),
    (0x03, 12),
    (0x04, 16),
    (0x0e, 8),
    (0x0f, 8),
    (0x10, 64),
    (0x12, 48),
    (0x13, 16),
    (0x18, 8),
];

/// Side effect of a config write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConfigAction {
    /// Function Level Reset.
    Reset,
    /// The virtual INTx Disable bit changed.
    IntxDisable(bool),
}

/// Config space of one function as vfio-pci virtualizes it.
#[derive(Debug)]
pub(super) struct VfioConfig {
    /// Values of the virtual bits (`vconfig`).
    copy: Vec<u8>,
    /// Bits that are read from the copy (`perm_bits.virt`).
    virt: Vec<u8>,
    /// Bits that a write changes, in the copy or in the hardware (`perm_bits.write`).
    write: Vec<u8>,
    /// Sizes of BARs 0 to 5 and of the ROM.
    sizes: [u64; 7],
    /// The lowest byte of each BAR's register, which has its type.
    types: [u8; 6],
    is_virtual: bool,
    power: Option<usize>,
    express: Option<usize>,
    msi: Option<usize>,
    msix: Option<usize>,
}

impl VfioConfig {
    /// Follows `vfio_config_init`. A virtual function has the IDs `ids`.
    pub(super) fn new(hardware: &[u8], sizes: [u64; 7], ids: Option<[u16; 2]>) -> Self {
        let mut copy = hardware.to_vec();
        copy.resize(copy.len().max(HEADER_SIZE), 0);
        let mut config = Self {
            // Bytes that belong to no capability are read from the hardware and written to it.
            virt: vec![0; copy.len()],
            write: vec![0xff; copy.len()],
            sizes,
            types: std::array::from_fn(|bar| copy[usize::from(regs::BASE_ADDRESS_0) + 4 * bar]),
            copy,
            is_virtual: ids.is_some(),
            power: None,
            express: None,
            msi: None,
            msix: None,
        };
        config.add_header(ids);
        let listed = config.add_capabilities(hardware);
        if !listed {
            config.copy[usize::from(regs::STATUS)] &= !(regs::STATUS_CAP_LIST as u8);
        }
        if config.express.is_some() && hardware.len() >= EXTENDED_CONFIG_SIZE {
            config.add_extended(hardware);
        }
        config
    }

    /// Sets the virtual and the writable bits of `width` bytes (`p_setb`, `p_setw`, `p_setd`).
    fn permit(&mut self, offset: usize, width: usize, virt: u32, write: u32) {
        for index in 0..width {
            let shift = index * 8;
            if let Some(place) = self.virt.get_mut(offset + index) {
                *place = (virt >> shift) as u8;
            }
            if let Some(place) = self.write.get_mut(offset + index) {
                *place = (write >> shift) as u8;
            }
        }
    }

    /// Makes a capability of `len` bytes read-only, its header of `header` bytes virtual.
    fn protect(&mut self, offset: usize, len: usize, header: usize) {
        for at in offset..(offset + len).min(self.write.len()) {
            self.permit(at, 1, if at < offset + header { 0xff } else { 0 }, 0);
        }
    }

    /// `init_pci_cap_basic_perm`.
    fn add_header(&mut self, ids: Option<[u16; 2]>) {
        self.protect(0, HEADER_SIZE, 4);
        self.permit(regs::COMMAND.into(), 2, regs::COMMAND_INTX_DISABLE.into(), 0xffff);
        self.permit(regs::STATUS.into(), 2, regs::STATUS_CAP_LIST.into(), 0);
        // Cache line size, latency timer and BIST.
        for offset in [0x0c, 0x0d, 0x0f] {
            self.permit(offset, 1, 0, 0xff);
        }
        for bar in 0..6 {
            self.permit(usize::from(regs::BASE_ADDRESS_0) + 4 * bar, 4, u32::MAX, u32::MAX);
        }
        self.permit(regs::ROM_ADDRESS.into(), 4, u32::MAX, u32::MAX);
        self.permit(regs::CAPABILITY_LIST.into(), 1, 0xff, 0);
        self.permit(regs::INTERRUPT_LINE.into(), 1, 0xff, 0xff);
        self.permit(regs::INTERRUPT_PIN.into(), 1, 0xff, 0);
        if let Some(ids) = ids {
            for (offset, id) in [(0, ids[0]), (2, ids[1])] {
                self.copy[offset..offset + 2].copy_from_slice(&id.to_le_bytes());
            }
            self.copy[usize::from(regs::INTERRUPT_PIN)] = 0;
            self.copy[usize::from(regs::COMMAND)] |= regs::COMMAND_MEMORY as u8;
        }
        // `vfio_pci_core_enable` enables the pin.
        self.copy[usize::from(regs::COMMAND) + 1] &= !((regs::COMMAND_INTX_DISABLE >> 8) as u8);
    }

    /// `vfio_cap_init`. Returns whether any capability is shown.
    fn add_capabilities(&mut self, hardware: &[u8]) -> bool {
        let byte = |at: usize| hardware.get(at).copied().unwrap_or(0);
        let word = |at: usize| u16::from_le_bytes([byte(at), byte(at + 1)]);
        if word(regs::STATUS.into()) & regs::STATUS_CAP_LIST == 0 {
            return false;
        }
        let mut link = usize::from(regs::CAPABILITY_LIST);
        let mut at = usize::from(byte(link));
        let mut listed = false;
        for _ in 0..(CONFIG_SIZE - HEADER_SIZE) / 4 {
            if at == 0 {
                break;
            }
            let (id, next) = (byte(at), byte(at + 1));
            let flags = word(at + 2);
            let wide = flags & regs::MSI_FLAGS_64BIT != 0;
            let maskable = flags & regs::MSI_FLAGS_MASKBIT != 0;
            let len = match id {
                regs::CAP_ID_MSI => 10 + if wide { 4 } else { 0 } + if maskable { 10 } else { 0 },
                regs::CAP_ID_VNDR => usize::from(byte(at + 2)),
                regs::CAP_ID_EXP => {
                    let integrated = (flags & regs::EXP_FLAGS_TYPE) >> 4 == regs::EXP_TYPE_RC_END;
                    match (flags & regs::EXP_FLAGS_VERS, integrated) {
                        (1, true) => 0x0c,
                        (1, false) => 0x14,
                        (_, true) => 0x2c,
                        (_, false) => 0x3c,
                    }
                }
                _ => LENGTHS.iter().find(|(known, _)| *known == id).map_or(0, |&(_, len)| len),
            };
            if len == 0 {
                self.copy[link] = next;
                at = next.into();
                continue;
            }
            self.protect(at, len, 2);
            match id {
                regs::CAP_ID_PM => self.add_power(at),
                regs::CAP_ID_MSI => self.add_msi(at, wide, maskable),
                regs::CAP_ID_VNDR => {
                    let end = (at + len).min(CONFIG_SIZE).min(self.write.len());
                    self.write.get_mut(at..end).unwrap_or_default().fill(0xff);
                }
                regs::CAP_ID_EXP => {
                    self.express = Some(at);
                    let control = regs::EXP_DEVCTL_BCR_FLR | EXP_DEVCTL_PAYLOAD | EXP_DEVCTL_READRQ;
                    let write = u32::from(!EXP_DEVCTL_PHANTOM);
                    self.permit(at + usize::from(regs::EXP_DEVCTL), 2, control.into(), write);
                    if len >= 0x2c {
                        let write = u32::from(!EXP_DEVCTL2_ARI);
                        self.permit(at + usize::from(regs::EXP_DEVCTL2), 2, 0, write);
                    }
                }
                regs::CAP_ID_MSIX => self.msix = Some(at),
                // Vital product data: address and data go through the Linux kernel, which is not simulated.
                0x03 => [2, 4, 6].into_iter().for_each(|word| self.permit(at + word, 2, u32::MAX, u32::MAX)),
                _ => {}
            }
            listed = true;
            link = at + 1;
            at = next.into();
        }
        listed
    }

    /// `init_pci_cap_pm_perm`.
    fn add_power(&mut self, at: usize) {
        self.power = Some(at);
        self.permit(at + usize::from(regs::PM_PMC), 2, PM_PME_SUPPORT.into(), 0);
        let write = !u32::from(PM_PME | regs::PM_CTRL_STATE_MASK);
        self.permit(at + usize::from(regs::PM_CTRL), 4, PM_PME.into(), write);
        for (register, hidden) in [(regs::PM_PMC, PM_PME_SUPPORT), (regs::PM_CTRL, PM_PME)] {
            let place = at + usize::from(register);
            let value = self.copied16(place) & !hidden;
            self.set_copied16(place, value);
        }
    }

    /// `init_pci_cap_msi_perm`.
    fn add_msi(&mut self, at: usize, wide: bool, maskable: bool) {
        self.msi = Some(at);
        self.permit(at + usize::from(regs::MSI_FLAGS), 1, 0xff, 0xff);
        let data = usize::from(if wide { regs::MSI_DATA_64 } else { regs::MSI_DATA_32 });
        for at in (at + 4..at + data).step_by(4) {
            self.permit(at, 4, u32::MAX, u32::MAX);
        }
        self.permit(at + data, 2, u32::MAX, u32::MAX);
        if maskable {
            self.permit(at + data + 4, 4, 0, u32::MAX);
            self.permit(at + data + 8, 4, 0, u32::MAX);
        }
    }

    /// `vfio_ecap_init`.
    fn add_extended(&mut self, hardware: &[u8]) {
        let dword = |at: usize| {
            let bytes = hardware.get(at..).and_then(|rest| rest.first_chunk());
            bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes))
        };
        if dword(CONFIG_SIZE) == 0 {
            return;
        }
        let (mut at, mut link, mut shown) = (CONFIG_SIZE, None, false);
        for _ in 0..(EXTENDED_CONFIG_SIZE - CONFIG_SIZE) / 4 {
            if at < CONFIG_SIZE {
                break;
            }
            let header = dword(at);
            let (id, next) = (header as u16, (header >> 20 & 0xffc) as usize);
            let len = match id {
                regs::EXT_CAP_ID_VNDR | regs::EXT_CAP_ID_DVSEC => (dword(at + 4) >> 20) as usize,
                regs::EXT_CAP_ID_ACS => 8,
                regs::EXT_CAP_ID_REBAR => 4 + (dword(at + 8) >> 5 & 7) as usize * 8,
                // Virtual channels, which have a length that nothing here needs.
                0x02 | 0x08 | 0x09 => 0x10,
                _ => EXTENDED_LENGTHS.iter().find(|(known, _)| *known == id).map_or(0, |&(_, len)| len),
            };
            match (len, link) {
                (0, Some(link)) => {
                    let kept = self.copied32(link) & 0xf_ffff;
                    self.set_copied32(link, kept | (next as u32) << 20);
                    at = next;
                    continue;
                }
                (0, None) => {
                    self.protect(at, 4, 4);
                    self.set_copied32(at, header & 0xffc0_0000);
                }
                _ => {
                    self.protect(at, len, 4);
                    shown = true;
                }
            }
            match id {
                regs::EXT_CAP_ID_ERR => {
                    for register in [0x04, 0x08, 0x0c, 0x10, 0x14, 0x18] {
                        self.permit(at + register, 4, 0, 0x03ff_f03f);
                    }
                }
                regs::EXT_CAP_ID_VNDR if len != 0 => {
                    let end = (at + len).min(self.write.len());
                    self.write.get_mut(at..end).unwrap_or_default().fill(0xff);
                }
                _ => {}
            }
            link = Some(at);
            at = next;
        }
        if !shown {
            self.set_copied32(CONFIG_SIZE, 0);
        }
    }

    fn copied16(&self, at: usize) -> u16 {
        get16(&self.copy, at)
    }

    fn set_copied16(&mut self, at: usize, value: u16) {
        set16(&mut self.copy, at, value);
    }

    fn copied32(&self, at: usize) -> u32 {
        u32::from(self.copied16(at)) | u32::from(self.copied16(at + 2)) << 16
    }

    fn set_copied32(&mut self, at: usize, value: u32) {
        self.set_copied16(at, value as u16);
        self.set_copied16(at + 2, (value >> 16) as u16);
    }

    /// Whether memory BARs answer (`__vfio_pci_memory_enabled`).
    pub(super) fn decodes_memory(&self, hardware: &[u8]) -> bool {
        let asleep = self.power.is_some_and(|at| {
            get16(hardware, at + usize::from(regs::PM_CTRL)) & regs::PM_CTRL_STATE_MASK == regs::PM_CTRL_D3HOT
        });
        !asleep && (self.is_virtual || self.copied16(regs::COMMAND.into()) & regs::COMMAND_MEMORY != 0)
    }

    /// Whether the virtual INTx Disable bit is set.
    pub(super) fn intx_disabled(&self) -> bool {
        self.copied16(regs::COMMAND.into()) & regs::COMMAND_INTX_DISABLE != 0
    }

    /// BAR, offset and length of the MSI-X table: vfio-pci reads ones there, and drops writes (`vfio_pci_core_do_io_rw`).
    pub(super) fn msix_table(&self) -> Option<(u32, std::ops::Range<u64>)> {
        let at = self.msix?;
        let table = self.copied32(at + usize::from(regs::MSIX_TABLE));
        let entries =
            u64::from(self.copied16(at + usize::from(regs::MSIX_FLAGS)) & regs::MSIX_FLAGS_QSIZE) + 1;
        let start = u64::from(table & !regs::MSIX_TABLE_BIR);
        Some((table & regs::MSIX_TABLE_BIR, start..start + entries * regs::MSIX_ENTRY_SIZE))
    }

    /// Resets `hardware` to `initial`, except for the header and the PCI Express controls, which Linux restores after a reset
    /// (`pci_restore_state`).
    pub(super) fn reset(&self, hardware: &mut [u8], initial: &[u8]) {
        let saved = hardware.to_vec();
        hardware.copy_from_slice(initial);
        let header = [regs::COMMAND, regs::CACHE_LINE_SIZE, regs::ROM_ADDRESS, regs::INTERRUPT_LINE];
        let header = header.into_iter().chain((regs::BASE_ADDRESS_0..).step_by(2).take(12)).map(usize::from);
        let controls = [regs::EXP_DEVCTL, regs::EXP_LNKCTL, regs::EXP_DEVCTL2, regs::EXP_LNKCTL2];
        let express = self.express.into_iter();
        let express = express.flat_map(|at| controls.map(|register| at + usize::from(register)));
        for register in header.chain(express) {
            set16(hardware, register, get16(&saved, register));
        }
    }

    /// Sizes the virtual BARs, as hardware does (`vfio_bar_fixup`).
    fn size_bars(&mut self) {
        let mut index = 0;
        while index < 6 {
            let register = usize::from(regs::BASE_ADDRESS_0) + 4 * index;
            let mask = self.sizes[index].next_power_of_two().wrapping_neg();
            let flags = u32::from(self.types[index]);
            let (is_io, is_wide) = (flags & 1 != 0, flags & 0b111 == regs::BASE_ADDRESS_MEM_TYPE_64);
            index += 1;
            if mask == u64::MAX {
                self.set_copied32(register, 0);
                continue;
            }
            let flags = flags & if is_io { 0b01 } else { 0xf };
            let value = self.copied32(register) & mask as u32 & !0xf | flags;
            self.set_copied32(register, value);
            if is_wide && index < 6 {
                let value = self.copied32(register + 4) & (mask >> 32) as u32;
                self.set_copied32(register + 4, value);
                index += 1;
            }
        }
        let rom = usize::from(regs::ROM_ADDRESS);
        let mask = match self.sizes[6] {
            0 => 0,
            size => size.next_power_of_two().wrapping_neg() as u32 | regs::ROM_ADDRESS_ENABLE,
        };
        let value = self.copied32(rom) & mask;
        self.set_copied32(rom, value);
    }

    /// Reads (`vfio_default_config_read`). `hardware` is all ones when the function is gone.
    pub(super) fn read(&mut self, hardware: &[u8], offset: usize, data: &mut [u8]) {
        self.size_bars();
        for (byte, at) in data.iter_mut().zip(offset..) {
            let (Some(&physical), Some(&copy), Some(&virt)) =
                (hardware.get(at), self.copy.get(at), self.virt.get(at))
            else {
                return;
            };
            *byte = physical & !virt | copy & virt;
            // A virtual function has no such bit.
            if self.is_virtual && at == usize::from(regs::COMMAND) {
                *byte |= copy & regs::COMMAND_MEMORY as u8;
            }
        }
    }

    /// Writes (`vfio_default_config_write` and the functions around it). Changes `hardware` where the write reaches it.
    pub(super) fn write(&mut self, hardware: &mut [u8], offset: usize, data: &[u8]) -> Vec<ConfigAction> {
        let disabled = self.intx_disabled();
        for (&byte, at) in data.iter().zip(offset..) {
            let (Some(physical), Some(copy)) = (hardware.get_mut(at), self.copy.get_mut(at)) else {
                continue;
            };
            let (virt, write) = (self.virt[at], self.write[at]);
            *copy = *copy & !(virt & write) | byte & virt & write;
            *physical = *physical & !(write & !virt) | byte & write & !virt;
            if at == usize::from(regs::COMMAND) {
                let kept = (regs::COMMAND_MEMORY | regs::COMMAND_IO) as u8;
                *copy = *copy & !kept | byte & kept;
            }
        }
        let wrote = |at: usize| offset <= at && at < offset + data.len();
        let mut actions = Vec::new();
        if disabled != self.intx_disabled() {
            actions.push(ConfigAction::IntxDisable(!disabled));
        }
        if let Some(control) = self.power.map(|at| at + usize::from(regs::PM_CTRL)).filter(|&at| wrote(at)) {
            // The Linux kernel changes the state; D1 and D2 are taken for unsupported.
            let state = u16::from(data[control - offset]) & regs::PM_CTRL_STATE_MASK;
            if matches!(state, 0 | regs::PM_CTRL_D3HOT) {
                let value = get16(hardware, control) & !regs::PM_CTRL_STATE_MASK | state;
                set16(hardware, control, value);
            }
        }
        if let Some(control) = self.express.map(|at| at + usize::from(regs::EXP_DEVCTL)) {
            self.write_device_control(hardware, control, &mut actions);
        }
        if let Some(flags) = self.msi.map(|at| at + usize::from(regs::MSI_FLAGS)).filter(|&at| wrote(at)) {
            // Only an ioctl enables MSI.
            let value = self.copied16(flags) & !regs::MSI_FLAGS_ENABLE;
            self.set_copied16(flags, value | get16(hardware, flags) & regs::MSI_FLAGS_ENABLE);
        }
        actions
    }

    /// `vfio_exp_config_write`.
    fn write_device_control(&mut self, hardware: &mut [u8], at: usize, actions: &mut Vec<ConfigAction>) {
        let control = self.copied16(at);
        if control & regs::EXP_DEVCTL_BCR_FLR != 0 {
            self.set_copied16(at, control & !regs::EXP_DEVCTL_BCR_FLR);
            let capabilities = at - usize::from(regs::EXP_DEVCTL) + usize::from(regs::EXP_DEVCAP);
            if u32::from(get16(hardware, capabilities + 2)) << 16 & regs::EXP_DEVCAP_FLR != 0 {
                actions.push(ConfigAction::Reset);
            }
        }
        // The host's payload size is the least read request size.
        let physical = get16(hardware, at);
        let least = (physical & EXP_DEVCTL_PAYLOAD) << 7;
        let requested = (self.copied16(at) & EXP_DEVCTL_READRQ).max(least);
        set16(hardware, at, physical & !EXP_DEVCTL_READRQ | requested);
    }
}

/// 16 bits at `at`; zero past the end.
pub(super) fn get16(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u16::from_le_bytes(*bytes))
}

/// Sets 16 bits at `at`; nothing past the end.
pub(super) fn set16(bytes: &mut [u8], at: usize, value: u16) {
    if let Some(place) = bytes.get_mut(at..).and_then(|rest| rest.first_chunk_mut()) {
        *place = value.to_le_bytes();
    }
}
