//! Measures how long it takes to make a guest's RAM present and to map it for DMA, by one thread and by two.
//!
//! ```text
//! map_ram ADDRESS [--backend iommufd|group] [--pages transparent|small|reserved] [--gib N] [--rounds N]
//! ```
//!
//! The function is claimed, or its claim taken up. A round prefaults new RAM (`MADV_POPULATE_WRITE`, 2 MiB at a time as
//! `vm-service` does) with each number of threads, and maps the last of it in each [`Way`], in pieces of 1 GiB; their order
//! changes from round to round. One round more comes first, and does not count. `reserved` are pages of 2 MiB from the host's
//! pool (`/proc/sys/vm/nr_hugepages`).
//!
//! Each line of its output is what was measured, a tab, and seconds. `compute` is work without memory or the Linux kernel, and so tells
//! what a second thread can bring at most on the machine as it is at the moment.

use std::error::Error;
use std::hint::black_box;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use vm_memory::mmap::{MmapRegion, MmapRegionBuilder};
use vm_passthrough::claim::ClaimOptions;
use vm_passthrough::guest::SharedMemory;
use vm_passthrough::vfio::{self, AddressSpace as _, Backend, DmaPermission, Mapping, Space};
use vm_passthrough::{PassthroughManager, PciAddress};

type Result<T = (), E = Box<dyn Error>> = std::result::Result<T, E>;
type Ram = Vec<Arc<MmapRegion>>;

/// A piece of RAM, and the alignment of all of it.
const GIB: usize = 1 << 30;
/// What a thread prefaults at a time.
const CHUNK: usize = 2 << 20;
/// Where the first piece is mapped: above what is reserved.
const IOVA: u64 = 4 << 30;
/// Steps of `compute`.
const STEPS: u64 = 1 << 27;

/// What the RAM is made of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pages {
    /// Transparent huge pages.
    Transparent,
    /// Pages of 4 KiB.
    Small,
    /// Huge pages of the host's pool.
    Reserved,
}

/// How it is mapped.
#[derive(Clone, Copy)]
enum Way {
    /// A piece after the other.
    InTurn,
    /// All of them by one call, and so by as many threads as there are processors where that helps.
    AtOnce,
}

impl Way {
    const ALL: [Self; 2] = [Self::InTurn, Self::AtOnce];

    fn name(self) -> &'static str {
        match self {
            Self::InTurn => "map, 1 thread",
            Self::AtOnce => "map, all at once",
        }
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("map_ram: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result {
    let mut arguments = std::env::args().skip(1);
    let (mut address, mut backend, mut pages) = (None, None, Pages::Transparent);
    let (mut gib, mut rounds) = (4usize, 5usize);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{argument} takes a value"));
        match argument.as_str() {
            "--backend" => {
                backend = Some(match value()?.as_str() {
                    "iommufd" => Backend::Iommufd,
                    "group" => Backend::Group,
                    other => return Err(format!("--backend takes iommufd or group, not {other}").into()),
                });
            }
            "--pages" => {
                pages = match value()?.as_str() {
                    "transparent" => Pages::Transparent,
                    "small" => Pages::Small,
                    "reserved" => Pages::Reserved,
                    other => {
                        return Err(
                            format!("--pages takes transparent, small or reserved, not {other}").into()
                        );
                    }
                };
            }
            "--gib" => gib = value()?.parse()?,
            "--rounds" => rounds = value()?.parse()?,
            text => address = Some(text.parse::<PciAddress>()?),
        }
    }
    let address = address.ok_or("the address of a function is missing")?;

    let mut manager = PassthroughManager::new()?;
    let claimed = manager.claim(address, &ClaimOptions::default())?;
    let space = vfio::open_space(manager.host(), &[address], backend)?;
    let device = claimed.open(&space)?;

    for round in 0..=rounds {
        let tell = |what: &str, time: Duration| {
            if round > 0 {
                println!("{what}\t{}", time.as_secs_f64());
            }
        };
        let counts = if round % 2 == 0 { [1, 2] } else { [2, 1] };
        for threads in counts {
            tell(&format!("compute, {}", counted(threads)), compute(threads));
        }
        let mut ram = Ram::new();
        for threads in counts {
            // There may be no room for both.
            drop(std::mem::take(&mut ram));
            ram = (0..gib).map(|_| reserve(pages)).collect::<Result<_>>()?;
            tell(&format!("prefault, {}", counted(threads)), prefault(&ram, threads)?);
        }
        check(&ram, pages)?;
        for at in 0..Way::ALL.len() {
            let way = Way::ALL[(round + at) % Way::ALL.len()];
            tell(way.name(), map(&ram, way, &space)?);
        }
    }

    device.close()?;
    Ok(space.close()?)
}

fn counted(threads: u64) -> String {
    format!("{threads} thread{}", if threads == 1 { "" } else { "s" })
}

/// Reserves a piece of RAM, as `vm-service` does it for a guest.
fn reserve(pages: Pages) -> Result<Arc<MmapRegion>> {
    let of_pool = if pages == Pages::Reserved { libc::MAP_HUGETLB } else { libc::MAP_NORESERVE };
    let region = MmapRegionBuilder::new(GIB)
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | of_pool)
        .build()?;
    match pages {
        Pages::Transparent => sys::advise_huge_pages(&region, true)?,
        Pages::Small => sys::advise_huge_pages(&region, false)?,
        Pages::Reserved => {}
    }
    Ok(Arc::new(region))
}

/// Checks that the RAM is made of the pages that were asked for.
fn check(ram: &Ram, pages: Pages) -> Result {
    let smaps = std::fs::read_to_string("/proc/self/smaps")?;
    let kib = |field: &str| -> u64 {
        let values = smaps.lines().filter_map(|line| line.strip_prefix(field));
        values.filter_map(|value| value.trim().strip_suffix(" kB")?.parse::<u64>().ok()).sum()
    };
    let all = (ram.len() * GIB) as u64 >> 10;
    let (transparent, reserved) = (kib("AnonHugePages:"), kib("Private_Hugetlb:"));
    let holds = match pages {
        // The last few may have to be found between others.
        Pages::Transparent => transparent >= all / 100 * 99,
        Pages::Small => transparent < all / 100 && reserved == 0,
        Pages::Reserved => reserved == all,
    };
    if !holds {
        let found =
            format!("{transparent} KiB are in transparent huge pages and {reserved} KiB in reserved ones");
        return Err(format!("the RAM is not of the pages that were asked for: of {all} KiB {found}").into());
    }
    Ok(())
}

/// Does the same work, divided among `threads` threads.
fn compute(threads: u64) -> Duration {
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| (0..STEPS / threads).fold(1u64, |sum, step| black_box(sum.rotate_left(7) ^ step)));
        }
    });
    begun.elapsed()
}

/// Makes all of the RAM present.
fn prefault(ram: &Ram, threads: u64) -> Result<Duration> {
    let chunks = ram.len() * (GIB / CHUNK);
    let next = AtomicUsize::new(0);
    let work = || -> std::io::Result<()> {
        loop {
            let chunk = next.fetch_add(1, Ordering::Relaxed);
            if chunk >= chunks {
                return Ok(());
            }
            let (piece, within) = (chunk / (GIB / CHUNK), chunk % (GIB / CHUNK));
            sys::populate(&ram[piece], within * CHUNK, CHUNK)?;
        }
    };
    let begun = Instant::now();
    std::thread::scope(|scope| -> Result {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        for thread in threads {
            thread.join().map_err(|_| "a prefaulting thread panicked")??;
        }
        Ok(())
    })?;
    Ok(begun.elapsed())
}

/// Maps all of the RAM for DMA, and unmaps it, which is not counted.
fn map(ram: &Ram, way: Way, space: &Space) -> Result<Duration> {
    let ranges = || -> Vec<(u64, Arc<dyn Mapping>)> {
        let memory = |piece: &Arc<MmapRegion>| Arc::new(SharedMemory::new(piece.clone())) as Arc<dyn Mapping>;
        (IOVA..).step_by(GIB).zip(ram.iter().map(memory)).collect()
    };
    let pieces = ranges();
    let begun = Instant::now();
    match way {
        Way::InTurn => pieces
            .iter()
            .try_for_each(|(iova, memory)| space.map(*iova, memory.clone(), DmaPermission::ReadWrite))?,
        Way::AtOnce => space.map_all(&pieces, DmaPermission::ReadWrite)?,
    }
    let took = begun.elapsed();
    for (iova, memory) in &pieces {
        if space.mapped_from(*iova) != Some(memory.len()) {
            return Err(format!("nothing is mapped at {iova:#x}").into());
        }
        space.unmap(*iova)?;
    }
    Ok(took)
}

/// Advice to the Linux kernel.
#[allow(unsafe_code)]
mod sys {
    use std::io;

    use rustix::mm::{Advice, madvise};
    use vm_memory::mmap::MmapRegion;

    /// Has the region be made of transparent huge pages, or of none.
    pub(super) fn advise_huge_pages(region: &MmapRegion, huge: bool) -> io::Result<()> {
        let advice = if huge { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
        // SAFETY: the range is one live mapping, and the advice does not change its contents.
        Ok(unsafe { madvise(region.as_ptr().cast(), region.size(), advice) }?)
    }

    /// Makes a part of the region present.
    pub(super) fn populate(region: &MmapRegion, offset: usize, len: usize) -> io::Result<()> {
        if offset.checked_add(len).is_none_or(|end| end > region.size()) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let start = region.as_ptr().wrapping_add(offset).cast();
        loop {
            // SAFETY: the range lies in one live mapping, as was checked, and the advice does not change its contents.
            match unsafe { madvise(start, len, Advice::LinuxPopulateWrite) } {
                Err(rustix::io::Errno::INTR) => {}
                answer => return Ok(answer?),
            }
        }
    }
}
