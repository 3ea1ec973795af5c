//! `claim`: takes functions and their companions from their drivers, until `release`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use clap::Args;
use vm_passthrough::claim::{self, Cancel, Claim, ClaimError, ClaimOptions};
use vm_passthrough::iommu::{VFIO_DRIVER, VfioDriver};
use vm_passthrough::manager::{Claimed, ManagerError};
use vm_passthrough::readiness::{ExplainOptions, left_with_host};
use vm_passthrough::{PassthroughManager, PciAddress, PciFunction, ledger, pci};

use super::explain;
use super::{Scan, SimArgs};
use crate::api::{self, Accept, Body, LeftFunction};
use crate::cli::context::Context;
use crate::devices::saved::{self, SavedClaim, SavedClaims};
use crate::failure::{EXIT_FAILED, Failure};
use crate::log;
use crate::os::signals::StopSignals;
use crate::os::sys;

/// Arguments of `claim`.
#[derive(Debug, Args)]
pub(crate) struct ClaimArgs {
    /// PCI addresses, as in 0000:65:00.0 or 65:00.0; all are claimed, or none
    #[arg(value_name = "ADDR", required_unless_present = "restore")]
    pub(crate) addresses: Vec<PciAddress>,
    /// Claim them again after each boot too, until `release`
    #[arg(long)]
    pub(crate) persist: bool,
    /// Claim what `--persist` noted, as after a boot, and is not claimed yet
    #[arg(long, conflicts_with_all = ["addresses", "persist", "with_group", "accept"])]
    pub(crate) restore: bool,
    /// Take every function of its IOMMU group, also those of other devices
    #[arg(long)]
    pub(crate) with_group: bool,
    /// Bind it to this VFIO driver: vfio-pci, or a variant of it; without, the one that fits best
    #[arg(long, value_name = "DRIVER", conflicts_with = "restore")]
    pub(crate) vfio_driver: Option<String>,
    /// Go on although this stands in the way; it is reported as a warning
    #[arg(long, value_enum, value_name = "CODE")]
    pub(crate) accept: Vec<Accept>,
    #[command(flatten)]
    pub(crate) sim: SimArgs,
}

/// Claims functions for whoever runs a guest next: all of them, or none.
///
/// # Errors
/// When one can't be passed to a guest, or a step fails; everything is undone then, or the message says what is not.
pub(crate) fn run(context: &mut Context<'_>, args: &ClaimArgs) -> Result<(), Failure> {
    let mut manager = PassthroughManager::with_host(context.host.clone()).map_err(Failure::failed)?;
    let course = Course::default();
    let claimed = match args.restore {
        true => {
            let undone = "the claim under way is undone, and no other is made";
            let _signals = cancelled_by_signals(course.clone(), undone)?;
            restore(context, &mut manager, &course.cancel)
        }
        false => claim(context, &mut manager, args, &course),
    };
    // Claims of other devices are recovered last, as one of them may be stuck.
    super::release::recover_except(&mut manager, &args.addresses)?;
    claimed
}

fn claim(
    context: &mut Context<'_>,
    manager: &mut PassthroughManager,
    args: &ClaimArgs,
    course: &Course,
) -> Result<(), Failure> {
    super::release::recover_near(manager, &args.addresses)?;
    let host = context.host.clone();
    // How much RAM a guest will have is not known yet.
    let mut options = ExplainOptions::for_memory(0);
    options.with_group = args.with_group;
    options.accept = args.accept.iter().map(Into::into).collect();
    options.driver = vfio_driver(args.vfio_driver.as_ref());
    options.beside.clone_from(&args.addresses);
    let scan = Scan::of(&host)?;
    let readiness: Vec<_> = args
        .addresses
        .iter()
        .map(|&address| scan.explain_one(address, &options))
        .collect::<Result<_, _>>()?;
    explain::require_ready(context, &readiness)?;
    let signals = cancelled_by_signals(course.clone(), "what was claimed is released")?;
    let mut options = ClaimOptions::default();
    options.persistent = true;
    options.tentative = true;
    options.with_group = args.with_group;
    options.driver = vfio_driver(args.vfio_driver.as_ref());
    options.cancel = Some(course.cancel.clone());
    let saved = args.persist.then(|| scan.functions());
    let claims = claim_all(manager, &args.addresses, &options, saved, course)?;
    // One that ended this process now would tell that nothing is claimed.
    signals.stay();
    print(context, &args.addresses, &claims, String::new())
}

/// What `--vfio-driver` asks for.
pub(super) fn vfio_driver(name: Option<&String>) -> VfioDriver {
    name.map_or(VfioDriver::Best, |name| VfioDriver::Named(name.clone()))
}

/// Claims all of these, or none. With the functions of the host, they are claimed again after each boot.
fn claim_all(
    manager: &mut PassthroughManager,
    addresses: &[PciAddress],
    options: &ClaimOptions,
    saved: Option<&[PciFunction]>,
    course: &Course,
) -> Result<Vec<Claimed>, Failure> {
    let mut claims: Vec<Claimed> = Vec::new();
    let claimed = (|| {
        for &address in addresses {
            // It may be claimed as the companion of one before it.
            if !claims.iter().any(|claim| claim.addresses().contains(&address)) {
                claims.push(manager.claim(address, options).map_err(|error| error.to_string())?);
            }
        }
        course.complete(|| {
            let note =
                |functions| claims.iter().map(|claim| note(claim, options, functions)).collect::<Vec<_>>();
            let notes = saved.map(note);
            let host = manager.host().clone();
            // Whoever ends this process before has it all undone.
            let mut keep = || manager.keep(&claims).map_err(|error| error.to_string());
            let Some(notes) = notes else { return keep() };
            // Until they are kept, no other process can release them and remove the files.
            let saved = SavedClaims::lock(&host).map_err(|error| error.to_string())?;
            saved.save(&notes, keep)
        })
    })();
    let Err(mut message) = claimed else { return Ok(claims) };
    for claim in claims.iter().rev() {
        message += &match manager.release(claim) {
            Ok(()) => format!("; {} is released again", claim.target),
            Err(error) => format!("; {error}"),
        };
    }
    Err(Failure::failed(message))
}

/// What is noted of a claim that is to be made again after each boot.
fn note(claim: &Claim, options: &ClaimOptions, functions: &[PciFunction]) -> SavedClaim {
    let claimed = functions.iter().filter(|function| claim.addresses().contains(&function.address));
    let functions = claimed.map(|function| (function.address, function.ids)).collect();
    let (target, with_group, driver) = (claim.target, options.with_group, options.driver.clone());
    SavedClaim { target, with_group, driver, functions }
}

/// Makes claims again that a boot has ended, each whatever becomes of the others. What is claimed already stays as it is.
fn restore(
    context: &mut Context<'_>,
    manager: &mut PassthroughManager,
    cancel: &Cancel,
) -> Result<(), Failure> {
    let standing = ledger::claims(&context.host, claim::DEADLINE).map_err(Failure::failed)?;
    let is_claimed = |address| standing.iter().flatten().any(|claim| claim.entry.function(address).is_some());
    let (mut text, mut restored, mut errors) = (String::new(), Vec::new(), Vec::new());
    for saved in saved::all(&context.host).map_err(Failure::failed)? {
        let saved = match saved {
            Ok(saved) => saved,
            Err(error) => {
                errors.push(error);
                continue;
            }
        };
        let target = saved.target;
        let mut options = ClaimOptions::default();
        options.persistent = true;
        options.tentative = true;
        options.with_group = saved.with_group;
        options.driver = saved.driver.clone();
        options.cancel = Some(cancel.clone());
        options.only = Some(saved.functions.clone());
        let claimed = match () {
            () if is_claimed(target) => Ok(None),
            // Even to refuse may take a claim its deadline.
            () if cancel.is_requested() => Err("a signal came before".to_owned()),
            () => match manager.claim(target, &options) {
                Err(ManagerError::Claim(ClaimError::Taken { address, .. })) if address == target => Ok(None),
                claimed => claimed
                    .map_err(|error| error.to_string())
                    .and_then(|claim| keep_saved(manager, claim, &saved)),
            },
        };
        match claimed {
            Ok(Some(claim)) => restored.push(claim),
            // A String takes any write.
            Ok(None) => drop(writeln!(text, "{target} is claimed already")),
            Err(error) => errors.push(format!("{target} is not claimed again: {error}")),
        }
    }
    print(context, &restored.iter().map(|claim| claim.target).collect::<Vec<_>>(), &restored, text)?;
    if errors.is_empty() { Ok(()) } else { Err(Failure::failed(errors.join("\nerror: "))) }
}

/// Keeps a claim that was made again, unless its file was removed by a release.
fn keep_saved(
    manager: &mut PassthroughManager,
    claim: Claimed,
    saved: &SavedClaim,
) -> Result<Option<Claimed>, String> {
    let kept = {
        let lock = SavedClaims::lock(manager.host()).map_err(|error| error.to_string());
        lock.and_then(|lock| match lock.has(saved) {
            true => manager.keep(std::slice::from_ref(&claim)).map_err(|error| error.to_string()),
            false => Err("it was released meanwhile".to_owned()),
        })
    };
    match kept {
        Ok(()) => Ok(Some(claim)),
        Err(why) => Err(match manager.release(&claim) {
            Ok(()) => why,
            Err(error) => format!("{why}; {error}"),
        }),
    }
}

fn print(
    context: &mut Context<'_>,
    asked: &[PciAddress],
    claims: &[Claimed],
    mut text: String,
) -> Result<(), Failure> {
    let functions = || claims.iter().flat_map(|claim| &claim.functions);
    for function in functions() {
        let former = match &function.driver {
            Some(driver) if function.kept => format!("was on {driver} already"),
            Some(driver) => format!("taken from {driver}"),
            None => "had no driver".to_owned(),
        };
        let variant = match function.vfio_driver.as_str() {
            _ if function.kept => String::new(),
            VFIO_DRIVER => String::new(),
            driver => format!(", bound to {driver}"),
        };
        // A String takes any write.
        let _ = writeln!(text, "{} claimed, {former}{variant}", function.address);
    }
    let claimed: Vec<_> = functions().map(|function| function.address).collect();
    let mut left = BTreeMap::new();
    for function in asked.iter().filter_map(|&address| pci::read_function(&context.host, address).ok()) {
        let functions = left_with_host(&context.host, &function, &claimed).into_iter();
        left.extend(functions.map(|left| (left.address, left.driver)));
    }
    let left =
        left.into_iter().map(|(address, driver)| LeftFunction { address: address.to_string(), driver });
    let left: Vec<_> = left.collect();
    text.extend(left.iter().map(|left| format!("{left}\n")));
    context.print(|| Body::Claim(api::Claim::new(asked, functions(), left)), || text)
}

/// How far a claim is, for signals to know.
#[derive(Clone, Debug, Default)]
struct Course {
    cancel: Cancel,
    /// Locked while it becomes so.
    is_complete: Arc<Mutex<bool>>,
}

impl Course {
    /// Takes the last steps, which no signal undoes, unless one came before.
    fn complete(&self, last: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
        let mut is_complete = self.is_complete();
        if self.cancel.is_requested() {
            return Err("a signal came before it was complete".to_owned());
        }
        last()?;
        *is_complete = true;
        Ok(())
    }

    fn is_complete(&self) -> MutexGuard<'_, bool> {
        self.is_complete.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The first signal cancels the claim; a second one ends this process where it is, and the ledger knows what is to be undone.
/// One that comes when the claim is complete does nothing.
fn cancelled_by_signals(course: Course, outcome: &'static str) -> Result<StopSignals, Failure> {
    let on_signal = move |signal| {
        let (cancel, is_complete) = (&course.cancel, course.is_complete());
        if *is_complete {
            tracing::warn!("{signal}: the claim was complete; `vm-service release` gives back what it took");
            return;
        }
        if cancel.is_requested() {
            let what = format!(
                "{signal} again: what was not complete is not released yet; the next command that changes the host does that"
            );
            log::say(format_args!("error: {what}\n"));
            log::keep_fatal(module_path!(), &what);
            log::flush();
            sys::exit_at_once(EXIT_FAILED);
        }
        cancel.request();
        tracing::warn!("{signal}: {outcome}; once more to leave that to the next command");
    };
    StopSignals::start(on_signal).map_err(|error| {
        Failure::failed(format_args!("signals can't be waited for: {error}; raise `ulimit -n`"))
    })
}
