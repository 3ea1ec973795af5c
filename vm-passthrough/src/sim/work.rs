//! What goes on in the enclosures of a simulated host: their GPUs get hot and cool, work ends, links count their errors.
//!
//! Nothing of it runs by itself: [`SimHost::advance`] brings the files up to the present.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use super::SimHost;
use super::egpu::{SimEgpuFault, SimHeat, SplitMix64};
use super::faults::{now, replace};
use crate::PciAddress;
use crate::usb4::Route;

/// How often files are brought up to the present by [`SimHost::go_on`].
const OFTEN: Duration = Duration::from_millis(250);
/// The ID of the first process that works on a simulated GPU: none of Linux has it.
const FIRST_PROCESS: u32 = 1 << 22;
/// How much of its link's rate an idle GPU uses, one in so many.
const IDLE: f64 = 100.0;
/// Revolutions of a fan in a minute, at most.
const RPM: u64 = 3300;

/// Keeps a simulated host going until it is dropped.
#[derive(Debug)]
pub struct SimGoing(Option<(Sender<()>, JoinHandle<()>)>);

impl Drop for SimGoing {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.0.take() {
            drop(stop);
            // It does not panic, and nothing could be done here if it did.
            let _ = thread.join();
        }
    }
}

impl SimHost {
    /// Brings its files up to the present now and then, on a thread of its own.
    pub fn go_on(&self) -> SimGoing {
        let (stop, stopped) = channel::<()>();
        let sim = self.clone();
        let run = move || {
            while stopped.recv_timeout(OFTEN) == Err(RecvTimeoutError::Timeout) {
                if let Err(error) = sim.advance() {
                    tracing::debug!("the simulated host does not go on: {error}");
                }
            }
        };
        // Without a thread its temperatures are those of the moment at which it was opened.
        let thread = std::thread::Builder::new().name("simulated host".into()).spawn(run).ok();
        SimGoing(thread.map(|thread| (stop, thread)))
    }

    /// Brings its files up to the present: the temperature, power, clocks and fan of GPUs in enclosures, their work and the
    /// errors of their links.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn advance(&self) -> io::Result<()> {
        let routes = self.enclosures()?;
        if routes.is_empty() {
            return Ok(());
        }
        let _lock = self.lock()?;
        let mut jobs = 0;
        routes.into_iter().try_for_each(|route| self.advance_enclosure(route, &mut jobs))?;
        self.end_jobs(jobs)
    }

    /// Of one enclosure; `number` is how many jobs run on the others.
    fn advance_enclosure(&self, route: Route, number: &mut u32) -> io::Result<()> {
        let (mut faults, now) = (self.faults(route)?, now());
        let is_job = |fault: &SimEgpuFault| match fault {
            SimEgpuFault::Work(time) => Some(*time),
            _ => None,
        };
        let jobs = faults.all(is_job);
        let ends = |since: Duration, time: Option<Duration>| time.map(|time| since.saturating_add(time));
        let lasting: Vec<_> = jobs
            .into_iter()
            .filter(|(since, time)| ends(*since, *time).is_none_or(|end| end > now))
            .collect();
        faults.retain(|fault| is_job(fault).is_none());
        let gpus = self.end_functions(route)?;
        // Work ends with its GPU.
        if !gpus.is_empty() {
            lasting.iter().for_each(|(since, time)| faults.push(*since, SimEgpuFault::Work(*time)));
        }
        let is_busy = !gpus.is_empty() && !lasting.is_empty();
        for _ in lasting.iter().filter(|_| is_busy) {
            self.add_job(&gpus, *number)?;
            *number += 1;
        }
        let before = faults.find(|fault| match fault {
            SimEgpuFault::Temperature(millidegrees) => Some(*millidegrees),
            _ => None,
        });
        let mut heat = SimHeat::default();
        let (since, millidegrees) = before.unwrap_or((now, heat.millidegrees()));
        heat.set(millidegrees);
        let has_fan = faults.find(|fault| matches!(fault, SimEgpuFault::Fan(false)).then_some(())).is_none();
        let elapsed = now.saturating_sub(since);
        for gpu in &gpus {
            let dir = self.device_dir(*gpu)?;
            let sensors = dir.join("hwmon/hwmon4");
            let errors = flips(&self.link_of(route)?.rate, faults.bit_errors(), elapsed, is_busy, now);
            count(&dir, errors)?;
            if sensors.exists() && dir.join("driver").exists() {
                let can_tell = faults.hang().is_none()
                    && faults
                        .find(|fault| matches!(fault, SimEgpuFault::Sensor(false)).then_some(()))
                        .is_none();
                show(&dir, &sensors, &mut heat, elapsed, is_busy, has_fan, can_tell)?;
            }
        }
        if gpus.is_empty() {
            heat.run(elapsed, false, false);
        }
        faults.push(now, SimEgpuFault::Temperature(heat.millidegrees()));
        self.keep_faults(route, &faults)
    }

    /// A process that holds these functions.
    fn add_job(&self, gpus: &[PciAddress], number: u32) -> io::Result<()> {
        let dir = format!("proc/{}", FIRST_PROCESS + number);
        if self.path(&dir).exists() {
            return Ok(());
        }
        self.write(&format!("{dir}/comm"), "simulated-work\n")?;
        for (descriptor, gpu) in gpus.iter().enumerate() {
            // As the link of a descriptor says it: the whole path.
            let file = self.device_dir(*gpu)?.join("resource0");
            fs::create_dir_all(self.path(&dir).join("fd"))?;
            std::os::unix::fs::symlink(file, self.path(&dir).join(format!("fd/{}", descriptor + 3)))?;
        }
        Ok(())
    }

    /// Ends the processes that work, but for the first so many.
    pub(super) fn end_jobs(&self, but: u32) -> io::Result<()> {
        for entry in fs::read_dir(self.path("proc"))? {
            let name = entry?.file_name();
            let number = name.to_str().and_then(|name| name.parse::<u32>().ok());
            if number.is_some_and(|number| number >= FIRST_PROCESS + but) {
                self.delete(&format!("proc/{}", name.to_string_lossy()))?;
            }
        }
        Ok(())
    }
}

/// How many errors a link has corrected in this time.
fn flips(rate: &u32, chance: f64, elapsed: Duration, is_busy: bool, now: Duration) -> u64 {
    let bits = f64::from(*rate) * 1e6 * elapsed.as_secs_f64() / if is_busy { 1.0 } else { IDLE };
    let expected = (bits * chance).min(1e9);
    let mut random = SplitMix64::new(now.as_nanos() as u64);
    let rest = (random.next() >> 11) as f64 / (1_u64 << 53) as f64;
    expected as u64 + u64::from(rest < expected.fract())
}

/// Counts corrected errors of a link, as AER and the driver do.
fn count(dir: &Path, errors: u64) -> io::Result<()> {
    let path = dir.join("aer_dev_correctable");
    if errors == 0 || !path.exists() {
        return Ok(());
    }
    let counted = |line: &str| match line.rsplit_once(' ') {
        Some((name @ ("BadTLP" | "TOTAL_ERR_COR"), number)) => {
            format!("{name} {}\n", number.parse::<u64>().unwrap_or(0).saturating_add(errors))
        }
        _ => format!("{line}\n"),
    };
    replace(&path, &fs::read_to_string(&path)?.lines().map(counted).collect::<String>())?;
    let replays = dir.join("pcie_replay_count");
    let before = number(&replays).unwrap_or(0);
    replace(&replays, &format!("{}\n", before.saturating_add(errors)))
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim_end().parse().ok()
}

/// Lets time pass for a GPU, and has its driver show what it is like then.
fn show(
    dir: &Path,
    sensors: &Path,
    heat: &mut SimHeat,
    elapsed: Duration,
    is_busy: bool,
    has_fan: bool,
    can_tell: bool,
) -> io::Result<()> {
    let is_manual = number(&sensors.join("pwm1_enable")) == Some(1);
    let automatic = 51 + 204 * (heat.millidegrees().clamp(40_000, 80_000) as u64 - 40_000) / 40_000;
    let pwm = if is_manual { number(&sensors.join("pwm1")).unwrap_or(0) } else { automatic };
    heat.fan = has_fan && pwm > 0;
    let cap = number(&sensors.join("power1_cap")).map_or(f64::MAX, |microwatts| microwatts as f64 / 1e6);
    heat.power.1 = heat.power.1.min(cap);
    heat.run(elapsed, true, is_busy);
    let levels = |name| fs::read_to_string(dir.join(name)).unwrap_or_default();
    let mhz = |text: &str| {
        let all = text.lines().filter_map(|line| {
            let level = line.split_once(": ")?.1;
            level.split("Mhz").next()?.parse::<u64>().ok()
        });
        let all: Vec<u64> = all.collect();
        if is_busy { all.into_iter().max() } else { all.into_iter().min() }
    };
    let millidegrees = i64::from(heat.millidegrees());
    let watts = if is_busy { heat.power.1 } else { heat.power.0 };
    let told = |value: String| if can_tell { format!("{value}\n") } else { String::new() };
    let put = |name: &str, value: String| replace(&sensors.join(name), &told(value));
    put("temp1_input", millidegrees.to_string())?;
    put("temp2_input", (millidegrees + if is_busy { 11_000 } else { 2000 }).to_string())?;
    put("temp3_input", (millidegrees + if is_busy { 6000 } else { 1000 }).to_string())?;
    put("power1_average", ((watts * 1e6) as u64).to_string())?;
    put("fan1_input", (if heat.fan { RPM * pwm.min(255) / 255 } else { 0 }).to_string())?;
    if !is_manual {
        put("pwm1", pwm.to_string())?;
    }
    put("freq1_input", (mhz(&levels("pp_dpm_sclk")).unwrap_or(0) * 1_000_000).to_string())?;
    put("freq2_input", (mhz(&levels("pp_dpm_mclk")).unwrap_or(0) * 1_000_000).to_string())?;
    replace(&dir.join("gpu_busy_percent"), &told(if is_busy { 97 } else { 0 }.to_string()))
}
