use std::cell::RefCell;

use proptest::prelude::*;

use super::*;

/// A function with a type 0 header and nothing but BARs.
struct Fake {
    bytes: RefCell<Vec<u8>>,
    /// What of each BAR register sticks, and its read-only bits.
    bars: [(u32, u32); 6],
    /// What of the ROM's sticks.
    rom: u32,
}

impl Fake {
    fn new(bars: [(u32, u32); 6]) -> Self {
        let fake = Self { bytes: RefCell::new(vec![0; 256]), bars, rom: 0 };
        for (index, (_, fixed)) in bars.iter().enumerate() {
            write32(&fake, regs::BASE_ADDRESS_0 + index as u16 * 4, *fixed);
        }
        fake
    }
}

impl ConfigAccess for Fake {
    fn read_config(&self, offset: u16, data: &mut [u8]) {
        let offset = usize::from(offset);
        data.copy_from_slice(&self.bytes.borrow()[offset..offset + data.len()]);
    }

    fn write_config(&self, offset: u16, data: &[u8]) {
        let offset = usize::from(offset);
        let mut bytes = self.bytes.borrow_mut();
        bytes[offset..offset + data.len()].copy_from_slice(data);
        if let Some(index) = offset.checked_sub(0x10).map(|o| o / 4).filter(|&i| i < 6 || i == 8) {
            let at = 0x10 + index * 4;
            let value = u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
            let (mask, fixed) = self.bars.get(index).copied().unwrap_or((self.rom, 0));
            bytes[at..at + 4].copy_from_slice(&(value & mask | fixed).to_le_bytes());
        }
    }
}

fn bar(index: u8, size: u64, wide: bool, prefetchable: bool) -> BarRequest {
    BarRequest { index, size, wide, prefetchable, io: false }
}

fn io(index: u8, size: u64) -> BarRequest {
    BarRequest { index, size, wide: false, prefetchable: false, io: true }
}

fn slot(number: u8) -> PciAddress {
    PciAddress::new(0, number, 0, 0).unwrap()
}

fn function(name: &str, slot_number: Option<u8>, bars: &[BarRequest]) -> FunctionRequest {
    FunctionRequest { name: name.into(), slot: slot_number.map(slot), bars: bars.to_vec() }
}

#[test]
fn sizes_bars_and_leaves_them_as_they_were() {
    fn check(bars: [(u32, u32); 6], expect: &[BarRequest]) {
        let fake = Fake::new(bars);
        write16(&fake, regs::COMMAND, 0b111);
        write32(&fake, regs::BASE_ADDRESS_0, 0xfeb0_0000);
        let before = fake.bytes.borrow().clone();
        assert_eq!(probe(&fake), expect);
        assert_eq!(*fake.bytes.borrow(), before);
    }
    check([(0, 0); 6], &[]);
    // 16 MiB, 32-bit; an I/O BAR; 1 GiB, 64-bit, prefetchable.
    check(
        [(0xff00_0000, 0), (0xffff_ffe0, 1), (0xc000_0000, 0xc), (0xffff_ffff, 0), (0, 0), (0, 0)],
        &[bar(0, 16 << 20, false, false), io(1, 32), bar(2, 1 << 30, true, true)],
    );
    // Of an I/O BAR the upper half may be missing.
    check([(0xfffc, 1), (0, 0), (0, 0), (0, 1), (0, 0), (0, 0)], &[io(0, 4)]);
    // 256 GiB: no bit of the lower register sticks.
    check(
        [(0, 0xc), (0xffff_ffc0, 0), (0, 0), (0, 0), (0, 0), (0xffff_f000, 0)],
        &[bar(0, 256 << 30, true, true), bar(5, 4096, false, false)],
    );
    // A 64-bit BAR in the last register has no upper half: taken as 32-bit.
    check([(0, 0), (0, 0), (0, 0), (0, 0), (0, 0), (0xffff_0000, 4)], &[bar(5, 65536, false, false)]);
    // 64-bit with nothing that sticks is no BAR.
    check([(0, 4), (0, 0), (0, 0), (0, 0), (0, 0), (0, 0)], &[]);
    // A vanished function reads all ones.
    check([(u32::MAX, u32::MAX); 6], &[]);
}

#[test]
fn a_rom_gets_a_place_where_all_else_fits_beside_it() {
    let rom = |size| bar(BarRequest::ROM, size, false, false);
    for (mask, expect) in [(0, None), (1, None), (0xffff_0001, Some(1 << 16)), (0xffff_f801, Some(2048))] {
        let fake = Fake { rom: mask, ..Fake::new([(0, 0); 6]) };
        write32(&fake, regs::ROM_ADDRESS, 0xfebf_0001);
        let before = fake.bytes.borrow().clone();
        assert_eq!(probe(&fake), Vec::from_iter(expect.map(rom)), "{mask:#x}");
        assert_eq!(*fake.bytes.borrow(), before);
    }
    let fake =
        Fake { rom: 0xffff_0001, ..Fake::new([(0xff00_0000, 0), (0, 0), (0, 0), (0, 0), (0, 0), (0, 0)]) };
    let card = |number| function("card", Some(number), &probe(&fake));
    let windows = |mib: u64| Windows { low: 0xc000_0000..0xc000_0000 + (mib << 20), high: 0..0, io: 0..0 };
    let placed = plan(&[card(1), card(2)], &windows(64)).unwrap();
    let addresses: Vec<_> =
        placed.iter().map(|card| card.bars.iter().map(|bar| bar.address).collect::<Vec<_>>()).collect();
    assert_eq!(addresses, [[0xc000_0000, 0xc100_0000], [0xc200_0000, 0xc300_0000]]);
    assert_eq!(placed[0].port.memory, Some(0xc000_0000..=0xc10f_ffff));
    program(&fake, &placed[1]);
    assert_eq!((read32(&fake, 0x10), read32(&fake, regs::ROM_ADDRESS)), (0xc200_0000, 0xc300_0000));
    let placed = plan(&[card(1), card(2)], &windows(32)).unwrap();
    assert_eq!((placed[0].bars.len(), placed[0].port.memory.clone()), (1, Some(0xc000_0000..=0xc0ff_ffff)));
    assert!(plan(&[card(1), card(2)], &windows(31)).is_err());
}

#[test]
fn programs_bars_and_ports() {
    let fake = Fake::new([(0xff00_0000, 0), (0, 0), (0, 0xc), (0xffff_ffc0, 0), (0, 0), (0, 0)]);
    let request = function("f", Some(1), &probe(&fake));
    let windows = Windows {
        low: 0xc000_0000..0xfec0_0000,
        high: 0x40_0000_0000..0x100_0000_0000,
        io: 0x1000..0x1_0000,
    };
    let placed = plan(&[request], &windows).unwrap();
    program(&fake, &placed[0]);
    enable(&fake);
    assert_eq!(read32(&fake, 0x10), 0xc000_0000);
    assert_eq!(read32(&fake, 0x18), 0xc);
    assert_eq!(read32(&fake, 0x1c), 0x40);
    assert_eq!(read16(&fake, 0x04), 0b111);

    let port = Fake::new([(0, 0); 6]);
    let port = Fake { bars: [(u32::MAX, 0); 6], ..port };
    program_port(&port, &placed[0].port);
    assert_eq!((read16(&port, 0x20), read16(&port, 0x22)), (0xc000, 0xc0f0));
    assert_eq!((read16(&port, 0x24), read16(&port, 0x26)), (0, 0xfff0));
    assert_eq!((read32(&port, 0x28), read32(&port, 0x2c)), (0x40, 0x7f));
    program_port(&port, &PortWindows::default());
    assert!(read16(&port, 0x20) > read16(&port, 0x22));
    assert!(read16(&port, 0x24) > read16(&port, 0x26));
}

#[test]
fn chooses_the_window() {
    fn check(slot: Option<u8>, request: BarRequest, expect: u64) {
        let windows = Windows {
            low: 0xc000_0000..0xd000_0000,
            high: 0x1_0000_0000..0x2_0000_0000,
            io: 0x1000..0x1_0000,
        };
        let placed = plan(&[function("f", slot, &[request])], &windows).unwrap();
        assert_eq!(placed[0].bars[0].address, expect, "{request:?}");
    }
    check(Some(1), bar(0, 4096, false, false), 0xc000_0000);
    check(Some(1), bar(0, 4096, false, true), 0xc000_0000);
    check(Some(1), bar(0, 4096, true, false), 0xc000_0000);
    check(Some(1), bar(0, 4096, true, true), 0x1_0000_0000);
    check(None, bar(0, 4096, true, false), 0x1_0000_0000);
    check(None, bar(0, 4096, false, true), 0xc000_0000);
    // With no high window.
    let windows = Windows { low: 0xc000_0000..0xd000_0000, high: 0..0, io: 0x1000..0x1_0000 };
    let request = function("f", Some(1), &[bar(0, 4096, true, true), bar(2, 8192, false, false)]);
    let placed = plan(&[request], &windows).unwrap();
    assert_eq!((placed[0].bars[0].address, placed[0].bars[1].address), (0xc000_2000, 0xc000_0000));
    assert_eq!(placed[0].port.memory, Some(0xc000_0000..=0xc00f_ffff));
    assert_eq!(placed[0].port.prefetchable, None);
}

#[test]
fn io_bars_get_ports_while_there_are_any() {
    let windows = Windows { low: 0xc000_0000..0xd000_0000, high: 0..0, io: 0x1000..0x1_0000 };
    let card = |number| function("card", Some(number), &[bar(0, 4096, false, false), io(1, 64), io(2, 256)]);
    let placed = plan(&(1..=20).map(card).collect::<Vec<_>>(), &windows).unwrap();
    for (index, placed) in placed.iter().enumerate() {
        let ports: Vec<_> = placed.bars[1..].iter().map(|bar| (bar.request.index, bar.address)).collect();
        let base = 0x1000 * (index as u64 + 1);
        match index < 15 {
            true => assert_eq!(
                (ports, placed.port.io.clone()),
                (vec![(1, base + 256), (2, base)], Some(base..=base + 0xfff))
            ),
            false => assert_eq!((ports, placed.port.io.clone()), (vec![], None)),
        }
        assert!(placed.port.memory.is_some());
    }
    let port = Fake { bars: [(u32::MAX, 0); 6], ..Fake::new([(0, 0); 6]) };
    program_port(&port, &placed[2].port);
    assert_eq!(read16(&port, regs::IO_BASE), 0x3030);
    program_port(&port, &placed[19].port);
    assert_eq!(read16(&port, regs::IO_BASE), 0x00f0);
    let error = plan(&[], &Windows { io: 0..0x1_0001, ..windows.clone() }).unwrap_err().to_string();
    assert!(error.contains("65536 ports"), "{error}");
    let error = plan(&[function("a", None, &[io(3, 2)])], &windows).unwrap_err().to_string();
    assert!(error.contains("BAR 3 of a has the size 0x2"), "{error}");
}

#[test]
fn functions_of_a_slot_share_its_windows() {
    let windows =
        Windows { low: 0xc000_0000..0xd000_0000, high: 0x1_0000_0000..0x2_0000_0000, io: 0x1000..0x1_0000 };
    let requests = [
        function("gpu", Some(1), &[bar(0, 16 << 20, false, false), bar(1, 1 << 30, true, true)]),
        function("disk", Some(2), &[bar(0, 1 << 20, false, false)]),
        function("audio", Some(1), &[bar(0, 16 << 10, false, false)]),
    ];
    let placed = plan(&requests, &windows).unwrap();
    assert_eq!(placed[0].port, placed[2].port);
    assert_eq!(placed[0].port.memory, Some(0xc000_0000..=0xc10f_ffff));
    assert_eq!(placed[0].port.prefetchable, Some(0x1_0000_0000..=0x1_3fff_ffff));
    assert_eq!(placed[2].bars[0].address, 0xc100_0000);
    assert_eq!(placed[1].port.memory, Some(0xc110_0000..=0xc11f_ffff));
    let narrow = Windows { low: 0xc000_0000..0xc100_0000, high: windows.high, io: 0x1000..0x1_0000 };
    let error = plan(&requests, &narrow).unwrap_err().to_string();
    assert!(error.contains("BARs of gpu (BAR 0: 0x1000000 bytes, BAR 0 of audio: 0x4000 bytes)"), "{error}");
}

#[test]
fn says_what_does_not_fit_and_by_how_much() {
    fn check(functions: &[FunctionRequest], expect: &str) {
        let windows = Windows {
            low: 0xf000_0000..0xf100_0000,
            high: 0x1_0000_0000..0x1_4000_0000,
            io: 0x1000..0x1_0000,
        };
        let error = plan(functions, &windows).unwrap_err().to_string();
        assert!(error.contains(expect), "{error}");
    }
    check(
        &[function("gpu", Some(1), &[bar(1, 256 << 30, true, true)])],
        "BARs of gpu (BAR 1: 0x4000000000 bytes) don't fit into the guest's 64-bit window: 0x4000000000 bytes at \
         multiples of 0x4000000000 are needed, the window lacks 0x7ec0000000 bytes",
    );
    check(
        &[
            function("a", Some(1), &[bar(0, 16 << 20, false, false)]),
            function("b", Some(2), &[bar(0, 4096, false, false)]),
        ],
        "BARs of b (BAR 0: 0x1000 bytes) don't fit into the guest's window below 4 GiB: 0x100000 bytes at \
         multiples of 0x100000 are needed, the window lacks 0x100000 bytes",
    );
    check(
        &[function("a", Some(1), &[bar(0, 1 << 63, true, true), bar(2, 1 << 63, true, true)])],
        "don't fit",
    );
    check(&[function("a", Some(1), &[bar(3, 12, false, false)])], "BAR 3 of a has the size 0xc");
    check(&[function("a", Some(1), &[bar(3, 1 << 32, false, false)])], "BAR 3 of a has the size 0x100000000");
    let inverted = Windows { low: std::ops::Range { start: 2, end: 1 }, high: 0..0, io: 0x1000..0x1_0000 };
    assert!(plan(&[], &inverted).unwrap_err().to_string().contains("ends before"));
    let wide = Windows { low: 0..FOUR_GIB_AND_ONE, high: 0..0, io: 0x1000..0x1_0000 };
    assert!(plan(&[], &wide).unwrap_err().to_string().contains("above 4 GiB"));
}

#[test]
fn what_a_larger_bar_leaves_free_is_used() {
    let windows = Windows { low: 0..0, high: 1 << 32..1 << 40, io: 0..0 };
    let gpu = |number| {
        let bars = [bar(0, 256 << 30, true, true), bar(2, 32 << 20, true, true)];
        function("gpu", Some(number), &bars)
    };
    let card = function("card", Some(3), &[bar(0, 64 << 30, true, true)]);
    let placed = plan(&[card.clone(), gpu(1)], &windows).unwrap();
    assert_eq!((placed[0].bars[0].address, placed[1].bars[0].address), (64 << 30, 256 << 30));
    assert_eq!(placed[1].port.prefetchable, Some(256 << 30..=(512 << 30) + (32 << 20) - 1));
    let error = plan(&[gpu(1), gpu(2), card], &windows).unwrap_err().to_string();
    assert!(error.contains("lacks 0x2000000 bytes"), "{error}");
}

#[test]
fn what_the_processor_keeps_is_left_out() {
    fn check(ram_end: u64, bits: u8, reserved: std::ops::Range<u64>, expect: std::ops::Range<u64>) {
        assert_eq!(
            Windows::above(0..0, ram_end, bits).without(&reserved).high,
            expect,
            "{ram_end:#x} {reserved:x?}"
        );
    }
    const GIB: u64 = 1 << 30;
    let hyper_transport = |bits: u8| (1 << bits) - 12 * GIB..1 << bits;
    check(GIB, 46, 0..0, 4 * GIB..1 << 46);
    check(GIB, 48, hyper_transport(48), 4 * GIB..(1 << 48) - 12 * GIB);
    check(GIB, 48, hyper_transport(40), 1 << 40..1 << 48);
    check(GIB, 40, hyper_transport(40), 4 * GIB..1012 * GIB);
    check(1015 * GIB, 40, hyper_transport(40), 1015 * GIB..1015 * GIB);
}

const FOUR_GIB_AND_ONE: u64 = (1 << 32) + 1;

/// Functions in any order, several of some slots, with BARs of up to 1 << `most`: the largest that may be.
fn requests(most: u32) -> impl Strategy<Value = Vec<FunctionRequest>> {
    let bar = (4..=most, any::<bool>(), any::<bool>(), prop::bool::weighted(0.2));
    let function = (prop::option::of(0u8..8), prop::collection::vec(bar, 0..4)).prop_map(|(number, bars)| {
        let bars = bars.into_iter().enumerate().map(|(index, (log, wide, prefetchable, io))| BarRequest {
            index: if index == 3 { BarRequest::ROM } else { index as u8 * 2 },
            size: 1
                << match (io, wide) {
                    (true, _) => log.min(26) / 2,
                    (false, true) => log,
                    (false, false) => log.min(27),
                },
            wide: wide && !io && index != 3,
            prefetchable: prefetchable && !io && index != 3,
            io: io && index != 3,
        });
        let bars = bars.map(|bar| match bar.index {
            BarRequest::ROM => BarRequest { size: bar.size.clamp(2048, 16 << 20), ..bar },
            _ => bar,
        });
        FunctionRequest { name: "f".into(), slot: number.map(slot), bars: bars.collect() }
    });
    prop::collection::vec(function, 0..24).prop_map(|mut functions| {
        functions.iter_mut().zip(0..).for_each(|(function, number)| function.name = format!("f{number}"));
        functions
    })
}

proptest! {
    #[test]
    fn no_two_bars_overlap_and_all_lie_in_their_windows(
        functions in requests(27),
        low in 0u64..0xfff0_0000,
        low_size in 0u64..0x8000_0000,
        high in 0u64..1 << 40,
        high_size in 0u64..1 << 33,
    ) {
        let windows = Windows { low: low..(low + low_size).min(1 << 32), high: high..high + high_size, io: 0x1000..0x1_0000 };
        holds(&functions, &windows)?;
    }

    #[test]
    fn the_largest_bars_lie_within_the_physical_address_bits(
        functions in requests(45),
        shuffled in any::<prop::sample::Index>(),
        ram_end in prop_oneof![Just(1u64 << 30), 0u64..1 << 43],
        bits in 30u8..=60,
        reserved in prop_oneof![Just(0..0), (36u8..=52).prop_map(|bits| (1u64 << bits) - (12 << 30)..1 << bits)],
    ) {
        let windows = Windows::above(0xc000_0000..0xe000_0000, ram_end, bits).without(&reserved);
        holds(&functions, &windows)?;
        let limit = 1u128 << bits.clamp(33, Windows::MOST_BITS);
        prop_assert!(windows.high.start <= windows.high.end && u128::from(windows.high.end) <= limit);
        prop_assert!(windows.high.is_empty() || windows.high.start >= ram_end.max(1 << 32));
        prop_assert!(windows.high.end <= reserved.start || reserved.end <= windows.high.start || windows.high.is_empty() || reserved.is_empty());
        // No order of the functions fits better than another.
        let mut others = functions.clone();
        if !others.is_empty() {
            let middle = shuffled.index(others.len());
            others.rotate_left(middle);
            others[..middle].reverse();
        }
        prop_assert_eq!(plan(&functions, &windows).is_ok(), plan(&others, &windows).is_ok());
    }
}

/// That what is planned has no overlap, is naturally aligned, and lies in its window and behind its port, and that an error names
/// a function, and how much its window lacks.
fn holds(functions: &[FunctionRequest], windows: &Windows) -> Result<(), TestCaseError> {
    let placed_of = match plan(functions, windows) {
        Ok(placed) => placed,
        Err(error) => return lacks(functions, windows, error),
    };
    let is_rom = |bar: &BarRequest| bar.index == BarRequest::ROM;
    let roms = placed_of.iter().flat_map(|placed| &placed.bars).any(|bar| is_rom(&bar.request));
    let mut slots = Vec::new();
    let mut taken: Vec<(u64, u64)> = Vec::new();
    let mut forwarded: Vec<(u64, u64)> = Vec::new();
    let mut ports: Vec<(u64, u64)> = Vec::new();
    for (request, placed) in functions.iter().zip(&placed_of) {
        let wanted = |bar: &&BarRequest| !bar.io && (roms || !is_rom(bar));
        let placed_memory = placed.bars.iter().filter(|bar| !bar.request.io).count();
        prop_assert_eq!(request.bars.iter().filter(wanted).count(), placed_memory);
        for bar in placed.bars.iter().filter(|bar| bar.request.io) {
            let (start, end) = (bar.address, bar.address + bar.request.size);
            prop_assert!(start % bar.request.size == 0 && windows.io.start <= start && end <= windows.io.end);
            let forwarded =
                placed.port.io.as_ref().is_some_and(|io| *io.start() <= start && end - 1 <= *io.end());
            prop_assert!(forwarded || request.slot.is_none());
            ports.push((start, end));
        }
        let port = [&placed.port.memory, &placed.port.prefetchable];
        let first =
            functions.iter().position(|other| other.slot == request.slot).map(|at| &placed_of[at].port);
        prop_assert!(
            request.slot.is_none() || first == Some(&placed.port),
            "the functions of a slot share its port"
        );
        if request.slot.is_none() || !slots.contains(&request.slot) {
            forwarded.extend(port.into_iter().flatten().map(|range| (*range.start(), *range.end() + 1)));
        }
        slots.push(request.slot);
        for bar in placed.bars.iter().filter(|bar| !bar.request.io) {
            let (start, end) = (bar.address, bar.address + bar.request.size);
            prop_assert_eq!(start % bar.request.size, 0);
            let window = if bar.request.wide && end > 1 << 32 { &windows.high } else { &windows.low };
            let inside = |w: &std::ops::Range<u64>| w.start <= start && end <= w.end;
            prop_assert!(inside(window) || (bar.request.wide && inside(&windows.high)));
            if request.slot.is_some() {
                let port = port.into_iter().flatten().any(|r| *r.start() <= start && end - 1 <= *r.end());
                prop_assert!(port, "{:x?} is not forwarded by {:x?}", bar, placed.port);
            }
            taken.push((start, end));
        }
    }
    ports.sort_unstable();
    prop_assert!(ports.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{ports:x?}");
    for list in [&mut taken, &mut forwarded] {
        list.sort_unstable();
        let overlap = list.windows(2).any(|pair| pair[0].1 > pair[1].0);
        // The low and the high window may themselves overlap here; then so may what is in them.
        let disjoint = windows.low.end <= windows.high.start || windows.high.end <= windows.low.start;
        prop_assert!(!overlap || !disjoint);
    }
    Ok(())
}

/// That a window which is larger by what it lacks has room for the function that did not fit.
fn lacks(
    functions: &[FunctionRequest],
    windows: &Windows,
    error: PlacementError,
) -> Result<(), TestCaseError> {
    let PlacementError::NoRoom { function, kind, needed, missing, alignment, .. } = &error else {
        return Err(TestCaseError::fail(format!("{error}")));
    };
    prop_assert!(*missing > 0 && *needed > 0 && alignment.is_power_of_two());
    let mut larger = windows.clone();
    let named = functions.iter().find(|other| other.name == *function).expect("one of them");
    let slot = |other: &&FunctionRequest| {
        other.name == named.name || named.slot.is_some() && other.slot == named.slot
    };
    let functions = match kind {
        // Others that did not fit there, and do below 4 GiB, would be the first to have the room.
        WindowKind::High => {
            larger.high.end = larger.high.end.saturating_add(*missing);
            functions.iter().filter(slot).cloned().collect()
        }
        WindowKind::Low => {
            larger.low.end += *missing;
            functions.to_vec()
        }
        WindowKind::Io => return Err(TestCaseError::fail("I/O BARs need no place")),
    };
    // Such a window may be impossible, which is another error.
    let lacks = plan(&functions, &larger).err();
    let is_same = matches!(&lacks, Some(PlacementError::NoRoom { function: other, kind: where_, .. }) if (other, where_) == (function, kind));
    prop_assert!(!is_same, "{lacks:?} after {error:?}");
    Ok(())
}
