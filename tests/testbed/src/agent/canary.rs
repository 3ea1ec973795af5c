//! Host memory that no guest may reach.

use std::fs::File;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, bail, ensure};

const PAGE: usize = 4096;
/// What a canary is made of. The bare guest knows it and has it nowhere else.
const BYTE: u8 = 0xc5;
/// How many pages to try.
const PAGES: usize = 12288;

/// A page of this process, and where it lies in the machine's memory.
#[derive(Debug)]
pub struct Canary {
    pages: Vec<u8>,
    offset: usize,
    physical: u64,
}

impl Canary {
    /// A page at a physical address of at least `lowest`.
    ///
    /// # Errors
    /// When none is found.
    pub fn above(lowest: u64) -> Result<Self> {
        let pages = vec![BYTE; (PAGES + 1) * PAGE];
        let pagemap = File::open("/proc/self/pagemap").context("can't open /proc/self/pagemap")?;
        let start = pages.as_ptr().addr();
        let first = start.next_multiple_of(PAGE) - start;
        for page in 0..PAGES {
            let offset = first + page * PAGE;
            let physical = physical_page(&pagemap, start + offset)?;
            if physical >= lowest {
                return Ok(Self { pages, offset, physical });
            }
        }
        bail!("none of {PAGES} pages lies at {lowest:#x} or above")
    }

    /// Its physical address.
    pub fn physical(&self) -> u64 {
        self.physical
    }

    /// Whether it still holds what it held.
    pub fn unchanged(&self) -> bool {
        // Another page of the same machine may have been hit too, when a device writes elsewhere.
        std::hint::black_box(&self.pages)[self.offset..][..PAGE].iter().all(|&byte| byte == BYTE)
            && self.pages.iter().all(|&byte| byte == BYTE)
    }
}

/// The physical address of a page (Documentation/admin-guide/mm/pagemap.rst).
fn physical_page(pagemap: &File, address: usize) -> Result<u64> {
    const PRESENT: u64 = 1 << 63;
    const FRAME: u64 = (1 << 55) - 1;
    let mut entry = [0; 8];
    pagemap.read_exact_at(&mut entry, (address / PAGE * 8) as u64).context("can't read the page map")?;
    let entry = u64::from_le_bytes(entry);
    ensure!(entry & PRESENT != 0 && entry & FRAME != 0, "the page at {address:#x} is not in memory");
    Ok((entry & FRAME) * PAGE as u64)
}

/// A guest's RAM, as the process that runs the guest has it.
#[derive(Debug)]
pub struct ProcessMemory {
    memory: File,
    pagemap: File,
    base: u64,
}

impl ProcessMemory {
    /// The RAM, of `size` bytes, of the guest that process `pid` runs.
    ///
    /// # Errors
    /// When the process has no mapping of that size.
    pub fn of(pid: u32, size: u64) -> Result<Self> {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))
            .context("can't read the process's mappings")?;
        let range = |line: &str| {
            let (start, end) = line.split_whitespace().next()?.split_once('-')?;
            Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
        };
        let base =
            maps.lines().filter_map(range).find(|(start, end)| end - start == size).map(|(start, _)| start);
        Ok(Self {
            memory: File::open(format!("/proc/{pid}/mem"))?,
            pagemap: File::open(format!("/proc/{pid}/pagemap"))?,
            base: base
                .with_context(|| format!("process {pid} has no mapping of {size:#x} bytes:\n{maps}"))?,
        })
    }

    /// Whether the guest's page at `guest` holds what canaries are made of, and nothing else.
    ///
    /// # Errors
    /// When it can't be read.
    pub fn is_canary(&self, guest: u64) -> Result<bool> {
        let mut page = [0; PAGE];
        self.memory.read_exact_at(&mut page, self.base + guest).context("can't read the guest's memory")?;
        Ok(page.iter().all(|&byte| byte == BYTE))
    }

    /// Where the guest's page at `guest` lies in the machine's memory.
    ///
    /// # Errors
    /// When it is not in memory.
    pub fn physical(&self, guest: u64) -> Result<u64> {
        physical_page(&self.pagemap, usize::try_from(self.base + guest)?)
    }
}
