//! The guest's RAM.
//!
//! It is private anonymous memory rather than a memfd: nothing else has to share it, transparent huge pages apply
//! to it by default (for shared memory they are usually off), and pinning for DMA then needs 512 times fewer pages. Only
//! where the guest shares an accelerator of the host is it a memfd, which the accelerator's worker maps too, and where it is to
//! be of huge pages of the host's pool, of which all are reserved before the guest starts. Nobody can make that shorter, so that no
//! access ends in a signal.
//! It begins on a huge page's boundary, as KVM and the IOMMU map a huge page whole only where the guest-physical address
//! and the one in this process are aligned alike. Children of this process don't get it: a child would keep it alive,
//! and a fork would copy what is pinned.

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use vm_memory::mmap::{MmapRegion, MmapRegionBuilder, MmapRegionError};
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap, GuestMemoryRegion as _,
    GuestRegionMmap,
};
use vm_passthrough::claim::Cancel;

use super::error::MachineError;
use super::layout::Layout;
use super::numa::GuestNuma;
use super::sys;

/// What a huge page covers.
const HUGE: usize = 2 << 20;
/// KVM takes one byte in N of RAM for itself: eight for each page, where it has no two-dimensional paging.
const KVM_PART: u64 = 4096 / 8;
/// How often RAM is mapped again to have it aligned.
const ATTEMPTS: usize = 8;
/// What a prefaulting thread takes at a time: a huge page. Meanwhile it holds the lock of this process's address space
/// (`mmap_lock`), for which every fork, and so each write of a claim to sysfs, waits.
const CHUNK: u64 = HUGE as u64;
/// How often its progress is reported, in seconds.
const PROGRESS: u64 = 5;
/// Most threads that prefault. More of them wait for each other in the Linux kernel's page allocator.
const MAX_THREADS: usize = 16;

/// What the RAM is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Backing {
    /// Memory of this process alone.
    Private,
    /// A memfd for each range, which other processes can map.
    Shared,
    /// The same, of huge pages of this size in bytes.
    Huge(u64),
}

impl Backing {
    fn huge_pages(self) -> MemfdFlags {
        match self {
            Self::Private | Self::Shared => MemfdFlags::empty(),
            Self::Huge(size) if size == HUGE as u64 => MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
            Self::Huge(_) => MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB,
        }
    }

    fn advise(self, region: &MmapRegion) -> io::Result<()> {
        match self {
            Self::Private | Self::Shared => sys::advise_huge_pages(region),
            Self::Huge(_) => Ok(()),
        }
    }
}

/// Reserves the RAM of `layout`, with advice to use huge pages.
///
/// # Errors
/// When the host has no room for it.
pub(super) fn create(layout: &Layout, backing: Backing) -> Result<GuestMemoryMmap, MachineError> {
    let size = layout.ram.iter().map(|range| range.end - range.start).sum();
    let failed = |reason: String| failed(size, reason);
    // It does not ask before it takes them, and Linux kills processes to have them.
    let of_kvm = size / KVM_PART;
    if of_kvm > host() / 2 {
        return Err(failed(format!("KVM may take {} to keep track of it; lower `memory`", rounded(of_kvm))));
    }
    if size > host() {
        tracing::warn!(
            "the guest has {} of RAM, the host {}: Linux kills the guest when it uses more than there is; lower `memory`",
            rounded(size),
            rounded(host())
        );
    }
    let mut regions = Vec::new();
    for range in &layout.ram {
        let len = usize::try_from(range.end - range.start)
            .map_err(|_| failed("it does not fit this process".to_owned()))?;
        let file = match backing {
            Backing::Private => None,
            Backing::Shared | Backing::Huge(_) => {
                let file = memfd("guest-ram", len as u64, backing.huge_pages());
                Some(file.map_err(|error| failed(format!("no memfd: {error}")))?)
            }
        };
        let region = match (backing, &file) {
            // The Linux kernel aligns it, and reserves all that it takes.
            (Backing::Huge(page), Some(file)) => map(len, Some(file), 0).map_err(|error| {
                failed(format!(
                    "{error}; raise /sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages, and see hugetlb.* of its cgroup",
                    page >> 10
                ))
            })?,
            _ => aligned(len, file.as_ref()).map_err(|error| {
                failed(format!("{error}; lower `memory`, or raise the limit on virtual memory (ulimit -v, vm.overcommit_memory)"))
            })?,
        };
        if let Err(error) = backing.advise(&region) {
            tracing::debug!(%error, "the host has no transparent huge pages");
        }
        if let Err(error) = sys::advise_no_fork(&region) {
            tracing::debug!(%error, "children of this process get the guest's RAM");
        }
        regions.push(
            GuestRegionMmap::new(region, GuestAddress(range.start))
                .ok_or_else(|| failed("it passes the end of the address space".to_owned()))?,
        );
    }
    GuestMemoryMmap::from_regions(regions).map_err(|error| failed(error.to_string()))
}

/// Has each node's part of RAM come from its node of the host, as long as that has any left. Nothing of it may be present yet.
pub(super) fn place(memory: &GuestMemoryMmap, parts: &[(u8, Range<u64>)], numa: &GuestNuma) {
    let hosts: Vec<u16> = numa.hosts().collect();
    for (node, part) in parts {
        let Some(&host) = hosts.get(usize::from(*node)) else { continue };
        let region = memory.find_region(GuestAddress(part.start));
        let placed = region.map(|region| {
            let offset = part.start - region.start_addr().0;
            let len = part.end - part.start;
            sys::prefer_node(&region.get_mmap(), offset as usize, len as usize, host)
        });
        if let Some(Err(error)) = placed {
            tracing::warn!(
                "the guest's RAM comes from any NUMA node, not from {host}: {error}; see whether this process may use that node \
                 (cpuset.mems of its cgroup)"
            );
        }
    }
}

/// Bytes of RAM that the host has.
fn host() -> u64 {
    let host = rustix::system::sysinfo();
    host.totalram.saturating_mul(host.mem_unit.into())
}

/// For people: in GiB, and what is less in MiB.
fn rounded(bytes: u64) -> String {
    match bytes >> 30 {
        0 => format!("{} MiB", bytes >> 20),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

/// A guest's RAM of `size` bytes can't be made.
pub(super) fn failed(size: u64, reason: impl fmt::Display) -> MachineError {
    MachineError::Memory { size: rounded(size), host: rounded(host()), reason: reason.to_string() }
}

/// Maps `len` bytes that begin on a huge page's boundary if that can be had.
///
/// Linux aligns large anonymous mappings by itself since 6.7, if their length is. Elsewhere it places each right below the
/// one before, so that a filler of the right length moves the next one onto a boundary; whether it did is looked at.
fn aligned(len: usize, file: Option<&File>) -> Result<MmapRegion, MmapRegionError> {
    let first = map(len, file, libc::MAP_NORESERVE)?;
    let is_aligned = |region: &MmapRegion| (region.as_ptr() as usize).is_multiple_of(HUGE);
    if len < HUGE || is_aligned(&first) {
        return Ok(first);
    }
    // What is misplaced stays mapped meanwhile: it fills a hole that the next one would come to.
    let mut misplaced = vec![first];
    for _ in 0..ATTEMPTS {
        let below = misplaced.last().map_or(0, |region| region.as_ptr() as usize);
        match below.wrapping_sub(len) % HUGE {
            0 => {}
            // As long as the RAM, so that it comes to no smaller hole.
            filler => match map(len.next_multiple_of(HUGE) + filler, None, libc::MAP_NORESERVE) {
                Ok(filler) => misplaced.push(filler),
                Err(_) => break,
            },
        }
        match map(len, file, libc::MAP_NORESERVE) {
            Ok(region) if is_aligned(&region) => return Ok(region),
            Ok(region) => misplaced.push(region),
            Err(_) => break,
        }
    }
    tracing::debug!("the guest's RAM is not aligned to huge pages");
    Ok(misplaced.swap_remove(0))
}

fn map(len: usize, file: Option<&File>, flags: libc::c_int) -> Result<MmapRegion, MmapRegionError> {
    let builder = MmapRegionBuilder::new(len).with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE);
    match file {
        None => builder.with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags),
        Some(file) => builder
            .with_mmap_flags(libc::MAP_SHARED | flags)
            .with_file_offset(FileOffset::new(file.try_clone().map_err(MmapRegionError::Mmap)?, 0)),
    }
    .build()
}

/// Memory beside the RAM that other processes can map, of the length that it has for ever.
///
/// # Errors
/// When the host has no room for it.
pub(super) fn window(bytes: u64) -> io::Result<MmapRegion> {
    let len = usize::try_from(bytes).map_err(io::Error::other)?;
    let file = memfd("guest-window", bytes, MemfdFlags::empty())?;
    let region = aligned(len, Some(&file)).map_err(io::Error::other)?;
    if let Err(error) = sys::advise_no_fork(&region) {
        tracing::debug!(%error, "children of this process get the guest's window");
    }
    Ok(region)
}

/// Memory as a file of just this length, of `huge` pages where that says so.
///
/// # Errors
/// When there are no files left.
pub(crate) fn memfd(name: &str, len: u64, huge: MemfdFlags) -> io::Result<File> {
    let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | huge)?;
    ftruncate(&file, len)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file.into())
}

/// Threads that make all of a guest's RAM present. Dropping it ends them early.
///
/// Mapping RAM for DMA pins all of it, and one thread that takes a fault for each page is slow at that; the pages are
/// cleared meanwhile by as many threads as there are processors.
pub(crate) struct Prefault {
    work: Arc<Work>,
    threads: Vec<JoinHandle<()>>,
}

struct Work {
    memory: GuestMemoryMmap,
    /// Offset in all of the RAM from which on nobody has begun.
    next: AtomicU64,
    ended: AtomicBool,
    cancel: Option<Cancel>,
    begun: Instant,
    /// How often its progress was reported.
    reported: AtomicU64,
}

impl Prefault {
    /// Starts on `memory`. Where threads can't be had, or the Linux kernel is older than 5.14, the faults are taken when
    /// the memory is first used. It ends early once `cancel` asks for it.
    pub(crate) fn start(memory: &GuestMemoryMmap, cancel: Option<Cancel>) -> Self {
        let work = Arc::new(Work {
            memory: memory.clone(),
            next: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            cancel,
            begun: Instant::now(),
            reported: AtomicU64::new(0),
        });
        let size = work.size();
        let useful = usize::try_from(size.div_ceil(CHUNK)).unwrap_or(MAX_THREADS);
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let mut threads = Vec::new();
        for _ in 0..processors.min(useful).min(MAX_THREADS) {
            let work = work.clone();
            match std::thread::Builder::new().name("prefault".into()).spawn(move || work.run()) {
                Ok(thread) => threads.push(thread),
                Err(error) => tracing::debug!(%error, "the guest's RAM is prefaulted by fewer threads"),
            }
        }
        Self { work, threads }
    }

    /// Waits until all is present, or it was asked to give up.
    pub(crate) fn wait(mut self) {
        self.join();
    }

    fn join(&mut self) {
        for thread in self.threads.drain(..) {
            // A chunk is cleared within milliseconds.
            if thread.join().is_err() {
                tracing::error!("a prefaulting thread panicked");
            }
        }
    }
}

impl Drop for Prefault {
    fn drop(&mut self) {
        self.work.ended.store(true, Ordering::Relaxed);
        self.join();
    }
}

impl Work {
    fn size(&self) -> u64 {
        self.memory.iter().map(|region| region.size() as u64).sum()
    }

    /// Whether nobody wants it any more.
    fn is_over(&self) -> bool {
        self.ended.load(Ordering::Relaxed) || self.cancel.as_ref().is_some_and(Cancel::is_requested)
    }

    /// Reports how far it has come, once in [`PROGRESS`].
    fn report(&self) {
        let (periods, reported) =
            (self.begun.elapsed().as_secs() / PROGRESS, self.reported.load(Ordering::Relaxed));
        let is_due = periods > reported;
        let order = Ordering::Relaxed;
        if is_due && self.reported.compare_exchange(reported, periods, order, order).is_ok() {
            let (done, all) = (self.next.load(Ordering::Relaxed), self.size());
            tracing::info!(
                "{} of {} of the guest's RAM are present for its devices",
                rounded(done.min(all)),
                rounded(all)
            );
        }
    }

    fn run(&self) {
        while !self.is_over() {
            self.report();
            let mut start = self.next.fetch_add(CHUNK, Ordering::Relaxed);
            let mut found = false;
            // Regions are whole pages but not whole chunks; what of a chunk lies in the next region is of the next one.
            let mut left = CHUNK;
            for region in self.memory.iter() {
                let size = region.size() as u64;
                if start >= size {
                    start -= size;
                    continue;
                }
                found = true;
                let len = left.min(size - start);
                if let Err(error) = sys::populate(&region.get_mmap(), start as usize, len as usize) {
                    tracing::debug!(%error, "the guest's RAM is not prefaulted");
                    return;
                }
                left -= len;
                start = 0;
                if left == 0 {
                    break;
                }
            }
            if !found {
                return;
            }
            // A claim that goes on meanwhile is what the guest waits for, and has few processors at worst.
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use vm_memory::Bytes as _;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// The flags of this process's mapping at `address`.
    fn flags(address: usize) -> String {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let holds = |line: &str| {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            range.is_some_and(|(start, end)| {
                let number = |text| usize::from_str_radix(text, 16).unwrap_or(0);
                (number(start)..number(end)).contains(&address)
            })
        };
        let mut lines = smaps.lines().skip_while(|line| !holds(line));
        lines.find_map(|line| line.strip_prefix("VmFlags:")).unwrap().to_owned()
    }

    /// Bytes of a region that are present.
    fn present(region: &GuestRegionMmap) -> u64 {
        let mut entries = vec![0; region.size() / 4096 * 8];
        let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
        pagemap.read_exact_at(&mut entries, (region.as_ptr() as u64) / 4096 * 8).unwrap();
        // Bit 63: present; bit 62: swapped out.
        entries.chunks_exact(8).filter(|entry| entry[7] & 0xc0 != 0).count() as u64 * 4096
    }

    #[test]
    fn ram_is_aligned_to_huge_pages_and_kept_from_children() {
        let both = [Backing::Private, Backing::Shared];
        for (size, backing) in [2 * MIB, 4 * MIB, 5 * MIB, 64 * MIB + 4096]
            .into_iter()
            .flat_map(|size| both.map(|backing| (size, backing)))
        {
            let memory = create(&Layout::new(size, 40, 0..0).unwrap(), backing).unwrap();
            let start = memory.iter().next().unwrap().as_ptr() as usize;
            assert_eq!(start % HUGE, 0, "{size:#x}");
            let flags = flags(start);
            assert!(flags.split_ascii_whitespace().any(|flag| flag == "dc"), "{flags}");
        }
    }

    #[test]
    fn more_ram_than_the_host_has_is_reported_with_both_figures() {
        let host = host();
        let made = |size: u64| {
            let mut made = None;
            let layout = Layout::new(size & !(2 * MIB - 1), 52, 0..0).unwrap();
            let log = crate::log::limit::testing::logged(|| made = Some(create(&layout, Backing::Private)));
            (made.unwrap().map(drop).map_err(|error| error.to_string()), log)
        };
        assert_eq!(made(host / 2), (Ok(()), String::new()));
        let (made_more, log) = made(host * 2);
        assert_eq!(made_more, Ok(()));
        assert!(log.contains(" of RAM, the host ") && log.contains("lower `memory`"), "{log}");
        let (much, log) = made(host * KVM_PART);
        assert_eq!(log, "");
        let error = much.unwrap_err();
        let end = format!(
            "a host that has {}: KVM may take {0} to keep track of it; lower `memory`",
            rounded(host)
        );
        assert!(error.ends_with(&end), "{error}");
    }

    #[test]
    fn prefaulting_makes_all_present_and_changes_nothing() {
        let size = 37 * MIB;
        // Two regions, and no end at a multiple of a chunk.
        let memory = GuestMemoryMmap::<()>::from_ranges(&[
            (GuestAddress(0), 19 * MIB as usize),
            (GuestAddress(1 << 32), 18 * MIB as usize),
        ])
        .unwrap();
        memory.write_obj(0x1234_5678u32, GuestAddress(17 * MIB)).unwrap();
        let prefault = Prefault::start(&memory, None);
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while prefault.threads.iter().any(|thread| !thread.is_finished()) {
            assert!(std::time::Instant::now() < deadline);
            std::thread::yield_now();
        }
        assert!(prefault.work.next.load(Ordering::Relaxed) >= size);
        assert_eq!(memory.read_obj::<u32>(GuestAddress(17 * MIB)).unwrap(), 0x1234_5678);
        assert_eq!(memory.iter().map(present).sum::<u64>(), size);
    }

    #[test]
    fn prefaulting_ends_when_it_is_dropped() {
        let memory = create(&Layout::new(1 << 30, 40, 0..0).unwrap(), Backing::Private).unwrap();
        drop(Prefault::start(&memory, None));
    }

    #[test]
    fn prefaulting_is_waited_for_until_somebody_cancels_it() {
        let memory = create(&Layout::new(16 * MIB, 40, 0..0).unwrap(), Backing::Private).unwrap();
        Prefault::start(&memory, Some(Cancel::default())).wait();
        assert_eq!(memory.iter().map(present).sum::<u64>(), 16 * MIB);
        let much = create(&Layout::new(256 * MIB, 40, 0..0).unwrap(), Backing::Private).unwrap();
        let cancel = Cancel::default();
        cancel.request();
        Prefault::start(&much, Some(cancel)).wait();
        assert_eq!(much.iter().map(present).sum::<u64>(), 0);
    }
}
