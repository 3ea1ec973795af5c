//! Reads the GPUs that are meant, and notices when others come.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use vm_passthrough::Host;
use vm_passthrough::telemetry::{Answer, Watch};

use super::Observation;
use crate::devices::gpus::{self, Gpu, Which};
use crate::failure::Failure;

/// The shortest and the longest time that drivers are waited for.
const WAIT: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(2)];

/// Reads GPUs.
#[derive(Debug)]
pub(crate) struct Sampler {
    host: Host,
    which: Which,
    gpus: Vec<Gpu>,
    watch: Watch,
    seen: Seen,
}

/// What tells that other GPUs are to be read, or by another driver.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    functions: Vec<String>,
    routers: Vec<String>,
    drivers: Vec<Option<PathBuf>>,
}

impl Sampler {
    /// A sampler of the GPUs that are meant.
    ///
    /// # Errors
    /// When the host can't be scanned, or the one that is meant is not there.
    pub(crate) fn new(host: &Host, which: Which) -> Result<Self, Failure> {
        let gpus = gpus::find(host, which)?;
        let mut watch = Watch::new();
        watch.watch(gpus.iter().map(|gpu| gpu.reader(host))).map_err(no_thread)?;
        let seen = seen(host, &gpus);
        Ok(Self { host: host.clone(), which, gpus, watch, seen })
    }

    /// The GPUs that are read.
    pub(crate) fn gpus(&self) -> &[Gpu] {
        &self.gpus
    }

    /// The GPUs as they are now. Drivers are waited for as long as the interval, within bounds.
    pub(crate) fn sample(&mut self, interval: Duration) -> Observation {
        let seen = seen(&self.host, &self.gpus);
        if seen != self.seen {
            self.look_again();
        }
        let [shortest, longest] = WAIT;
        let mut answers = self.watch.read(interval.clamp(shortest, longest));
        let answer = |gpu: &Gpu| (gpu.clone(), answers.remove(&gpu.address()).unwrap_or(Answer::Gone));
        let gpus = self.gpus.iter().map(answer).collect();
        Observation { at: Instant::now(), gpus }
    }

    fn look_again(&mut self) {
        // The one that is meant may be away. What can't be found out is tried again with the next change.
        self.gpus = gpus::find(&self.host, self.which).unwrap_or_default();
        if let Err(error) = self.watch.watch(self.gpus.iter().map(|gpu| gpu.reader(&self.host))) {
            tracing::warn!("{}", no_thread(error).message);
        }
        self.seen = seen(&self.host, &self.gpus);
    }
}

fn no_thread(error: std::io::Error) -> Failure {
    Failure::failed(format_args!("no thread can be started to ask a GPU: {error}"))
}

fn seen(host: &Host, gpus: &[Gpu]) -> Seen {
    let names = |bus: &Path| {
        let entries = std::fs::read_dir(bus.join("devices")).into_iter().flatten();
        let mut names: Vec<_> =
            entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort_unstable();
        names
    };
    let driver = |gpu: &Gpu| std::fs::read_link(host.pci_device(gpu.address()).join("driver")).ok();
    Seen {
        functions: names(&host.sys.join("bus/pci")),
        routers: names(&host.thunderbolt),
        drivers: gpus.iter().map(driver).collect(),
    }
}
