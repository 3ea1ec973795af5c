use std::io::Write as _;

use proptest::prelude::*;
use virtio_queue::{Queue, QueueT as _};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

use super::block::testing::{Bench, SECTOR};
use super::registers::{DRIVER_OK, FEATURES_OK, Registers};
use crate::config::Disk;
use crate::vmm::Stop;

const SIZE: u16 = 8;
const DESCRIPTORS: u64 = 0x1000;
const AVAILABLE: u64 = 0x2000;
const USED: u64 = 0x3000;
const HEADER: u64 = 0x4000;
const DATA: u64 = 0x5000;
const STATUS: u64 = 0x7000;
const NEXT: u16 = 1;
const WRITE: u16 = 2;

fn memory() -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1_0000)]).unwrap()
}

fn queue() -> Queue {
    let mut queue = Queue::new(SIZE).unwrap();
    queue.try_set_desc_table_address(GuestAddress(DESCRIPTORS)).unwrap();
    queue.try_set_avail_ring_address(GuestAddress(AVAILABLE)).unwrap();
    queue.try_set_used_ring_address(GuestAddress(USED)).unwrap();
    queue.set_ready(true);
    queue
}

/// Puts descriptors into the table and the first of them into the ring.
fn offer(memory: &GuestMemoryMmap, descriptors: &[(u64, u32, u16)]) {
    for (index, &(address, len, flags)) in descriptors.iter().enumerate() {
        let last = index + 1 == descriptors.len();
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend((flags | if last { 0 } else { NEXT }).to_le_bytes());
        bytes.extend((index as u16 + 1).to_le_bytes());
        memory.write_slice(&bytes, GuestAddress(DESCRIPTORS + index as u64 * 16)).unwrap();
    }
    memory.write_slice(&[0, 0, 1, 0, 0, 0], GuestAddress(AVAILABLE)).unwrap();
}

fn header(memory: &GuestMemoryMmap, kind: u32, sector: u64) {
    memory.write_obj(kind, GuestAddress(HEADER)).unwrap();
    memory.write_obj(sector, GuestAddress(HEADER + 8)).unwrap();
}

fn disk(sectors: u64, read_only: bool) -> (tempfile::NamedTempFile, Bench) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    for sector in 0..sectors {
        file.write_all(&[sector as u8 + 1; SECTOR]).unwrap();
    }
    let bench = Bench::open(&Disk { path: file.path().to_owned(), read_only });
    (file, bench)
}

/// Does one request; returns its status and the used length.
fn request(bench: &Bench, memory: &GuestMemoryMmap, data: &[(u64, u32, u16)]) -> (u8, u32) {
    memory.write_obj(0xeeu8, GuestAddress(STATUS)).unwrap();
    let mut descriptors = vec![(HEADER, 16, 0)];
    descriptors.extend(data);
    descriptors.push((STATUS, 1, WRITE));
    offer(memory, &descriptors);
    assert_eq!(bench.serve(memory, &mut queue()).unwrap(), 1, "one notification");
    (memory.read_obj(GuestAddress(STATUS)).unwrap(), memory.read_obj(GuestAddress(USED + 8)).unwrap())
}

#[test]
fn requests_do_what_they_say() {
    let (file, bench) = disk(8, false);
    let memory = memory();
    header(&memory, 0, 2);
    assert_eq!(request(&bench, &memory, &[(DATA, 512, WRITE), (DATA + 512, 512, WRITE)]), (0, 1025));
    assert_eq!(memory.read_obj::<[u8; 2]>(GuestAddress(DATA + 511)).unwrap(), [3, 4]);
    header(&memory, 1, 7);
    memory.write_slice(&[0x77; 512], GuestAddress(DATA)).unwrap();
    assert_eq!(request(&bench, &memory, &[(DATA, 100, 0), (DATA + 100, 412, 0)]), (0, 1));
    assert_eq!(std::fs::read(file.path()).unwrap()[7 * SECTOR..], [0x77; SECTOR]);
    header(&memory, 4, 0);
    assert_eq!(request(&bench, &memory, &[]), (0, 1));
    header(&memory, 8, 0);
    assert_eq!(request(&bench, &memory, &[(DATA, 20, WRITE)]), (0, 21));
    header(&memory, 99, 0);
    assert_eq!(request(&bench, &memory, &[]), (2, 1));
}

#[test]
fn requests_outside_the_disk_fail() {
    let (file, bench) = disk(8, false);
    let memory = memory();
    for (kind, sector, len) in [
        (0, 8, 512),
        (0, 7, 1024),
        (1, 7, 1024),
        (0, u64::MAX, 512),
        (1, u64::MAX / 512, 512),
        (0, 0, 511),
        (1, 0, 1),
    ] {
        header(&memory, kind, sector);
        let flags = if kind == 0 { WRITE } else { 0 };
        assert_eq!(request(&bench, &memory, &[(DATA, len, flags)]), (1, 1), "{kind} {sector} {len}");
    }
    assert_eq!(std::fs::metadata(file.path()).unwrap().len(), 8 * SECTOR as u64);
}

/// Not even one that is short: a queue may be full of requests that each wait for the storage.
#[test]
fn a_disk_that_is_to_stop_begins_no_request() {
    let (_file, bench) = disk(1, false);
    let memory = memory();
    let stop = Stop::new().unwrap();
    stop.request();
    for kind in [0, 1, 4, 8, 99] {
        header(&memory, kind, 0);
        memory.write_obj(0xeeu8, GuestAddress(STATUS)).unwrap();
        offer(&memory, &[(HEADER, 16, 0), (STATUS, 1, WRITE)]);
        assert_eq!(bench.serve_until(&memory, &mut queue(), &stop).unwrap(), 0, "{kind}");
        assert_eq!(memory.read_obj::<u8>(GuestAddress(STATUS)).unwrap(), 0xee, "{kind}");
    }
}

#[test]
fn failing_requests_do_not_fill_the_log() {
    let (file, bench) = disk(8, false);
    // The storage has lost what the disk was when it was opened.
    file.as_file().set_len(0).unwrap();
    let memory = memory();
    let logged = crate::log::limit::testing::logged(|| {
        for _ in 0..20_000 {
            header(&memory, 0, 2);
            assert_eq!(request(&bench, &memory, &[(DATA, 512, WRITE)]), (1, 1));
        }
    });
    assert!(
        logged.contains("messages are left out that are like this one: a disk request failed"),
        "{logged}"
    );
    assert!(logged.len() < 4 << 10, "{} bytes", logged.len());
}

#[test]
fn a_read_only_disk_is_not_written() {
    let (file, bench) = disk(1, true);
    let memory = memory();
    header(&memory, 1, 0);
    assert_eq!(request(&bench, &memory, &[(DATA, 512, 0)]), (1, 1));
    assert_eq!(std::fs::read(file.path()).unwrap(), [1; SECTOR]);
}

#[test]
fn a_disk_in_use_is_refused() {
    let (file, _bench) = disk(1, false);
    let again = Bench::try_open(&Disk { path: file.path().to_owned(), read_only: true });
    assert!(again.unwrap_err().to_string().contains("another process has locked it"));
    let odd = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(odd.path(), [0; 513]).unwrap();
    let odd = Bench::try_open(&Disk { path: odd.path().to_owned(), read_only: true });
    assert!(odd.unwrap_err().to_string().contains("513 bytes, which is not a whole number"));
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can make another user's link");
    }
    let (folder, target) = (tempfile::tempdir().unwrap(), disk(1, false).0);
    let path = folder.path().join("disk");
    std::os::unix::fs::symlink(target.path(), &path).unwrap();
    let open = || Bench::try_open(&Disk { path: path.clone(), read_only: false });
    open().unwrap();
    std::os::unix::fs::lchown(&path, Some(12345), None).unwrap();
    assert!(open().unwrap_err().to_string().contains("disk is a link that the user 12345 made"));
}

#[test]
fn broken_queues_are_errors() {
    let (_file, bench) = disk(1, false);
    let check = |descriptors: &[(u64, u32, u16)], available: u16| {
        let memory = memory();
        header(&memory, 0, 0);
        offer(&memory, descriptors);
        memory.write_obj(available, GuestAddress(AVAILABLE + 2)).unwrap();
        assert!(bench.serve(&memory, &mut queue()).is_err(), "{descriptors:?} {available}");
    };
    check(&[(HEADER, 16, 0)], 1);
    check(&[(HEADER, 16, 0), (0xffff_ffff_0000, 512, WRITE)], 1);
    check(&[(HEADER, 16, 0), (u64::MAX, 512, WRITE)], 1);
    check(&[(HEADER, 16, 0), (STATUS, 1, WRITE)], SIZE + 1);
}

#[test]
fn features_are_checked() {
    fn check(accepted: u64, ok: bool) {
        let mut registers = Registers::new(1 << 9, &[SIZE]);
        registers.accept_for_test(accepted);
        registers.set_status(1);
        registers.set_status(3);
        registers.set_status(3 | FEATURES_OK);
        assert_eq!(registers.status & FEATURES_OK != 0, ok, "{accepted:#x}");
        assert_eq!(registers.set_status(3 | FEATURES_OK | DRIVER_OK), ok);
        assert!(!registers.set_status(3 | FEATURES_OK | DRIVER_OK), "only once");
    }
    check(1 << 32, true);
    check(1 << 32 | 1 << 9, true);
    check(1 << 9, false);
    check(1 << 32 | 1 << 10, false);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]
    #[test]
    fn no_queue_harms(
        table in prop::collection::vec((0u64..0x1_2000, 0u32..0x3000, 0u16..8, 0u16..12), SIZE as usize),
        ring in prop::collection::vec(0u16..12, SIZE as usize),
        index in 0u16..12,
        kind in 0u32..10,
        sector in prop_oneof![0u64..10, any::<u64>()],
    ) {
        let (file, bench) = disk(4, false);
        let memory = memory();
        for (slot, (address, len, flags, next)) in table.into_iter().enumerate() {
            let at = DESCRIPTORS + slot as u64 * 16;
            // Rings stay out of the data, so that what is offered stays as it is.
            memory.write_obj(if address < HEADER { address + HEADER } else { address }, GuestAddress(at)).unwrap();
            memory.write_obj(len, GuestAddress(at + 8)).unwrap();
            memory.write_obj(flags, GuestAddress(at + 12)).unwrap();
            memory.write_obj(next, GuestAddress(at + 14)).unwrap();
        }
        memory.write_obj(index, GuestAddress(AVAILABLE + 2)).unwrap();
        for (slot, head) in ring.into_iter().enumerate() {
            memory.write_obj(head, GuestAddress(AVAILABLE + 4 + slot as u64 * 2)).unwrap();
        }
        header(&memory, kind, sector);
        // It may succeed or fail, but it ends, and the disk keeps its size.
        let _ = bench.serve(&memory, &mut queue());
        prop_assert_eq!(file.as_file().metadata().unwrap().len(), 4 * SECTOR as u64);
    }
}
