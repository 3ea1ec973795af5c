//! What a record is about: one table from the modules that log to categories.
//!
//! `RUST_LOG` takes the categories where it takes modules, as in `RUST_LOG=info,EGPU=debug`: they are written out as modules
//! by the same table, so that what a filter lets through and what a record is called can't differ.

use crate::api::LogCategory::{self, Cli, Cuda, Driver, Egpu, General, Memory, Pcie, Python, Usb4};

/// Modules, each with those in it, and what their records are about. The longest that fits decides; what none fits is
/// [`General`]. A record whose target is a category's name is about that.
const TABLE: &[(&str, LogCategory)] = &[
    ("vm_passthrough::claim", Driver),
    ("vm_passthrough::ledger", Driver),
    ("vm_service::devices::saved", Driver),
    ("vm_passthrough::egpu", Egpu),
    ("vm_passthrough::tuning", Egpu),
    ("vm_service::cli::commands::egpu", Egpu),
    ("vm_service::devices::known_egpus", Egpu),
    ("vm_passthrough::guest::dma", Memory),
    ("vm_passthrough::numa", Memory),
    ("vm_passthrough::vfio::space", Memory),
    ("vm_passthrough::vfio::sys::memory", Memory),
    ("vm_service::vmm::memory", Memory),
    ("vm_service::vmm::numa", Memory),
    ("vm_passthrough::gpu", Pcie),
    ("vm_passthrough::guest", Pcie),
    ("vm_passthrough::iommu", Pcie),
    ("vm_passthrough::pci", Pcie),
    ("vm_passthrough::vfio", Pcie),
    ("vm_service::vmm::pci", Pcie),
    ("vm_passthrough::usb4", Usb4),
    ("vm_cuda", Cuda),
    ("vm_runtime::cuda", Cuda),
    ("vm_service::cli", Cli),
    ("vm_service::cli::benchmark", General),
    ("vm_service::cli::commands", Cli),
    ("vm_service::cli::kernel", General),
    ("vm_service::cli::monitor", General),
    ("vm_service::cli::usage", General),
    ("vm_service::os::signals", Cli),
    ("vm_python", Python),
];

/// What the records of a module are about.
pub(crate) fn category_of(target: &str) -> LogCategory {
    let is_in = |module: &str| {
        target.strip_prefix(module).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
    };
    let row = TABLE.iter().filter(|(module, _)| is_in(module)).max_by_key(|(module, _)| module.len());
    row.map(|(_, category)| *category).or_else(|| target.parse().ok()).unwrap_or(General)
}

/// What `RUST_LOG` says, with modules in the place of categories: `EnvFilter` knows no others. Where a category is named, those that
/// are not have the level that stands alone, or nothing.
pub(super) fn directives(text: &str) -> String {
    let (mut named, mut others, mut alone) = (Vec::new(), Vec::new(), None);
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let (name, level) = part.split_once('=').unwrap_or((part, "trace"));
        match name.parse::<LogCategory>() {
            Ok(category) => named.push((category, level)),
            Err(_) if is_level(part) => alone = Some(part),
            Err(_) => others.push(part.to_owned()),
        }
    }
    if named.is_empty() {
        return text.to_owned();
    }
    let level_of = |category| {
        let said = named.iter().rev().find(|(of, _)| *of == category);
        said.map(|(_, level)| *level).or(alone).unwrap_or("off")
    };
    let names =
        <LogCategory as strum::IntoEnumIterator>::iter().map(|category| (category.as_str(), category));
    let rows = TABLE.iter().copied().chain(names).map(|(module, of)| format!("{module}={}", level_of(of)));
    [level_of(General).to_owned()].into_iter().chain(rows).chain(others).collect::<Vec<_>>().join(",")
}

/// Whether it is a level by itself, which then is that of all modules.
fn is_level(part: &str) -> bool {
    part.parse::<tracing::level_filters::LevelFilter>().is_ok()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tracing_subscriber::EnvFilter;

    use super::*;

    #[test]
    fn every_target_has_a_category() {
        let check = |target: &str, expect: LogCategory| assert_eq!(category_of(target), expect, "{target}");
        check("vm_passthrough::claim", Driver);
        check("vm_passthrough::claim::bind", Driver);
        check("vm_passthrough::ledger", Driver);
        check("vm_passthrough::claims", General);
        check("vm_passthrough::pci::scan", Pcie);
        check("vm_passthrough::vfio::reset", Pcie);
        check("vm_passthrough::vfio", Pcie);
        check("vm_passthrough::vfio::space", Memory);
        check("vm_passthrough::vfio::sys::memory", Memory);
        check("vm_passthrough::vfio::sys", Pcie);
        check("vm_passthrough::guest::dma", Memory);
        check("vm_passthrough::guest::intx", Pcie);
        check("vm_passthrough::usb4::tunnel", Usb4);
        check("vm_passthrough::egpu::connect", Egpu);
        check("vm_service::cli::commands::egpu::log", Egpu);
        check("vm_service::cli::commands::claim", Cli);
        check("vm_service::cli", Cli);
        check("vm_service::client", General);
        check("vm_service::cli::kernel::engine", General);
        check("vm_cuda::assemble::standby", Cuda);
        check("vm_cudart", General);
        check("vm_python", Python);
        check("PYTHON", Python);
        check("EGPU", Egpu);
        check("egpu", General);
        check("vm_service::daemon::http", General);
        check("", General);
        check("::", General);
        check("hyper::proto", General);
    }

    /// Modules of this workspace that the table names, but for those that are to come.
    #[test]
    fn modules_of_the_table_exist() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        // The workspace's packages: `vm-accel = { path = "features/accelerator/core" }`, and those whose folder has their name.
        let manifest = std::fs::read_to_string(root.join("Cargo.toml")).unwrap();
        let place_of = |package: &str| {
            let line = manifest.lines().find(|line| line.starts_with(&format!("{package} = {{ path = \"")));
            line.and_then(|line| line.split('"').nth(1)).unwrap_or(package).to_owned()
        };
        let mut found = 0;
        for (module, _) in TABLE {
            let path = module.replace("::", "/");
            let (package, rest) = path.split_once('/').unwrap_or((&path, "lib"));
            let package = root.join(place_of(&package.replace('_', "-")));
            let file = package.join("src").join(rest);
            found += usize::from(file.is_dir() || file.with_extension("rs").is_file());
        }
        // Without the Python binding, which may not be there.
        assert!(found + 1 >= TABLE.len(), "{found} of {}", TABLE.len());
    }

    #[test]
    fn categories_filter_as_modules_do() {
        /// What `filter` lets through of these, by their levels.
        #[track_caller]
        fn check(filter: &str, expect: &[&str]) {
            use tracing_subscriber::layer::SubscriberExt as _;
            let (send, receive) = std::sync::mpsc::channel();
            let written = directives(filter);
            let subscriber = tracing_subscriber::registry()
                .with(EnvFilter::try_new(&written).unwrap_or_else(|error| panic!("{written}: {error}")))
                .with(Heard(send));
            tracing::subscriber::with_default(subscriber, || {
                tracing::info!(target: "vm_passthrough::vfio::space", "memory");
                tracing::debug!(target: "vm_passthrough::vfio::space", "memory debug");
                tracing::info!(target: "vm_passthrough::vfio", "pcie");
                tracing::debug!(target: "vm_passthrough::vfio", "pcie debug");
                tracing::debug!(target: "EGPU", "egpu debug");
                tracing::info!(target: "other", "other");
                tracing::debug!(target: "other", "other debug");
            });
            assert_eq!(receive.iter().collect::<Vec<_>>(), expect, "{filter}: {written}");
        }
        struct Heard(std::sync::mpsc::Sender<String>);
        impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Heard {
            fn on_event(&self, event: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
                let mut said = Said::default();
                event.record(&mut said);
                self.0.send(said.0).expect("heard");
            }
        }
        #[derive(Default)]
        struct Said(String);
        impl tracing::field::Visit for Said {
            fn record_debug(&mut self, _: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0 = format!("{value:?}");
            }
        }
        check("info", &["memory", "pcie", "other"]);
        check("info,PCIE=debug", &["memory", "pcie", "pcie debug", "other"]);
        check("MEMORY=debug", &["memory", "memory debug"]);
        check("EGPU", &["egpu debug"]);
        check("warn,GENERAL=info", &["other"]);
        check("PCIE=off,info,EGPU=debug", &["memory", "egpu debug", "other"]);
        check("PCIE=off,info,vm_passthrough::vfio=debug", &["memory", "pcie", "pcie debug", "other"]);
        check("vm_passthrough::vfio=info", &["memory", "pcie"]);
        assert!(EnvFilter::try_new(directives("PCIE=loud")).is_err());
    }
}
