//! The host's pools of huge pages (Linux, `Documentation/admin-guide/mm/hugetlbpage.rst`), of which a guest's RAM may be made.

use std::path::PathBuf;

use thiserror::Error;

use super::memory::size_text;
use super::{BlockerCode, Case, RamPages, Severity};
use crate::{Host, files};

/// The host's pool of huge pages of one size has too few.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{evidence}; {remedy}")]
pub struct HugePagesTooFew {
    /// What was read, and where.
    pub evidence: String,
    /// What to do.
    pub remedy: String,
}

/// Checks that the host's pool of huge pages of `size` bytes has enough for `memory` bytes that nobody has reserved.
///
/// # Errors
/// When it has not, or there is no such pool.
pub fn check_huge_pages(host: &Host, size: u64, memory: u64) -> Result<(), HugePagesTooFew> {
    let pool = host.sys.join(format!("kernel/mm/hugepages/hugepages-{}kB", size >> 10));
    let read = |name: &str| files::read_trimmed(&pool.join(name))?.parse::<u64>().ok();
    let (Some(all), Some(free)) = (read("nr_hugepages"), read("free_hugepages")) else {
        return Err(HugePagesTooFew {
            evidence: format!("there is no {}: the host has no pages of {}", pool.display(), size_text(size)),
            remedy: "choose another size, or leave `hugepages` out".into(),
        });
    };
    // Reserved ones count as free until they are used; more may be had than there are for good, as far as memory goes.
    let reserved = read("resv_hugepages").unwrap_or(0);
    let more =
        read("nr_overcommit_hugepages").unwrap_or(0).saturating_sub(read("surplus_hugepages").unwrap_or(0));
    let had = free.saturating_sub(reserved).saturating_add(more);
    let needed = memory.div_ceil(size.max(1));
    if had >= needed {
        return Ok(());
    }
    let file: PathBuf = pool.join("nr_hugepages");
    let late = if size > 1 << 21 {
        "; early after a boot, as the Linux kernel needs as much memory in one piece for each"
    } else {
        ""
    };
    Err(HugePagesTooFew {
        evidence: format!(
            "the guest's {} of RAM take {needed} huge pages of {}, and {} has {had} that are free",
            size_text(memory),
            size_text(size),
            pool.display()
        ),
        remedy: format!("make more: echo {} > {}{late}", all.saturating_add(needed - had), file.display()),
    })
}

pub(super) fn judge(case: &mut Case<'_>) {
    let RamPages::Huge(size) = case.options.pages else { return };
    if let Err(HugePagesTooFew { evidence, remedy }) =
        check_huge_pages(case.host, size, case.options.memory())
    {
        let function = case.function.address;
        case.add(BlockerCode::HugePagesTooFew, Severity::Blocker, function, evidence, &remedy);
    }
}
