//! Host memory that no guest may reach.

use std::fs::File;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, bail, ensure};

const PAGE: usize = 4096;
/// What a canary is made of. The bare guest knows it and has it nowhere else.
const BYTE: u8 = 0xc5;
/// How many pages to try.
const PAGES: usize = 256;

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
        // Another page of the same machine may have been hit too, when a device writes where it was not told to.
        std::hint::black_box(&self.pages)[self.offset..][..PAGE].iter().all(|&byte| byte == BYTE)
            && self.pages.iter().all(|&byte| byte == BYTE)
    }
}

/// The physical address of a page (Documentation/admin-guide/mm/pagemap.rst).
pub(super) fn physical_page(pagemap: &File, address: usize) -> Result<u64> {
    const PRESENT: u64 = 1 << 63;
    const FRAME: u64 = (1 << 55) - 1;
    let mut entry = [0; 8];
    pagemap.read_exact_at(&mut entry, (address / PAGE * 8) as u64).context("can't read the page map")?;
    let entry = u64::from_le_bytes(entry);
    ensure!(entry & PRESENT != 0 && entry & FRAME != 0, "the page at {address:#x} is not in memory");
    Ok((entry & FRAME) * PAGE as u64)
}
