//! The NPUs of the host, and what runs models on them.

pub(crate) use known::{address, all, check_libraries, name_libraries};

use crate::api;
use crate::text::table::{Table, printable};

/// An NPU.
#[derive(Clone, Debug)]
pub(crate) struct Npu {
    kind: String,
    driver: Option<String>,
    address: Option<String>,
    node: Option<String>,
    provider: Option<String>,
    is_emulated: bool,
}

impl Npu {
    /// As JSON.
    pub(crate) fn document(&self, number: usize) -> api::Npu {
        api::Npu {
            number,
            kind: self.kind.clone(),
            driver: self.driver.clone(),
            address: self.address.clone(),
            node: self.node.clone(),
            provider: self.provider.clone(),
            emulated: self.is_emulated,
        }
    }
}

#[cfg(feature = "npu")]
mod known {
    use std::path::absolute;
    use std::process::Command;

    use vm_passthrough::accelerator::npu::{FOLDER_VARIABLE, Libraries, NpuError, Roots, Runtime, devices};
    use vm_passthrough::{Host, PciAddress};

    use super::Npu;
    use crate::failure::Failure;

    fn roots(host: &Host) -> Roots {
        Roots { sys: host.sys.clone(), dev: host.dev.clone() }
    }

    /// Them all, in the order in which `--device npu:N` numbers them. Libraries are asked on a real host alone.
    pub(crate) fn all(host: &Host) -> Vec<Npu> {
        let roots = roots(host);
        let known = devices(&roots);
        let runtime =
            (roots == Roots::system()).then(|| runtime(known.as_ref().is_ok_and(|all| !all.is_empty())));
        let found = match runtime.flatten() {
            Some(runtime) => runtime.devices(&roots),
            None => known,
        };
        let found = found.unwrap_or_else(|error| {
            tracing::debug!("no NPUs: {error}");
            Vec::new()
        });
        let npus = found.into_iter().map(|device| Npu {
            kind: device.kind.name().to_owned(),
            driver: device.driver,
            address: device.address,
            node: device.node.map(|node| node.display().to_string()),
            provider: device.provider.map(|provider| provider.to_string()),
            is_emulated: device.emulated.is_some(),
        });
        npus.collect()
    }

    /// ONNX Runtime, which takes longer to be loaded than all else, where there is something to ask it: an NPU, or a library of a provider.
    fn runtime(is_there: bool) -> Option<Runtime> {
        let libraries = match Libraries::find() {
            Err(error @ NpuError::Untrusted { .. }) => {
                tracing::warn!("{error}");
                return None;
            }
            libraries => libraries.ok()?,
        };
        (is_there || libraries.may_have_npus()).then(|| Runtime::load(&libraries).ok())?
    }

    /// The PCI address of an NPU by its number, where it is a PCI function. No library is asked: those of the Linux kernel come first.
    pub(crate) fn address(host: &Host, number: u32) -> Option<PciAddress> {
        let found = devices(&roots(host)).ok()?;
        found.get(number as usize)?.address.as_ref()?.parse().ok()
    }

    /// That the libraries of NPUs may be loaded.
    ///
    /// # Errors
    /// Whose they are, and what to do.
    pub(crate) fn check_libraries() -> Result<(), Failure> {
        Libraries::folder().map(drop).map_err(Failure::failed)
    }

    /// Tells a process where the libraries of NPUs are, as they are found here: it has neither the variables nor the user that it takes.
    pub(crate) fn name_libraries(command: &mut Command) {
        match Libraries::folder() {
            Ok(None) => {}
            // It is in another directory.
            Ok(Some(folder)) => drop(command.env(FOLDER_VARIABLE, absolute(&folder).unwrap_or(folder))),
            // It was told before the guest was started.
            Err(error) => tracing::debug!("{error}"),
        }
    }
}

/// None are known without the cargo feature.
#[cfg(not(feature = "npu"))]
mod known {
    use std::process::Command;

    use vm_passthrough::{Host, PciAddress};

    use super::Npu;
    use crate::failure::Failure;

    pub(crate) fn all(_: &Host) -> Vec<Npu> {
        Vec::new()
    }

    pub(crate) fn address(_: &Host, _: u32) -> Option<PciAddress> {
        None
    }

    #[expect(clippy::unnecessary_wraps, reason = "there is nothing to look at")]
    pub(crate) fn check_libraries() -> Result<(), Failure> {
        Ok(())
    }

    pub(crate) fn name_libraries(_: &mut Command) {}
}

/// A line for each.
pub(crate) fn table(npus: &[Npu]) -> Table<6> {
    let mut table = Table::new(["DEVICE", "NAME", "DRIVER", "ADDRESS", "NODE", "MODELS BY"]);
    for (number, npu) in npus.iter().enumerate() {
        let or_dash = |text: &Option<String>| {
            text.as_ref().map_or_else(|| "-".to_owned(), |text| printable(text).to_string())
        };
        let emulated = if npu.is_emulated { " (emulated)" } else { "" };
        table.push([
            format!("npu:{number}"),
            format!("{}{emulated}", npu.kind),
            or_dash(&npu.driver),
            or_dash(&npu.address),
            or_dash(&npu.node),
            or_dash(&npu.provider),
        ]);
    }
    table
}
