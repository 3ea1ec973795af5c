//! Debian's packages, through apt.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::cache::{Cache, version_key};
use super::command::output_of;
use super::{Step, say};

const BACKPORTS: &str = "bookworm-backports";
const BACKPORTS_LIST: &str = "/etc/apt/sources.list.d/vm-testbed-backports.list";
const BACKPORTS_LINE: &str = "deb http://deb.debian.org/debian bookworm-backports main\n";

/// Whether this process has read the package lists afresh.
static UPDATED: AtomicBool = AtomicBool::new(false);

/// A command run as root: directly, or through sudo without asking for a password.
fn as_root(program: &str) -> Command {
    if rustix::process::geteuid().is_root() {
        Command::new(program)
    } else {
        let mut command = Command::new("sudo");
        command.arg("-n").arg(program);
        command
    }
}

/// Which of the packages are not installed.
pub(super) fn missing<'a>(packages: &[&'a str]) -> Vec<&'a str> {
    let installed = |package: &&str| {
        output_of("dpkg-query", &["-W", "-f=${db:Status-Status}", package])
            .is_some_and(|status| status == "installed")
    };
    packages.iter().copied().filter(|package| !installed(package)).collect()
}

/// The releases of Debian whose packages do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Release {
    /// Debian 12, whose QEMU is too old: the backports have a newer one.
    Bookworm,
    /// Debian 13.
    Trixie,
}

impl Release {
    /// That of this system, by what `/etc/os-release` says.
    fn of(os_release: &str) -> Option<Self> {
        let name = os_release.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="))?;
        match name.trim_matches('"') {
            "bookworm" => Some(Self::Bookworm),
            "trixie" => Some(Self::Trixie),
            _ => None,
        }
    }

    fn here(cache: &Cache) -> Result<Self> {
        Self::of(&std::fs::read_to_string("/etc/os-release").unwrap_or_default()).with_context(|| {
            format!(
                "packages are installed on Debian 12 (bookworm) and 13 (trixie) only; on this system install QEMU 10 \
                 and put the Linux kernels into {} by hand",
                cache.root().display()
            )
        })
    }
}

/// Reads the package lists, once, with the backports among them where they are needed.
pub(super) fn update(cache: &Cache) -> Result<()> {
    if UPDATED.load(Ordering::Relaxed) {
        return Ok(());
    }
    let release = Release::here(cache)?;
    let log = cache.logs()?.join("apt-update.log");
    let step = Step { what: "reading the package lists", log, deadline: Duration::from_secs(300) };
    let has_backports =
        || output_of("apt-cache", &["policy"]).is_some_and(|policy| policy.contains(BACKPORTS));
    if release == Release::Bookworm && !has_backports() {
        say(format_args!("adding {BACKPORTS} to apt's sources, in {BACKPORTS_LIST}"));
        let write = format!("printf '%s' '{BACKPORTS_LINE}' > {BACKPORTS_LIST}");
        let log = cache.logs()?.join("apt-sources.log");
        Step { what: "adding the backports", log, deadline: Duration::from_secs(20) }
            .run(as_root("sh").args(["-c", &write]))?;
    }
    say(step.what);
    // One source that does not answer must not keep the others from being read.
    let updated = step.run(as_root("apt-get").args(["-q", "-o", "Acquire::Retries=3", "update"]));
    if let Err(error) = updated {
        say(format_args!("{error:#}"));
    }
    UPDATED.store(true, Ordering::Relaxed);
    Ok(())
}

/// Installs those of the packages that are missing.
///
/// # Errors
/// When apt fails, or this user is neither root nor allowed to use sudo.
pub(super) fn install(cache: &Cache, packages: &[&str]) -> Result<()> {
    let missing = missing(packages);
    if missing.is_empty() {
        return Ok(());
    }
    update(cache)?;
    // Where a library came from the backports, as some do with QEMU, what is built with it has to come from there too.
    match install_from(cache, None, &missing) {
        Err(_) if Release::here(cache)? == Release::Bookworm => {
            say(format_args!("the release's own do not fit what came from {BACKPORTS} before"));
            install_from(cache, Some(BACKPORTS), &missing)
        }
        done => done,
    }
}

/// Installs the newest that there is, also where an older release is installed.
pub(super) fn install_newest(cache: &Cache, packages: &[&str]) -> Result<()> {
    update(cache)?;
    let from = match Release::here(cache)? {
        Release::Bookworm => Some(BACKPORTS),
        Release::Trixie => None,
    };
    install_from(cache, from, packages)
}

fn install_from(cache: &Cache, release: Option<&str>, packages: &[&str]) -> Result<()> {
    say(format_args!("installing {}", packages.join(" ")));
    let log = cache.logs()?.join(format!("apt-install-{}.log", packages[0]));
    let step = Step { what: "installing packages", log, deadline: Duration::from_secs(900) };
    let mut command = as_root("env");
    command.args(["DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-y", "--no-install-recommends"]);
    // Another apt may run, as on a machine that has just booted.
    command.args(["-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=3", "install"]);
    if let Some(release) = release {
        command.args(["-t", release]);
    }
    step.run(command.args(packages))
        .context("as root, or with sudo, the testbed installs its packages itself")
}

/// The version of the package that apt would fetch.
pub(super) fn candidate(package: &str) -> Option<String> {
    let records = output_of("apt-cache", &["show", "--no-all-versions", package])?;
    records.lines().find_map(|line| line.strip_prefix("Version: ")).map(str::to_owned)
}

/// The newest package whose name matches the extended regular expression.
pub(super) fn newest_named(pattern: &str) -> Option<String> {
    let found = output_of("apt-cache", &["search", "--names-only", pattern])?;
    found
        .lines()
        .filter_map(|line| line.split(' ').next())
        .max_by_key(|name| version_key(name))
        .map(str::to_owned)
}

/// Fetches a package and unpacks it, not installing it, into `into`.
///
/// # Errors
/// When it can't be fetched or unpacked.
pub(super) fn unpack(cache: &Cache, package: &str, into: &Path) -> Result<()> {
    say(format_args!("fetching {package}"));
    let download = into.join("download");
    std::fs::create_dir(&download)?;
    let log = cache.logs()?.join(format!("fetch-{package}.log"));
    Step { what: "fetching a package", log, deadline: Duration::from_secs(900) }.run(
        Command::new("apt-get").current_dir(&download).args([
            "-q",
            "-o",
            "Acquire::Retries=3",
            "-o",
            "APT::Sandbox::User=root",
            "download",
            package,
        ]),
    )?;
    let deb: PathBuf = match std::fs::read_dir(&download)?.flatten().next() {
        Some(entry) => entry.path(),
        None => bail!("apt-get download {package} left no file in {}", download.display()),
    };
    let log = cache.logs()?.join(format!("unpack-{package}.log"));
    Step { what: "unpacking a package", log, deadline: Duration::from_secs(300) }
        .run(Command::new("dpkg").arg("-x").arg(&deb).arg(into))?;
    std::fs::remove_dir_all(&download)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::Release;

    #[test]
    fn the_release_is_read_from_the_system() {
        let check = |text: &str, expect| assert_eq!(Release::of(text), expect, "{text}");
        check("ID=debian\nVERSION_CODENAME=bookworm\n", Some(Release::Bookworm));
        check("VERSION_CODENAME=\"trixie\"\nID=debian", Some(Release::Trixie));
        check("VERSION_CODENAME=noble\nUBUNTU_CODENAME=noble\n", None);
        check("# VERSION_CODENAME=bookworm", None);
        check("", None);
    }
}
