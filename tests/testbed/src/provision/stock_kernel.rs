//! Debian's stock Linux 6.12, unpacked from its package: what operators run. It has VFIO's group and container, and
//! no iommufd.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::{Cache, LinuxKernel, apt, fnv1a, modules, say};

/// The modules that L1 and Linux guests load.
const MODULES: &[&str] = &[
    "vfio-pci",
    "vfio_iommu_type1",
    "kvm-amd",
    "nvme",
    "e1000e",
    "e1000",
    "igb",
    "igbvf",
    "virtio_blk",
    "virtio-rng",
    "xhci_pci",
    "usb-storage",
    "sd_mod",
    "vhost_vsock",
    "vmw_vsock_virtio_transport",
    "tun",
    "vhost_net",
    "virtio_net",
    "button",
    "evdev",
];

/// What only scenarios with a disk of files load.
const EXT4: &[&str] = &["crc32c_generic", "ext4"];

/// Matches the Linux 6.12 image packages of Debian 12 and 13.
const PACKAGE: &str = r"^linux-image-6\.12\.[0-9]+\+deb1[23]-amd64$";

/// The stock Linux kernel, from the cache or from Debian.
///
/// # Errors
/// When it is neither cached nor to be had.
pub fn provision_stock(cache: &Cache) -> Result<LinuxKernel> {
    let suffix = format!("-stock-{:08x}", fnv1a([MODULES, EXT4].concat().join(",").as_bytes()) as u32);
    if let Some(place) = cache.newest("linux-", &suffix) {
        return open(&place);
    }
    let lock = cache.lock()?;
    if let Some(place) = cache.newest("linux-", &suffix) {
        return open(&place);
    }
    apt::install(cache, &["xz-utils"])?;
    apt::update(cache)?;
    let package = apt::newest_named(PACKAGE)
        .context("apt knows no stock Linux 6.12; is Debian's security among its sources?")?;
    let version = apt::candidate(&package).with_context(|| format!("apt knows no version of {package}"))?;
    let place = cache.fill(&lock, &format!("linux-{version}{suffix}"), |part| {
        let tree = part.join("tree");
        fs::create_dir(&tree)?;
        apt::unpack(cache, &package, &tree)?;
        let image = fs::read_dir(tree.join("boot"))?
            .flatten()
            .find(|entry| entry.file_name().to_string_lossy().starts_with("vmlinuz-"))
            .with_context(|| format!("{package} holds no /boot/vmlinuz"))?;
        fs::copy(image.path(), part.join("vmlinuz"))?;
        // Debian 13 has them in /usr.
        let places = ["usr/lib/modules", "lib/modules"].map(|place| tree.join(place));
        let modules = places.iter().find(|place| place.exists());
        take_modules(modules.with_context(|| format!("{package} holds no modules"))?, part)?;
        fs::remove_dir_all(&tree)?;
        Ok(())
    })?;
    open(&place)
}

/// Puts the modules, uncompressed, and their load order into `part`.
fn take_modules(tree: &Path, part: &Path) -> Result<()> {
    let files = modules::find(tree)?;
    let mut order = String::new();
    modules::in_load_order(
        &[MODULES, EXT4].concat(),
        &mut |name| {
            let file = files.get(name).with_context(|| format!("the package holds no module {name}"))?;
            let output = Command::new("xz")
                .arg("-dc")
                .arg(file)
                .stdin(Stdio::null())
                .output()
                .context("can't run xz")?;
            ensure!(output.status.success(), "xz can't unpack {}", file.display());
            Ok(output.stdout)
        },
        &mut |name, content| {
            order.push_str(name);
            order.push('\n');
            Ok(fs::write(part.join(format!("{name}.ko")), content)?)
        },
    )?;
    fs::write(part.join("modules"), order)?;
    Ok(())
}

fn open(place: &Path) -> Result<LinuxKernel> {
    let list = place.join("modules");
    let order = fs::read_to_string(&list)
        .with_context(|| format!("can't read {}; remove its directory", list.display()))?;
    say(format_args!("stock Linux kernel: {}", place.display()));
    let last = MODULES.last().map(|name| name.replace('-', "_"));
    let behind = order.lines().position(|name| Some(name) == last.as_deref()).map(|last| last + 1);
    let mut modules: Vec<_> = order.lines().map(|name| place.join(format!("{name}.ko"))).collect();
    let ext4 = modules.split_off(behind.unwrap_or(modules.len()));
    Ok(LinuxKernel { image: place.join("vmlinuz"), modules, ext4 })
}
