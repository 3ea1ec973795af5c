//! Which VFIO driver fits a function: vfio-pci serves any, and a variant of it one kind of device, for which it does more, as
//! migration or memory that no BAR shows.
//!
//! A variant says what it is for in its module's aliases, which begin with `vfio_pci:` so that no driver is bound by them
//! (Linux `PCI_DRIVER_OVERRIDE_DEVICE_VFIO`, commit cc6711b0bf36 "PCI / VFIO: Add 'override_only' support for VFIO PCI sub
//! system", which also says how to choose: the match with the fewest wildcards). libvirt chooses so too.
//!
//! The lists come from the host's disk and are read within bounds: a pattern is as long as Linux can write one, only `*` is a
//! wildcard in it, and matching takes at most the product of both lengths.

use std::fmt;
use std::path::PathBuf;

use super::{VFIO_DRIVER, is_vfio_driver};
use crate::pci::PciFunction;
use crate::{Host, files};

/// What the aliases of VFIO drivers begin with.
const PREFIX: &str = "vfio_pci:";
/// Longest pattern, in bytes: one without wildcards has 61.
const MAX_PATTERN: usize = 96;
/// Most aliases of variants; a Linux kernel has fewer than a hundred.
const MAX_ALIASES: usize = 4096;
/// Longest name of a module, in bytes (Linux `MODULE_NAME_LEN`).
const MAX_NAME: usize = 64;

/// Which VFIO driver a claim binds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum VfioDriver {
    /// The variant that fits best of those that are loaded, or vfio-pci.
    #[default]
    Best,
    /// The one of this name. `vfio-pci` is for all functions of a claim; a variant is for the one that is asked for.
    Named(String),
}

/// The VFIO driver that a function is bound to when it is claimed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverChoice {
    /// Its name.
    pub driver: String,
    /// Why this one.
    pub reason: DriverReason,
}

/// Why a VFIO driver is chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DriverReason {
    /// The function is on it already.
    Bound,
    /// It was asked for by name.
    Named,
    /// It is a variant that is made for the function.
    Variant {
        /// The alias that matches.
        alias: String,
        /// The list that has it.
        list: PathBuf,
    },
    /// It is vfio-pci, and a variant that is made for the function is not loaded.
    NotLoaded {
        /// The variant's module.
        module: String,
        /// The alias that matches.
        alias: String,
        /// The list that has it.
        list: PathBuf,
    },
    /// It is vfio-pci, and no variant is made for the function.
    NoVariant,
}

impl fmt::Display for DriverChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, ", self.driver)?;
        match &self.reason {
            DriverReason::Bound => f.write_str("which has it already"),
            DriverReason::Named => f.write_str("as asked for"),
            DriverReason::Variant { alias, list } => {
                write!(f, "which is made for it ({alias} in {})", list.display())
            }
            DriverReason::NotLoaded { module, .. } => {
                write!(f, "as {module}, which is made for it, is not loaded")
            }
            DriverReason::NoVariant => f.write_str("as no variant of it is made for this device"),
        }
    }
}

/// The VFIO drivers of a host, each with what it is for.
#[derive(Clone, Debug, Default)]
pub struct VfioDrivers {
    aliases: Vec<Alias>,
}

/// One alias of a variant.
#[derive(Clone, Debug)]
struct Alias {
    pattern: String,
    module: String,
    /// The driver's name; `None` while the module is not loaded.
    driver: Option<String>,
    list: PathBuf,
}

impl VfioDrivers {
    /// Those of the Linux kernel that runs: from `modules.alias`, and from `modules.builtin.modinfo` for those that are part of
    /// it. Where these lists can't be read, there are no variants.
    pub fn read(host: &Host) -> Self {
        let release = files::read_trimmed(&host.proc.join("sys/kernel/osrelease")).unwrap_or_default();
        let mut aliases = Vec::new();
        // It becomes part of a path.
        if !is_name(&release, &['.', '+', '~']) {
            return Self { aliases };
        }
        let list = |name| {
            let path = host.modules.join(&release).join(name);
            (files::read(&path).ok().flatten().unwrap_or_default(), path)
        };
        let (text, path) = list("modules.alias");
        let words = text.lines().filter_map(|line| line.strip_prefix("alias ")?.split_once(' '));
        aliases.extend(
            words.filter_map(|(pattern, module)| Alias::new(pattern, module, &path)).take(MAX_ALIASES),
        );
        let (text, path) = list("modules.builtin.modinfo");
        let entries = text.split('\0').filter_map(|entry| entry.split_once(".alias="));
        aliases.extend(
            entries.filter_map(|(module, pattern)| Alias::new(pattern, module, &path)).take(MAX_ALIASES),
        );
        let mut known: Vec<(String, Option<String>)> = Vec::new();
        for alias in &mut aliases {
            if !known.iter().any(|(module, _)| *module == alias.module) {
                known.push((alias.module.clone(), driver_of(host, &alias.module)));
            }
            alias.driver = known
                .iter()
                .find(|(module, _)| *module == alias.module)
                .and_then(|(_, driver)| driver.clone());
        }
        Self { aliases }
    }

    /// The driver that `function` is bound to in a claim: what was asked for, else the one that it is on, if that is a VFIO
    /// driver, else the best. `is_target` says whether it is the function that is claimed, or a companion.
    pub fn choose(&self, function: &PciFunction, wanted: &VfioDriver, is_target: bool) -> DriverChoice {
        let plain = |reason| DriverChoice { driver: VFIO_DRIVER.into(), reason };
        let bound = function.driver.as_ref().filter(|driver| is_vfio_driver(driver));
        match wanted {
            VfioDriver::Named(driver) if is_target || driver == VFIO_DRIVER => {
                let reason = if bound == Some(driver) { DriverReason::Bound } else { DriverReason::Named };
                return DriverChoice { driver: driver.clone(), reason };
            }
            _ => {}
        }
        if let Some(driver) = bound {
            return DriverChoice { driver: driver.clone(), reason: DriverReason::Bound };
        }
        let modalias = modalias(function);
        let fits = self.aliases.iter().filter(|alias| matches(&alias.pattern, &modalias));
        // Of those that match alike, the first.
        let Some(best) = fits.min_by_key(|alias| alias.pattern.matches('*').count()) else {
            return plain(DriverReason::NoVariant);
        };
        let Alias { pattern: alias, module, driver, list } = best.clone();
        match driver {
            Some(driver) => DriverChoice { driver, reason: DriverReason::Variant { alias, list } },
            None => plain(DriverReason::NotLoaded { module, alias, list }),
        }
    }
}

impl Alias {
    /// `None` for what is no alias of a variant.
    fn new(pattern: &str, module: &str, list: &std::path::Path) -> Option<Self> {
        let module = module.replace('-', "_");
        let is_variant = pattern.starts_with(PREFIX) && pattern.len() <= MAX_PATTERN && is_name(&module, &[]);
        // The alias of vfio-pci itself matches everything.
        (is_variant && module != "vfio_pci").then(|| Self {
            pattern: pattern.to_owned(),
            module,
            driver: None,
            list: list.to_owned(),
        })
    }
}

/// Whether a word can be a part of a path: letters, digits, `_`, `-` and these.
fn is_name(word: &str, more: &[char]) -> bool {
    let is_known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-') || more.contains(&c);
    (1..=MAX_NAME).contains(&word.len()) && !word.starts_with('.') && word.chars().all(is_known)
}

/// The driver that a module has registered, as in `/sys/module/MODULE/drivers/pci:DRIVER`.
fn driver_of(host: &Host, module: &str) -> Option<String> {
    let names = files::names(&host.sys.join("module").join(module).join("drivers")).ok()?;
    names
        .iter()
        .filter_map(|name| name.strip_prefix("pci:"))
        .find(|name| is_vfio_driver(name))
        .map(Into::into)
}

/// What Linux matches aliases with (`pci_uevent` in `drivers/pci/pci-driver.c`), for VFIO drivers.
fn modalias(function: &PciFunction) -> String {
    let (ids, class) = (&function.ids, function.class);
    format!(
        "{PREFIX}v{:08X}d{:08X}sv{:08X}sd{:08X}bc{:02X}sc{:02X}i{:02x}",
        ids.vendor,
        ids.device,
        ids.subsystem_vendor,
        ids.subsystem_device,
        class.base(),
        class.subclass(),
        class.interface()
    )
}

/// Whether `text` is as `pattern` says, in which `*` stands for any bytes. Where the text departs from the pattern, only the last
/// `*` takes one byte more: no earlier one would help.
fn matches(pattern: &str, text: &str) -> bool {
    let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
    let (mut p, mut t) = (0, 0);
    // After the last `*`, and where its text began.
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        match (pattern.get(p), star) {
            (Some(b'*'), _) => {
                p += 1;
                star = Some((p, t));
            }
            (Some(byte), _) if *byte == text[t] => (p, t) = (p + 1, t + 1),
            (_, Some((after, from))) => {
                star = Some((after, from + 1));
                (p, t) = (after, from + 1);
            }
            (_, None) => return false,
        }
    }
    pattern[p..].iter().all(|&byte| byte == b'*')
}

#[cfg(test)]
mod tests;
