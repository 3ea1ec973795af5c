//! `list`: the host's accelerators, or all its PCI functions.

use super::Scan;
use crate::cli::{Context, Failure, ListArgs};
use crate::describe;
use crate::json::{Body, Function};
use crate::table::Table;

/// Lists functions.
///
/// # Errors
/// When the host can't be scanned or the output can't be written.
pub(crate) fn run(context: &mut Context<'_>, args: &ListArgs) -> Result<(), Failure> {
    let scan = Scan::of(&context.host)?;
    let listed: Vec<_> = scan
        .functions()
        .iter()
        .filter(|function| args.all || describe::is_accelerator(function.device_type))
        .collect();
    context.print(
        || Body::List {
            functions: listed
                .iter()
                .map(|function| Function::new(function, scan.companions(function)))
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
            let mut table = Table::new(["ADDRESS", "NAME", "TYPE", "GROUP", "DRIVER", "LINK", "NUMA"]);
            let dash = || "-".to_owned();
            for function in &listed {
                table.push([
                    function.address.to_string(),
                    describe::name(function),
                    describe::device_type(function.device_type).into(),
                    function.iommu_group.map_or_else(dash, |group| group.to_string()),
                    function.driver.clone().unwrap_or_else(dash),
                    function.link.map_or_else(dash, describe::link),
                    function.numa_node.map_or_else(dash, |node| node.to_string()),
                ]);
            }
            table.to_string()
        },
    )
}
