//! `egpu diag`: six checks of an enclosure and of what it needs, each with what shows it and what to do.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use clap::Args;
use vm_passthrough::claim::Cancel;
use vm_passthrough::egpu::{Enclosure as _, Limits, is_accelerator};
use vm_passthrough::pci::{self, PciFunction};
use vm_passthrough::readiness::{BlockerCode, ExplainOptions, Explainer, unassigned_bars};
use vm_passthrough::{deadlines, iommu, telemetry};

use super::enclosure::{Chosen, EnclosureArgs, enclosure, name};
use crate::api::{Body, CheckVerdict, EgpuCheck};
use crate::cli::context::Context;
use crate::devices::known_egpus::{EgpuStore, Known};
use crate::failure::Failure;
use crate::text::describe;

/// How much cooler than its limit a GPU should be, in thousandths of a degree.
const MARGIN: i32 = 10_000;
/// Errors that the hardware corrected, beyond which a cable is to be doubted.
const MANY: u64 = 1000;

/// Arguments of `egpu diag`.
#[derive(Debug, Args)]
pub(super) struct DiagArgs {
    #[command(flatten)]
    enclosure: EnclosureArgs,
}

/// Checks an enclosure.
///
/// # Errors
/// When there is none, or one of the checks fails.
pub(super) fn run(context: &mut Context<'_>, args: &DiagArgs) -> Result<(), Failure> {
    let chosen = args.enclosure.choose(context, |_| true, "no enclosure is connected")?;
    let checks = checks(context, &chosen)?;
    let mut text = format!("{} {}\n", chosen.router.route, name(&chosen.router));
    for check in &checks {
        let verdict = match check.verdict {
            CheckVerdict::Passed => "ok     ",
            CheckVerdict::Warning => "warning",
            CheckVerdict::Failed => "FAILED ",
        };
        // A String takes any write.
        let _ = writeln!(text, "{verdict} {}: {}", check.name, check.evidence.join("; "));
        for remedy in &check.remedies {
            let _ = writeln!(text, "        {remedy}");
        }
    }
    let failed: Vec<&str> = checks
        .iter()
        .filter(|check| check.verdict == CheckVerdict::Failed)
        .map(|check| check.name.as_str())
        .collect();
    let outcome = match &*failed {
        [] => Ok(()),
        failed => Err(Failure::failed(format_args!("failed: {}", failed.join(", ")))),
    };
    let id = chosen.id.to_string();
    context.print(|| Body::EgpuDiag { enclosure: id, checks }, || text)?;
    outcome
}

fn checks(context: &Context<'_>, chosen: &Chosen) -> Result<Vec<EgpuCheck>, Failure> {
    let (store, unread) = match EgpuStore::read(&context.host) {
        Ok(store) => (store, None),
        Err(error) => (EgpuStore::default(), Some(error)),
    };
    let policy = store.policy.clone();
    let mut enclosure = enclosure(&context.host, &chosen.router, chosen.id, policy, None, Cancel::default())?;
    let adopted = chosen.router.is_authorised().then(|| enclosure.adopt());
    let functions: Vec<PciFunction> = enclosure
        .functions()
        .into_iter()
        .filter_map(|address| pci::read_function(&context.host, address).ok())
        .collect();

    let mut system = Findings::of("system");
    let release = std::fs::read_to_string(context.host.proc.join("sys/kernel/osrelease")).unwrap_or_default();
    system.note(format!("Linux {}", release.trim()));
    system.judge(
        !iommu::is_present(&context.host),
        CheckVerdict::Warning,
        "no IOMMU is in use",
        "turn it on in the firmware setup; without it nothing can be given to guests",
    );
    if let Some(error) = unread {
        system.judge(true, CheckVerdict::Failed, error, "mend or remove it: nothing is connected before");
    }
    let domain = &chosen.domain;
    system.note(format!("domain{}: security {}", domain.number, domain.security));
    system.judge(
        domain.iommu_dma_protection != Some(true),
        CheckVerdict::Failed,
        "no DMA protection",
        "turn on \"Kernel DMA Protection\" or the IOMMU in the firmware setup",
    );
    system.judge(
        !domain.deauthorization,
        CheckVerdict::Warning,
        "its tunnels can't be taken down by the host",
        "disconnect, and then pull the cable",
    );

    let mut drivers = Findings::of("drivers");
    let mut egpu = Findings::of("eGPU");
    let explainer = Explainer::new(&context.host);
    for function in &functions {
        let driver = function.driver.as_deref().unwrap_or("none");
        drivers.note(format!("{} is on {driver}", function.address));
        egpu.note(format!("{} {}, in this enclosure (inferred)", function.address, describe::name(function)));
        let explained = explainer.explain_function(function.clone(), &ExplainOptions::default());
        let blockers = match explained {
            Ok(readiness) => readiness.blockers,
            Err(error) => {
                egpu.judge(true, CheckVerdict::Failed, error.to_string(), "see dmesg");
                continue;
            }
        };
        // Those of companions are found where they are explained.
        for found in blockers.into_iter().filter(|found| found.function == function.address) {
            let findings = match found.code {
                BlockerCode::UnbindMayHang => &mut drivers,
                BlockerCode::BarNotResized => &mut egpu,
                _ => continue,
            };
            findings.judge(true, CheckVerdict::Warning, found.evidence, &found.remedy);
        }
    }
    drivers.judge(functions.is_empty(), CheckVerdict::Warning, "no functions", "connect it");
    let accelerators: Vec<_> =
        functions.iter().filter(|function| is_accelerator(function)).map(|function| function.ids).collect();
    egpu.judge(accelerators.is_empty(), CheckVerdict::Failed, "no GPU is there", "connect it, and see dmesg");
    if let Some(Known { egpu: known, .. }) = store.known.get(&chosen.id)
        && !accelerators.is_empty()
    {
        let remedy = "run `vm-service egpu connect --remember` if that is right";
        egpu.judge(
            known.accelerators != accelerators,
            CheckVerdict::Failed,
            "it is another GPU than the one that is known",
            remedy,
        );
    }

    let mut tunnel = Findings::of("tunnel");
    let router = &chosen.router;
    tunnel.judge(
        !router.is_authorised(),
        CheckVerdict::Failed,
        "no PCIe is tunnelled to it",
        "run `vm-service egpu connect`",
    );
    match router.link {
        Some(link) => {
            tunnel.note(format!("its link has {}", describe::link_lanes(link)));
            let needs = store.policy.minimum_rate;
            tunnel.judge(
                link.slower().0 < needs,
                CheckVerdict::Failed,
                "less than the policy asks for",
                "use a better cable or port",
            );
            tunnel.judge(
                link.is_single_lane(),
                CheckVerdict::Warning,
                "it runs on one lane",
                "try another cable, up to 0.8 m or an active one",
            );
        }
        None => tunnel.judge(true, CheckVerdict::Warning, "its link's rate is unknown", "update Linux"),
    }
    let needs = store.policy.minimum_power;
    let slots = functions.iter().filter(|function| is_accelerator(function));
    for slot in slots.filter_map(|function| function.upstream) {
        if let Some(has) = pci::slot_power(&context.host, slot) {
            tunnel.note(format!("its slot gives {has} W"));
            let evidence = "less than the policy asks for";
            tunnel.judge(has < needs, CheckVerdict::Failed, evidence, "use an enclosure with more power");
        }
    }
    if let Some(version) = &router.nvm_version {
        tunnel.note(format!("firmware {version}"));
    }

    let mut integrity = Findings::of("integrity");
    let unassigned = functions.iter().map(|function| function.address);
    let unassigned: Vec<_> =
        unassigned.filter_map(|address| Some((address, unassigned_bars(&context.host, address)?))).collect();
    match adopted {
        Some(Ok(true)) => integrity.note("all functions answer, and have their BARs".into()),
        Some(Ok(false)) if !unassigned.is_empty() => {
            for (address, found) in unassigned {
                let evidence = format!("{address}: {}", found.evidence);
                integrity.judge(true, CheckVerdict::Failed, evidence, &found.fix);
            }
        }
        Some(Ok(false)) => {
            integrity.judge(
                true,
                CheckVerdict::Failed,
                enclosure.unsound().unwrap_or_else(|| "a function does not answer as it should".into()),
                "run `vm-service egpu reset`, then with `--hard`, then with `--reconnect`",
            );
        }
        Some(Err(error)) => integrity.judge(true, CheckVerdict::Failed, error.to_string(), "see dmesg"),
        None => {
            integrity.judge(true, CheckVerdict::Warning, "it can't be asked without a tunnel", "connect it")
        }
    }
    let mut health = Findings::of("health");
    for function in &functions {
        let address = function.address;
        // The driver logs a slot, which is its GPU's.
        let xids =
            if is_accelerator(function) { telemetry::xids(&context.host, address) } else { Vec::new() };
        if let Some((cause, remedy)) = telemetry::advise(&xids) {
            let evidence = format!("{address}: its driver logged Xid {}: {}", cause.number, cause.text);
            health.judge(true, CheckVerdict::Warning, evidence, remedy);
            let others: BTreeSet<_> =
                xids.iter().map(|xid| xid.number).filter(|&number| number != cause.number).collect();
            if !others.is_empty() {
                let others: Vec<_> = others.iter().map(ToString::to_string).collect();
                health.note(format!("it also logged Xid {}", others.join(", ")));
            }
        }
        match pci::health(&context.host, address, deadlines::HEARTBEAT) {
            Ok(state) => {
                health.note(format!("{address} is in {}", state.power_state));
                if let Some(errors) = state.errors {
                    let (fatal, nonfatal, correctable) =
                        (errors.fatal.total, errors.nonfatal.total, errors.correctable.total);
                    integrity.note(format!(
                        "{address} reported {fatal} fatal, {nonfatal} other and {correctable} corrected errors"
                    ));
                    let remedy = "check cable and plugs, and look whether the number grows";
                    integrity.judge(fatal > 0, CheckVerdict::Failed, "its link was not reliable", remedy);
                    let is_doubtful = nonfatal > 0 || correctable > MANY;
                    integrity.judge(
                        is_doubtful,
                        CheckVerdict::Warning,
                        "its link may not be reliable",
                        remedy,
                    );
                }
            }
            Err(error) => health.judge(true, CheckVerdict::Failed, error.to_string(), "see dmesg"),
        }
    }
    match enclosure.temperature() {
        Some(celsius) => {
            health.note(format!("its temperature is {} °C", celsius / 1000));
            let hottest = Limits::default().hottest;
            let remedy = "check fans and airflow, or lower its power limit";
            health.judge(celsius >= hottest, CheckVerdict::Failed, "too hot", remedy);
            let is_warm = (hottest - MARGIN..hottest).contains(&celsius);
            health.judge(is_warm, CheckVerdict::Warning, "nearly too hot", remedy);
        }
        None if accelerators.is_empty() => {
            health.judge(true, CheckVerdict::Warning, "no GPU is there to be asked", "connect it");
        }
        None => health.note("no driver reports its temperature".into()),
    }
    Ok([system, drivers, egpu, tunnel, integrity, health].into_iter().map(|findings| findings.0).collect())
}

/// What one check has found so far.
struct Findings(EgpuCheck);

impl Findings {
    fn of(name: &str) -> Self {
        Self(EgpuCheck {
            name: name.into(),
            verdict: CheckVerdict::Passed,
            evidence: Vec::new(),
            remedies: Vec::new(),
        })
    }

    fn note(&mut self, evidence: String) {
        self.0.evidence.push(evidence);
    }

    /// Notes a finding if it `holds`.
    fn judge(&mut self, holds: bool, verdict: CheckVerdict, evidence: impl Into<String>, remedy: &str) {
        if holds {
            self.0.verdict = self.0.verdict.max(verdict);
            self.note(evidence.into());
            self.0.remedies.push(remedy.into());
        }
    }
}
