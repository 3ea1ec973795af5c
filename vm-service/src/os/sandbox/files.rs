//! What a worker may open, by Landlock, which also keeps it from tracing processes that are not its own, and from sending
//! them signals.

use std::fs;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access as _, AccessFs, LandlockStatus, Ruleset, RulesetAttr as _, RulesetCreatedAttr as _,
    RulesetError, RulesetStatus, Scope, path_beneath_rules,
};
use rustix::termios::isatty;

use super::Profile;

/// The newest version whose rights are named here; what an older Linux kernel does not know is left out.
const VERSION: ABI = ABI::V6;
/// What any worker reads: about itself and the machine.
const MACHINE: &[&str] = &["/proc", "/sys"];
/// Where libraries and their settings are.
const LIBRARIES: &[&str] =
    &["/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/opt", "/nix/store", "/run/opengl-driver"];
/// Variables of the environment that name more of them.
const NAMED: &[&str] = &["LD_LIBRARY_PATH", "ROCM_PATH", "VM_ROCM_HIP", "VM_ROCM_LLVM"];
/// The worker's own threads, to whose files there a driver's library writes their names.
const THREADS: &str = "/proc/self/task";
/// Nodes that are no accelerator's.
const HARMLESS: &[&str] = &["/dev/null", "/dev/urandom", "/dev/random"];

/// What is in force.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Reach {
    /// Only files that are allowed can be opened.
    pub(super) files: bool,
    /// Signals stay within the process.
    pub(super) signals: bool,
}

/// Whose device nodes a worker needs, and the folders with more of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nodes {
    /// Nobody's.
    None,
    /// NVIDIA's driver's.
    Nvidia,
    /// AMD's compute driver's, with the GPUs that it has.
    #[cfg_attr(not(feature = "rocm"), allow(dead_code, reason = "no worker asks"))]
    Amd,
    /// Those of NPUs: of the accel subsystem, and of Hexagons (FastRPC) and Ascends, which have drivers of their own.
    Npu,
}

impl Nodes {
    /// Those that there are, below the root.
    pub(super) fn below(self, root: &Path) -> Vec<PathBuf> {
        let dev = root.join("dev");
        match self {
            Self::None => Vec::new(),
            Self::Nvidia => nodes(&dev, &["nvidia"]),
            Self::Amd => {
                let compute = Some(dev.join("kfd")).filter(|node| node.exists());
                let is_amds = |node: &PathBuf| {
                    let name = node.file_name().unwrap_or_default();
                    let vendor = root.join("sys/class/drm").join(name).join("device/vendor");
                    fs::read_to_string(vendor).is_ok_and(|vendor| vendor.trim() == "0x1002")
                };
                let renders = nodes(&dev.join("dri"), &["renderD"]).into_iter().filter(is_amds);
                compute.into_iter().chain(renders).collect()
            }
            Self::Npu => {
                let own = nodes(&dev, &["fastrpc", "davinci", "hisi_hdc", "devmm_svm"]);
                nodes(&dev.join("accel"), &["accel"]).into_iter().chain(own).collect()
            }
        }
    }
}

/// What a folder has under names that begin so.
fn nodes(folder: &Path, starts: &[&str]) -> Vec<PathBuf> {
    let nodes = fs::read_dir(folder).into_iter().flatten().flatten();
    let is_one = |name: &str| starts.iter().any(|start| name.starts_with(start));
    nodes.filter(|node| is_one(&node.file_name().to_string_lossy())).map(|node| node.path()).collect()
}

/// From here on this thread, and those that it begins, read what the machine says of itself. A driver's library also reads
/// libraries, also those in `folders`, and opens `devices` for whatever it likes.
///
/// # Errors
/// The Linux kernel's.
pub(super) fn restrict(profile: Profile, devices: &[PathBuf], folders: &[&Path]) -> Result<Reach, String> {
    let read = AccessFs::from_read(VERSION);
    let node = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::ReadDir | AccessFs::IoctlDev;
    // As the VMM named them; an empty entry would be the working directory, which is the root.
    let named: Vec<PathBuf> = NAMED
        .iter()
        .filter_map(std::env::var_os)
        .flat_map(|folders| std::env::split_paths(&folders).collect::<Vec<_>>())
        .filter(|path| path.is_absolute() && path != Path::new("/"))
        .collect();
    let write = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::Truncate;
    let (libraries, named, threads) = match profile {
        Profile::Own | Profile::Machine | Profile::Vmm => (&[][..], &[][..], None),
        Profile::Driver | Profile::Npu => (LIBRARIES, &named[..], Some(THREADS)),
    };
    // A VMM has nothing open to look for any more.
    let (machine, harmless) = if profile == Profile::Vmm { (&[][..], &[][..]) } else { (MACHINE, HARMLESS) };
    let restricted = || {
        Ruleset::default()
            .handle_access(AccessFs::from_all(VERSION))?
            .scope(Scope::from_all(VERSION))?
            .create()?
            .add_rules(path_beneath_rules(machine, read))?
            .add_rules(path_beneath_rules(libraries, read))?
            .add_rules(path_beneath_rules(named, read))?
            .add_rules(path_beneath_rules(folders, read))?
            .add_rules(path_beneath_rules(threads, write))?
            .add_rules(path_beneath_rules(harmless, AccessFs::ReadFile | AccessFs::WriteFile))?
            .add_rules(path_beneath_rules(devices, node))?
            .restrict_self()
    };
    in_force(restricted())
}

/// As [`restrict`], but whatever the user may open can be opened.
///
/// # Errors
/// The Linux kernel's.
pub(super) fn restrict_signals() -> Result<Reach, String> {
    let restricted = || Ruleset::default().scope(Scope::from_all(VERSION))?.create()?.restrict_self();
    in_force(restricted()).map(|reach| Reach { files: false, ..reach })
}

/// From here on this thread, and those that it begins, open no files. Whether that is in force.
///
/// # Errors
/// The Linux kernel's.
pub(super) fn restrict_all() -> Result<bool, String> {
    let restricted =
        || Ruleset::default().handle_access(AccessFs::from_all(VERSION))?.create()?.restrict_self();
    in_force(restricted()).map(|reach| reach.files)
}

/// From here on this thread, and those that it begins, only read `file` and what is below `folder`, wherever links lead, and use
/// the terminals that they have. Whether that is in force.
///
/// # Errors
/// The Linux kernel's.
pub(crate) fn restrict_to(folder: &Path, file: Option<&Path>) -> Result<bool, String> {
    let terminal = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev;
    let standard: [(BorrowedFd<'_>, _); 3] = [
        (rustix::stdio::stdin(), "/proc/self/fd/0"),
        (rustix::stdio::stdout(), "/proc/self/fd/1"),
        (rustix::stdio::stderr(), "/proc/self/fd/2"),
    ];
    // They are opened once more where they are not to be waited for.
    let terminals = standard.into_iter().filter(|&(file, _)| isatty(file)).map(|(_, path)| path);
    let restricted = || {
        Ruleset::default()
            .handle_access(AccessFs::from_all(VERSION))?
            .create()?
            .add_rules(path_beneath_rules([folder], AccessFs::from_read(VERSION)))?
            .add_rules(path_beneath_rules(file, AccessFs::ReadFile))?
            .add_rules(path_beneath_rules(terminals.chain(["/dev/tty"]), terminal))?
            .add_rules(path_beneath_rules(["/dev/null"], AccessFs::WriteFile))?
            .restrict_self()
    };
    in_force(restricted()).map(|reach| reach.files)
}

fn in_force(restricted: Result<landlock::RestrictionStatus, RulesetError>) -> Result<Reach, String> {
    let status = restricted.map_err(|error| error.to_string())?;
    let version = match status.landlock {
        LandlockStatus::Available { effective_abi, .. } if status.ruleset != RulesetStatus::NotEnforced => {
            effective_abi
        }
        _ => return Ok(Reach::default()),
    };
    Ok(Reach { files: true, signals: version >= ABI::V6 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_those_of_one_driver() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let nodes = [
            "nvidia0",
            "nvidiactl",
            "kfd",
            "kvm",
            "kfd2",
            "dri/renderD128",
            "dri/renderD129",
            "dri/card0",
            "accel/accel0",
            "davinci0",
        ];
        nodes.iter().for_each(|node| write(&format!("dev/{node}"), ""));
        for (name, vendor) in [("renderD128", "0x1002\n"), ("renderD129", "0x8086\n"), ("card0", "0x1002\n")]
        {
            write(&format!("sys/class/drm/{name}/device/vendor"), vendor);
        }
        let check = |nodes: Nodes, expect: &[&str]| {
            let mut found = nodes.below(root.path());
            found.sort();
            let expect: Vec<_> = expect.iter().map(|node| root.path().join("dev").join(node)).collect();
            assert_eq!(found, expect, "{nodes:?}");
        };
        check(Nodes::None, &[]);
        check(Nodes::Nvidia, &["nvidia0", "nvidiactl"]);
        check(Nodes::Amd, &["dri/renderD128", "kfd"]);
        check(Nodes::Npu, &["accel/accel0", "davinci0"]);
    }
}
