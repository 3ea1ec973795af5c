use std::cell::RefCell;
use std::fs::File;
use std::net::UdpSocket;
use std::os::fd::OwnedFd;
use std::process::Command;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use virtio_queue::{Queue, QueueT as _};
use vm_memory::{Bytes as _, GuestAddress};

use super::datapath::{Datapath, Next};
use super::*;
use crate::vmm::Stop;

const SIZE: u16 = 8;
/// The receiving queue's rings; the transmitting queue's follow.
const RINGS: [u64; 2] = [0x1000, 0x4000];
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const DATA: u64 = 0x8000;
const RAM: usize = 0x4_0000;
const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// A datapath whose queues are served in the test's own thread, and the other end of its tap.
struct Bench<'a> {
    datapath: Datapath<Box<dyn Fn(u16) + 'a>>,
    memory: GuestMemoryMmap,
    peer: Tap,
    stop: Stop,
}

fn queue(rings: u64) -> Queue {
    let mut queue = Queue::new(SIZE).unwrap();
    queue.try_set_desc_table_address(GuestAddress(rings)).unwrap();
    queue.try_set_avail_ring_address(GuestAddress(rings + AVAILABLE)).unwrap();
    queue.try_set_used_ring_address(GuestAddress(rings + USED)).unwrap();
    queue.set_ready(true);
    queue
}

impl<'a> Bench<'a> {
    fn new(mergeable: bool, told: &'a RefCell<Vec<u16>>) -> Self {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let tap = |end: OwnedFd| Tap::of(File::from(end));
        Self::at(Arc::new(tap(pair.0)), tap(pair.1), mergeable, told)
    }

    fn at(tap: Arc<Tap>, peer: Tap, mergeable: bool, told: &'a RefCell<Vec<u16>>) -> Self {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), RAM)]).unwrap();
        let queues = RINGS.map(|rings| Some(queue(rings)));
        let notify: Box<dyn Fn(u16) + 'a> = Box::new(|queue| told.borrow_mut().push(queue));
        let datapath = Datapath::new(tap, memory.clone(), queues, mergeable, notify);
        Self { datapath, memory, peer, stop: Stop::new().unwrap() }
    }

    /// Puts descriptors into a queue's table from `at` on, and the first into its ring.
    fn offer(&self, queue: u16, at: u16, descriptors: &[(u64, u32)]) {
        let (rings, flags) = (RINGS[usize::from(queue)], if queue == RECEIVE { WRITE } else { 0 });
        for (&(address, len), index) in descriptors.iter().zip(at..) {
            let more = if usize::from(index - at) + 1 == descriptors.len() { 0 } else { NEXT };
            let slot = GuestAddress(rings + u64::from(index) * 16);
            let word = u64::from(len) | u64::from(flags | more) << 32 | u64::from(index + 1) << 48;
            self.memory.write_obj([address, word], slot).unwrap();
        }
        let index = GuestAddress(rings + AVAILABLE + 2);
        let count: u16 = self.memory.read_obj(index).unwrap();
        let slot = rings + AVAILABLE + 4 + u64::from(count % SIZE) * 2;
        self.memory.write_obj(at, GuestAddress(slot)).unwrap();
        self.memory.write_obj(count.wrapping_add(1), index).unwrap();
    }

    /// How many buffers of a queue were used.
    fn count(&self, queue: u16) -> u16 {
        self.memory.read_obj(GuestAddress(RINGS[usize::from(queue)] + USED + 2)).unwrap()
    }

    /// What a queue's used ring has: heads and lengths.
    fn used(&self, queue: u16) -> Vec<(u32, u32)> {
        let (ring, count) = (RINGS[usize::from(queue)] + USED, self.count(queue));
        let element =
            |slot: u16| self.memory.read_obj::<[u32; 2]>(GuestAddress(ring + 4 + u64::from(slot % SIZE) * 8));
        (count.saturating_sub(SIZE)..count).map(|slot| element(slot).unwrap().into()).collect()
    }

    fn read(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read_slice(&mut bytes, GuestAddress(address)).unwrap();
        bytes
    }
}

/// A frame with its header.
fn frame(len: usize) -> Vec<u8> {
    (0..len).map(|at| if at < HEADER { 0 } else { at as u8 }).collect()
}

#[test]
fn a_driver_sends_frames_in_pieces() {
    let told = RefCell::default();
    let mut bench = Bench::new(true, &told);
    let sent = frame(1500);
    bench.memory.write_slice(&sent, GuestAddress(DATA)).unwrap();
    bench.offer(TRANSMIT, 0, &[(DATA, 12), (DATA + 12, 88), (DATA + 100, 1400)]);
    // Shorter than its header: lost.
    bench.offer(TRANSMIT, 3, &[(DATA, 11)]);
    bench.offer(TRANSMIT, 4, &[(DATA, 1500)]);
    assert_eq!(bench.datapath.transmit(&bench.stop).unwrap(), Next::Driver);
    let mut got = vec![0; 70_000];
    for _ in 0..2 {
        assert_eq!(bench.peer.receive(&mut got), Ok(1500));
        assert_eq!(got[..1500], sent);
    }
    assert_eq!(bench.peer.receive(&mut got), Err(rustix::io::Errno::AGAIN));
    assert_eq!(bench.used(TRANSMIT), [(0, 0), (3, 0), (4, 0)]);
    assert_eq!(*told.borrow(), [TRANSMIT], "once for all");
}

#[test]
fn a_received_frame_fills_as_many_buffers_as_it_takes() {
    let told = RefCell::default();
    let mut bench = Bench::new(true, &told);
    let sent = frame(1000);
    bench.peer.send(&sent).unwrap();
    // No buffer, too few of them, and enough.
    assert_eq!(bench.datapath.receive(&bench.stop).unwrap(), Next::Driver);
    bench.offer(RECEIVE, 0, &[(DATA, 300), (DATA + 300, 100)]);
    bench.offer(RECEIVE, 2, &[(DATA + 400, 400)]);
    assert_eq!(bench.datapath.receive(&bench.stop).unwrap(), Next::Driver);
    assert_eq!((bench.used(RECEIVE), told.borrow().len()), (vec![], 0));
    bench.offer(RECEIVE, 3, &[(DATA + 800, 400)]);
    assert_eq!(bench.datapath.receive(&bench.stop).unwrap(), Next::Tap);
    assert_eq!(bench.used(RECEIVE), [(0, 400), (2, 400), (3, 200)]);
    assert_eq!(*told.borrow(), [RECEIVE]);
    let mut expect = sent;
    expect[10] = 3;
    assert_eq!(bench.read(DATA, 1000), expect);
}

/// The driver may look at the used ring at any time.
#[test]
fn all_buffers_of_a_frame_are_told_together() {
    let told = RefCell::default();
    let mut bench = Bench::new(true, &told);
    // Wraps around the ring and around its index.
    for round in 0..20_000u32 {
        for part in 0..4 {
            bench.offer(RECEIVE, part, &[(DATA + u64::from(part) * 100, 100)]);
        }
        bench.peer.send(&frame(400)).unwrap();
        assert_eq!(bench.datapath.receive(&bench.stop).unwrap(), Next::Tap);
        assert_eq!(bench.count(RECEIVE), (round as u16 + 1).wrapping_mul(4));
    }
}

#[test]
fn a_driver_that_asked_for_an_interrupt_within_a_frame_gets_it() {
    for event in 0..3u16 {
        let told = RefCell::default();
        let mut bench = Bench::new(true, &told);
        bench.datapath.set_event_idx_for_test();
        bench.memory.write_obj(event, GuestAddress(RINGS[0] + AVAILABLE + 4 + u64::from(SIZE) * 2)).unwrap();
        for part in 0..3 {
            bench.offer(RECEIVE, part, &[(DATA + u64::from(part) * 100, 100)]);
        }
        bench.peer.send(&frame(300)).unwrap();
        bench.datapath.receive(&bench.stop).unwrap();
        assert_eq!(*told.borrow(), [RECEIVE], "{event}");
    }
}

#[test]
fn a_frame_that_never_fits_is_lost_and_the_next_one_comes() {
    for (mergeable, buffers) in [(false, 1), (true, SIZE)] {
        let told = RefCell::default();
        let mut bench = Bench::new(mergeable, &told);
        for index in 0..buffers {
            bench.offer(RECEIVE, index, &[(DATA + u64::from(index) * 100, 100)]);
        }
        bench.peer.send(&frame(2000)).unwrap();
        bench.peer.send(&frame(100)).unwrap();
        assert_eq!(bench.datapath.receive(&bench.stop).unwrap(), Next::Tap);
        assert_eq!(bench.used(RECEIVE), [(0, 100)], "{mergeable}");
    }
}

#[test]
fn a_device_that_is_to_stop_begins_no_frame() {
    let told = RefCell::default();
    let mut bench = Bench::new(true, &told);
    bench.offer(TRANSMIT, 0, &[(DATA, 100)]);
    bench.offer(RECEIVE, 0, &[(DATA, 2000)]);
    bench.peer.send(&frame(100)).unwrap();
    bench.stop.request();
    bench.datapath.transmit(&bench.stop).unwrap();
    bench.datapath.receive(&bench.stop).unwrap();
    assert_eq!((bench.used(TRANSMIT), bench.used(RECEIVE)), (vec![], vec![]));
    assert_eq!(bench.read(DATA, 100), [0; 100]);
}

#[test]
fn work_at_a_time_is_bounded() {
    let told = RefCell::default();
    let mut bench = Bench::new(true, &told);
    // A driver that says it has more than the ring holds breaks it; one whose ring is full has as much as it can have.
    for index in 0..SIZE {
        bench.offer(TRANSMIT, index, &[(DATA, 100)]);
    }
    assert_eq!(bench.datapath.transmit(&bench.stop).unwrap(), Next::Driver);
    bench.memory.write_obj(3 * SIZE, GuestAddress(RINGS[1] + AVAILABLE + 2)).unwrap();
    assert!(bench.datapath.transmit(&bench.stop).is_err());
}

#[test]
fn broken_receive_buffers_are_errors() {
    for descriptors in [&[(DATA, 11)][..], &[(u64::MAX - 5, 100)], &[(RAM as u64 - 10, 100)]] {
        let told = RefCell::default();
        let mut bench = Bench::new(true, &told);
        bench.offer(RECEIVE, 0, descriptors);
        bench.peer.send(&frame(100)).unwrap();
        assert!(bench.datapath.receive(&bench.stop).is_err(), "{descriptors:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(512) })]
    #[test]
    fn no_queue_harms(
        table in prop::collection::vec((0u64..RAM as u64 + 0x1000, 0u32..0x3000, 0u16..8, 0u16..12), 2 * SIZE as usize),
        ring in prop::collection::vec(0u16..12, 2 * SIZE as usize),
        index in (0u16..12, 0u16..12),
        frames in prop::collection::vec(0usize..3000, 0..6),
        mergeable in any::<bool>(),
        event_idx in any::<bool>(),
    ) {
        let told = RefCell::default();
        let mut bench = Bench::new(mergeable, &told);
        if event_idx {
            bench.datapath.set_event_idx_for_test();
        }
        for (slot, (address, len, flags, next)) in table.into_iter().enumerate() {
            let at = GuestAddress(RINGS[slot / usize::from(SIZE)] + (slot % usize::from(SIZE)) as u64 * 16);
            let word = u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48;
            bench.memory.write_obj([address, word], at).unwrap();
        }
        for (rings, (ring, index)) in RINGS.iter().zip(ring.chunks(SIZE.into()).zip([index.0, index.1])) {
            for (slot, head) in ring.iter().enumerate() {
                bench.memory.write_obj(*head, GuestAddress(rings + AVAILABLE + 4 + slot as u64 * 2)).unwrap();
            }
            bench.memory.write_obj(index, GuestAddress(rings + AVAILABLE + 2)).unwrap();
        }
        for len in frames {
            // An empty one would be the end of the stream to a socket.
            bench.peer.send(&frame(len + 1)).unwrap();
        }
        // It may succeed or fail, but it ends.
        for _ in 0..4 {
            let _ = bench.datapath.transmit(&bench.stop);
            let _ = bench.datapath.receive(&bench.stop);
        }
    }
}

/// Gives this test's thread a network of its own with a tap that has this address; `None` where that can't be had.
fn network_with_tap(name: &str, address: &str) -> Option<()> {
    if let Err(error) = sys::leave_network() {
        println!("skipped: this user can have no network of its own: {error}");
        return None;
    }
    for arguments in [
        &["tuntap", "add", "dev", name, "mode", "tap"][..],
        &["address", "add", address, "dev", name],
        &["link", "set", name, "up"],
    ] {
        let ran = Command::new("ip").args(arguments).output();
        if !ran.as_ref().is_ok_and(|ran| ran.status.success()) {
            println!("skipped: `ip {}`: {ran:?}", arguments.join(" "));
            return None;
        }
    }
    Some(())
}

#[test]
fn a_tap_that_cannot_be_had_is_told_with_what_to_do() {
    if network_with_tap("t0", "10.9.0.1/24").is_none() {
        return;
    }
    let error = |name: &str| Tap::open(name).err().unwrap_or_default();
    let make = "`ip tuntap add dev t1 mode tap user USER && ip link set t1 up`";
    assert_eq!(error("t1"), format!("the host has no network interface t1; make it with {make}"));
    assert!(error("lo").starts_with("lo is no tap; name another interface"), "{}", error("lo"));
    let held = Tap::open("t0").unwrap();
    assert_eq!((held.name(), held.mtu()), ("t0", 1500));
    assert_eq!(error("t0"), "another process uses it; end that, or name another tap");
    drop(held);
    Tap::open("t0").unwrap();
    // One for several queues, by one of them.
    let several =
        Command::new("ip").args(["tuntap", "add", "dev", "t2", "mode", "tap", "multi_queue"]).status();
    assert!(several.unwrap().success());
    let log = crate::log::limit::testing::logged(|| drop(Tap::open("t2").unwrap()));
    assert!(log.contains("t2 is down") && log.contains("`ip link set t2 up`"), "{log}");
    let net = |vhost| config::Net { tap: "t0".into(), mac: None, vhost };
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), RAM)]).unwrap();
    let mac = MacAddress([2, 0, 0, 0, 0, 1]);
    let device = NetDevice::open(&net(Some(false)), mac, &memory).unwrap();
    assert_eq!(device.config(), [2, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0xdc, 5]);
    drop(device);
    if !std::path::Path::new("/dev/vhost-net").exists() {
        let error = NetDevice::open(&net(Some(true)), mac, &memory).err().unwrap().to_string();
        assert!(
            error.contains("tap t0: /dev/vhost-net can't be opened") && error.contains("modprobe vhost_net"),
            "{error}"
        );
        NetDevice::open(&net(None), mac, &memory).unwrap();
    }
}

/// An Ethernet frame to all stations with a UDP packet from 10.9.0.2 to 10.9.0.1, whose checksum is left to the host.
fn packet(port: u16, payload: &[u8]) -> Vec<u8> {
    let mut header = [0; HEADER];
    // VIRTIO_NET_HDR_F_NEEDS_CSUM, from the UDP header on, 6 bytes into it.
    header[0] = 1;
    header[6..10].copy_from_slice(&[34, 0, 6, 0]);
    let mut packet = header.to_vec();
    packet.extend([0xff; 6]);
    packet.extend([2, 0, 0, 0, 0, 9, 8, 0]);
    let udp = 8 + payload.len() as u16;
    let mut ip = vec![0x45, 0];
    ip.extend((20 + udp).to_be_bytes());
    ip.extend([0, 1, 0, 0, 64, 17, 0, 0, 10, 9, 0, 2, 10, 9, 0, 1]);
    let sum = |words: &[u8]| -> u16 {
        let sum: u32 = words.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
        (sum & 0xffff) as u16 + (sum >> 16) as u16
    };
    let checksum = !sum(&ip);
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    // The part of the checksum that is of addresses and length.
    let pseudo = sum(&[&ip[12..20], &[0, 17], &udp.to_be_bytes()].concat());
    packet.extend(ip);
    packet.extend([port.to_be_bytes(), port.to_be_bytes(), udp.to_be_bytes(), pseudo.to_be_bytes()].concat());
    packet.extend(payload);
    packet
}

#[test]
fn packets_go_both_ways_through_a_real_tap() {
    if network_with_tap("t0", "10.9.0.1/24").is_none() {
        return;
    }
    let host = UdpSocket::bind("10.9.0.1:9000").unwrap();
    host.set_broadcast(true).unwrap();
    host.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let tap = Arc::new(Tap::open("t0").unwrap());
    let told = RefCell::default();
    let mut bench = Bench::at(tap.clone(), Tap::of(File::open("/dev/null").unwrap()), true, &told);

    for features in [0, OFFLOADS] {
        for _ in 0..3 {
            host.send_to(b"for nobody", "10.9.0.255:9000").unwrap();
        }
        tap.set_offloads(features).unwrap();
        tap.drain();
        let sent = packet(9000, b"from the guest");
        bench.memory.write_slice(&sent, GuestAddress(DATA)).unwrap();
        bench.offer(TRANSMIT, 0, &[(DATA, 12), (DATA + 12, sent.len() as u32 - 12)]);
        bench.datapath.transmit(&bench.stop).unwrap();
        let mut got = [0; 100];
        let (len, from) = host.recv_from(&mut got).expect("a packet with a right checksum");
        assert_eq!((&got[..len], from.to_string().as_str()), (&b"from the guest"[..], "10.9.0.2:9000"));

        let deadline = Instant::now() + Duration::from_secs(20);
        let mut said: Option<Instant> = None;
        // The host says other things too.
        loop {
            assert!(Instant::now() < deadline, "nothing came");
            let before = bench.count(RECEIVE);
            bench.offer(RECEIVE, 0, &[(DATA, 2000)]);
            while bench.count(RECEIVE) == before && Instant::now() < deadline {
                // Linux drops what is sent before it has noticed that the tap was opened.
                if said.is_none_or(|said| said.elapsed() > Duration::from_millis(100)) {
                    host.send_to(b"from the host", "10.9.0.255:9000").unwrap();
                    said = Some(Instant::now());
                }
                bench.datapath.receive(&bench.stop).unwrap();
            }
            let (_, len) = *bench.used(RECEIVE).last().expect("a frame");
            let got = bench.read(DATA, len as usize);
            assert!(!got.ends_with(b"for nobody"), "it came before the driver did");
            if got.ends_with(b"from the host") {
                // With the offloads the checksum is left to the guest.
                assert_eq!(got[0] & 1, u8::from(features != 0), "{:?}", &got[..HEADER]);
                break;
            }
        }
    }
}
