//! Claims.

use schemars::JsonSchema;
use serde::Serialize;
use vm_passthrough::{PciAddress, ledger};

use super::LeftFunction;
use crate::devices::saved::SavedClaim;

/// Functions that are claimed, with their companions.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Claim {
    /// The function that was asked for; the first of several.
    pub address: Option<String>,
    /// All that were asked for.
    pub addresses: Vec<String>,
    /// All functions that are claimed, in the order in which they were taken.
    pub functions: Vec<ClaimedFunction>,
    /// Functions of the same slots that stay with the host, as they are in other IOMMU groups.
    pub left: Vec<LeftFunction>,
}

/// A function of a claim.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ClaimedFunction {
    /// Its address.
    pub address: String,
    /// Driver that it had before.
    pub driver: Option<String>,
    /// VFIO driver that it has in the claim; null of a claim that is yet to be made again.
    pub vfio_driver: Option<String>,
    /// Whether it was on a VFIO driver already and was left there.
    pub kept: bool,
}

impl Claim {
    /// `functions`, as they were claimed for those that were asked for.
    pub fn new<'a>(
        asked: &[PciAddress],
        functions: impl Iterator<Item = &'a ledger::ClaimedFunction>,
        left: Vec<LeftFunction>,
    ) -> Self {
        let addresses: Vec<_> = asked.iter().map(ToString::to_string).collect();
        Self {
            address: addresses.first().cloned(),
            addresses,
            functions: functions.map(ClaimedFunction::from).collect(),
            left,
        }
    }
}

impl From<&ledger::ClaimedFunction> for ClaimedFunction {
    fn from(value: &ledger::ClaimedFunction) -> Self {
        Self {
            address: value.address.to_string(),
            driver: value.driver.clone(),
            vfio_driver: Some(value.vfio_driver.clone()),
            kept: value.kept,
        }
    }
}

/// A claim of the host.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ListedClaim {
    /// The function that was asked for.
    pub address: String,
    /// All its functions, in the order in which they were taken.
    pub functions: Vec<ClaimedFunction>,
    /// Whether it lives until it is released or the host boots; otherwise it ends with its owner.
    pub until_released: bool,
    /// Whether it is made again after a boot.
    pub persist: bool,
    /// Whether somebody uses it.
    pub state: ClaimState,
    /// Who claimed it; null when it is yet to be made again.
    pub owner: Option<Owner>,
    /// Who uses it, or used it last, where it is persistent.
    pub user: Option<Owner>,
}

/// Whether somebody uses a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ClaimState {
    /// A process that is alive has it.
    InUse,
    /// It waits for a guest, or for its release.
    Unused,
    /// Its owner died: the next command that changes the host releases it.
    OwnerDied,
    /// It is to be made again after a boot, and is not yet.
    NotRestored,
}

/// A process that has, or had, a claim.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Owner {
    /// Process ID. It may have been given to another process since.
    pub pid: u32,
    /// Name of the command.
    pub command: String,
    /// Name of the guest that it has the claim for.
    pub guest: Option<String>,
    /// Since when, in seconds after 1970 began.
    pub since: Option<u64>,
}

impl From<&ledger::Owner> for Owner {
    fn from(value: &ledger::Owner) -> Self {
        let ledger::Owner { pid, command, guest, since } = value.clone();
        Self { pid, command, guest, since }
    }
}

impl ListedClaim {
    /// A claim of the ledger, and whether it is made again after a boot.
    pub(crate) fn new(value: &ledger::LedgerEntry, persist: bool) -> Self {
        let entry = &value.entry;
        Self {
            address: entry.target.to_string(),
            functions: entry.functions.iter().map(ClaimedFunction::from).collect(),
            until_released: entry.persistent,
            persist,
            state: if value.alive {
                ClaimState::InUse
            } else if entry.is_waiting() {
                ClaimState::Unused
            } else {
                ClaimState::OwnerDied
            },
            owner: Some((&entry.owner).into()),
            user: entry.user.as_ref().map(Owner::from),
        }
    }

    /// A claim that is not made again yet.
    pub(crate) fn not_restored(saved: &SavedClaim) -> Self {
        let function = |address: &PciAddress| ClaimedFunction {
            address: address.to_string(),
            driver: None,
            vfio_driver: None,
            kept: false,
        };
        Self {
            address: saved.target.to_string(),
            functions: saved.functions.keys().rev().map(function).collect(),
            until_released: true,
            persist: true,
            state: ClaimState::NotRestored,
            owner: None,
            user: None,
        }
    }
}
