//! Peer-to-peer DMA: what is mapped for a guest's other devices, and that none of it outlives its BAR.

use std::thread::sleep;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::PciAddress;
use crate::guest::{DeviceError, DeviceOptions, PeerDma, PeerReport};
use crate::sim::Fault;

const MEMORY: u16 = 0b10;
const RAM: u64 = 0x10_0000;

/// A guest with some devices, which are not attached.
struct Guest {
    peers: PeerDma,
    devices: Vec<(Arc<VfioPciDevice>, Arc<SimDevice>)>,
    vmm: Arc<SimVmm>,
    space: Arc<SimSpace>,
    log: SimLog,
}

impl Guest {
    /// BAR 0: 1 MiB; BAR 2: 64 KiB, of which the MSI-X table is left out; BAR 4: 256 bytes.
    fn new(count: u8) -> Self {
        let (log, peers) = (SimLog::default(), PeerDma::new().unwrap());
        let space = SimSpace::new(vec![0..=0xfedf_ffff, 0xfef0_0000..=(1 << 39) - 1], &log);
        let vmm = SimVmm::new(&[(0, RAM)], &log).unwrap();
        let device = |number| {
            let address = PciAddress::new(0, 0x65, number, 0).unwrap();
            let sim = builder(&config(4), 4, false).log(&log).build(address, space.clone()).unwrap();
            let options = DeviceOptions::default().peers(Some(peers.clone()));
            (VfioPciDevice::with_options(sim.clone(), vmm.clone(), options).unwrap(), sim)
        };
        Self { devices: (0..count).map(device).collect(), peers, vmm, space, log }
    }

    fn device(&self, number: usize) -> &VfioPciDevice {
        &self.devices[number].0
    }

    /// Has a device decode BAR 0 at `wide` and BAR 2 at `narrow`.
    fn place(&self, number: usize, wide: u64, narrow: u32) {
        self.command(number, 0);
        let device = self.device(number);
        device.config_write(0x10, &(wide as u32).to_le_bytes());
        device.config_write(0x14, &((wide >> 32) as u32).to_le_bytes());
        device.config_write(0x18, &narrow.to_le_bytes());
        self.command(number, MEMORY);
    }

    fn command(&self, number: usize, command: u16) {
        self.device(number).config_write(0x04, &command.to_le_bytes());
    }

    /// What is mapped for DMA beside RAM, joined where one piece follows another, once nothing is on its way.
    fn mapped(&self) -> (PeerReport, Vec<(u64, u64)>) {
        let until = Instant::now() + Duration::from_secs(60);
        let mut report = self.peers.report();
        while report.waiting > 0 && Instant::now() < until {
            sleep(Duration::from_millis(1));
            report = self.peers.report();
        }
        let mut joined: Vec<(u64, u64)> = Vec::new();
        for (start, len) in self.space.maps().into_iter().filter(|(start, _)| *start >= RAM) {
            match joined.last_mut() {
                Some((before, so_far)) if *before + *so_far == start => *so_far += len,
                _ => joined.push((start, len)),
            }
        }
        (report, joined)
    }
}

/// The ranges of lines `dma map 0xSTART+0xLEN` and the like.
fn range(line: &str, what: &str) -> Option<(u64, Option<u64>)> {
    let number = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).unwrap();
    let rest = line.strip_prefix(what)?;
    Some(match rest.split_once('+') {
        Some((start, len)) => (number(start), Some(number(len))),
        None => (number(rest), None),
    })
}

/// Checks an order of events: what is mapped for DMA is what the guest reaches, from after that is mapped into it until before it
/// is taken from it.
fn check_order(lines: &[String]) {
    let (mut guest, mut dma) = (Vec::new(), Vec::<(u64, u64)>::new());
    for line in lines {
        if let Some((start, Some(len))) = range(line, "guest map ") {
            guest.push((start, len));
        } else if let Some((start, Some(len))) = range(line, "guest unmap ") {
            guest.retain(|part| *part != (start, len));
            let left = dma.iter().find(|(from, size)| *from < start + len && start < from + size);
            assert_eq!(left, None, "{line} before it is unmapped for DMA: {lines:#?}");
        } else if let Some((start, Some(len))) = range(line, "dma map ").filter(|(start, _)| *start >= RAM) {
            let is_within = |(from, size): &(u64, u64)| *from <= start && start + len <= from + size;
            assert!(guest.iter().any(is_within), "{line}, where the guest has nothing: {lines:#?}");
            dma.push((start, len));
        } else if let Some((start, None)) = range(line, "dma unmap ") {
            dma.retain(|(from, _)| *from != start);
        }
    }
}

const TWO: [(u64, u64); 3] = [(0x2_0000_0000, 0x10_0000), (0xc000_0000, 0x2000), (0xc000_4000, 0xc000)];
const WAY: u64 = 0x3_0000_0000;

#[test]
fn bars_are_mapped_for_others_and_unmapped_before_they_go() {
    let guest = Guest::new(2);
    guest.device(0).attach().unwrap();
    guest.place(0, 0x2_0000_0000, 0xc000_0000);
    assert_eq!(guest.mapped(), (PeerReport::default(), vec![]), "nobody is there to map for");

    guest.device(1).attach().unwrap();
    let sum = 0x10_e000;
    let of_one = PeerReport { mapped: sum, ..PeerReport::default() };
    let mut two = TWO.to_vec();
    two.sort_unstable();
    assert_eq!(guest.mapped(), (of_one.clone(), two.clone()));
    guest.place(1, WAY, 0xc100_0000);
    assert_eq!(guest.mapped().0.mapped, 2 * sum);

    // One moves, sleeps, is reset, goes.
    guest.place(1, WAY + 0x1000_0000, 0xc200_0000);
    let moved = guest.mapped();
    assert!(moved.0.mapped == 2 * sum && moved.1.contains(&(WAY + 0x1000_0000, 0x10_0000)), "{moved:x?}");
    guest.command(1, 0);
    assert_eq!(guest.mapped(), (of_one.clone(), two.clone()));
    guest.command(1, MEMORY);
    guest.device(1).config_write(PM + 4, &[3, 0]);
    assert_eq!(guest.mapped(), (of_one.clone(), two.clone()), "it is in D3hot");
    guest.device(1).config_write(PM + 4, &[0, 0]);
    assert_eq!(guest.mapped().0.mapped, 2 * sum);
    guest.device(1).reset().unwrap();
    assert_eq!(guest.mapped(), (of_one, two));
    guest.place(1, WAY, 0xc100_0000);
    guest.mapped();

    // Pulled, while the first is in use.
    guest.devices[1].1.vanish();
    guest.devices[1].1.want_back();
    guest.device(1).detach().unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    while !guest.mapped().1.is_empty() {
        assert!(Instant::now() < until, "with one device nothing stays mapped");
        sleep(Duration::from_millis(1));
    }
    assert_eq!(guest.mapped().0, PeerReport::default());
    guest.device(0).detach().unwrap();
    assert_eq!(guest.space.maps(), []);
    check_order(&guest.log.take());
}

#[test]
fn a_refusal_is_told_and_harms_nobody() {
    let guest = Guest::new(2);
    (0..2).for_each(|number| guest.device(number).attach().unwrap());
    // Beyond the IOMMU's addresses.
    guest.place(0, 1 << 39, 0xc000_0000);
    let (report, mapped) = guest.mapped();
    assert_eq!((report.mapped, report.refused), (0xe000, 0x10_0000));
    assert!(report.reason.unwrap().contains("above 0x7fffffffff"));
    assert_eq!(mapped, [(0xc000_0000, 0x2000), (0xc000_4000, 0xc000)]);

    // The second piece of one is refused: all of it is.
    guest.place(1, WAY, 0xc100_0000);
    guest.mapped();
    guest.command(0, 0);
    guest.command(1, 0);
    assert_eq!(guest.mapped().1, []);
    guest.space.fail(Fault::MapDma, 1);
    guest.place(0, 0x2_0000_0000, 0xc000_0000);
    let (report, _) = guest.mapped();
    assert!(report.mapped + report.refused == 0x10_e000 && report.refused >= 0x10_0000, "{report:?}");
    guest.space.heal();
    // It is tried again when something else has changed.
    guest.place(1, WAY, 0xc100_0000);
    guest.command(1, 0);
    assert_eq!(guest.mapped().0, PeerReport { mapped: 0x10_e000, ..PeerReport::default() });
    (0..2).for_each(|number| guest.device(number).detach().unwrap());
    check_order(&guest.log.take());
}

#[test]
fn a_bar_that_stays_mapped_keeps_its_device() {
    let guest = Guest::new(2);
    (0..2).for_each(|number| guest.device(number).attach().unwrap());
    guest.place(0, 0x2_0000_0000, 0xc000_0000);
    guest.mapped();
    guest.space.fail(Fault::UnmapDma, 0);
    // The guest turns decoding off, which is not done then.
    guest.log.take();
    guest.command(0, 0);
    let hardware = guest.devices[0].1.config()[4];
    assert_eq!(u16::from(hardware) & MEMORY, MEMORY, "it still decodes");
    let error = guest.device(0).detach().unwrap_err();
    assert!(matches!(error, DeviceError::PeersReach { .. }), "{error}");
    guest.space.heal();
    guest.device(0).detach().unwrap();
    guest.device(1).detach().unwrap();
    assert_eq!(guest.space.maps(), []);
}

#[test]
fn clones_are_equal_and_no_others() {
    let (one, other) = (PeerDma::new().unwrap(), PeerDma::new().unwrap());
    assert_eq!(one, one.clone());
    assert_ne!(one, other);
}

/// What may happen to a device.
#[derive(Clone, Debug)]
enum Happens {
    Attach,
    Detach,
    Place(u8, u8),
    Command(u16),
    Power(u8),
    Reset,
    Vanish,
    Fail(u8),
    Heal,
    Wait,
}

fn happens() -> impl Strategy<Value = Happens> {
    prop_oneof![
        3 => Just(Happens::Attach),
        2 => Just(Happens::Detach),
        4 => (0..6u8, 0..6u8).prop_map(|(wide, narrow)| Happens::Place(wide, narrow)),
        2 => (0..8u16).prop_map(Happens::Command),
        1 => prop_oneof![Just(0), Just(3)].prop_map(Happens::Power),
        1 => Just(Happens::Reset),
        1 => Just(Happens::Vanish),
        1 => (0..4u8).prop_map(Happens::Fail),
        2 => Just(Happens::Heal),
        2 => Just(Happens::Wait),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Whatever happens in whatever order, with things that fail: no BAR is mapped for DMA where or when the guest does not have it,
    /// and none when its device is detached. Places overlap each other and RAM.
    #[test]
    fn no_mapping_outlives_its_bar(events in prop::collection::vec((0..3usize, happens()), 1..60)) {
        let guest = Guest::new(3);
        for (number, event) in &events {
            let (device, sim) = &guest.devices[*number];
            match event {
                Happens::Attach => drop(device.attach()),
                Happens::Detach => {
                    // What could not be unmapped is said.
                    drop(device.detach());
                }
                Happens::Place(wide, narrow) => {
                    guest.place(*number, u64::from(*wide) * 0x8_0000, 0xc000_0000 + u32::from(*narrow) * 0x8000);
                }
                Happens::Command(command) => guest.command(*number, *command),
                Happens::Power(state) => device.config_write(PM + 4, &[*state, 0]),
                Happens::Reset => drop(device.reset()),
                Happens::Vanish => {
                    sim.vanish();
                    sim.want_back();
                }
                Happens::Fail(0) => guest.space.fail(Fault::MapDma, 3),
                Happens::Fail(1) => guest.space.fail(Fault::UnmapDma, 0),
                Happens::Fail(2) => guest.vmm.fail(Fault::MapGuest),
                Happens::Fail(_) => guest.vmm.fail(Fault::UnmapGuest),
                Happens::Heal => {
                    guest.space.heal();
                    guest.vmm.heal();
                }
                Happens::Wait => drop(guest.mapped()),
            }
        }
        guest.space.heal();
        guest.vmm.heal();
        for (device, _) in &guest.devices {
            drop(device.detach());
            // A second attempt does what the first could not do.
            device.detach().unwrap();
        }
        prop_assert_eq!(guest.space.maps(), vec![]);
        prop_assert_eq!(guest.vmm.maps(), vec![]);
        // What can't be unmapped for DMA is taken from the guest all the same.
        if !events.iter().any(|(_, event)| matches!(event, Happens::Fail(1))) {
            check_order(&guest.log.take());
        }
    }
}
