//! `egpu status`: a line for each GPU.

use std::time::Duration;

use clap::Args;
use vm_passthrough::Host;
use vm_passthrough::telemetry::{Answer, Source, Watch};
use vm_passthrough::usb4::{self, Authorization};

use crate::api::{Body, GpuStatus};
use crate::cli::context::Context;
use crate::devices::gpus::{self, Gpu, GpuName, Which};
use crate::failure::Failure;
use crate::text::describe;
use crate::text::table::Table;

/// How long drivers are waited for. One that wakes a GPU takes seconds.
const DEADLINE: Duration = Duration::from_secs(10);

/// Which GPUs.
#[derive(Debug, Args)]
pub(crate) struct WhichArgs {
    /// The GPU, as in 0000:65:00.0 or 65:00.0, or its enclosure: the UUID or the router, as in 0-1; without one, those behind a tunnel
    #[arg(value_name = "GPU")]
    name: Option<GpuName>,
    /// Every GPU of the host, those behind a tunnel first
    #[arg(long, conflicts_with = "name")]
    all: bool,
}

impl WhichArgs {
    /// What they say.
    pub(crate) fn which(&self) -> Which {
        match (self.name, self.all) {
            (Some(name), _) => Which::One(name),
            (None, true) => Which::All,
            (None, false) => Which::Tunnelled,
        }
    }
}

/// The message where there is no such GPU.
pub(super) fn none(which: Which) -> &'static str {
    match which {
        Which::All => "this host has no GPUs; `vm-service list --all` lists every PCI function",
        _ => "no GPU is behind a tunnel; with `--all` every GPU of the host is meant",
    }
}

/// The message where an enclosure is connected that Linux tunnels no PCIe to.
fn unauthorised(host: &Host) -> Option<String> {
    let domains = usb4::scan_routers(host).ok()?;
    let mut routers = domains.iter().flat_map(|domain| &domain.routers);
    let router = routers.find(|router| router.route.depth() > 0 && !router.is_authorised())?;
    Some(format!(
        "no GPU is behind a tunnel: the enclosure {} {} is connected, and not authorised; `vm-service egpu connect {}` authorises it",
        router.route,
        super::enclosure::name(router),
        router.route
    ))
}

/// Prints a row for each GPU.
///
/// # Errors
/// When the host can't be scanned, the one that is meant is not there, or the output can't be written.
pub(super) fn run(context: &mut Context<'_>, args: &WhichArgs) -> Result<(), Failure> {
    let host = context.host.clone();
    let which = args.which();
    let gpus = gpus::find(&host, which)?;
    let answers = ask(&host, &gpus)?;
    let width = context.width;
    let json = || Body::EgpuStatus {
        gpus: answers.iter().map(|(gpu, answer)| GpuStatus::new(gpu, answer)).collect(),
    };
    let waiting = if answers.is_empty() { unauthorised(&host) } else { None };
    context.print(json, || match answers.is_empty() {
        true => format!("{}\n", waiting.unwrap_or_else(|| none(which).into())),
        false => table(&answers).fit(width),
    })
}

fn ask<'a>(host: &Host, gpus: &'a [Gpu]) -> Result<Vec<(&'a Gpu, Answer)>, Failure> {
    let mut watch = Watch::new();
    watch
        .watch(gpus.iter().map(|gpu| gpu.reader(host)))
        .map_err(|error| Failure::failed(format_args!("no thread can be started to ask a GPU: {error}")))?;
    let mut answers = watch.read(DEADLINE);
    Ok(gpus.iter().map(|gpu| (gpu, answers.remove(&gpu.address()).unwrap_or(Answer::Gone))).collect())
}

fn table(gpus: &[(&Gpu, Answer)]) -> Table<9> {
    let mut table = Table::new([
        "ADDRESS",
        "NAME",
        "ENCLOSURE",
        "AUTHORISED",
        "DRIVER",
        "LINK",
        "TEMPERATURE",
        "POWER",
        "BUSY",
    ]);
    for (gpu, answer) in gpus {
        let dash = || "-".to_owned();
        let (link, temperature, power, busy) = match answer {
            Answer::Told(_, told) => {
                let unknown = match &told.source {
                    Source::None(why) => why.clone(),
                    _ => dash(),
                };
                (
                    told.link.map_or_else(dash, describe::gpu_link),
                    told.temperature.map_or(unknown, |degrees| format!("{degrees:.0} °C")),
                    told.power.map_or_else(dash, |watts| describe::of_limit(watts, told.power_limit, "W")),
                    told.busy.map_or_else(dash, |busy| format!("{busy} %")),
                )
            }
            Answer::Gone => ("gone".into(), dash(), dash(), dash()),
            Answer::Waiting(_) => {
                let late = format!("its driver did not answer within {} s", DEADLINE.as_secs());
                (dash(), late, dash(), dash())
            }
        };
        table.push([
            gpu.address().to_string(),
            gpu.name(),
            gpu.enclosure_text().unwrap_or_else(dash),
            authorised(gpu),
            describe::holder(gpu),
            link,
            temperature,
            power,
            busy,
        ]);
    }
    table
}

fn authorised(gpu: &Gpu) -> String {
    match gpu.enclosure.as_ref().and_then(|router| router.authorization) {
        Some(Authorization::No) => "no",
        Some(Authorization::Yes) => "yes",
        Some(Authorization::Challenged) => "yes, by its key",
        None => "-",
    }
    .into()
}
