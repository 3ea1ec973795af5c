//! The ACPI tables.
//!
//! The platform is *hardware-reduced* (ACPI 6.5, 4.1): there is no PM timer, no SCI and no legacy event block to
//! emulate, a guest sleeps and resets through three one-byte registers, and Linux then leaves out the timer and
//! interrupt-controller probing of the PC, each step of which would be an exit.

use std::ops::{Range, RangeInclusive};

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
use acpi_tables::{Aml, AmlSink};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};
use vm_passthrough::pci::placement::Windows;

use super::boot::BootError;
use super::layout::{self, port};
use super::numa::{GuestNuma, VcpuPlace};
use super::pci::{self, RootBus};

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
    /// The vCPUs.
    pub(super) vcpus: Vec<VcpuPlace>,
    /// The PCI root buses, bus 0 first.
    pub(super) roots: Vec<RootBus>,
    /// The NUMA nodes, and which has which RAM.
    pub(super) numa: GuestNuma,
    pub(super) ram: Vec<(u8, Range<u64>)>,
}

impl Platform {
    fn last_bus(&self) -> u8 {
        self.roots.iter().map(|root| root.last).max().unwrap_or(0)
    }
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
    xsdt.add_entry(place(&madt(&platform.vcpus)));
    let mut mcfg = MCFG::new(OEM, OEM_TABLE, REVISION);
    mcfg.add_ecam(layout::ECAM, 0, 0, platform.last_bus());
    xsdt.add_entry(place(&mcfg));
    if platform.numa.is_shown() {
        xsdt.add_entry(place(&srat(platform)));
        xsdt.add_entry(place(&slit(&platform.numa)));
    }
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

fn madt(vcpus: &[VcpuPlace]) -> MADT {
    let mut madt = MADT::new(OEM, OEM_TABLE, REVISION, LocalInterruptController::Address(layout::LOCAL_APIC));
    for (index, vcpu) in (0..=u8::MAX).zip(vcpus) {
        madt.add_structure(ProcessorLocalApic::new(index, vcpu.apic_id, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(0, layout::IO_APIC, 0));
    madt
}

/// Which node has which vCPUs and RAM (ACPI 6.5, 5.2.16).
fn srat(platform: &Platform) -> Sdt {
    const ENABLED: u32 = 1;
    let mut body = [&1u32.to_le_bytes()[..], &[0; 8]].concat();
    for vcpu in &platform.vcpus {
        // Processor local APIC affinity: type, length, node, APIC id, flags, and what is 0 here.
        body.extend([0, 16, vcpu.node, vcpu.apic_id]);
        body.extend(ENABLED.to_le_bytes());
        body.extend([0; 8]);
    }
    for (node, ram) in &platform.ram {
        // Memory affinity: type, length, node, reserved, base, length, reserved, flags, reserved.
        body.extend([1, 40]);
        body.extend(u32::from(*node).to_le_bytes());
        body.extend([0; 2]);
        body.extend(ram.start.to_le_bytes());
        body.extend((ram.end - ram.start).to_le_bytes());
        body.extend([0; 4]);
        body.extend(ENABLED.to_le_bytes());
        body.extend([0; 8]);
    }
    table(*b"SRAT", 3, &body)
}

/// How far nodes are from each other (ACPI 6.5, 5.2.17).
fn slit(numa: &GuestNuma) -> Sdt {
    let rows = numa.distances().flatten().copied();
    let body: Vec<u8> = (numa.hosts().len() as u64).to_le_bytes().into_iter().chain(rows).collect();
    table(*b"SLIT", 1, &body)
}

fn table(signature: [u8; 4], revision: u8, body: &[u8]) -> Sdt {
    let mut table = Sdt::new(signature, 36, revision, OEM, OEM_TABLE, REVISION);
    table.append_slice(body);
    table
}

fn dsdt(platform: &Platform) -> Sdt {
    let mut body = Vec::new();
    Name::new("_S5_".into(), &aml::Package::new(vec![&SLEEP_TYPE_S5])).to_aml_bytes(&mut body);
    let mut devices = Vec::new();
    for root in &platform.roots {
        pci_host(platform, root, &mut devices);
    }
    ecam(platform, &mut devices);
    serial(&mut devices);
    power_button(&mut devices);
    body.vec(&aml::Scope::raw("_SB_".into(), devices));
    table(*b"DSDT", 6, &body)
}

/// `_PRT`: where the interrupt pins of each slot of a root bus lead to (ACPI 6.5, 6.2.13). Root ports need none of their own: a guest
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

/// What the host bridge of a root bus forwards, of one kind. Bus 0's forwards all that no other does.
fn forwarded(
    platform: &Platform,
    root: &RootBus,
    kind: fn(&Windows) -> &Range<u64>,
) -> impl Iterator<Item = RangeInclusive<u64>> {
    let others = platform.roots.iter().filter(|other| root.node == 0 && other.node != 0);
    let taken = others.flat_map(|other| &other.windows).map(kind).filter(|taken| !taken.is_empty());
    let own = root.windows.iter().map(kind).cloned().collect();
    let left = taken.fold(own, |ranges: Vec<_>, taken| {
        let split = |range: Range<u64>| {
            [range.start..range.end.min(taken.start), range.start.max(taken.end)..range.end]
        };
        ranges.into_iter().flat_map(split).filter(|range| !range.is_empty()).collect()
    });
    left.into_iter().filter(|range| !range.is_empty()).map(|range| range.start..=range.end - 1)
}

/// A PCI host bridge with its windows, which the guest keeps as they are.
fn pci_host(platform: &Platform, root: &RootBus, out: &mut Vec<u8>) {
    use AddressSpaceCacheable::{Cacheable, NotCacheable};
    let mut resources = Vec::new();
    AddressSpace::new_bus_number(u16::from(root.first), root.last.into()).to_aml_bytes(&mut resources);
    if root.node == 0 {
        aml::IO::new(port::PCI_ADDRESS, port::PCI_ADDRESS, 1, 8).to_aml_bytes(&mut resources);
        AddressSpace::new_io(0u16, port::PCI_ADDRESS - 1, None).to_aml_bytes(&mut resources);
    }
    for ports in forwarded(platform, root, |windows| &windows.io) {
        let (first, last) = (*ports.start() as u16, *ports.end() as u16);
        AddressSpace::new_io(first, last, None).to_aml_bytes(&mut resources);
    }
    for low in forwarded(platform, root, |windows| &windows.low) {
        let (first, last) = (*low.start() as u32, *low.end() as u32);
        AddressSpace::new_memory(NotCacheable, true, first, last, None).to_aml_bytes(&mut resources);
    }
    for high in forwarded(platform, root, |windows| &windows.high) {
        let (first, last) = high.into_inner();
        AddressSpace::new_memory(Cacheable, true, first, last, None).to_aml_bytes(&mut resources);
    }
    let node = root.node as u8;
    let mut body = Vec::new();
    Name::new("_HID".into(), &EISAName::new("PNP0A08")).to_aml_bytes(&mut body);
    Name::new("_CID".into(), &EISAName::new("PNP0A03")).to_aml_bytes(&mut body);
    Name::new("_SEG".into(), &aml::ZERO).to_aml_bytes(&mut body);
    Name::new("_BBN".into(), &root.first).to_aml_bytes(&mut body);
    Name::new("_UID".into(), &node).to_aml_bytes(&mut body);
    if platform.numa.is_shown() {
        Name::new("_PXM".into(), &node).to_aml_bytes(&mut body);
    }
    Name::new("_CRS".into(), &ResourceTemplate::new(vec![&Raw(resources)])).to_aml_bytes(&mut body);
    Name::new("_PRT".into(), &interrupt_routing()).to_aml_bytes(&mut body);
    osc().to_aml_bytes(&mut body);
    aml::Device::new(Path::new(&format!("PCI{node}")), vec![&Raw(body)]).to_aml_bytes(out);
}

/// What was encoded before.
struct Raw(Vec<u8>);

impl Aml for Raw {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        sink.vec(&self.0);
    }
}

/// `_OSC`: what the guest has of what it asks for.
fn osc() -> Raw {
    let mut body = Vec::new();
    Method::new(
        "_OSC".into(),
        4,
        true,
        vec![
            &aml::CreateDWordField::new(&Path::new("CDW1"), &aml::Arg(3), &aml::ZERO),
            &aml::If::new(
                &aml::Equal::new(&aml::Arg(0), &aml::Uuid::new("33db4d5b-1ff7-401c-9657-7441c03dd766")),
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
    )
    .to_aml_bytes(&mut body);
    Raw(body)
}

/// Reserves ECAM: Linux wants it in the memory map or in a motherboard device.
fn ecam(platform: &Platform, out: &mut Vec<u8>) {
    let len = (u32::from(platform.last_bus()) + 1) * layout::ECAM_BUS as u32;
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
    use vm_passthrough::numa::NumaNode;

    use super::*;

    fn u32_at(bytes: &[u8], at: usize) -> usize {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize
    }

    fn u64_at(bytes: &[u8], at: usize) -> usize {
        u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize
    }

    fn windows(low: Range<u64>, high: Range<u64>, io: Range<u64>) -> Windows {
        Windows { low, high, io }
    }

    /// With a root bus of each node, which has one window of each kind.
    fn platform(vcpus: u8, buses: u8, nodes: usize) -> Platform {
        let host = |id| NumaNode { id, has_memory: true, cpus: Vec::new(), distances: Vec::new() };
        let ids: Vec<u16> = (0..nodes as u16).collect();
        let hosts: Vec<_> = ids.iter().copied().map(host).collect();
        let numa = GuestNuma::on(&ids, &hosts).unwrap();
        let all = windows(0xc000_0000..0xe000_0000, 1 << 32..1 << 46, 0x1000..0x1_0000);
        let root = |node: usize| {
            let at = node as u64;
            let part = windows(
                0xd000_0000 + (at << 20)..0xd010_0000 + (at << 20),
                at << 40..(at << 40) + (1 << 32),
                at << 12..(at + 1) << 12,
            );
            let (first, last) = if node == 0 { (0, buses) } else { (buses, buses) };
            RootBus { node, first, last, windows: vec![if node == 0 { all.clone() } else { part }] }
        };
        let vcpus = numa.vcpus(vcpus).unwrap();
        #[allow(clippy::single_range_in_vec_init)]
        let ram = numa.ram(&[0..1 << 30], 2 << 20).unwrap();
        Platform { vcpus, roots: (0..nodes.max(1)).map(root).collect(), numa, ram }
    }

    #[test]
    fn host_bridges_forward_what_no_other_does() {
        let list = |platform: &Platform, root: usize, kind| {
            forwarded(platform, &platform.roots[root], kind)
                .map(RangeInclusive::into_inner)
                .collect::<Vec<_>>()
        };
        let alone = platform(1, 1, 1);
        assert_eq!(list(&alone, 0, |windows| &windows.low), [(0xc000_0000, 0xdfff_ffff)]);
        assert_eq!(list(&alone, 0, |windows| &windows.io), [(0x1000, 0xffff)]);
        let three = platform(1, 1, 3);
        let low = [(0xc000_0000, 0xd00f_ffff), (0xd030_0000, 0xdfff_ffff)];
        assert_eq!(list(&three, 0, |windows| &windows.low), low);
        assert_eq!(list(&three, 1, |windows| &windows.low), [(0xd010_0000, 0xd01f_ffff)]);
        assert_eq!(list(&three, 0, |windows| &windows.io), [(0x3000, 0xffff)]);
        let gib4 = 1u64 << 32;
        let high =
            [(gib4, (1 << 40) - 1), ((1 << 40) + gib4, (2 << 40) - 1), ((2 << 40) + gib4, (1 << 46) - 1)];
        assert_eq!(list(&three, 0, |windows| &windows.high), high);
    }

    #[test]
    fn every_table_is_reached_and_sums_to_zero() {
        for (vcpus, buses, nodes) in [(1, 0, 0), (2, 1, 1), (255, 255, 2), (5, 9, 8)] {
            let platform = platform(vcpus, buses, nodes);
            let (rsdp, bytes) = build(&platform, 0);
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
                    b"SRAT" => assert_eq!(len, 48 + usize::from(vcpus) * 16 + platform.ram.len() * 40),
                    b"SLIT" => assert_eq!(len, 44 + nodes * nodes),
                    _ => {}
                }
                seen.push(String::from_utf8(signature.to_vec()).unwrap());
            }
            seen.sort();
            let numa: &[_] = if nodes > 1 { &["SLIT", "SRAT"] } else { &[] };
            assert_eq!(seen, [&["APIC", "DSDT", "FACP", "MCFG"], numa, &["XSDT"]].concat());
            assert!(bytes.len() < 0x2_0000);
        }
    }
}
