//! Chooses the addresses. Pure: sizes in, addresses out.

use std::ops::{Range, RangeInclusive};

use thiserror::Error;

use super::slot_of;
use crate::PciAddress;
use crate::pci::{BarKind, PciFunction, Sriov};

/// A bridge forwards memory in units of 1 MiB, and ports in units of 4096.
pub(super) const MEMORY_UNIT: u64 = 1 << 20;
const IO_UNIT: u64 = 1 << 12;
/// The number of ports.
const PORTS: u64 = 1 << 16;
/// First address that 32 bits can't hold.
const FOUR_GIB: u64 = 1 << 32;

/// One BAR that wants an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct BarRequest {
    /// Index of its first register, 0 to 5; [`ROM`](Self::ROM) for the expansion ROM.
    pub index: u8,
    /// Size in bytes, a power of two.
    pub size: u64,
    /// Whether it is 64 bits wide.
    pub wide: bool,
    /// Whether it is prefetchable.
    pub prefetchable: bool,
    /// Whether it is port I/O.
    pub io: bool,
}

impl BarRequest {
    /// The index of the expansion ROM.
    pub const ROM: u8 = 6;
}

/// One function whose BARs want addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct FunctionRequest {
    /// What errors call it.
    pub name: String,
    /// The slot behind a port that it is in, named as by [`PassthroughDevice::slot`](crate::PassthroughDevice::slot): the
    /// functions of one share the port's windows. `None` on a root bus.
    pub slot: Option<PciAddress>,
    /// Its BARs.
    pub bars: Vec<BarRequest>,
}

impl FunctionRequest {
    /// What a function of the host asks for in a guest, by what a scan found: its BARs.
    pub fn of(function: &PciFunction, behind_port: bool) -> Self {
        let rom = function.rom.map(|rom| BarRequest {
            index: BarRequest::ROM,
            size: rom.size,
            wide: false,
            prefetchable: false,
            io: false,
        });
        let bars = function.bars.iter().map(|bar| BarRequest {
            index: bar.index,
            size: bar.size,
            wide: bar.kind == BarKind::Memory64,
            prefetchable: bar.prefetchable,
            io: bar.kind == BarKind::Io,
        });
        let is_virtual = matches!(function.sriov, Some(Sriov::Virtual { .. }));
        let slot = behind_port.then(|| slot_of(function.address, is_virtual));
        Self { name: function.address.to_string(), slot, bars: bars.chain(rom).collect() }
    }
}

/// Where BARs may be, in guest-physical addresses. An empty range gives no room.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Windows {
    /// Below 4 GiB.
    pub low: Range<u64>,
    /// Anywhere; by custom above the guest's RAM and below the end of its address width.
    pub high: Range<u64>,
    /// Ports.
    pub io: Range<u64>,
}

impl Windows {
    /// Most physical address bits that a processor has.
    pub const MOST_BITS: u8 = 52;

    /// `low`, and all from the first whole GiB above the guest's RAM, which ends before `ram_end`, to the end of what
    /// `physical_address_bits` reach. The high window is empty where that leaves nothing. Ports are those of a PC: the first
    /// 4096 are ISA's.
    pub fn above(low: Range<u64>, ram_end: u64, physical_address_bits: u8) -> Self {
        const GIB: u64 = 1 << 30;
        let limit = 1u64 << physical_address_bits.clamp(33, Self::MOST_BITS);
        let start = ram_end.max(FOUR_GIB).checked_next_multiple_of(GIB).unwrap_or(limit);
        Self { low, high: start.min(limit)..limit, io: IO_UNIT..PORTS }
    }

    /// Without the addresses `reserved`, which the processor keeps to itself: the high window is the larger of what is below
    /// and above them.
    #[must_use]
    pub fn without(self, reserved: &Range<u64>) -> Self {
        let Range { start, end } = self.high;
        let (below, above) = (start..end.min(reserved.start), start.max(reserved.end)..end);
        let size = |range: &Range<u64>| range.end.saturating_sub(range.start);
        let larger = match reserved.is_empty() {
            true => start..end,
            false if size(&below) >= size(&above) => below.start..below.end.max(below.start),
            false => above,
        };
        Self { high: larger, ..self }
    }
}

/// One of the windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
pub enum WindowKind {
    /// [`Windows::low`].
    #[strum(to_string = "window below 4 GiB")]
    Low,
    /// [`Windows::high`].
    #[strum(to_string = "64-bit window")]
    High,
    /// [`Windows::io`].
    #[strum(to_string = "window of ports")]
    Io,
}

/// A BAR and its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedBar {
    /// What was asked.
    pub request: BarRequest,
    /// Guest-physical address or port, a multiple of the size.
    pub address: u64,
}

/// A function whose BARs have addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedFunction {
    /// Its BARs, in order of index; without those that [`plan`] found no place for.
    pub bars: Vec<PlacedBar>,
    /// What the port above it forwards, to all functions of its slot; all closed for a function on a root bus.
    pub port: PortWindows,
}

/// What a port forwards downstream. Both ends are included, the base is a multiple of 1 MiB (4096 ports) and so is the address
/// after the end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortWindows {
    /// Memory below 4 GiB.
    pub memory: Option<RangeInclusive<u64>>,
    /// Prefetchable memory.
    pub prefetchable: Option<RangeInclusive<u64>>,
    /// Ports.
    pub io: Option<RangeInclusive<u64>>,
}

/// Why BARs got no addresses.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// They don't fit.
    #[error(
        "the BARs of {function} ({bars}) don't fit into the guest's {kind}: {needed:#x} bytes at multiples of \
         {alignment:#x} are needed, the window lacks {missing:#x} bytes; {}", remedy(*.kind)
    )]
    NoRoom {
        /// The first function that did not fit.
        function: String,
        /// Its BARs that go into that window.
        bars: String,
        /// The window that is full.
        kind: WindowKind,
        /// Bytes that the function takes in it, in one piece.
        needed: u64,
        /// What its place must be a multiple of.
        alignment: u64,
        /// By how much the window would have to grow at its end.
        missing: u64,
    },
    /// A window is impossible.
    #[error("the guest's {kind} {start:#x}..{end:#x} is impossible: {reason}")]
    BadWindow {
        /// Which.
        kind: WindowKind,
        /// Its first address.
        start: u64,
        /// The address after its end.
        end: u64,
        /// Why.
        reason: &'static str,
    },
    /// A BAR is impossible.
    #[error("BAR {index} of {function} has the size {size:#x}, which no BAR has")]
    BadSize {
        /// Whose.
        function: String,
        /// Which.
        index: u8,
        /// The size.
        size: u64,
    },
}

fn remedy(kind: WindowKind) -> &'static str {
    match kind {
        WindowKind::Low => "give the guest fewer devices, or less RAM below 4 GiB",
        WindowKind::High => "give the guest more physical address bits, or fewer devices",
        WindowKind::Io => "give the guest fewer devices",
    }
}

/// What goes into one window in one piece: the BARs of a function on a root bus, or of all functions of a slot.
struct Block {
    /// With the index of the function. Largest first.
    bars: Vec<(usize, BarRequest)>,
    size: u64,
    alignment: u64,
}

impl Block {
    /// The function that it is named after, which has the largest BAR.
    fn function(&self) -> usize {
        self.bars.first().map_or(0, |&(function, _)| function)
    }
}

/// Chooses an address for every BAR: naturally aligned, largest first, each as low as it fits, none over another. What does not fit into the
/// high window goes into the low one, if it fits there. I/O BARs that do not fit get none; expansion ROMs get none where not all
/// else fits beside them, as few drivers look at them.
///
/// # Errors
/// When a BAR or a window is impossible, or not all fit; the error names the first function that does not.
pub fn plan(functions: &[FunctionRequest], windows: &Windows) -> Result<Vec<PlacedFunction>, PlacementError> {
    plan_all(functions, windows).or_else(|error| {
        let is_rom = |bar: &BarRequest| bar.index == BarRequest::ROM;
        if !functions.iter().flat_map(|function| &function.bars).any(is_rom) {
            return Err(error);
        }
        let mut without = functions.to_vec();
        without.iter_mut().for_each(|function| function.bars.retain(|bar| !is_rom(bar)));
        plan_all(&without, windows)
    })
}

fn plan_all(functions: &[FunctionRequest], windows: &Windows) -> Result<Vec<PlacedFunction>, PlacementError> {
    check_window(WindowKind::Low, &windows.low)?;
    check_window(WindowKind::High, &windows.high)?;
    check_window(WindowKind::Io, &windows.io)?;
    for function in functions {
        for bar in &function.bars {
            let (least, most) = match bar {
                BarRequest { io: true, .. } => (4, PORTS),
                BarRequest { wide: true, .. } => (16, 1 << 63),
                _ => (16, 1 << 31),
            };
            if !bar.size.is_power_of_two() || bar.size < least || bar.size > most {
                return Err(PlacementError::BadSize {
                    function: function.name.clone(),
                    index: bar.index,
                    size: bar.size,
                });
            }
        }
    }
    let mut placed: Vec<PlacedFunction> =
        functions.iter().map(|_| PlacedFunction { bars: Vec::new(), port: PortWindows::default() }).collect();
    let units = units(functions);
    // What did not fit into the high window, by unit.
    let mut spilled: Vec<Option<PlacementError>> = vec![None; units.len()];
    for (kind, window) in
        [(WindowKind::High, &windows.high), (WindowKind::Low, &windows.low), (WindowKind::Io, &windows.io)]
    {
        let mut blocks: Vec<(usize, Block)> = Vec::new();
        for (unit, members) in units.iter().enumerate() {
            let goes = |function: usize, bar: &BarRequest| {
                let natural = kind_of(bar, functions[function].slot.is_some());
                let spills =
                    kind == WindowKind::Low && natural == WindowKind::High && spilled[unit].is_some();
                natural == kind || spills
            };
            blocks.extend(block(functions, members, kind, goes).map(|block| (unit, block)));
        }
        blocks.sort_by_key(|(_, block)| std::cmp::Reverse((block.alignment, block.size)));
        let mut room = Room::new(window);
        for (unit, block) in &blocks {
            let start = match room.take(block.alignment, block.size) {
                Ok(start) => start,
                Err(missing) => {
                    let error = no_room(functions, block, kind, missing);
                    match kind {
                        WindowKind::Io => {}
                        WindowKind::Low => return Err(spilled[*unit].take().unwrap_or(error)),
                        WindowKind::High => spilled[*unit] = Some(error),
                    }
                    continue;
                }
            };
            place(&mut placed, block, start);
            let range = Some(start..=start + (block.size - 1));
            for &member in units[*unit].iter().filter(|&&member| functions[member].slot.is_some()) {
                match kind {
                    WindowKind::Low => placed[member].port.memory = range.clone(),
                    WindowKind::High => placed[member].port.prefetchable = range.clone(),
                    WindowKind::Io => placed[member].port.io = range.clone(),
                }
            }
        }
    }
    for function in &mut placed {
        function.bars.sort_by_key(|bar| bar.request.index);
    }
    Ok(placed)
}

/// What is left of a window.
struct Room {
    /// Not empty, ascending.
    free: Vec<Range<u64>>,
    /// Nothing is placed from here on.
    used: u64,
    end: u64,
}

impl Room {
    fn new(window: &Range<u64>) -> Self {
        let free = Vec::from_iter((!window.is_empty()).then(|| window.clone()));
        Self { free, used: window.start, end: window.end }
    }

    /// The lowest place for `size` bytes at a multiple of `alignment`, a power of two.
    ///
    /// # Errors
    /// How many bytes are missing at the end of the window.
    fn take(&mut self, alignment: u64, size: u64) -> Result<u64, u128> {
        let after = |start: u64| {
            let start = u128::from(start).next_multiple_of(u128::from(alignment));
            (start, start + u128::from(size))
        };
        let fits = |range: &Range<u64>| after(range.start).1 <= u128::from(range.end);
        let Some(index) = self.free.iter().position(fits) else {
            return Err(after(self.used).1 - u128::from(self.end));
        };
        let range = self.free.remove(index);
        // It ends within the range, which 64 bits hold.
        let (start, end) = after(range.start);
        let (start, end) = (start as u64, end as u64);
        let left = [range.start..start, end..range.end].into_iter().filter(|range| !range.is_empty());
        self.free.splice(index..index, left);
        self.used = self.used.max(end);
        Ok(start)
    }
}

/// The functions by what is placed in one piece: each slot, and each function on a root bus.
fn units(functions: &[FunctionRequest]) -> Vec<Vec<usize>> {
    let mut units: Vec<Vec<usize>> = Vec::new();
    for (index, function) in functions.iter().enumerate() {
        let same =
            |unit: &&mut Vec<usize>| function.slot.is_some() && functions[unit[0]].slot == function.slot;
        match units.iter_mut().find(same) {
            Some(unit) => unit.push(index),
            None => units.push(vec![index]),
        }
    }
    units
}

fn check_window(kind: WindowKind, window: &Range<u64>) -> Result<(), PlacementError> {
    let reason = if window.start > window.end {
        "it ends before it starts"
    } else if kind == WindowKind::Low && window.end > FOUR_GIB {
        "it reaches above 4 GiB"
    } else if kind == WindowKind::Io && window.end > PORTS {
        "there are no more than 65536 ports"
    } else {
        return Ok(());
    };
    Err(PlacementError::BadWindow { kind, start: window.start, end: window.end, reason })
}

/// Which window a BAR goes into.
fn kind_of(bar: &BarRequest, behind_port: bool) -> WindowKind {
    match bar {
        BarRequest { io: true, .. } => WindowKind::Io,
        BarRequest { wide: true, prefetchable, .. } if *prefetchable || !behind_port => WindowKind::High,
        _ => WindowKind::Low,
    }
}

/// The BARs of functions for which `goes` holds, packed: powers of two, largest first, leave no gaps.
fn block(
    functions: &[FunctionRequest],
    members: &[usize],
    kind: WindowKind,
    goes: impl Fn(usize, &BarRequest) -> bool,
) -> Option<Block> {
    let mut bars: Vec<(usize, BarRequest)> = members
        .iter()
        .flat_map(|&member| functions[member].bars.iter().map(move |&bar| (member, bar)))
        .filter(|(member, bar)| goes(*member, bar))
        .collect();
    bars.sort_by_key(|&(member, bar)| (std::cmp::Reverse(bar.size), member, bar.index));
    let &(first, largest) = bars.first()?;
    let unit = match kind {
        _ if functions[first].slot.is_none() => 1,
        WindowKind::Io => IO_UNIT,
        WindowKind::Low | WindowKind::High => MEMORY_UNIT,
    };
    let alignment = largest.size.max(unit);
    let sum = bars.iter().fold(0u64, |sum, (_, bar)| sum.saturating_add(bar.size));
    let size = sum.checked_next_multiple_of(unit).unwrap_or(u64::MAX);
    Some(Block { bars, size, alignment })
}

fn place(placed: &mut [PlacedFunction], block: &Block, start: u64) {
    let mut address = start;
    for &(function, request) in &block.bars {
        placed[function].bars.push(PlacedBar { request, address });
        address += request.size;
    }
}

fn no_room(functions: &[FunctionRequest], block: &Block, kind: WindowKind, missing: u128) -> PlacementError {
    let named = block.function();
    let bars = block.bars.iter().map(|&(function, bar)| match function == named {
        true => format!("BAR {}: {:#x} bytes", bar.index, bar.size),
        false => format!("BAR {} of {}: {:#x} bytes", bar.index, functions[function].name, bar.size),
    });
    PlacementError::NoRoom {
        function: functions[named].name.clone(),
        bars: bars.collect::<Vec<_>>().join(", "),
        kind,
        needed: block.size,
        alignment: block.alignment,
        missing: u64::try_from(missing).unwrap_or(u64::MAX),
    }
}
