//! A claim.

use schemars::JsonSchema;
use serde::Serialize;
use vm_passthrough::claim;

/// A function that is claimed, with its companions.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Claim {
    /// The function that was asked for.
    pub address: String,
    /// All functions of the claim, in the order in which they were taken.
    pub functions: Vec<ClaimedFunction>,
}

/// A function of a claim.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ClaimedFunction {
    /// Its address.
    pub address: String,
    /// Driver that it had before.
    pub driver: Option<String>,
    /// Whether it was on a VFIO driver already and was left there.
    pub kept: bool,
}

impl From<&claim::Claim> for Claim {
    fn from(value: &claim::Claim) -> Self {
        Self {
            address: value.target.to_string(),
            functions: value
                .functions
                .iter()
                .map(|function| ClaimedFunction {
                    address: function.address.to_string(),
                    driver: function.driver.clone(),
                    kept: function.kept,
                })
                .collect(),
        }
    }
}
