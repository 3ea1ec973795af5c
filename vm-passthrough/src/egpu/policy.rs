//! Which enclosures are connected, and which are not.

use thiserror::Error;

use crate::pci::{PciFunction, PciIds};
use crate::usb4::{Domain, Rate, Router, Security, UniqueId};

/// What the operator allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Which enclosures PCIe is tunnelled to.
    pub authorise: Authorise,
    /// Whether only where the IOMMU keeps what is connected from the host's memory.
    pub dma_protection: bool,
    /// The slowest link in Mbit/s, of all lanes, in the slower direction.
    pub minimum_rate: u32,
    /// The least power that the slot of the enclosure says it can give, in watts; 0 for any, also where none is said.
    pub minimum_power: u32,
}

impl Default for Policy {
    /// Those that are asked for, where the host's memory is protected.
    fn default() -> Self {
        Self { authorise: Authorise::Ask, dma_protection: true, minimum_rate: 0, minimum_power: 0 }
    }
}

/// Which enclosures PCIe is tunnelled to.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames,
)]
#[strum(serialize_all = "lowercase")]
pub enum Authorise {
    /// None, not even those that are asked for.
    Never,
    /// Those that are asked for.
    #[default]
    Ask,
    /// Those that are asked for, and known ones as soon as they are connected.
    Known,
    /// All as soon as they are connected.
    Always,
}

/// An enclosure that was connected before, with what was in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownEgpu {
    /// Its router's UUID.
    pub id: UniqueId,
    /// Which accelerators were in it, in order of their addresses then.
    pub accelerators: Vec<PciIds>,
}

/// Why an enclosure is not connected.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The policy allows none.
    #[error("the policy is to authorise no enclosure; change it by `vm-service egpu policy --authorise`")]
    Never,
    /// The policy is to ask.
    #[error("the policy is to ask; run `vm-service egpu connect {0}`")]
    NotAsked(UniqueId),
    /// It is not known.
    #[error("{0} is not known; run `vm-service egpu connect {0} --remember`")]
    Unknown(UniqueId),
    /// Its memory accesses are not contained.
    #[error(
        "domain{domain} has no DMA protection, so what is connected could read and write the host's memory; turn on the IOMMU in the \
         firmware setup (\"Kernel DMA Protection\"), or say --allow-unprotected if all that is in the enclosure is trusted"
    )]
    DmaUnprotected {
        /// The domain.
        domain: u32,
    },
    /// Its link is too slow.
    #[error("{} and the policy asks for {}; {}", link_rate(*.has), Rate(*.needs), link_remedy(.router))]
    TooSlow {
        /// Mbit/s that it has; 0 where that is not known.
        has: u32,
        /// Mbit/s that are asked for.
        needs: u32,
        /// How it is connected.
        router: Box<Router>,
    },
    /// The firmware allows no PCIe.
    #[error(
        "the security level of domain{domain} is {security}, which allows no PCIe tunnels; change it in the firmware setup"
    )]
    NoPcie {
        /// The domain.
        domain: u32,
        /// Its level.
        security: Security,
    },
    /// It has no UUID.
    #[error("it has no UUID to be recognised by; update its firmware")]
    NoIdentity,
    /// Its slot gives too little power.
    #[error(
        "its slot gives {has} W and the policy asks for {needs} W; use an enclosure whose slot gives that, or lower the policy's minimum \
         (`vm-service egpu policy --minimum-power`)"
    )]
    TooWeak {
        /// Watts that it says.
        has: u32,
        /// Watts that are asked for.
        needs: u32,
    },
}

fn link_rate(has: u32) -> String {
    match has {
        0 => "its link's rate is not known".into(),
        has => format!("its link has {}", Rate(has)),
    }
}

fn link_remedy(router: &Router) -> &'static str {
    match router.link {
        Some(link) if link.is_single_lane() => {
            "it runs on one lane: try another cable, up to 0.8 m or an active one"
        }
        Some(_) => "use a port and a cable of a higher rate",
        None => "update Linux, or set the policy's minimum rate to 0",
    }
}

impl Policy {
    /// Whether PCIe may be tunnelled to a router. `asked` is whether an operator asks for it.
    ///
    /// # Errors
    /// Why not.
    pub fn judge(&self, domain: &Domain, router: &Router, known: bool, asked: bool) -> Result<(), Refusal> {
        let id = router.unique_id.ok_or(Refusal::NoIdentity)?;
        match self.authorise {
            Authorise::Never => return Err(Refusal::Never),
            Authorise::Ask if !asked => return Err(Refusal::NotAsked(id)),
            Authorise::Known if !asked && !known => return Err(Refusal::Unknown(id)),
            _ => {}
        }
        if !router.is_authorised()
            && matches!(domain.security, Security::DpOnly | Security::UsbOnly | Security::NoPcie)
        {
            return Err(Refusal::NoPcie { domain: domain.number, security: domain.security.clone() });
        }
        // Unknown counts as unprotected.
        if self.dma_protection && domain.iommu_dma_protection != Some(true) {
            return Err(Refusal::DmaUnprotected { domain: domain.number });
        }
        let has = router.link.map_or(0, |link| link.slower().0);
        if has < self.minimum_rate {
            let router = Box::new(router.clone());
            return Err(Refusal::TooSlow { has, needs: self.minimum_rate, router });
        }
        Ok(())
    }
}

/// Whether a function is what eGPUs are for: a display controller or a processing accelerator (PCI Code and ID Assignment
/// Specification 1.16, 1.4 and 1.19).
pub fn is_accelerator(function: &PciFunction) -> bool {
    matches!(function.class.base(), 0x03 | 0x12)
}
