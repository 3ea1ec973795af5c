//! The state of a function, for who watches it: its link, its power, the errors that it reported, and its interrupts.
//!
//! A function is read without waking it, and what may wait in the Linux kernel has a deadline: the state of the link is in config
//! space, which Linux keeps to itself while it resets the function, and for which newer releases resume it.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use super::{Link, PciAddress, PowerState, ScanError, text};
use crate::deadlines::until;
use crate::{Host, files};

/// Most kinds of errors of one severity; there are 32 bits for each (PCI Express 6.0, 7.8.4).
const MAX_KINDS: usize = 32;

/// The state of one function at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceHealth {
    /// Power state that the Linux kernel knows.
    pub power_state: PowerState,
    /// PCI Express link; `None` without one, in D3cold, and where it could not be read.
    pub link: Option<LinkHealth>,
    /// The errors that it reported; `None` where Linux counts none: without the capability AER, or without its driver.
    pub errors: Option<AerCounters>,
    /// What could not be read, and why.
    pub unread: Vec<String>,
}

/// The state of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkHealth {
    /// What it runs at, and what the function can do.
    pub link: Link,
    /// Highest speed that the function and the port above it can both do, in megatransfers per second and lane.
    pub possible_speed: u32,
    /// Most lanes that they can both use.
    pub possible_width: u8,
}

impl LinkHealth {
    /// Whether it is down.
    pub fn is_down(&self) -> bool {
        self.link.width == 0 || self.link.speed == 0
    }
}

/// Errors that a function has reported since Linux found it, by Advanced Error Reporting (Linux
/// `Documentation/ABI/testing/sysfs-bus-pci-devices-aer`). What its link partner saw is counted there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AerCounters {
    /// Those that the hardware corrected.
    pub correctable: AerCount,
    /// Those that lost a transaction, but left the link reliable.
    pub nonfatal: AerCount,
    /// Those after which the link is not reliable.
    pub fatal: AerCount,
}

/// Errors of one severity.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AerCount {
    /// Messages: one may tell of several errors.
    pub total: u64,
    /// The kinds of which there were any, as Linux names them, with how many.
    pub kinds: Vec<(String, u64)>,
}

/// Interrupts that a function has raised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interrupts {
    /// Vectors that are set up.
    pub vectors: u32,
    /// Interrupts that the host has handled, of all of these since each was set up.
    pub total: u64,
}

/// The state of a function.
///
/// # Errors
/// When there is no such function. What can't be read otherwise is in [`DeviceHealth::unread`].
pub fn health(host: &Host, address: PciAddress, deadline: Duration) -> Result<DeviceHealth, ScanError> {
    let dir = host.pci_device(address);
    let gone = || ScanError::NotFound { address, path: host.sys.join("bus/pci/devices") };
    if !dir.exists() {
        return Err(gone());
    }
    let power_state = files::read_trimmed(&dir.join("power_state"))
        .map_or(PowerState::Unknown, |text| text::power_state(text.as_bytes()));
    let mut unread = Vec::new();
    let mut reader = Reader { host, until: until(deadline), deadline, failed: None };
    // Reading it would wake the function.
    let link = if power_state == PowerState::D3Cold { None } else { reader.link(&dir) };
    unread.extend(reader.failed);
    let errors = aer_counters(&dir);
    // As the directory answers for one function only, all of this is of the one that is there still.
    if dir.exists() { Ok(DeviceHealth { power_state, link, errors, unread }) } else { Err(gone()) }
}

/// Reads attributes whose reads may wait in the Linux kernel, all of them within one deadline.
struct Reader<'a> {
    host: &'a Host,
    until: Instant,
    deadline: Duration,
    /// What kept one from being read; the others are not tried then.
    failed: Option<String>,
}

impl Reader<'_> {
    fn link(&mut self, dir: &Path) -> Option<LinkHealth> {
        // 255 lanes is what a function that does not answer reads as.
        let lanes = |text: String| text::decimal(text.as_bytes()).filter(|&lanes| lanes != 255);
        let speed = |text: String| text::link_speed(text.as_bytes());
        let max_width: u8 = self.read(dir, "max_link_width").and_then(lanes).filter(|&lanes| lanes > 0)?;
        let max_speed = self.read(dir, "max_link_speed").map_or(0, speed);
        let width = self.read(dir, "current_link_width").and_then(lanes).unwrap_or(0);
        let speed_now = self.read(dir, "current_link_speed").map_or(0, speed);
        // The directory of the bridge above, where there is one.
        let above = dir.canonicalize().ok().and_then(|dir| Some(dir.parent()?.to_owned()));
        let above = above.filter(|above| {
            above
                .file_name()
                .and_then(|name| name.to_str())
                .is_some_and(|name| name.parse::<PciAddress>().is_ok())
        });
        let port_width: Option<u8> =
            above.as_deref().and_then(|dir| self.read(dir, "max_link_width")).and_then(lanes);
        let port_speed = above.as_deref().and_then(|dir| self.read(dir, "max_link_speed")).map(speed);
        if self.failed.is_some() {
            return None;
        }
        Some(LinkHealth {
            link: Link { speed: if width == 0 { 0 } else { speed_now }, width, max_speed, max_width },
            possible_speed: port_speed.filter(|&port| port > 0).map_or(max_speed, |port| port.min(max_speed)),
            possible_width: port_width.filter(|&port| port > 0).map_or(max_width, |port| port.min(max_width)),
        })
    }

    /// The text of an attribute; `None` where there is none, or it can't say, as of a function that was pulled.
    fn read(&mut self, dir: &Path, name: &str) -> Option<String> {
        if self.failed.is_some() {
            return None;
        }
        let path = dir.join(name);
        let left = self.until.saturating_duration_since(Instant::now());
        match self.host.writer().read(&path, left) {
            Ok(text) => Some(text),
            Err(error) => {
                let why = match error.kind() {
                    io::ErrorKind::NotFound => return None,
                    io::ErrorKind::TimedOut => format!(
                        "Linux did not answer within {} s, as while it resets the function",
                        self.deadline.as_secs()
                    ),
                    _ if matches!(
                        error.raw_os_error(),
                        Some(libc::EINVAL | libc::EIO | libc::ENODEV | libc::ENXIO | libc::EAGAIN)
                    ) =>
                    {
                        return None;
                    }
                    _ => error.to_string(),
                };
                self.failed = Some(format!("{} can't be read: {why}", path.display()));
                None
            }
        }
    }
}

/// The link of a function as it is now; `None` without one. It may wait in the Linux kernel.
pub(crate) fn link(dir: &Path) -> Option<Link> {
    let text = |name: &str| files::read_trimmed(&dir.join(name));
    // 255 lanes is what a function that does not answer reads as.
    let lanes =
        |name| text(name).and_then(|text| text::decimal(text.as_bytes())).filter(|&lanes: &u8| lanes != 255);
    let speed = |name| text(name).map_or(0, |text| text::link_speed(text.as_bytes()));
    let max_width = lanes("max_link_width").filter(|&lanes| lanes > 0)?;
    let width = lanes("current_link_width").unwrap_or(0);
    let speed_now = if width == 0 { 0 } else { speed("current_link_speed") };
    Some(Link { speed: speed_now, width, max_speed: speed("max_link_speed"), max_width })
}

/// What Linux has counted; it reads its own memory for that.
pub(crate) fn aer_counters(dir: &Path) -> Option<AerCounters> {
    let count = |name: &str| Some(aer_count(&files::read(&dir.join(name)).ok()??));
    Some(AerCounters {
        correctable: count("aer_dev_correctable")?,
        nonfatal: count("aer_dev_nonfatal")?,
        fatal: count("aer_dev_fatal")?,
    })
}

/// A line for each kind of error and, last, one for all messages.
fn aer_count(text: &str) -> AerCount {
    let mut count = AerCount::default();
    for line in text.lines().take(MAX_KINDS + 1) {
        let Some((kind, number)) = line.trim().rsplit_once(' ') else { continue };
        let (kind, Ok(number)) = (kind.trim(), number.parse()) else { continue };
        if kind.starts_with("TOTAL_ERR_") {
            count.total = number;
        } else if number > 0 && kind.len() <= 64 {
            count.kinds.push((kind.to_owned(), number));
        }
    }
    count
}

/// The interrupts of all functions that VFIO has, by `/proc/interrupts`, in which it names their vectors
/// `vfio-msix[0](0000:65:00.0)`.
///
/// The host handles each of them, also those that KVM delivers to a guest by irqfd, except where the processor posts interrupts
/// to a guest that runs (VT-d posted interrupts, AVIC): these reach nobody on the host, and nobody counts them.
pub fn interrupts(host: &Host) -> BTreeMap<PciAddress, Interrupts> {
    let text = files::read(&host.proc.join("interrupts")).ok().flatten().unwrap_or_default();
    interrupts_in(&text)
}

fn interrupts_in(text: &str) -> BTreeMap<PciAddress, Interrupts> {
    let mut all: BTreeMap<_, Interrupts> = BTreeMap::new();
    for line in text.lines() {
        // The names of all that share a line are separated by commas.
        let Some((_, name)) = line.split_once("vfio-") else { continue };
        let address =
            name.split_once('(').and_then(|(_, rest)| rest.split_once(')')?.0.parse::<PciAddress>().ok());
        let Some(address) = address else { continue };
        // A number for each CPU, up to the name of the interrupt chip.
        let counts = line.split_ascii_whitespace().skip(1).map_while(|word| word.parse::<u64>().ok());
        let own = all.entry(address).or_default();
        own.vectors = own.vectors.saturating_add(1);
        own.total = counts.fold(own.total, u64::saturating_add);
    }
    all
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::host::SysfsWriter;
    use crate::sim::{SimFunction, SimHost};

    const SECOND: Duration = Duration::from_secs(1);
    const CORRECTABLE: &str = "RxErr 2\nBadTLP 0\nTimeout 1\nTOTAL_ERR_COR 2\n";

    fn address(text: &str) -> PciAddress {
        text.parse().unwrap()
    }

    fn sim(function: SimFunction) -> SimHost {
        let sim = SimHost::new().unwrap();
        sim.add(&SimFunction::root_port(address("00:01.0")).link(8_000, 8)).unwrap();
        sim.add(&function.below(address("00:01.0"))).unwrap();
        sim
    }

    fn read(sim: &SimHost) -> DeviceHealth {
        health(&sim.plain_host(), address("01:00.0"), SECOND).unwrap()
    }

    #[test]
    fn a_link_and_what_it_could_be() {
        let gpu = || SimFunction::gpu(address("01:00.0"));
        let link = Link { speed: 2_500, width: 4, max_speed: 16_000, max_width: 16 };
        let sim = sim(gpu().degraded_link(link));
        let found = read(&sim).link.unwrap();
        assert_eq!(found, LinkHealth { link, possible_speed: 8_000, possible_width: 8 });
        assert!(!found.is_down());
        // Not trained, and of a function that does not answer.
        for width in ["0\n", "255\n"] {
            sim.set(address("01:00.0"), "current_link_width", width).unwrap();
            assert!(read(&sim).link.unwrap().is_down());
        }
        // What is asleep stays so.
        sim.set(address("01:00.0"), "power_state", "D3cold\n").unwrap();
        let health = read(&sim);
        assert_eq!((health.power_state, health.link), (PowerState::D3Cold, None));
        sim.remove(address("01:00.0")).unwrap();
        let gone = super::health(&sim.plain_host(), address("01:00.0"), SECOND);
        assert!(matches!(gone, Err(ScanError::NotFound { .. })), "{gone:?}");
    }

    #[test]
    fn errors_are_counted_by_severity() {
        let sim = sim(SimFunction::nvme(address("01:00.0")));
        assert_eq!(read(&sim).errors, None);
        sim.set(address("01:00.0"), "aer_dev_correctable", CORRECTABLE).unwrap();
        sim.set(address("01:00.0"), "aer_dev_nonfatal", "Undefined 0\nTOTAL_ERR_NONFATAL 0\n").unwrap();
        sim.set(
            address("01:00.0"),
            "aer_dev_fatal",
            "\u{0}\nTLP x\n 7\nTOTAL_ERR_FATAL 99999999999999999999\n",
        )
        .unwrap();
        let errors = read(&sim).errors.unwrap();
        let kinds = vec![("RxErr".to_owned(), 2), ("Timeout".to_owned(), 1)];
        assert_eq!(errors.correctable, AerCount { total: 2, kinds });
        assert_eq!((errors.nonfatal, errors.fatal), Default::default());
        let flood = "E 1\n".repeat(100_000);
        assert_eq!(aer_count(&flood).kinds.len(), MAX_KINDS + 1);
    }

    /// A Linux kernel that has the function's config space to itself.
    #[derive(Debug)]
    struct Stuck;

    impl SysfsWriter for Stuck {
        fn write(&self, _: &Path, _: &str, _: Duration) -> io::Result<()> {
            Err(io::ErrorKind::TimedOut.into())
        }

        fn read(&self, _: &Path, _: Duration) -> io::Result<String> {
            Err(io::ErrorKind::TimedOut.into())
        }
    }

    #[test]
    fn what_does_not_answer_is_waited_for_once() {
        let sim = sim(SimFunction::nvme(address("01:00.0")));
        let health = health(&sim.host_with(Arc::new(Stuck)), address("01:00.0"), SECOND).unwrap();
        assert_eq!((health.power_state, health.link), (PowerState::D0, None));
        assert!(
            matches!(&health.unread[..], [why] if why.contains("max_link_width can't be read")),
            "{health:?}"
        );
    }

    #[test]
    fn interrupts_of_functions_that_vfio_has() {
        fn check(text: &str, expect: &[(&str, u32, u64)]) {
            let found = interrupts_in(text);
            let found: Vec<_> =
                found.iter().map(|(at, own)| (at.to_string(), own.vectors, own.total)).collect();
            let expect: Vec<_> =
                expect.iter().map(|&(at, vectors, total)| (at.to_owned(), vectors, total)).collect();
            assert_eq!(found, expect, "{text}");
        }
        check("", &[]);
        check("           CPU0\n  0:         42  IR-IO-APIC    2-edge      timer\n", &[]);
        check(
            "            CPU0       CPU1\n 24:  7  0  IR-PCI-MSIX-0000:01:00.0    0-edge      nvme0q0\n 25:  1  2  \
             IR-PCI-MSIX-0000:02:00.0    0-edge      vfio-msix[0](0000:02:00.0)\n 26:  0  4  IR-PCI-MSIX-0000:02:00.0    \
             1-edge      vfio-msix[1](0000:02:00.0)\n 16:  5  5  IR-IO-APIC   16-fasteoi   vfio-intx(0000:03:00.0), i801_smbus\n",
            &[("0000:02:00.0", 2, 7), ("0000:03:00.0", 1, 10)],
        );
        check("vfio-(", &[]);
        check(" 1: 99999999999999999999 3 vfio-msi[0](0000:02:00.0)", &[("0000:02:00.0", 1, 0)]);
        check(" 1: 18446744073709551615 3 x vfio-msi[0](0000:02:00.0)", &[("0000:02:00.0", 1, u64::MAX)]);
    }
}
