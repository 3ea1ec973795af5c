//! Gets what the testbed needs onto this machine: Debian packages, QEMU, two Linux kernels.
//!
//! Packages are installed through apt, as root or through sudo. The Linux kernels are cached outside the checkout, in
//! `$XDG_CACHE_HOME/vm-testbed` (`~/.cache/vm-testbed`), in one directory per version and configuration that is
//! complete or absent, never half there. What is cached is used without asking the network.

mod apt;
mod built_kernel;
mod cache;
mod command;
mod disk;
mod modules;
mod qemu;
mod stock_kernel;
mod systemd;

pub use built_kernel::provision_built;
pub use cache::Cache;
pub use command::{Step, say, tail};
pub use disk::{make_disk, provision_disk};
pub use qemu::{libraries_of, provision_qemu, qemu_files};
pub use stock_kernel::provision_stock;
pub use systemd::{provision_systemd, systemd_files};

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};

/// A Linux kernel to boot.
#[derive(Clone, Debug)]
pub struct LinuxKernel {
    /// The bzImage.
    pub image: PathBuf,
    /// Its loadable modules, uncompressed, in the order in which they can be loaded.
    pub modules: Vec<PathBuf>,
    /// Those of ext4 that are to be loaded after them, for scenarios that mount a disk.
    pub ext4: Vec<PathBuf>,
}

impl LinuxKernel {
    /// One that needs no modules.
    ///
    /// # Errors
    /// When there is no such file.
    pub fn from_image(image: &Path) -> Result<Self> {
        ensure!(image.is_file(), "{} is no file; name a bzImage", image.display());
        Ok(Self { image: image.to_owned(), modules: Vec::new(), ext4: Vec::new() })
    }
}

/// FNV-1a, 64 bits wide: names configurations, and checks data that travels through devices.
pub fn fnv1a(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    #[test]
    fn fnv1a_gives_the_published_values() {
        // From http://www.isthe.com/chongo/tech/comp/fnv/
        for (input, hash) in
            [("", 0xcbf2_9ce4_8422_2325), ("a", 0xaf63_dc4c_8601_ec8c), ("foobar", 0x8594_4171_f739_67e8)]
        {
            assert_eq!(super::fnv1a(input.as_bytes()), hash, "{input:?}");
        }
    }
}
