//! `egpu policy` and `egpu forget`: what is allowed of enclosures, and which are known.

use std::fmt::Write as _;

use clap::Args;
use vm_passthrough::egpu::Authorise;
use vm_passthrough::ledger::EnclosureLock;
use vm_passthrough::usb4::{Rate, UniqueId};

use super::enclosure::{LOCK, locked};
use crate::api::{Body, EgpuPolicy, KnownEnclosure};
use crate::cli::context::Context;
use crate::devices::known_egpus::{EgpuStore, Known, authorise, megabits};
use crate::devices::saved::text_of;
use crate::failure::Failure;

/// Arguments of `egpu policy`.
#[derive(Debug, Args)]
pub(super) struct PolicyArgs {
    /// Which enclosures are authorised: `never`, only on request (`ask`), known ones also when they are plugged in (`known`), or all
    /// when they are plugged in (`always`)
    #[arg(long, value_name = "WHICH", value_parser = authorise)]
    authorise: Option<Authorise>,
    /// Whether only where the IOMMU protects the host's memory
    #[arg(long, value_name = "BOOL")]
    dma_protection: Option<bool>,
    /// The slowest link, in Gb/s of all its lanes
    #[arg(long, value_name = "GIGABITS", value_parser = rate)]
    minimum_rate: Option<u32>,
    /// The least power that the slot in the enclosure says it can give
    #[arg(long, value_name = "WATTS")]
    minimum_power: Option<u32>,
}

impl PolicyArgs {
    /// Whether nothing is to be changed.
    pub(super) fn only_reads(&self) -> bool {
        let Self { authorise, dma_protection, minimum_rate, minimum_power } = self;
        authorise.is_none() && dma_protection.is_none() && minimum_rate.is_none() && minimum_power.is_none()
    }
}

/// Arguments of `egpu forget`.
#[derive(Debug, Args)]
pub(super) struct ForgetArgs {
    /// UUID of the enclosure
    #[arg(value_name = "UUID")]
    id: UniqueId,
}

fn rate(text: &str) -> Result<u32, String> {
    megabits(text.parse().map_err(|_| format!("`{text}` is no number"))?)
}

/// Shows the policy, changed as the arguments say.
///
/// # Errors
/// When it can't be read or written.
pub(super) fn run(context: &mut Context<'_>, args: &PolicyArgs) -> Result<(), Failure> {
    let PolicyArgs { authorise, dma_protection, minimum_rate, minimum_power } = args;
    change(context, !args.only_reads(), |store| {
        let policy = &mut store.policy;
        policy.authorise = authorise.unwrap_or(policy.authorise);
        policy.dma_protection = dma_protection.unwrap_or(policy.dma_protection);
        policy.minimum_rate = minimum_rate.unwrap_or(policy.minimum_rate);
        policy.minimum_power = minimum_power.unwrap_or(policy.minimum_power);
        Ok(())
    })
}

/// Forgets an enclosure.
///
/// # Errors
/// When it is not known, or the file can't be written.
pub(super) fn forget(context: &mut Context<'_>, args: &ForgetArgs) -> Result<(), Failure> {
    change(context, true, |store| match store.known.remove(&args.id) {
        Some(_) => Ok(()),
        None => Err(Failure::failed(format_args!(
            "{} is not known; `vm-service egpu policy` shows what is",
            args.id
        ))),
    })
}

/// Changes what is allowed or known, and shows it. Where nothing is to be changed, nobody is waited for.
fn change(
    context: &mut Context<'_>,
    is_change: bool,
    change: impl FnOnce(&mut EgpuStore) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let lock = || locked(LOCK, |wait| EnclosureLock::of_all(&context.host, wait, || false));
    let _lock = is_change.then(lock).transpose()?;
    let mut store = EgpuStore::read(&context.host).map_err(Failure::failed)?;
    change(&mut store)?;
    if is_change {
        store.write(&context.host).map_err(Failure::failed)?;
    }
    let policy = &store.policy;
    let known = store.known.iter().map(|(id, Known { name, egpu, guest })| KnownEnclosure {
        enclosure: id.to_string(),
        name: name.clone(),
        accelerators: egpu.accelerators.iter().map(text_of).collect(),
        guest: guest.clone(),
    });
    let known: Vec<_> = known.collect();
    let mut text = String::new();
    // A String takes any write.
    let _ = writeln!(text, "authorise      {}", policy.authorise);
    let _ =
        writeln!(text, "DMA protection {}", if policy.dma_protection { "required" } else { "not required" });
    let _ = writeln!(text, "minimum rate   {}", Rate(policy.minimum_rate));
    let _ = writeln!(text, "minimum power  {} W", policy.minimum_power);
    for KnownEnclosure { enclosure, name, accelerators, guest } in &known {
        let guest = guest.as_ref().map(|guest| format!(", for {guest}")).unwrap_or_default();
        let _ = writeln!(text, "known          {enclosure} {name} with {}{guest}", accelerators.join(", "));
    }
    let json = EgpuPolicy {
        authorise: policy.authorise.to_string(),
        dma_protection: policy.dma_protection,
        minimum_megabits: policy.minimum_rate,
        minimum_watts: policy.minimum_power,
        known,
    };
    context.print(|| Body::EgpuPolicy(json), || text)
}
