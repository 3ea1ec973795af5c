//! Fixes that remove a device from the host. Only this module writes such texts, as methods of [`Spare`]; no [`Spare`] exists
//! for a device that the host uses.

use std::path::Path;

use super::host_use::{self, below};
use super::{Case, Severity, disks};
use crate::PciAddress;
use crate::pci::{self, PciFunction};

/// Devices that passed the host-use checks.
pub(super) struct Spare(String);

impl Spare {
    /// Checks that the host does not need `functions`, and that none of them is the target's controller.
    ///
    /// # Errors
    /// A clause that names each function that the host needs, and why.
    pub(super) fn functions<'f>(
        case: &Case<'_>,
        functions: impl IntoIterator<Item = &'f PciFunction>,
    ) -> Result<Self, String> {
        let (mut names, mut needed) = (Vec::new(), Vec::new());
        for function in functions {
            match needed_for(case, function) {
                None => names.push(function.address.to_string()),
                Some(why) => needed.push(format!("{} must stay with the host ({why})", function.address)),
            }
        }
        if needed.is_empty() { Ok(Self(names.join(", "))) } else { Err(needed.join(", ")) }
    }

    /// As [`functions`](Self::functions), of functions that are read here; those that can't be read count as needed.
    ///
    /// # Errors
    /// As for [`functions`](Self::functions).
    pub(super) fn addresses(case: &Case<'_>, addresses: &[PciAddress]) -> Result<Self, String> {
        let read =
            |address: &PciAddress| pci::read_function(case.host, *address).map_err(|error| error.to_string());
        let functions = addresses.iter().map(read).collect::<Result<Vec<_>, _>>()?;
        Self::functions(case, &functions)
    }

    /// The other functions of the group that a claim with --with-group takes.
    ///
    /// # Errors
    /// As for [`functions`](Self::functions).
    pub(super) fn whole_group(case: &Case<'_>) -> Result<Self, String> {
        Self::functions(case, case.others.iter().filter(|other| case.is_taken_with_group(other)))
    }

    /// The controller of the PCI domain that the target is in, with all of that domain.
    ///
    /// # Errors
    /// As for [`functions`](Self::functions).
    pub(super) fn controller(case: &Case<'_>, controller: &PciFunction) -> Result<Self, String> {
        match host_needs(case, controller) {
            None => Ok(Self(controller.address.to_string())),
            Some(why) => Err(format!("{} must stay with the host ({why})", controller.address)),
        }
    }

    /// A device that is no PCI function, by its name in sysfs.
    ///
    /// # Errors
    /// As for [`functions`](Self::functions).
    pub(super) fn device(case: &Case<'_>, name: &str) -> Result<Self, String> {
        let mut uses: Vec<_> =
            below(&case.facts.blocks, name).into_iter().flat_map(|disk| disks::uses_of(case, disk)).collect();
        uses.extend(host_use::default_routes(case, name));
        match &uses[..] {
            [] => Ok(Self(name.to_owned())),
            uses => Err(format!("{name} must stay with the host ({})", uses.join("; "))),
        }
    }

    /// Unbinds one device from its driver.
    pub(super) fn unbind(&self, unbind: &Path) -> String {
        format!("take {0} from its driver: echo {0} > {1}", self.0, unbind.display())
    }

    /// Claims the whole group.
    #[expect(clippy::unused_self, reason = "the value is the proof that the host does not need the group")]
    pub(super) fn give_group(&self) -> &'static str {
        "give the whole group away (--with-group)"
    }

    /// Assigns the devices to the guest that gets the target.
    pub(super) fn give_along(&self, by_group: bool) -> String {
        let how = if by_group { ", as --with-group does" } else { "" };
        format!("give {} to the same guest{how}", self.0)
    }

    /// Claims the devices along with the target, by the commands that take several addresses.
    pub(super) fn name_too(&self, target: PciAddress) -> String {
        let addresses = self.0.replace(", ", " ");
        format!(
            "to pass them too, name them as well: vm-service claim {target} {addresses} (`attach`, `--device` of `run` and [[devices]] of \
             a guest file take them, too)"
        )
    }

    /// Passes the devices instead of the target.
    pub(super) fn pass(&self) -> String {
        format!("pass {}", self.0)
    }

    /// Removes one device, and scans for it again.
    pub(super) fn find_again(&self, case: &Case<'_>) -> String {
        format!(
            "find {} again: echo 1 > {}/bus/pci/devices/{0}/remove; echo 1 > {1}/bus/pci/rescan",
            self.0,
            case.host.sys.display()
        )
    }

    /// Removes virtual functions.
    #[expect(clippy::unused_self, reason = "the value is the proof that the host does not need them")]
    pub(super) fn remove_vfs(&self, count: &Path) -> String {
        format!("disable them: echo 0 > {}", count.display())
    }
}

/// Returns why a fix must not take a function from the host, `None` if it may.
fn needed_for(case: &Case<'_>, function: &PciFunction) -> Option<String> {
    let address = function.address;
    if case.function.controller == Some(address) {
        return Some(format!("{} is behind it", case.function.address));
    }
    host_needs(case, function)
}

/// Returns the first use of a function by the host or by another guest.
fn host_needs(case: &Case<'_>, function: &PciFunction) -> Option<String> {
    let mut alone = Case {
        host: case.host,
        facts: case.facts,
        options: case.options,
        function: function.clone(),
        guest: &[],
        group: None,
        others: Vec::new(),
        found: Vec::new(),
    };
    host_use::judge(&mut alone);
    alone.found.sort_by_key(|found| found.severity);
    let found = alone.found.first()?;
    let first = found.evidence.split("; ").next().unwrap_or_default();
    let first = first.split(", by ").next().unwrap_or_default();
    Some(match found.severity {
        Severity::Blocker => format!("{}: {first}", found.code),
        Severity::Warning => format!("its use is not known: {first}"),
    })
}
