//! Uncorrectable errors of PCI Express, as the Linux kernel reports and counts them (Advanced Error Reporting).
//!
//! vfio-pci's ERR interrupt tells of a function that it or a port above it has had one, and nothing more: which it was is in the
//! counters of sysfs (`Documentation/ABI/testing/sysfs-bus-pci-devices-aer` of Linux).

use std::collections::BTreeMap;
use std::fmt;

use crate::pci::aer_counters;
use crate::{Host, PciAddress};

/// How severe an uncorrectable error is (PCI Express Base 6.0, 6.2.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum ErrorSeverity {
    /// A transaction was lost; the link is reliable, and nothing was reset.
    NonFatal,
    /// The link is not reliable. The Linux kernel resets it, and what the function's driver had set up is gone.
    Fatal,
}

impl fmt::Display for ErrorSeverity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NonFatal => "non-fatal",
            Self::Fatal => "fatal",
        })
    }
}

/// Uncorrectable errors of a function, or of a port above it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UncorrectableError {
    /// The severest. Where the Linux kernel counted none, as after Downstream Port Containment, it is fatal.
    pub severity: ErrorSeverity,
    /// What the Linux kernel counted: `0000:64:01.0 counted 1 fatal error (SDES)`.
    pub evidence: String,
}

/// How often each error was counted: by function, severity and name.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ErrorCounts(BTreeMap<(PciAddress, ErrorSeverity, String), u64>);

impl ErrorCounts {
    /// Those of a function and of every port above it. What can't be read counts nothing.
    pub(super) fn of(host: &Host, address: PciAddress) -> Self {
        let mut counts = BTreeMap::new();
        let path = host.pci_device(address);
        let path = path.canonicalize().unwrap_or(path);
        for dir in path.ancestors() {
            let Some(Ok(function)) = dir.file_name().map(|name| name.to_string_lossy().parse()) else {
                break;
            };
            let Some(counters) = aer_counters(dir) else { continue };
            for (severity, count) in
                [(ErrorSeverity::NonFatal, counters.nonfatal), (ErrorSeverity::Fatal, counters.fatal)]
            {
                counts
                    .extend(count.kinds.into_iter().map(|(kind, count)| ((function, severity, kind), count)));
            }
        }
        Self(counts)
    }

    /// What was counted since `before`.
    pub(super) fn since(&self, before: &Self) -> UncorrectableError {
        let (mut counted, mut severest) = (Vec::new(), None);
        for (key @ (function, severity, name), &count) in &self.0 {
            let more = count.saturating_sub(before.0.get(key).copied().unwrap_or(0));
            if more > 0 {
                let errors = if more == 1 { "error" } else { "errors" };
                counted.push(format!("{function} counted {more} {severity} {errors} ({name})"));
                severest = severest.max(Some(*severity));
            }
        }
        UncorrectableError {
            severity: severest.unwrap_or(ErrorSeverity::Fatal),
            evidence: match counted.is_empty() {
                true => "no counter in sysfs shows which".to_owned(),
                false => counted.join(", "),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io;
    use std::os::unix::fs::symlink;
    use std::path::Path;
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::host::SysfsWriter;

    #[derive(Debug)]
    struct ReadOnly;

    impl SysfsWriter for ReadOnly {
        fn write(&self, _path: &Path, _value: &str, _deadline: Duration) -> io::Result<()> {
            Err(io::ErrorKind::ReadOnlyFilesystem.into())
        }
    }

    #[test]
    fn what_was_counted_since_is_said_of_the_function_and_its_ports() {
        let root = tempfile::tempdir().expect("a directory");
        let host = Host::at(root.path(), Arc::new(ReadOnly));
        let address: PciAddress = "0000:65:00.0".parse().expect("an address");
        let port = root.path().join("sys/devices/pci0000:64/0000:64:01.0");
        let function = port.join("0000:65:00.0");
        fs::create_dir_all(&function).expect("a directory");
        let links = root.path().join("sys/bus/pci/devices");
        fs::create_dir_all(&links).expect("a directory");
        symlink(&function, links.join("0000:65:00.0")).expect("a link");

        for dir in [&port, &function] {
            for severity in ["correctable", "nonfatal", "fatal"] {
                fs::write(dir.join(format!("aer_dev_{severity}")), "").expect("a file");
            }
        }
        let none = ErrorCounts::of(&host, address);
        let check = |port_counts: &str, counts: &str, severity: ErrorSeverity, evidence: &str| {
            fs::write(port.join("aer_dev_fatal"), port_counts).expect("a file");
            fs::write(function.join("aer_dev_nonfatal"), counts).expect("a file");
            let expect = UncorrectableError { severity, evidence: evidence.to_owned() };
            assert_eq!(ErrorCounts::of(&host, address).since(&none), expect);
        };
        use ErrorSeverity::{Fatal, NonFatal};
        let nothing = "no counter in sysfs shows which";
        check("", "", Fatal, nothing);
        check("SDES 0\nTOTAL_ERR_FATAL 0\n", "TLP 0\n", Fatal, nothing);
        check("SDES 0\n", "TLP 1\n", NonFatal, "0000:65:00.0 counted 1 non-fatal error (TLP)");
        check(
            "SDES 1\nTOTAL_ERR_FATAL 1\n",
            "Undefined 0\nTLP 2\nTOTAL_ERR_NONFATAL 2\n",
            Fatal,
            "0000:64:01.0 counted 1 fatal error (SDES), 0000:65:00.0 counted 2 non-fatal errors (TLP)",
        );
        check("garbage\nSDES -1\nSDES 99999999999999999999999", "\n \n", Fatal, nothing);
        let before = ErrorCounts::of(&host, address);
        fs::write(port.join("aer_dev_fatal"), "SDES 3\n").expect("a file");
        let evidence = ErrorCounts::of(&host, address).since(&before).evidence;
        assert!(evidence.contains("counted 3 fatal errors"), "{evidence}");
        fs::write(port.join("aer_dev_fatal"), "x".repeat(5 << 20)).expect("a file");
        assert_eq!(ErrorCounts::of(&host, address).since(&none).evidence, nothing);
    }
}
