//! How often each function's answer was waited for: told when the program ends, where `VM_BRIDGE_COUNTS` names a file.

use std::fmt::Write as _;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use vm_cuda_api::FUNCTIONS;

use crate::sys::exit;

static ON: AtomicBool = AtomicBool::new(false);
/// Sent, and waited for.
static COUNTS: LazyLock<Vec<[AtomicU64; 2]>> =
    LazyLock::new(|| FUNCTIONS.iter().map(|_| [const { AtomicU64::new(0) }; 2]).collect());

/// Counts from now on, if it is asked for.
pub(crate) fn begin() {
    if std::env::var_os("VM_BRIDGE_COUNTS").is_some() && !ON.swap(true, Ordering::Relaxed) {
        exit::at_exit(write);
    }
}

/// Counts a call.
pub(crate) fn count(call: u16, asks: bool) {
    if ON.load(Ordering::Relaxed)
        && let Some(counts) = COUNTS.get(usize::from(call))
    {
        counts[usize::from(asks)].fetch_add(1, Ordering::Relaxed);
    }
}

extern "C" fn write() {
    let Some(path) = std::env::var_os("VM_BRIDGE_COUNTS") else { return };
    let mut lines: Vec<(u64, u64, &str)> = FUNCTIONS
        .iter()
        .zip(COUNTS.iter())
        .map(|(function, [posted, asked])| {
            (asked.load(Ordering::Relaxed), posted.load(Ordering::Relaxed), function.name.as_str())
        })
        .filter(|(asked, posted, _)| asked + posted > 0)
        .collect();
    lines.sort_unstable_by(|a, b| b.cmp(a));
    let mut text = String::from("waited-for sent function\n");
    for (asked, posted, name) in lines {
        // A string takes what is written to it.
        let _ = writeln!(text, "{asked} {posted} {name}");
    }
    // Nobody is left to be told.
    let _ =
        vm_files::replace(path.as_ref(), |mut file| std::io::Write::write_all(&mut file, text.as_bytes()));
}
