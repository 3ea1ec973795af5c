//! What an init process does: mounts, modules, power-off.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use rustix::mount::{MountFlags, mount};
use rustix::system::{RebootCommand, init_module, reboot};

/// Mounts the kernel's file systems.
pub(super) fn set_up() -> Result<()> {
    for (kind, target) in
        [("devtmpfs", "/dev"), ("proc", "/proc"), ("sysfs", "/sys"), ("tmpfs", "/run"), ("tmpfs", "/tmp")]
    {
        mount(kind, target, kind, MountFlags::empty(), None)
            .with_context(|| format!("can't mount {kind} on {target}"))?;
    }
    // Not every Linux kernel has it, and only some scenarios look at it.
    let _ = mount("debugfs", "/sys/kernel/debug", "debugfs", MountFlags::empty(), None);
    Ok(())
}

/// Loads the modules that the initial RAM disk brings, in its order.
pub(super) fn load_modules() -> Result<()> {
    let directory = Path::new("/modules");
    let order = fs::read_to_string(directory.join("order")).context("can't read /modules/order")?;
    for name in order.lines() {
        let module = fs::read(directory.join(name)).with_context(|| format!("can't read module {name}"))?;
        match init_module(&module, c"") {
            Ok(()) => {}
            // The processor has no virtualisation, as in a Linux guest: only who uses KVM minds.
            Err(error) if name == "kvm_amd.ko" => eprintln!("testbed-agent: {name} was not loaded: {error}"),
            Err(error) => return Err(error).with_context(|| format!("can't load module {name}")),
        }
    }
    Ok(())
}

/// A parameter of the Linux kernel's command line.
pub(super) fn parameter(name: &str) -> Option<String> {
    let line = fs::read_to_string("/proc/cmdline").ok()?;
    line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('=').map(str::to_owned))
}

/// Starts the machine afresh.
pub(super) fn restart() -> ! {
    let error = reboot(RebootCommand::Restart);
    eprintln!("testbed-agent: the machine does not restart: {error:?}");
    std::process::exit(1);
}

/// Powers the machine off.
pub(super) fn power_off() -> ! {
    rustix::fs::sync();
    let error = reboot(RebootCommand::PowerOff);
    eprintln!("testbed-agent: the machine does not power off: {error:?}");
    // A Linux kernel panics when its init process ends, and `panic=-1` then ends the machine.
    std::process::exit(1);
}
