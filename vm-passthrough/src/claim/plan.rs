//! What is to be done to claim a function: a pure function of what a scan found.

use std::fmt;

use thiserror::Error;

use super::ClaimOptions;
use crate::PciAddress;
use crate::iommu::{self, DriverReason, Part, VfioDriver, VfioDrivers, is_vfio_driver};
use crate::pci::{PciFunction, PciIds, Sriov};

/// One step of a [`Plan`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Take the function from its driver and bind it to a VFIO driver.
    Take {
        /// Which one.
        address: PciAddress,
        /// Driver that it is bound to.
        driver: Option<String>,
        /// The VFIO driver.
        vfio_driver: String,
    },
    /// Take the bridge from its driver, which keeps its group from being used, and leave it without one.
    Park {
        /// Which one.
        address: PciAddress,
        /// Driver that it is bound to.
        driver: String,
    },
    /// The function belongs to the claim and is on a VFIO driver already: leave it.
    Keep {
        /// Which one.
        address: PciAddress,
        /// The VFIO driver.
        driver: String,
    },
}

impl Step {
    /// The function that it is about.
    pub fn address(&self) -> PciAddress {
        match self {
            Self::Take { address, .. } | Self::Park { address, .. } | Self::Keep { address, .. } => *address,
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Take { address, driver: Some(driver), vfio_driver } => {
                write!(f, "unbind {address} from {driver}, bind it to {vfio_driver}")
            }
            Self::Take { address, driver: None, vfio_driver } => write!(f, "bind {address} to {vfio_driver}"),
            Self::Park { address, driver } => write!(f, "unbind {address} from {driver}"),
            Self::Keep { address, driver } => write!(f, "leave {address} on {driver}"),
        }
    }
}

/// What is to be done to claim a function, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The function that was asked for.
    pub target: PciAddress,
    /// Its IOMMU group.
    pub group: u32,
    /// The steps. Companions come before the function 0 that they depend on; a release goes the other way.
    pub steps: Vec<Step>,
}

/// Why a function must not be taken.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// No such function.
    #[error("there is no PCI function {0}; list what there is with a scan")]
    NoSuchFunction(PciAddress),
    /// It is not the device that it must be by [`ClaimOptions::only`].
    #[error(
        "{address} is {found} and not {}; the address belongs to another device since", expected.map_or_else(|| "one of those that were claimed together".into(), |ids| ids.to_string())
    )]
    OtherDevice {
        /// The function.
        address: PciAddress,
        /// What it is.
        found: PciIds,
        /// What it should be; `None` for none at this address.
        expected: Option<PciIds>,
    },
    /// It is a bridge.
    #[error("{0} is a PCI bridge, which VFIO does not expose; claim a function behind it")]
    Bridge(PciAddress),
    /// The driver that was asked for is none of VFIO's.
    #[error(
        "{0} is no VFIO driver, by its name: those are vfio-pci and what ends in -vfio-pci or _vfio_pci; name another, or none"
    )]
    NotAVfioDriver(String),
    /// No IOMMU translates for it.
    #[error(
        "{0} is in no IOMMU group, so its DMA can't be confined; turn the IOMMU on in the firmware and boot Linux with intel_iommu=on or amd_iommu=on"
    )]
    NoIommuGroup(PciAddress),
    /// It is a physical function whose virtual functions are enabled.
    #[error(
        "{address} has {num_vfs} virtual functions enabled, which would vanish under their users; disable them first (write 0 to its sriov_numvfs), or claim one of them"
    )]
    VirtualFunctionsInUse {
        /// The physical function.
        address: PciAddress,
        /// How many are enabled.
        num_vfs: u16,
    },
    /// A BAR can't be given the size that [`ClaimOptions::bar_sizes`] asks for.
    #[error(
        "BAR {index} of {address} can't have {asked} bytes: {}", possible(.sizes)
    )]
    BarSize {
        /// The function.
        address: PciAddress,
        /// The BAR.
        index: u8,
        /// What was asked for.
        asked: u64,
        /// What it can have; nothing when it can't be resized.
        sizes: Vec<u64>,
    },
    /// A BAR is to be resized of a function that is on a VFIO driver already, which Linux refuses.
    #[error(
        "BAR {index} of {address} can't be resized while {driver} has the function; release it, or unbind it from there, first"
    )]
    BarInUse {
        /// The function.
        address: PciAddress,
        /// The BAR.
        index: u8,
        /// The VFIO driver.
        driver: String,
    },
    /// Other devices of its IOMMU group are in use by the host.
    #[error(
        "IOMMU group {group} of {address} holds functions that the host's drivers use: {}; explain {address} lists the fixes{}",
        list(.others), if *.with_group_helps { ", such as a claim of the whole group" } else { "" }
    )]
    GroupNotViable {
        /// The function that was asked for.
        address: PciAddress,
        /// Its group.
        group: u32,
        /// Functions in other slots, with the driver that has them.
        others: Vec<(PciAddress, String)>,
        /// Whether claiming the whole group takes them all.
        with_group_helps: bool,
    },
}

fn possible(sizes: &[u64]) -> String {
    if sizes.is_empty() {
        return "the device can't resize it".into();
    }
    let sizes: Vec<_> = sizes.iter().map(u64::to_string).collect();
    format!("it can have {}", sizes.join(", "))
}

fn list(others: &[(PciAddress, String)]) -> String {
    let others: Vec<_> = others.iter().map(|(address, driver)| format!("{address} ({driver})")).collect();
    others.join(", ")
}

impl Plan {
    /// The plan to claim `target`, given all functions of the host and its VFIO drivers.
    ///
    /// The function's companions, which are the functions of its slot in its IOMMU group, are taken with it: a GPU's
    /// audio, USB and UCSI functions. Functions of other slots in the group are taken when `options` ask for the
    /// whole group, and then a bridge is taken from a driver that only serves its hot-plug slots. Other bridges stay with
    /// their driver, and functions on a VFIO driver stay there, unless `options` name another.
    ///
    /// # Errors
    /// When the function, or another that would have to be taken with it, must not be taken.
    pub fn new(
        functions: &[PciFunction],
        target: PciAddress,
        options: &ClaimOptions,
        drivers: &VfioDrivers,
    ) -> Result<Self, Refusal> {
        if let VfioDriver::Named(name) = &options.driver
            && !is_vfio_driver(name)
        {
            return Err(Refusal::NotAVfioDriver(name.clone()));
        }
        let function = functions
            .iter()
            .find(|function| function.address == target)
            .ok_or(Refusal::NoSuchFunction(target))?;
        let is_expected = |function: &PciFunction| match &options.only {
            Some(only) if only.get(&function.address) != Some(&function.ids) => {
                let (address, found) = (function.address, function.ids);
                Err(Refusal::OtherDevice { address, found, expected: only.get(&address).copied() })
            }
            _ => Ok(()),
        };
        is_expected(function)?;
        if function.is_bridge() {
            return Err(Refusal::Bridge(target));
        }
        let group = function.iommu_group.ok_or(Refusal::NoIommuGroup(target))?;

        let in_group = || functions.iter().filter(|other| other.iommu_group == Some(group));
        let in_the_way: Vec<_> =
            in_group().filter_map(|other| iommu::in_the_way(other, function, options.with_group)).collect();
        if !in_the_way.is_empty() {
            let with_group_helps = in_the_way.iter().all(|other| other.with_group_helps);
            let others = in_the_way.iter().map(|other| (other.function.address, other.driver.to_owned()));
            return Err(Refusal::GroupNotViable {
                address: target,
                group,
                others: others.collect(),
                with_group_helps,
            });
        }

        let mut members: Vec<_> = in_group()
            .map(|other| (other, Part::of(other, function, options.with_group)))
            .filter(|(_, part)| matches!(part, Part::Taken | Part::Parked))
            .collect();
        members.sort_by_key(|(member, _)| std::cmp::Reverse(member.address));
        let mut steps = Vec::new();
        for (member, part) in members {
            let address = member.address;
            is_expected(member)?;
            if part == Part::Parked {
                steps.extend(member.driver.clone().map(|driver| Step::Park { address, driver }));
                continue;
            }
            let choice = drivers.choose(member, &options.driver, address == target);
            let stays = choice.reason == DriverReason::Bound;
            for (&index, &asked) in options.bar_sizes.get(&address).into_iter().flatten() {
                let sizes = member.bar_sizes(index).to_vec();
                let has = member.bars.iter().find(|bar| bar.index == index).map(|bar| bar.size);
                if has.is_none() || !sizes.contains(&asked) {
                    return Err(Refusal::BarSize { address, index, asked, sizes });
                }
                if stays && has != Some(asked) {
                    return Err(Refusal::BarInUse { address, index, driver: choice.driver });
                }
            }
            if stays {
                steps.push(Step::Keep { address, driver: choice.driver });
                continue;
            }
            if let Some(Sriov::Physical { num_vfs, .. }) = member.sriov
                && num_vfs > 0
            {
                return Err(Refusal::VirtualFunctionsInUse { address, num_vfs });
            }
            steps.push(Step::Take { address, driver: member.driver.clone(), vfio_driver: choice.driver });
        }
        Ok(Self { target, group, steps })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pci::{DeviceType, PciClass, PowerState};

    fn function(address: &str, group: Option<u32>, driver: Option<&str>) -> PciFunction {
        PciFunction {
            address: address.parse().unwrap(),
            ids: PciIds { vendor: 1, device: 2, subsystem_vendor: 0, subsystem_device: 0, revision: 0 },
            class: PciClass(0x03_0000),
            device_type: DeviceType::Other,
            header_type: 0,
            upstream: None,
            bars: Vec::new(),
            resizable: Vec::new(),
            rom: None,
            iommu_group: group,
            driver: driver.map(Into::into),
            numa_node: None,
            link: None,
            power_state: PowerState::D0,
            sriov: None,
            resets: Vec::new(),
            capabilities: Vec::new(),
            extended_capabilities: Vec::new(),
            controller: None,
            boot_display: false,
        }
    }

    #[test]
    fn plans() {
        fn check(functions: &[PciFunction], with_group: bool, expect: Result<&[&str], &str>) {
            let target = functions[0].address;
            let options = ClaimOptions { with_group, ..ClaimOptions::default() };
            match (Plan::new(functions, target, &options, &VfioDrivers::default()), expect) {
                (Ok(plan), Ok(expect)) => {
                    let steps: Vec<_> = plan.steps.iter().map(ToString::to_string).collect();
                    assert_eq!(steps, expect);
                }
                (Err(refusal), Err(expect)) => assert!(refusal.to_string().contains(expect), "{refusal}"),
                (got, _) => panic!("{got:?}"),
            }
        }
        let gpu = function("0:1:0.0", Some(1), Some("nvidia"));
        let audio = function("0:1:0.1", Some(1), Some("snd_hda_intel"));
        let usb = function("0:1:0.2", Some(1), None);
        let ucsi = function("0:1:0.3", Some(1), Some("vfio-pci"));
        let mut bridge = function("0:0:1.0", Some(1), Some("pcieport"));
        bridge.header_type = 1;
        let bridge_on = |driver: &str| PciFunction { driver: Some(driver.into()), ..bridge.clone() };
        let card = function("0:1:1.0", Some(1), Some("e1000e"));
        let idle = function("0:1:1.1", Some(1), None);
        let elsewhere = function("0:2:0.0", Some(2), Some("nvme"));
        let port = function("0:1:0.4", Some(3), Some("mlx5_core"));

        check(
            std::slice::from_ref(&gpu),
            false,
            Ok(&["unbind 0000:01:00.0 from nvidia, bind it to vfio-pci"]),
        );
        check(
            &[
                gpu.clone(),
                bridge.clone(),
                audio.clone(),
                usb.clone(),
                ucsi.clone(),
                idle.clone(),
                elsewhere,
                port,
            ],
            false,
            Ok(&[
                "leave 0000:01:00.3 on vfio-pci",
                "bind 0000:01:00.2 to vfio-pci",
                "unbind 0000:01:00.1 from snd_hda_intel, bind it to vfio-pci",
                "unbind 0000:01:00.0 from nvidia, bind it to vfio-pci",
            ]),
        );
        check(
            &[gpu.clone(), card.clone()],
            false,
            Err(
                "0000:01:01.0 (e1000e); explain 0000:01:00.0 lists the fixes, such as a claim of the whole group",
            ),
        );
        check(
            &[gpu.clone(), card.clone(), idle.clone()],
            true,
            Ok(&[
                "bind 0000:01:01.1 to vfio-pci",
                "unbind 0000:01:01.0 from e1000e, bind it to vfio-pci",
                "unbind 0000:01:00.0 from nvidia, bind it to vfio-pci",
            ]),
        );
        let mut variant = card.clone();
        variant.driver = Some("mlx5_vfio_pci".into());
        check(&[gpu.clone(), variant], false, Ok(&["unbind 0000:01:00.0 from nvidia, bind it to vfio-pci"]));
        check(&[bridge.clone(), gpu.clone()], false, Err("is a PCI bridge"));
        // A bridge whose driver does not leave DMA alone; that of its hot-plug slots can be done without.
        check(
            &[gpu.clone(), bridge_on("shpchp")],
            false,
            Err(
                "0000:00:01.0 (shpchp); explain 0000:01:00.0 lists the fixes, such as a claim of the whole group",
            ),
        );
        check(
            &[gpu.clone(), bridge_on("shpchp")],
            true,
            Ok(&["unbind 0000:01:00.0 from nvidia, bind it to vfio-pci", "unbind 0000:00:01.0 from shpchp"]),
        );
        check(
            &[gpu.clone(), bridge_on("unknown")],
            false,
            Err("0000:00:01.0 (unknown); explain 0000:01:00.0 lists the fixes"),
        );
        check(
            &[gpu.clone(), bridge_on("unknown")],
            true,
            Err("0000:00:01.0 (unknown); explain 0000:01:00.0 lists the fixes"),
        );
        // The host's own bridge is never taken; without a driver it is in nobody's way.
        let mut host_bridge = function("0:1:2.0", Some(1), None);
        host_bridge.class = PciClass(0x06_0000);
        let alone: &[&str] = &["unbind 0000:01:00.0 from nvidia, bind it to vfio-pci"];
        check(&[gpu.clone(), host_bridge.clone()], true, Ok(alone));
        host_bridge.driver = Some("k10temp".into());
        check(&[gpu.clone(), host_bridge.clone()], true, Err("0000:01:02.0 (k10temp)"));
        check(&[host_bridge], true, Err("is a PCI bridge"));
        check(&[function("0:1:0.0", None, None)], false, Err("in no IOMMU group"));
        let mut physical = gpu.clone();
        physical.sriov = Some(Sriov::Physical { total_vfs: 8, num_vfs: 2 });
        check(&[physical.clone()], false, Err("has 2 virtual functions enabled"));
        check(&[audio, physical], false, Err("has 2 virtual functions enabled"));
        // Only what was there when it was noted.
        let only = |functions: &[&PciFunction]| {
            let only = functions.iter().map(|function| (function.address, function.ids)).collect();
            ClaimOptions { only: Some(only), ..ClaimOptions::default() }
        };
        let both = [gpu.clone(), usb.clone()];
        assert!(Plan::new(&both, gpu.address, &only(&[&gpu, &usb, &card]), &VfioDrivers::default()).is_ok());
        let refused = |expected: Option<PciIds>, address: PciAddress, options: &ClaimOptions| {
            let found = gpu.ids;
            let expect = Refusal::OtherDevice { address, found, expected };
            assert_eq!(Plan::new(&both, gpu.address, options, &VfioDrivers::default()), Err(expect));
        };
        refused(None, usb.address, &only(&[&gpu]));
        let mut other = gpu.clone();
        other.ids.device += 1;
        refused(Some(other.ids), gpu.address, &only(&[&other, &usb]));
        let missing = Plan::new(&[], gpu.address, &ClaimOptions::default(), &VfioDrivers::default());
        assert_eq!(missing, Err(Refusal::NoSuchFunction(gpu.address)));
        // A driver that is asked for by name: a variant is for the function alone, vfio-pci for its companions too.
        let named = |functions: &[PciFunction], driver: &str| {
            let options =
                ClaimOptions { driver: VfioDriver::Named(driver.into()), ..ClaimOptions::default() };
            let plan = Plan::new(functions, functions[0].address, &options, &VfioDrivers::default());
            plan.map(|plan| plan.steps.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))
        };
        let on = |function: &PciFunction, driver: &str| PciFunction {
            driver: Some(driver.into()),
            ..function.clone()
        };
        let both = [on(&gpu, "vfio-pci"), on(&usb, "x_vfio_pci")];
        assert_eq!(
            named(&both, "y_vfio_pci").unwrap(),
            "leave 0000:01:00.2 on x_vfio_pci; unbind 0000:01:00.0 from vfio-pci, bind it to y_vfio_pci"
        );
        assert_eq!(
            named(&both, "vfio-pci").unwrap(),
            "unbind 0000:01:00.2 from x_vfio_pci, bind it to vfio-pci; leave 0000:01:00.0 on vfio-pci"
        );
        assert_eq!(named(&both, "nvidia"), Err(Refusal::NotAVfioDriver("nvidia".into())));
    }
}
