//! `list`: the host's accelerators, or all its PCI functions.

use clap::Args;
use vm_passthrough::readiness::ExplainOptions;
use vm_passthrough::{PciFunction, pci};

use super::{Scan, SourceArgs};
use crate::api::{Body, Function, ListedFunction, Part, Usage};
use crate::cli::context::Context;
use crate::cli::usage;
use crate::devices::npus;
use crate::failure::Failure;
use crate::text::describe;
use crate::text::table::Table;

/// Arguments of `list`.
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// List every PCI function, not only accelerators
    #[arg(long)]
    pub(crate) all: bool,
    /// Show what uses each GPU, as its driver tells: time, memory and processes
    #[arg(long)]
    pub(crate) usage: bool,
    #[command(flatten)]
    pub(crate) source: SourceArgs,
}

/// Lists functions, each with whether it can be passed to a guest.
///
/// # Errors
/// When the host can't be scanned or the output can't be written.
pub(crate) fn run(context: &mut Context<'_>, args: &ListArgs) -> Result<(), Failure> {
    let host = context.host.clone();
    let scan = Scan::of(&host)?;
    // A look through the open files of all processes would be the better part of the work.
    let mut options = ExplainOptions::default();
    options.check_open_files = false;
    let listed: Vec<_> = scan
        .functions()
        .iter()
        .filter(|function| args.all || describe::is_accelerator(function.device_type))
        .filter_map(|function| match scan.explain(function, &options) {
            Ok(readiness) => readiness.map(|readiness| Ok((function, readiness))),
            Err(failure) => Some(Err(failure)),
        })
        .collect::<Result<_, _>>()?;
    let usage = match args.usage {
        true => usage::of(&host, &listed.iter().map(|(function, _)| *function).collect::<Vec<_>>()),
        false => vec![None; listed.len()],
    };
    let npus = npus::all(&host);
    let width = context.width;
    context.print(
        || Body::List {
            npus: npus.iter().enumerate().map(|(number, npu)| npu.document(number)).collect(),
            functions: listed
                .iter()
                .zip(usage.clone())
                .map(|((function, readiness), usage)| {
                    let parts = pci::parts(&host, function.address).iter().map(Part::from).collect();
                    let function = Function::new(function, scan.companions(function));
                    ListedFunction { usage, parts, ..ListedFunction::new(function, readiness) }
                })
                .collect(),
        },
        || {
            if listed.is_empty() && !npus.is_empty() {
                return npus::table(&npus).fit(width);
            }
            if listed.is_empty() {
                return if args.all {
                    "no PCI functions found\n".into()
                } else {
                    "no accelerators found; `vm-service list --all` lists every PCI function\n".into()
                };
            }
            if args.usage {
                let functions = listed.iter().map(|(function, _)| *function);
                return usage_table(functions.zip(&usage)).fit(width);
            }
            let mut table =
                Table::new(["ADDRESS", "ID", "NAME", "TYPE", "GROUP", "DRIVER", "LINK", "NUMA", "READY"]);
            let dash = || "-".to_owned();
            for (function, readiness) in &listed {
                table.push([
                    function.address.to_string(),
                    describe::id(function),
                    describe::name(function),
                    describe::device_type(function).into(),
                    function.iommu_group.map_or_else(dash, |group| group.to_string()),
                    function.driver.clone().unwrap_or_else(dash),
                    function.link.map_or_else(dash, describe::link),
                    function.numa_node.map_or_else(dash, |node| node.to_string()),
                    readiness
                        .first_blocker()
                        .map_or_else(|| "yes".into(), |blocker| blocker.code.to_string()),
                ]);
                for part in pci::parts(&host, function.address) {
                    let mut row = <[String; 9]>::default();
                    row[0] = format!("  {}", part.name);
                    row[2] = part.type_name.unwrap_or_default();
                    row[3] = describe::part_kind(part.kind).into();
                    table.push(row.map(|cell| if cell.is_empty() { dash() } else { cell }));
                }
            }
            let mut text = table.fit(width);
            if !npus.is_empty() {
                text.push('\n');
                text.push_str(&npus::table(&npus).fit(width));
            }
            text
        },
    )
}

/// What uses each function.
fn usage_table<'a>(functions: impl Iterator<Item = (&'a PciFunction, &'a Option<Usage>)>) -> Table<4> {
    let mut table = Table::new(["ADDRESS", "NAME", "USE", "PROCESSES"]);
    for (function, usage) in functions {
        let processes = usage.iter().filter_map(|usage| usage.processes.as_ref()).flatten();
        table.push([
            function.address.to_string(),
            describe::name(function),
            usage.as_ref().map_or_else(|| "-".into(), describe::usage),
            processes.map(describe::gpu_process).collect::<Vec<_>>().join("; "),
        ]);
    }
    table
}
