//! The ACPI tables.
//!
//! The platform is *hardware-reduced* (ACPI 6.5, 4.1): there is no PM timer, no SCI and no legacy event block to
//! emulate, a guest sleeps and resets through three one-byte registers, and Linux then leaves out the timer and
//! interrupt-controller probing of the PC, each step of which would be an exit.

use acpi_tables::aml::{
    self, AddressSpace, AddressSpaceCacheable, EISAName, Method, Name, Path, ResourceTemplate,
};
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace as GasSpace, GAS};
use acpi_tables::madt::{EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic};
use acpi_tables::mcfg::MCFG;
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, AmlSink as _};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

use super::boot::BootError;
use super::layout::{self, port};
use super::pci;

const OEM: [u8; 6] = *b"VMSERV";
const OEM_TABLE: [u8; 8] = *b"VMSERVIC";
const REVISION: u32 = 1;

/// Value of `SLP_TYP` that powers the machine off, as `_S5` says.
pub(super) const SLEEP_TYPE_S5: u8 = 5;
/// What the guest writes to [`port::RESET`] to reset the machine.
pub(super) const RESET_VALUE: u8 = 0x0e;

/// FADT `IAPC_BOOT_ARCH`: no VGA, no ASPM control, no CMOS clock; and, bit 1 being clear, no keyboard controller.
const BOOT_ARCH: u16 = 1 << 2 | 1 << 4 | 1 << 5;

/// What `_OSC` leaves to the guest: native hot-plug, PME and AER, and the PCI Express capability (PCI Firmware
/// Specification 3.3, table 4-5).
const OSC_CONTROL: u32 = 1 << 0 | 1 << 2 | 1 << 3 | 1 << 4;

/// What the tables describe.
#[derive(Clone, Debug)]
pub(super) struct Platform {
    /// Number of vCPUs.
    pub(super) vcpus: u8,
    /// Highest PCI bus.
    pub(super) last_bus: u8,
    /// Window for BARs above 4 GiB.
    pub(super) mem64: std::ops::Range<u64>,
}

/// Writes the tables into RAM and returns the address of the RSDP.
///
/// # Errors
/// When there is no RAM for them.
pub(super) fn write(memory: &GuestMemoryMmap, platform: &Platform) -> Result<u64, BootError> {
    let (rsdp, bytes) = build(platform, layout::ACPI_TABLES);
    if bytes.len() as u64 > layout::RESET_ENTRY - layout::ACPI_TABLES {
        return Err(BootError::TooLittleRam);
    }
    memory.write_slice(&bytes, GuestAddress(layout::ACPI_TABLES)).map_err(|_| BootError::TooLittleRam)?;
    Ok(rsdp)
}

/// The tables as they lie at `base`, RSDP first.
fn build(platform: &Platform, base: u64) -> (u64, Vec<u8>) {
    let mut bytes = vec![0; Rsdp::len()];
    let mut place = |table: &dyn Aml| {
        bytes.resize(bytes.len().next_multiple_of(16), 0);
        let address = base + bytes.len() as u64;
        table.to_aml_bytes(&mut bytes);
        address
    };
    let dsdt = place(&dsdt(platform));
    let mut xsdt = XSDT::new(OEM, OEM_TABLE, REVISION);
    xsdt.add_entry(place(&fadt(dsdt)));
    xsdt.add_entry(place(&madt(platform.vcpus)));
    let mut mcfg = MCFG::new(OEM, OEM_TABLE, REVISION);
    mcfg.add_ecam(layout::ECAM, 0, 0, platform.last_bus);
    xsdt.add_entry(place(&mcfg));
    let xsdt = place(&xsdt);
    let mut rsdp = Vec::new();
    Rsdp::new(OEM, xsdt).to_aml_bytes(&mut rsdp);
    bytes[..rsdp.len()].copy_from_slice(&rsdp);
    (base, bytes)
}

fn io_register(address: u16) -> GAS {
    GAS::new(GasSpace::SystemIo, 8, 0, AccessSize::ByteAccess, address.into())
}

fn fadt(dsdt: u64) -> impl Aml {
    let mut fadt = FADTBuilder::new(OEM, OEM_TABLE, REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton);
    fadt.iapc_boot_arch = BOOT_ARCH.into();
    fadt.reset_reg = io_register(port::RESET);
    fadt.reset_value = RESET_VALUE;
    fadt.sleep_control_reg = io_register(port::SLEEP_CONTROL);
    fadt.sleep_status_reg = io_register(port::SLEEP_STATUS);
    fadt.finalize()
}

fn madt(vcpus: u8) -> MADT {
    let mut madt = MADT::new(OEM, OEM_TABLE, REVISION, LocalInterruptController::Address(layout::LOCAL_APIC));
    for index in 0..vcpus {
        madt.add_structure(ProcessorLocalApic::new(index, index, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(0, layout::IO_APIC, 0));
    madt
}

fn dsdt(platform: &Platform) -> Sdt {
    let mut body = Vec::new();
    Name::new("_S5_".into(), &aml::Package::new(vec![&SLEEP_TYPE_S5])).to_aml_bytes(&mut body);
    let mut devices = Vec::new();
    pci_host(platform, &mut devices);
    ecam(platform, &mut devices);
    serial(&mut devices);
    power_button(&mut devices);
    body.vec(&aml::Scope::raw("_SB_".into(), devices));
    let mut dsdt = Sdt::new(*b"DSDT", 36, 6, OEM, OEM_TABLE, REVISION);
    dsdt.append_slice(&body);
    dsdt
}

/// `_PRT`: where the interrupt pins of each slot of bus 0 lead to (ACPI 6.5, 6.2.13). Root ports need none of their own: a guest
/// swizzles the pins of what is behind them to theirs.
fn interrupt_routing() -> aml::PackageBuilder {
    let mut table = aml::PackageBuilder::new();
    for slot in 0..pci::SLOTS as u8 {
        // Of all functions there.
        let address = u32::from(slot) << 16 | 0xffff;
        for (pin, line) in (0u8..).zip(layout::intx_lines(slot)) {
            table.add_element(&aml::Package::new(vec![&address, &pin, &aml::ZERO, &line]));
        }
    }
    table
}

/// The PCI host bridge with its windows, which the guest keeps as they are.
fn pci_host(platform: &Platform, out: &mut Vec<u8>) {
    let io_low = AddressSpace::new_io(0u16, port::PCI_ADDRESS - 1, None);
    let io_high = AddressSpace::new_io(port::PCI_WINDOW.start as u16, 0xffff, None);
    let windows: Vec<&dyn Aml> = vec![&io_low, &io_high];
    let bus = AddressSpace::new_bus_number(0u16, platform.last_bus.into());
    let config = aml::IO::new(port::PCI_ADDRESS, port::PCI_ADDRESS, 1, 8);
    let mem32 = AddressSpace::new_memory(
        AddressSpaceCacheable::NotCacheable,
        true,
        layout::MEM32.start as u32,
        (layout::MEM32.end - 1) as u32,
        None,
    );
    let mem64 = AddressSpace::new_memory(
        AddressSpaceCacheable::Cacheable,
        true,
        platform.mem64.start,
        platform.mem64.end - 1,
        None,
    );
    let mut resources: Vec<&dyn Aml> = vec![&bus, &config];
    resources.extend(windows);
    resources.extend([&mem32 as &dyn Aml, &mem64]);
    aml::Device::new(
        "PCI0".into(),
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0A08")),
            &Name::new("_CID".into(), &EISAName::new("PNP0A03")),
            &Name::new("_SEG".into(), &aml::ZERO),
            &Name::new("_BBN".into(), &aml::ZERO),
            &Name::new("_UID".into(), &aml::ZERO),
            &Name::new("_CRS".into(), &ResourceTemplate::new(resources)),
            &Name::new("_PRT".into(), &interrupt_routing()),
            &Method::new(
                "_OSC".into(),
                4,
                true,
                vec![
                    &aml::CreateDWordField::new(&Path::new("CDW1"), &aml::Arg(3), &aml::ZERO),
                    &aml::If::new(
                        &aml::Equal::new(
                            &aml::Arg(0),
                            &aml::Uuid::new("33db4d5b-1ff7-401c-9657-7441c03dd766"),
                        ),
                        vec![
                            &aml::CreateDWordField::new(&Path::new("CDW3"), &aml::Arg(3), &8u8),
                            &aml::And::new(&Path::new("CDW3"), &Path::new("CDW3"), &OSC_CONTROL),
                            &aml::Return::new(&aml::Arg(3)),
                        ],
                    ),
                    // Unrecognised UUID.
                    &aml::Or::new(&Path::new("CDW1"), &Path::new("CDW1"), &4u8),
                    &aml::Return::new(&aml::Arg(3)),
                ],
            ),
        ],
    )
    .to_aml_bytes(out);
}

/// Reserves ECAM: Linux wants it in the memory map or in a motherboard device.
fn ecam(platform: &Platform, out: &mut Vec<u8>) {
    let len = (u32::from(platform.last_bus) + 1) * layout::ECAM_BUS as u32;
    aml::Device::new(
        "MBRD".into(),
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0C02")),
            &Name::new("_UID".into(), &aml::ZERO),
            &Name::new(
                "_CRS".into(),
                &ResourceTemplate::new(vec![&aml::Memory32Fixed::new(true, layout::ECAM as u32, len)]),
            ),
        ],
    )
    .to_aml_bytes(out);
}

fn serial(out: &mut Vec<u8>) {
    aml::Device::new(
        "COM1".into(),
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0501")),
            &Name::new("_UID".into(), &aml::ZERO),
            &Name::new(
                "_CRS".into(),
                &ResourceTemplate::new(vec![
                    &aml::IO::new(port::SERIAL, port::SERIAL, 1, 8),
                    &aml::Interrupt::new(true, true, false, false, layout::SERIAL_GSI),
                ]),
            ),
        ],
    )
    .to_aml_bytes(out);
}

/// The power button, and the Generic Event Device whose interrupt says that it was pressed (ACPI 6.5, 4.8.2.2.1.2 and 5.6.9).
fn power_button(out: &mut Vec<u8>) {
    aml::Device::new(
        "PWRB".into(),
        vec![&Name::new("_HID".into(), &EISAName::new("PNP0C0C")), &Name::new("_UID".into(), &aml::ZERO)],
    )
    .to_aml_bytes(out);
    aml::Device::new(
        "GED0".into(),
        vec![
            &Name::new("_HID".into(), &"ACPI0013"),
            &Name::new("_UID".into(), &aml::ZERO),
            &Name::new(
                "_CRS".into(),
                &ResourceTemplate::new(vec![&aml::Interrupt::new(
                    true,
                    true,
                    false,
                    false,
                    layout::POWER_BUTTON_GSI,
                )]),
            ),
            // It has no other interrupt.
            &Method::new("_EVT".into(), 1, true, vec![&aml::Notify::new(&Path::new("PWRB"), &0x80u8)]),
        ],
    )
    .to_aml_bytes(out);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn u32_at(bytes: &[u8], at: usize) -> usize {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize
    }

    fn u64_at(bytes: &[u8], at: usize) -> usize {
        u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize
    }

    #[test]
    fn every_table_is_reached_and_sums_to_zero() {
        for (vcpus, last_bus) in [(1, 0), (2, 1), (255, 255)] {
            let (rsdp, bytes) = build(&Platform { vcpus, last_bus, mem64: 1 << 32..1 << 46 }, 0);
            let sum = |range: &[u8]| range.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
            assert_eq!(&bytes[rsdp as usize..8], b"RSD PTR ");
            assert_eq!((sum(&bytes[..20]), sum(&bytes[..36])), (0, 0));
            let mut tables = vec![u64_at(&bytes, 24)];
            let mut seen = Vec::new();
            while let Some(at) = tables.pop() {
                let len = u32_at(&bytes, at + 4);
                assert_eq!(sum(&bytes[at..at + len]), 0);
                let signature = &bytes[at..at + 4];
                match signature {
                    b"XSDT" => {
                        tables.extend((at + 36..at + len).step_by(8).map(|entry| u64_at(&bytes, entry)))
                    }
                    b"FACP" => tables.push(u64_at(&bytes, at + 140)),
                    b"APIC" => assert_eq!(len, 44 + usize::from(vcpus) * 8 + 12),
                    _ => {}
                }
                seen.push(String::from_utf8(signature.to_vec()).unwrap());
            }
            seen.sort();
            assert_eq!(seen, ["APIC", "DSDT", "FACP", "MCFG", "XSDT"]);
            assert!(bytes.len() < 0x2_0000);
        }
    }
}
