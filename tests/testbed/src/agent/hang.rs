//! What a guest's VMM does that does not end: what its threads wait for or spend, and what KVM counts, for people to read.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Over how long it is watched.
const WATCHED: Duration = Duration::from_secs(2);

/// What every guest of this machine does, over 2 s.
pub(super) fn what_guests_do() -> String {
    let mut text = String::from("--- what the threads of guests do: state, wait, ticks over 2 s ---\n");
    let (threads, counters) = (threads(), counters());
    let ticks: Vec<_> = threads.iter().map(|thread| ticks(thread)).collect();
    let counts: Vec<_> = counters.iter().map(|counter| number(counter)).collect();
    std::thread::sleep(WATCHED);
    for (thread, before) in threads.iter().zip(ticks) {
        let read = |file: &str| fs::read_to_string(thread.join(file)).unwrap_or_default().trim().to_owned();
        let status = read("status");
        let state = status.lines().find_map(|line| line.strip_prefix("State:")).unwrap_or_default();
        let spent = self::ticks(thread).saturating_sub(before);
        // A String takes any write.
        let _ = writeln!(text, "{} {}:{state}, {}, {spent}", thread.display(), read("comm"), read("wchan"));
    }
    text += "--- what KVM counts: before, over 2 s ---\n";
    for (counter, before) in counters.iter().zip(counts) {
        let more = number(counter).saturating_sub(before);
        if before > 0 || more > 0 {
            let name = counter.strip_prefix(KVM).unwrap_or(counter).display();
            let _ = writeln!(text, "{name}: {before}, {more}");
        }
    }
    text
}

const KVM: &str = "/sys/kernel/debug/kvm";

fn entries(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// The threads of each process that holds a KVM.
fn threads() -> Vec<PathBuf> {
    let has_kvm = |process: &PathBuf| {
        entries(&process.join("fd"))
            .iter()
            .any(|file| fs::read_link(file).is_ok_and(|to| to.to_string_lossy().contains("kvm-vm")))
    };
    entries(Path::new("/proc"))
        .into_iter()
        .filter(has_kvm)
        .flat_map(|process| entries(&process.join("task")))
        .collect()
}

/// What it has run, in user and in kernel mode.
fn ticks(thread: &Path) -> u64 {
    let stat = fs::read_to_string(thread.join("stat")).unwrap_or_default();
    // The name before may have spaces.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace();
    fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum()
}

fn counters() -> Vec<PathBuf> {
    entries(Path::new(KVM)).into_iter().filter(|path| path.is_dir()).flat_map(|vm| entries(&vm)).collect()
}

fn number(counter: &Path) -> u64 {
    fs::read_to_string(counter).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}
