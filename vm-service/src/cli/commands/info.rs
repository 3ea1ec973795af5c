//! `info`: one PCI function in full.

use std::error::Error;
use std::fmt::Write as _;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use vm_passthrough::readiness::ExplainOptions;
use vm_passthrough::{Host, PciAddress, PciFunction, gpu, pci};

use super::{Scan, SourceArgs};
use crate::api::{Body, Chip, DeviceHealth, Function, ListedFunction, Part, PartType, Usage};
use crate::cli::context::Context;
use crate::cli::usage;
use crate::devices::{health, npus};
use crate::failure::Failure;
use crate::text::describe;
use crate::text::table::{printable, wrap};

/// How long a read of an attribute may take that waits for the function's lock.
const DEADLINE: Duration = Duration::from_secs(2);

/// Arguments of `info`.
#[derive(Debug, Args)]
pub(crate) struct InfoArgs {
    /// PCI address, as in 0000:65:00.0 or 65:00.0; or npu:N, a device that runs models, as `list` numbers them
    #[arg(value_name = "ADDR|npu:N")]
    pub(crate) device: InfoDevice,
    /// Also read which chip it is from its registers, of GPUs of NVIDIA: where a driver of the host has it and it is awake
    #[arg(long)]
    pub(crate) registers: bool,
    #[command(flatten)]
    pub(crate) source: SourceArgs,
}

/// What is shown.
#[derive(Clone, Copy, Debug)]
pub(crate) enum InfoDevice {
    /// A PCI function.
    Function(PciAddress),
    /// An NPU, by its number.
    Npu(usize),
}

impl FromStr for InfoDevice {
    type Err = Box<dyn Error + Send + Sync>;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.strip_prefix("npu:") {
            Some(number) => number
                .parse()
                .map(Self::Npu)
                .map_err(|_| format!("`{number}` is no number of an NPU, as in npu:0").into()),
            None => Ok(Self::Function(text.parse()?)),
        }
    }
}

fn npu(context: &mut Context<'_>, number: usize) -> Result<(), Failure> {
    let npus = npus::all(&context.host);
    let Some(npu) = npus.get(number) else {
        return Err(Failure::failed(format_args!(
            "there is no NPU {number}; `vm-service list` shows those that there are"
        )));
    };
    let width = context.width;
    context.print(
        || Body::Info { function: None, npu: Some(npu.document(number)) },
        || npus::table(&npus[number..=number]).fit(width),
    )
}

/// Shows one function.
///
/// # Errors
/// When there is no such function, the host can't be scanned or the output can't be written.
pub(crate) fn run(context: &mut Context<'_>, args: &InfoArgs) -> Result<(), Failure> {
    let address = match args.device {
        InfoDevice::Function(address) => address,
        InfoDevice::Npu(number) => return npu(context, number),
    };
    let host = context.host.clone();
    let scan = Scan::of(&host)?;
    let function = scan.function(address)?;
    let readiness = scan.explain_one(address, &ExplainOptions::default())?;
    let driver_override = match pci::driver_override(&host, address, DEADLINE) {
        Ok(driver) => driver,
        Err(error) => {
            tracing::warn!(
                "{}/driver_override can't be read: {error}; if that took long, an unbind of it is stuck",
                host.pci_device(address).display()
            );
            None
        }
    };
    let usage = usage::of(&host, &[function]).pop().flatten();
    let health = health::read(&host, address);
    let chip = args.registers.then(|| gpu::report_chip(&host, function));
    let width = context.width;
    context.print(
        || {
            let listed = Function::new(function, scan.companions(function));
            let parts = pci::parts(&host, address).iter().map(Part::from).collect();
            let part_types = part_types(&host, address).into_iter().map(PartType::from).collect();
            let listed = Function { driver_override: driver_override.clone(), ..listed };
            let listed = ListedFunction {
                usage: usage.clone(),
                health: health.clone(),
                parts,
                part_types,
                chip: chip.as_ref().map(Chip::from),
                ..ListedFunction::new(listed, &readiness)
            };
            Body::Info { function: Some(Box::new(listed)), npu: None }
        },
        || {
            let known = Known {
                driver_override: driver_override.clone(),
                usage: usage.as_ref(),
                health: health.as_ref(),
                chip: chip.as_ref(),
            };
            wrap(&(render(&host, &scan, function, known) + &readiness.to_string()), width)
        },
    )
}

/// The types of parts that a function could get.
fn part_types(host: &Host, address: PciAddress) -> Vec<pci::PartType> {
    [pci::vgpu_types(host, address), pci::mdev_types(host, address)].concat()
}

/// What was asked of a function beside the scan.
struct Known<'a> {
    driver_override: Option<String>,
    usage: Option<&'a Usage>,
    health: Option<&'a DeviceHealth>,
    chip: Option<&'a gpu::ChipReport>,
}

fn render(host: &Host, scan: &Scan<'_>, function: &PciFunction, known: Known<'_>) -> String {
    let Known { driver_override, usage, health, chip } = known;
    let mut text = format!("{} {}\n", function.address, describe::name(function));
    let mut line = |name: &str, value: String| {
        // A String takes any write.
        let _ = writeln!(text, "  {name:<16} {}", printable(&value));
    };
    let or = |value: &Option<String>, none: &str| value.clone().unwrap_or_else(|| none.to_owned());
    let ids = function.ids;
    line("type", describe::device_type(function).into());
    let class = function.class_name().map_or_else(String::new, |name| format!(", {name}"));
    line("class", format!("{:06x}{class}", function.class.0));
    line("IDs", format!("{:04x}:{:04x}, revision {:02x}", ids.vendor, ids.device, ids.revision));
    if ids.subsystem_vendor != 0 {
        line("subsystem", format!("{:04x}:{:04x}", ids.subsystem_vendor, ids.subsystem_device));
    }
    if let Some(chip) = chip {
        line("chip", describe::chip(chip));
    }
    line("driver", or(&function.driver, "none"));
    if let Some(driver) = driver_override {
        line("driver override", driver);
    }
    if let Some(usage) = usage {
        line("use", describe::usage(usage));
        for process in usage.processes.iter().flatten() {
            line("  process", describe::gpu_process(process));
        }
    }
    line("IOMMU group", function.iommu_group.map_or_else(|| "none".into(), |group| group.to_string()));
    for companion in scan.companions(function) {
        let driver = or(&companion.driver, "no driver");
        line("  companion", format!("{} {} ({driver})", companion.address, describe::name(companion)));
    }
    line("NUMA node", function.numa_node.map_or_else(|| "none".into(), |node| node.to_string()));
    line("link", function.link.map_or_else(|| "none".into(), describe::link_in_full));
    if let Some(upstream) = function.upstream {
        line("below", upstream.to_string());
    }
    line("power", describe::power_state(function.power_state).into());
    if let Some(health) = health {
        health.errors.iter().for_each(|errors| line("errors", describe::errors(errors)));
        health.interrupts.iter().for_each(|interrupts| line("interrupts", describe::interrupts(interrupts)));
        health.unread.iter().for_each(|unread| line("not known", unread.clone()));
    }
    let resets: Vec<_> = function.resets.iter().map(|&reset| describe::reset_method(reset)).collect();
    line("resets", if resets.is_empty() { "none".into() } else { resets.join(", ") });
    if let Some(sriov) = function.sriov {
        line("SR-IOV", describe::sriov(sriov));
    }
    for part in pci::parts(host, function.address) {
        let of = part.type_name.map_or_else(String::new, |of| format!(", {of}"));
        line("part", format!("{} {}{of}", describe::part_kind(part.kind), part.name));
    }
    for known in part_types(host, function.address) {
        line("possible part", format!("{} {}", known.id, known.name.unwrap_or_default()));
    }
    line("boot display", if function.boot_display { "yes" } else { "no" }.into());
    for bar in &function.bars {
        line(&format!("BAR {}", bar.index), describe::bar(bar));
        let sizes: Vec<_> = function.bar_sizes(bar.index).iter().map(|&size| describe::size(size)).collect();
        if !sizes.is_empty() {
            line("  sizes", sizes.join(", "));
        }
    }
    if let Some(rom) = function.rom {
        line("ROM", describe::size(rom.size));
    }
    for capability in &function.capabilities {
        let name = describe::capability(capability.id);
        line("capability", format!("{:#04x} at {:#04x}, {name}", capability.id, capability.offset));
    }
    for capability in &function.extended_capabilities {
        let name = describe::extended_capability(capability.id);
        line("capability", format!("{:#06x} at {:#05x}, {name}", capability.id, capability.offset));
    }
    text
}
