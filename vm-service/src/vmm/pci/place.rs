//! Plays firmware: gives buses to root ports and addresses to BARs.

use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use vm_passthrough::PassthroughDevice;
use vm_passthrough::pci::placement::{
    self, ConfigAccess, FunctionRequest, PlacedFunction, PortWindows, Windows,
};
use vm_passthrough::pci::regs;

use super::root_port::Slot;
use super::{Function, PciRoot, RootPort};
use crate::vmm::error::MachineError;
use crate::vmm::layout;

impl ConfigAccess for RootPort {
    fn read_config(&self, offset: u16, data: &mut [u8]) {
        self.config_read(offset, data);
    }

    fn write_config(&self, offset: u16, data: &[u8]) {
        self.config_write(offset, data);
    }
}

/// A function of the VMM's own, for its BARs to be placed.
struct Own<'a>(&'a dyn Function);

impl ConfigAccess for Own<'_> {
    fn read_config(&self, offset: u16, data: &mut [u8]) {
        self.0.config_read(offset, data);
    }

    fn write_config(&self, offset: u16, data: &[u8]) {
        self.0.config_write(offset, data);
    }
}

impl PciRoot {
    /// Numbers the buses, places all BARs, and opens the ports; returns what is where. Devices keep their
    /// decoding off, as their drivers expect; ports forward, so that a guest without an operating system need not
    /// know of them. Ports with nothing behind them get windows of what is left.
    ///
    /// # Errors
    /// When the BARs don't fit.
    pub(in crate::vmm) fn place(&self, mem64: &Range<u64>) -> Result<Vec<RootBus>, MachineError> {
        let io = layout::port::PCI_WINDOW;
        let windows = Windows { low: layout::MEM32, high: mem64.clone(), io: io.start.into()..io.end.into() };
        let own = self.functions();
        let own: Vec<Own<'_>> = own.iter().map(|function| Own(function.as_ref())).collect();
        let _changing = self.changing();
        let ports = self.ports_by_root();
        let mut requests: Vec<FunctionRequest> = own
            .iter()
            .map(|function| FunctionRequest {
                name: "a device of the VMM".to_owned(),
                slot: None,
                bars: placement::probe(function),
            })
            .collect();
        let slots: Vec<_> = ports.iter().map(|(_, port)| requests_of(&port.slot())).collect();
        requests.extend(slots.iter().flatten().cloned());
        let placed = placement::plan(&requests, &windows)?;
        let empty = slots.iter().filter(|slot| slot.is_empty()).count();
        let mut reserved = reserve(&placed, &windows, empty).into_iter();
        let mut placed = placed.into_iter();
        for (function, placed) in own.iter().zip(placed.by_ref()) {
            placement::program(function, &placed);
        }
        // Without the first, what it has is what the others have not.
        let mut roots = vec![RootBus { node: 0, first: 0, last: 0, windows: vec![windows.clone()] }];
        let mut last = 0u8;
        let mut next = || {
            last = last.checked_add(1).ok_or(MachineError::BusFull { limit: 255 })?;
            Ok::<_, MachineError>(last)
        };
        for ((node, port), slot) in ports.iter().zip(&slots) {
            if roots.last().is_none_or(|root| root.node != *node) {
                let bus = next()?;
                roots.push(RootBus { node: *node, first: bus, last: bus, windows: Vec::new() });
            }
            let Some(root) = roots.last_mut() else { continue };
            let bus = next()?;
            root.last = bus;
            port.config_write(regs::PRIMARY_BUS, &[root.first, bus, bus]);
            let windows = if slot.is_empty() { reserved.next() } else { None };
            let windows = placed.by_ref().take(slot.len()).last().map(|placed| placed.port).or(windows);
            let windows = windows.unwrap_or_default();
            if *node > 0 {
                root.windows.push(ranges(&windows));
            }
            placement::program_port(port.as_ref(), &windows);
            placement::enable(port.as_ref());
            port.change(|slot| slot.windows = Some(windows));
            settle(port)?;
        }
        let mut buses = vec![None; 1 + roots.iter().map(|root| root.node).max().unwrap_or(0)];
        for root in &roots {
            buses[root.node] = Some(root.first);
        }
        self.number(buses);
        Ok(roots)
    }
}

/// A root bus, and what its host bridge forwards.
#[derive(Clone, Debug)]
pub(in crate::vmm) struct RootBus {
    /// The guest's NUMA node.
    pub(in crate::vmm) node: usize,
    /// Its number, and the highest of the buses behind its ports.
    pub(in crate::vmm) first: u8,
    pub(in crate::vmm) last: u8,
    /// Bus 0's are the whole, and the others' are parts of that, which bus 0 has not.
    pub(in crate::vmm) windows: Vec<Windows>,
}

/// What the BARs of a function that is there need.
pub(super) fn request_of(device: &Arc<dyn PassthroughDevice>) -> FunctionRequest {
    let bars = placement::probe(device.as_ref());
    FunctionRequest { name: device.address().to_string(), slot: Some(device.slot()), bars }
}

/// What the BARs of a slot's functions need: those that are there are asked, in case that they have changed.
fn requests_of(slot: &Slot) -> Vec<FunctionRequest> {
    let there = slot.functions.iter().map(request_of);
    there.chain(slot.awaited().map(|expected| expected.request.clone())).collect()
}

/// Where the BARs of a slot's functions can be, once that is decided.
pub(super) fn room(slot: &Slot) -> Option<Windows> {
    slot.windows.as_ref().map(ranges)
}

fn ranges(windows: &PortWindows) -> Windows {
    let range = |window: &Option<RangeInclusive<u64>>| {
        window.as_ref().map_or(0..0, |window| *window.start()..window.end().saturating_add(1))
    };
    let (low, high, io) = (range(&windows.memory), range(&windows.prefetchable), range(&windows.io));
    Windows { low, high, io }
}

/// Places the BARs of the functions behind a port in its windows, once these are decided and all functions are there, and sets what else
/// firmware does of both.
///
/// # Errors
/// When they don't fit, as they are others than were expected.
pub(super) fn settle(port: &RootPort) -> Result<(), MachineError> {
    let slot = port.slot();
    let Some(windows) = room(&slot).filter(|_| slot.awaited().next().is_none()) else { return Ok(()) };
    for (device, placed) in slot.functions.iter().zip(placement::plan(&requests_of(&slot), &windows)?) {
        placement::program(device.as_ref(), &placed);
        // Firmware notes where the pin leads to.
        let mut pin = [0];
        device.config_read(regs::INTERRUPT_PIN, &mut pin);
        let line = pin[0].checked_sub(1).and_then(|pin| slot.lines.get(usize::from(pin)));
        device.config_write(regs::INTERRUPT_LINE, &[line.map_or(0, |&line| line as u8)]);
    }
    drop(slot);
    port.take_payload();
    Ok(())
}

/// The most that an empty port gets of each window: NVMe's BARs, and others that are not prefetchable, need the low one;
/// GPUs have their memory in the high one.
const RESERVE_LOW: u64 = 16 << 20;
const RESERVE_HIGH: u64 = 1 << 40;
/// The granularity of a port's windows, of memory and of ports.
const MEMORY_UNIT: u64 = 1 << 20;
const IO_UNIT: u64 = 1 << 12;

/// Windows for `count` empty ports, of what the placed BARs leave: no device fits worse as there are empty ports. A window
/// is a power of two, and aligned to itself, so that a BAR can have all of it.
fn reserve(placed: &[PlacedFunction], windows: &Windows, count: usize) -> Vec<PortWindows> {
    let bars = || placed.iter().flat_map(|function| &function.bars);
    let share = |window: &Range<u64>, io: bool, most: u64| {
        let ends = bars().filter(|bar| bar.request.io == io).map(|bar| bar.address + bar.request.size);
        let used = ends.filter(|end| window.contains(&(end - 1))).max().unwrap_or(window.start);
        let mut size = most;
        while size >= if io { IO_UNIT } else { MEMORY_UNIT } {
            let start = used.checked_next_multiple_of(size).filter(|start| *start <= window.end);
            if let Some(start) = start.filter(|start| (window.end - start) / size >= count as u64) {
                return Some((start, size));
            }
            size /= 2;
        }
        None
    };
    let (low, high) = (share(&windows.low, false, RESERVE_LOW), share(&windows.high, false, RESERVE_HIGH));
    let io = share(&windows.io, true, IO_UNIT);
    let window = |share: Option<(u64, u64)>, index: u64| {
        share.map(|(start, size)| start + index * size..=start + index * size + (size - 1))
    };
    (0..count as u64)
        .map(|index| PortWindows {
            memory: window(low, index),
            prefetchable: window(high, index),
            io: window(io, index),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use vm_passthrough::pci::placement::{BarRequest, PlacedBar};
    use vm_passthrough::sim::{SimLog, SimVmm};

    use super::*;
    use crate::vmm::lifecycle::Lifecycle;
    use crate::vmm::pci::ExpectedFunction;
    use crate::vmm::testing::{FakeDevice, add};

    #[test]
    fn every_device_is_reached_where_it_was_placed() {
        let vmm = SimVmm::new(&[], &SimLog::default()).unwrap();
        let root = PciRoot::new(vmm.clone(), vmm.bars().clone(), Arc::new(Lifecycle::new().unwrap()));
        let devices: Vec<_> = (0..3).map(|index| Arc::new(FakeDevice::new(index).on(vmm.bars()))).collect();
        for device in &devices {
            add(&root, device.clone()).unwrap();
        }
        for _ in 0..2 {
            root.reset().unwrap();
            assert_eq!(root.place(&(1 << 32..1 << 40)).unwrap()[0].last, 3);
            for (bus, device) in (1..).zip(&devices) {
                let mut bar = [0; 4];
                root.config_read(bus, 0, regs::BASE_ADDRESS_0, &mut bar);
                let address = u64::from(u32::from_le_bytes(bar));
                assert!(layout::MEM32.contains(&address));
                assert!(!root.memory_read(address, &mut [0; 4]), "decode is off");
                root.config_write(bus, 0, regs::COMMAND, &[2, 0]);
                let mut data = [0; 4];
                assert!(root.memory_read(address, &mut data));
                assert_eq!(data, [0xa5; 4]);
                assert_eq!(vmm.bars().find(address).map(|hit| hit.device), Some(device.address()));
                root.config_write(bus, 0, regs::COMMAND, &[0, 0]);
            }
        }
    }

    #[test]
    fn devices_of_other_nodes_are_below_root_buses_of_their_own() {
        let vmm = SimVmm::new(&[], &SimLog::default()).unwrap();
        let root = PciRoot::new(vmm.clone(), vmm.bars().clone(), Arc::new(Lifecycle::new().unwrap()));
        let root = root.on_nodes([4, 2, 3]);
        root.add_port().unwrap();
        // Node 2 has none.
        let nodes = [Some(3), Some(4), None, Some(3), Some(9)];
        let devices: Vec<_> =
            (0..).zip(nodes).map(|(index, _)| Arc::new(FakeDevice::new(index).on(vmm.bars()))).collect();
        for (device, node) in devices.iter().zip(nodes) {
            let mut expected = ExpectedFunction::like(&**device);
            expected.node = node;
            root.expect(expected).unwrap();
            root.arrive(device.clone()).unwrap();
        }
        let id = |bus: u8, device: u8| {
            let mut data = [0; 4];
            root.config_read(bus, device << 3, 0, &mut data);
            u32::from_le_bytes(data)
        };
        for _ in 0..2 {
            root.reset().unwrap();
            let roots = root.place(&(1 << 32..1 << 40)).unwrap();
            let numbers: Vec<_> = roots.iter().map(|root| (root.node, root.first, root.last)).collect();
            assert_eq!(numbers, [(0, 0, 4), (2, 5, 7)]);
            assert_eq!(
                (1..=4).map(|bus| id(bus, 0) == FakeDevice::ID).collect::<Vec<_>>(),
                [true, true, true, false]
            );
            assert_eq!([id(6, 0), id(7, 0)], [FakeDevice::ID; 2]);
            // The ports of bus 0 behind its host bridge, those of bus 5 from device 0 on.
            assert_eq!(
                (1..=5).map(|device| id(0, device) != u32::MAX).collect::<Vec<_>>(),
                [true, true, true, true, false]
            );
            assert_eq!(
                (0..=2).map(|device| id(5, device) != u32::MAX).collect::<Vec<_>>(),
                [true, true, false]
            );
            for (bus, device) in [(6, &devices[0]), (7, &devices[3]), (1, &devices[1])] {
                let mut bar = [0; 4];
                root.config_read(bus, 0, regs::BASE_ADDRESS_0, &mut bar);
                let address = u64::from(u32::from_le_bytes(bar));
                root.config_write(bus, 0, regs::COMMAND, &[2, 0]);
                let forwarded =
                    |root: &RootBus| root.windows.iter().any(|window| window.low.contains(&address));
                assert_eq!(forwarded(&roots[1]), bus > 5);
                assert_eq!(vmm.bars().find(address).map(|hit| hit.device), Some(device.address()));
                root.config_write(bus, 0, regs::COMMAND, &[0, 0]);
            }
        }
    }

    #[test]
    fn empty_ports_share_what_is_left() {
        fn check(bar: Option<(u64, u64)>, count: usize, expect: &[(Option<u64>, Option<u64>)]) {
            const GIB: u64 = 1 << 30;
            let io = 0x1000..0x1_0000;
            let windows = Windows { low: 0xc000_0000..0xe000_0000, high: 4 * GIB..512 * GIB, io };
            let request = |size| BarRequest { index: 0, size, wide: true, prefetchable: true, io: false };
            let bars = bar.map(|(address, size)| PlacedBar { request: request(size), address });
            let placed = PlacedFunction { bars: bars.into_iter().collect(), port: PortWindows::default() };
            let reserved = reserve(&[placed], &windows, count);
            let starts: Vec<_> = reserved
                .iter()
                .map(|port| {
                    let start =
                        |window: &Option<std::ops::RangeInclusive<u64>>| window.as_ref().map(|w| *w.start());
                    (start(&port.memory), start(&port.prefetchable))
                })
                .collect();
            assert_eq!(starts, expect, "{bar:x?} {count}");
        }
        let gib = |n: u64| Some(n << 30);
        check(None, 0, &[]);
        check(None, 1, &[(Some(0xc000_0000), gib(256))]);
        check(None, 2, &[(Some(0xc000_0000), gib(128)), (Some(0xc100_0000), gib(256))]);
        check(Some((0xc000_0000, 4096)), 1, &[(Some(0xc100_0000), gib(256))]);
        check(Some((0xdff0_0000, 1 << 20)), 1, &[(None, gib(256))]);
        check(Some((256 << 30, 128 << 30)), 1, &[(Some(0xc000_0000), gib(384))]);
    }
}
