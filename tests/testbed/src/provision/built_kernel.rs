//! The self-built Linux 6.12 with iommufd and VFIO device cdevs, which Debian's stock kernel leaves out. All that
//! the testbed needs is built in: no modules, and a quick boot.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::{Cache, LinuxKernel, Step, apt, fnv1a, say};

/// What is asked of the kernel; all else is off (`allnoconfig`).
const CONFIG: &str = include_str!("../../linux-6.12.config");

const PACKAGE: &str = "linux-source-6.12";

/// What building it needs.
const TOOLS: &[&str] = &[
    "gcc",
    "libc6-dev",
    "make",
    "flex",
    "bison",
    "bc",
    "libelf-dev",
    "libssl-dev",
    "xz-utils",
    "tar",
    "perl",
];

/// The self-built Linux kernel, from the cache or from Debian's source.
///
/// # Errors
/// When it is neither cached nor to be built.
pub fn provision_built(cache: &Cache) -> Result<LinuxKernel> {
    let suffix = format!("-built-{:08x}", fnv1a(CONFIG.as_bytes()) as u32);
    if let Some(place) = cache.newest("linux-", &suffix) {
        return open(&place);
    }
    let lock = cache.lock()?;
    if let Some(place) = cache.newest("linux-", &suffix) {
        return open(&place);
    }
    apt::install(cache, TOOLS)?;
    apt::update(cache)?;
    let version = apt::candidate(PACKAGE)
        .with_context(|| format!("apt knows no {PACKAGE}; is Debian's security among its sources?"))?;
    let place = cache.fill(&lock, &format!("linux-{version}{suffix}"), |part| build(cache, part))?;
    open(&place)
}

fn build(cache: &Cache, part: &Path) -> Result<()> {
    let start = Instant::now();
    let work = part.join("work");
    fs::create_dir(&work)?;
    apt::unpack(cache, PACKAGE, &work)?;
    let logs = cache.logs()?;
    let step = |what, log: &str, minutes: u64| Step {
        what,
        log: logs.join(log),
        deadline: Duration::from_secs(minutes * 60),
    };
    let archive = work.join("usr/src").join(format!("{PACKAGE}.tar.xz"));
    step("unpacking the Linux source", "linux-unpack.log", 10)
        .run(Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(&work))?;
    let source = work.join(PACKAGE);
    fs::write(work.join("config"), CONFIG)?;
    step("configuring Linux", "linux-config.log", 10).run(
        Command::new("make")
            .current_dir(&source)
            .env("KCONFIG_ALLCONFIG", work.join("config"))
            .arg("allnoconfig"),
    )?;
    check_config(&fs::read_to_string(source.join(".config"))?)?;
    let jobs = std::thread::available_parallelism().map_or(2, usize::from);
    say(format_args!("building Linux with iommufd ({jobs} jobs; 5 to 10 minutes on 2 cores)"));
    step("building Linux", "linux-build.log", 60)
        .run(Command::new("make").current_dir(&source).arg(format!("-j{jobs}")).arg("bzImage"))?;
    fs::copy(source.join("arch/x86/boot/bzImage"), part.join("bzImage"))?;
    fs::copy(source.join(".config"), part.join("config"))?;
    fs::remove_dir_all(&work)?;
    say(format_args!("built Linux in {} s", start.elapsed().as_secs()));
    Ok(())
}

/// Checks that Kconfig took every option: it drops those whose dependencies are missing without a word.
fn check_config(got: &str) -> Result<()> {
    let has = |line: &str| match line.strip_suffix("=n") {
        Some(option) => !got.lines().any(|got| got.starts_with(&format!("{option}="))),
        None => got.lines().any(|got| got == line),
    };
    let dropped: Vec<&str> =
        CONFIG.lines().filter(|line| line.starts_with("CONFIG_") && !has(line)).collect();
    ensure!(dropped.is_empty(), "Kconfig dropped {}; their dependencies are missing", dropped.join(", "));
    Ok(())
}

fn open(place: &Path) -> Result<LinuxKernel> {
    let image = place.join("bzImage");
    let kernel = LinuxKernel::from_image(&image)
        .with_context(|| format!("the directory {} is not whole; remove it", place.display()))?;
    say(format_args!("self-built Linux kernel: {}", place.display()));
    Ok(kernel)
}
