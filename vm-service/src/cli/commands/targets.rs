//! `compile --list-targets`: what kernels can be compiled for.

use vm_jit::{TargetInfo, targets};

use crate::api::{self, Body};
use crate::cli::context::Context;
use crate::failure::Failure;
use crate::text::table::Table;

/// Prints every target and what it has.
///
/// # Errors
/// When standard output can't be written.
pub(super) fn list(context: &mut Context<'_>) -> Result<(), Failure> {
    let all = targets();
    context.print(|| Body::Targets { targets: all.iter().map(document).collect() }, || text(&all))
}

fn text(all: &[TargetInfo]) -> String {
    let mut table = Table::new(["TARGET", "CODE", "SHARED", "CLUSTERS", "TILES"]);
    let yes = |has: bool| if has { "yes" } else { "-" }.to_owned();
    for info in all {
        let target = if info.host { format!("{} (cpu)", info.target) } else { info.target.to_string() };
        let version = info.ptx_version.map_or_else(String::new, |version| format!(" {version}"));
        let shared = info.shared_bytes.map_or_else(|| "-".into(), |bytes| format!("{} KiB", bytes >> 10));
        table.push([
            target,
            format!("{}{version}", info.format),
            shared,
            yes(info.clusters),
            yes(info.tiles),
        ]);
    }
    table.to_string()
}

fn document(info: &TargetInfo) -> api::TargetInfo {
    api::TargetInfo {
        target: info.target.to_string(),
        format: info.format.to_string(),
        ptx_version: info.ptx_version.map(|version| version.to_string()),
        shared_bytes: info.shared_bytes,
        clusters: info.clusters,
        tiles: info.tiles,
        host: info.host,
    }
}
