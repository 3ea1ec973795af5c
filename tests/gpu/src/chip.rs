//! Which chip the GPU is, by its boot registers, which are only read, and by NVIDIA's management library.

use anyhow::{Context, ensure};
use vm_cuda::nvml::{self, Identity};
use vm_passthrough::gpu::{Architecture, NoChip, report_chip};
use vm_passthrough::pci::{self, PciFunction};
use vm_passthrough::{Host, PciAddress};

use crate::Report;
use crate::gpu::Gpu;
use crate::service::address;
use crate::skip::skip;

/// An architecture by what its chips' names begin with, by NVML's number (`nvmlDeviceArchitecture_t`) and by compute capability: the
/// major number, and the least and the highest minor one.
type Row = (Architecture, &'static str, u32, &'static [(u32, u32, u32)]);

const ARCHITECTURES: &[Row] = &[
    (Architecture::Maxwell, "GM", 3, &[(5, 0, 3)]),
    (Architecture::Pascal, "GP", 4, &[(6, 0, 2)]),
    (Architecture::Volta, "GV", 5, &[(7, 0, 2)]),
    (Architecture::Turing, "TU", 6, &[(7, 5, 5)]),
    (Architecture::Ampere, "GA", 7, &[(8, 0, 8)]),
    (Architecture::Ada, "AD", 8, &[(8, 9, 9)]),
    (Architecture::Hopper, "GH", 9, &[(9, 0, 0)]),
    (Architecture::Blackwell, "GB", 10, &[(10, 0, 9), (11, 0, 9), (12, 0, 9)]),
];

/// What this machine's sysfs has of the GPU.
///
/// # Errors
/// When it has nothing, the test is skipped.
pub(crate) fn function(host: &Host, at: PciAddress) -> anyhow::Result<PciFunction> {
    match pci::read_function(host, at) {
        Ok(function) => Ok(function),
        Err(error) => skip(format!("sysfs does not have the GPU: {error}")),
    }
}

/// Compares both. Where the registers can't be read, the PCI ID stands for them, and the test counts as skipped.
pub(crate) fn check(gpu: &Gpu, report: &mut Report) -> anyhow::Result<()> {
    let at = address(gpu)?;
    let says = match nvml::identity(&at.to_string()) {
        Err(error @ vm_accel::Error::Unavailable { .. }) => return skip(error.to_string()),
        says => says?,
    };
    report.note(format!("{says:?}"));
    let host = Host::system();
    let function = function(&host, at)?;
    let chip = report_chip(&host, &function);
    if let Some(named) = chip.named {
        let (architecture, ..) = row(|(_, begin, ..)| named.starts_with(begin))
            .with_context(|| format!("the PCI ID database calls it {named}"))?;
        agrees(architecture, &says).with_context(|| format!("by its PCI ID it is {named}"))?;
        product(&function, &says)?;
    }
    match chip.chip {
        Ok(found) => {
            report.note(format!("{found}, confirmed by NV_PMC_BOOT_42: {}", found.confirmed));
            agrees(found.architecture, &says).with_context(|| format!("its registers say {found}"))?;
            // The database has GH100GL, say, for GH100 on a board for servers.
            let same = chip.named.is_none_or(|named| named.starts_with(found.name));
            ensure!(same, "its registers say {found}, its PCI ID {:?}", chip.named);
            ensure!(found.confirmed, "NV_PMC_BOOT_42 does not say that it is {found}");
            Ok(())
        }
        Err(NoChip::NotReadable(error)) => {
            let id = chip.named.map_or("its PCI ID is not known either".into(), |named| {
                format!("by its PCI ID it is {named}, which agrees with NVML")
            });
            skip(format!("its registers can't be read: {error}; {id}"))
        }
        Err(error) => Err(anyhow::Error::new(error).context(format!("its registers read {:x?}", chip.boot))),
    }
}

fn row(holds: impl Fn(&Row) -> bool) -> Option<Row> {
    ARCHITECTURES.iter().find(|row| holds(row)).copied()
}

/// That the library says of it what holds of an architecture.
fn agrees(architecture: Architecture, says: &Identity) -> anyhow::Result<()> {
    let (.., number, capabilities) = row(|(known, ..)| *known == architecture)
        .with_context(|| format!("{architecture}: nothing is known of what NVML says of such a GPU"))?;
    let told = says.architecture;
    ensure!(told.is_none_or(|told| told == number), "NVML says architecture {told:?}, not {number}");
    let (major, minor) = says.compute_capability.context("NVML does not tell its compute capability")?;
    let holds = |&(known, least, most): &(u32, u32, u32)| major == known && (least..=most).contains(&minor);
    ensure!(capabilities.iter().any(holds), "{architecture} has no compute capability {major}.{minor}");
    Ok(())
}

/// That the product's name is one that the PCI ID database has: its number, as in H200, 4090 or A100.
fn product(function: &PciFunction, says: &Identity) -> anyhow::Result<()> {
    let (Some(name), Some(known)) = (&says.name, function.device_name()) else { return Ok(()) };
    let number = name.split([' ', '-']).find(|word| word.contains(|letter: char| letter.is_ascii_digit()));
    ensure!(
        number.is_none_or(|number| known.contains(number)),
        "NVML says {name}, the PCI ID database {known}"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_architecture_agrees_with_what_nvml_says_of_it_alone() {
        let check = |architecture, number, capability, expect: bool| {
            let says = Identity { name: None, architecture: number, compute_capability: Some(capability) };
            assert_eq!(agrees(architecture, &says).is_ok(), expect, "{architecture} {says:?}");
        };
        check(Architecture::Hopper, Some(9), (9, 0), true);
        check(Architecture::Hopper, None, (9, 0), true);
        check(Architecture::Hopper, Some(7), (9, 0), false);
        check(Architecture::Hopper, Some(9), (8, 9), false);
        check(Architecture::Ampere, Some(7), (8, 6), true);
        check(Architecture::Ampere, Some(7), (8, 9), false);
        check(Architecture::Ada, Some(8), (8, 9), true);
        check(Architecture::Blackwell, Some(10), (12, 0), true);
        check(Architecture::Tesla, None, (1, 0), false);
    }
}
