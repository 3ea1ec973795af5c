//! `list`: the host's accelerators, or all its PCI functions.

use super::{Scan, blockers};
use crate::cli::{Context, Failure, ListArgs};
use crate::json::{Body, Function};
use crate::table::Table;
use crate::describe;

/// Lists functions, each with its first blocker.
///
/// # Errors
/// When the host can't be scanned or the output can't be written.
pub fn run(context: &mut Context<'_>, args: &ListArgs) -> Result<(), Failure> {
    let scan = Scan::of(&context.host)?;
    let listed: Vec<_> = scan
        .functions()
        .iter()
        .filter(|function| args.all || describe::is_accelerator(function.device_type))
        .map(|function| scan.explain(function.address).map(|readiness| (function, readiness)))
        .collect::<Result<_, _>>()?;
    context.print(
        || Body::List {
            functions: listed
                .iter()
                .map(|(function, readiness)| {
                    Function::new(function, scan.companions(function), blockers(readiness))
                })
                .collect(),
        },
        || {
            if listed.is_empty() {
                return if args.all {
                    "no PCI functions found\n".into()
                } else {
                    "no accelerators found; `vm-service list --all` lists every PCI function\n".into()
                };
            }
            let mut table = Table::new(["ADDRESS", "NAME", "TYPE", "GROUP", "DRIVER", "LINK", "NUMA", "READY"]);
            let dash = || "-".to_owned();
            for (function, readiness) in &listed {
                table.push([
                    function.address.to_string(),
                    describe::name(function),
                    describe::device_type(function.device_type).into(),
                    function.iommu_group.map_or_else(dash, |group| group.to_string()),
                    function.driver.clone().unwrap_or_else(dash),
                    function.link.map_or_else(dash, describe::link),
                    function.numa_node.map_or_else(dash, |node| node.to_string()),
                    readiness.blockers.first().map_or_else(|| "yes".into(), |blocker| blocker.code().to_string()),
                ]);
            }
            table.to_string()
        },
    )
}
