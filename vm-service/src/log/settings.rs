//! Which log files a command writes.
//!
//! How large they grow and how many are kept the environment says, and no option: all processes that write the same files must
//! agree on it, so it belongs where it is set once for a host or a unit, not at one command.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::LONGEST;
use super::file::MOST_KEPT;
use crate::config::{format_size, parse_size};

/// Where root's log files are.
const SYSTEM: &str = "/var/log/vm-service";
/// The variables that say otherwise.
pub(crate) const FOLDER: &str = "VM_SERVICE_LOG_DIR";
pub(crate) const SIZE: &str = "VM_SERVICE_LOG_SIZE";
pub(crate) const KEPT: &str = "VM_SERVICE_LOG_KEEP";
/// A file's size unless it is said, and the least, a few records.
const DEFAULT_SIZE: u64 = 10 << 20;
const LEAST_SIZE: u64 = 2 * LONGEST as u64;
/// How many files are kept besides the newest unless it is said.
const DEFAULT_KEPT: u32 = 5;

/// The log files of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// The directory.
    pub(crate) folder: PathBuf,
    /// A file that would grow beyond so many bytes is rotated.
    pub(crate) size: u64,
    /// How many are kept besides the newest.
    pub(crate) kept: u32,
    /// Whether records are of a simulated host, which each says.
    pub(crate) simulated: bool,
}

/// The directory of log files: what the option says, or else the environment; nothing for none, or for a user without a home.
pub(crate) fn folder(
    option: Option<&Path>,
    environment: impl Fn(&str) -> Option<OsString>,
    is_root: bool,
) -> Option<PathBuf> {
    let absolute = |name| environment(name).map(PathBuf::from).filter(|path: &PathBuf| path.is_absolute());
    let folder = option
        .map(Path::to_owned)
        .or_else(|| environment(FOLDER).map(Into::into))
        .or_else(|| is_root.then(|| SYSTEM.into()))
        .or_else(|| Some(absolute("XDG_STATE_HOME")?.join("vm-service")))
        .or_else(|| Some(absolute("HOME")?.join(".local/state/vm-service")))?;
    // Without a `/` at its end, by which a link would be followed. An empty path has no absolute one.
    Some(std::path::absolute(&folder).ok()?.components().collect())
}

impl Settings {
    /// Those of a directory, and what of the environment is wrong and has no effect.
    pub(crate) fn of(folder: PathBuf, environment: impl Fn(&str) -> Option<OsString>) -> (Self, Vec<String>) {
        let mut wrong = Vec::new();
        let text = |name| environment(name).map(|text| text.to_string_lossy().into_owned());
        let size = text(SIZE).and_then(|text| match parse_size(&text) {
            Ok(size) if size >= LEAST_SIZE => Some(size),
            Ok(_) => {
                wrong.push(format!("{SIZE}={text} is less than {}", format_size(LEAST_SIZE)));
                None
            }
            Err(why) => {
                wrong.push(format!("{SIZE}={text} {why}"));
                None
            }
        });
        let kept = text(KEPT).and_then(|text| {
            let kept = text.parse().ok().filter(|kept| (1..=MOST_KEPT).contains(kept));
            if kept.is_none() {
                wrong.push(format!("{KEPT}={text} is not a number from 1 to {MOST_KEPT}"));
            }
            kept
        });
        let (size, kept) = (size.unwrap_or(DEFAULT_SIZE), kept.unwrap_or(DEFAULT_KEPT));
        (Self { folder, size, kept, simulated: false }, wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An environment of these.
    fn environment(of: &[(&str, &str)]) -> impl Fn(&str) -> Option<OsString> {
        move |name| of.iter().find(|(of, _)| *of == name).map(|(_, value)| value.into())
    }

    #[test]
    fn the_directory_is_what_was_said_last() {
        #[track_caller]
        fn check(option: Option<&str>, of: &[(&str, &str)], is_root: bool, expect: Option<&str>) {
            let got = folder(option.map(Path::new), environment(of), is_root);
            assert_eq!(got.as_deref(), expect.map(Path::new), "{option:?} {of:?} {is_root}");
        }
        let home = ("HOME", "/home/eva");
        check(None, &[home], true, Some("/var/log/vm-service"));
        check(None, &[home], false, Some("/home/eva/.local/state/vm-service"));
        check(None, &[home, ("XDG_STATE_HOME", "/state")], false, Some("/state/vm-service"));
        check(
            None,
            &[home, ("XDG_STATE_HOME", "relative")],
            false,
            Some("/home/eva/.local/state/vm-service"),
        );
        check(None, &[], false, None);
        check(None, &[("HOME", "")], false, None);
        check(None, &[home, (FOLDER, "/logs")], true, Some("/logs"));
        check(None, &[home, (FOLDER, "")], true, None);
        check(Some("/here/"), &[home, (FOLDER, "/logs")], false, Some("/here"));
        check(Some("/here/."), &[], true, Some("/here"));
        check(Some(""), &[home], true, None);
    }

    #[test]
    fn sizes_and_numbers_are_read_and_wrong_ones_reported() {
        #[track_caller]
        fn check(of: &[(&str, &str)], expect: (u64, u32), expect_wrong: &[&str]) {
            let (got, wrong) = Settings::of("/logs".into(), environment(of));
            assert_eq!((got.size, got.kept), expect, "{of:?}");
            assert_eq!(wrong, expect_wrong, "{of:?}");
        }
        check(&[], (10 << 20, 5), &[]);
        check(&[(SIZE, "1G"), (KEPT, "99")], (1 << 30, 99), &[]);
        check(&[(SIZE, "64K"), (KEPT, "1")], (64 << 10, 1), &[]);
        check(&[(SIZE, "63K")], (10 << 20, 5), &["VM_SERVICE_LOG_SIZE=63K is less than 64K"]);
        check(&[(SIZE, "10")], (10 << 20, 5), &["VM_SERVICE_LOG_SIZE=10 does not end in K, M, G or T"]);
        check(&[(KEPT, "0")], (10 << 20, 5), &["VM_SERVICE_LOG_KEEP=0 is not a number from 1 to 99"]);
        check(&[(KEPT, "-1")], (10 << 20, 5), &["VM_SERVICE_LOG_KEEP=-1 is not a number from 1 to 99"]);
    }
}
