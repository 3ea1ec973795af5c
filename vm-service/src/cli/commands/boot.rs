//! The guest that `run` and `start` boot: its file, what the command line changes of it, and how it is started.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use vm_passthrough::PciAddress;

use crate::api::{Accept, StartOptions, VfioBackend};
use crate::config::{self, GuestConfig, MAX_DEVICES, Net};
use crate::deadlines;
use crate::failure::Failure;
use crate::os::sandbox::Measure;

/// The guest, as its file and the command line describe it.
#[derive(Debug, Args)]
pub(crate) struct BootArgs {
    /// The guest, as a TOML file (docs/guest-toml.md)
    #[arg(value_name = "GUEST.toml")]
    pub(crate) guest: PathBuf,
    /// Number of the guest's vCPUs, instead of its file's
    #[arg(long, value_name = "NUMBER", value_parser = config::vcpus_argument)]
    pub(crate) vcpus: Option<u8>,
    /// The guest's memory, as in 512M or 4G, instead of its file's
    #[arg(long, value_name = "SIZE", value_parser = config::memory_argument)]
    pub(crate) memory: Option<u64>,
    /// Give this PCI function to the guest, beside those of its file
    #[arg(long = "device", value_name = "ADDR")]
    pub(crate) devices: Vec<PciAddress>,
    /// Give the guest a network interface at this tap, beside those of its file: tap=NAME[,mac=ADDRESS][,vhost=on|off]
    #[arg(long = "net", value_name = "tap=NAME")]
    pub(crate) nets: Vec<Net>,
    #[command(flatten)]
    pub(crate) options: StartOptionsArgs,
}

/// How a guest is started.
#[derive(Args, Debug)]
pub(crate) struct StartOptionsArgs {
    /// Take every function of the devices' IOMMU groups, also those of other devices
    #[arg(long)]
    with_group: bool,
    /// Go on although this stands in the way; it is reported as a warning
    #[arg(long, value_enum, value_name = "CODE")]
    accept: Vec<Accept>,
    /// How to open devices; without it, iommufd where the Linux kernel has it
    #[arg(long, value_enum)]
    backend: Option<VfioBackend>,
    /// End when the guest asks for a reboot, or crashes into one, instead of restarting it
    #[arg(long)]
    no_reboot: bool,
    /// Run although the guest's processes cannot have these parts of their confinement: user, files
    #[arg(long, value_delimiter = ',', value_name = "MEASURES", value_parser = waivers(&config::GUEST_WAIVERS))]
    unconfined: Vec<Measure>,
    /// How long the guest has to power itself off when a signal comes, before its power is cut; 0 cuts it at once, 30 when left out
    #[arg(long, value_name = "SECONDS", value_parser = deadlines::seconds)]
    shutdown_timeout: Option<Duration>,
}

/// Reads the measures of a confinement that can be waived.
pub(crate) fn waivers(may: &[Measure]) -> impl TypedValueParser<Value = Measure> {
    let names = PossibleValuesParser::new(may.iter().filter_map(ValueEnum::to_possible_value));
    names.try_map(|name| Measure::from_str(&name, false))
}

impl BootArgs {
    /// The guest, whose files may be missing.
    ///
    /// # Errors
    /// When its file is wrong, or it would have more of something than it can.
    pub(crate) fn config(&self) -> Result<GuestConfig, Failure> {
        let mut config = GuestConfig::load(&self.guest).map_err(Failure::usage)?;
        config.vcpus = self.vcpus.unwrap_or(config.vcpus);
        config.memory = self.memory.unwrap_or(config.memory);
        if let Some(message) = config.hugepages.and_then(|size| config::uneven(config.memory, size)) {
            return Err(Failure::usage(message));
        }
        for device in &self.devices {
            if !config.devices.contains(device) {
                config.devices.push(*device);
            }
        }
        if config.devices.len() > MAX_DEVICES {
            return Err(Failure::usage(format_args!(
                "the guest {} would get {} devices; a guest has at most {MAX_DEVICES}",
                config.name,
                config.devices.len()
            )));
        }
        config.add_nets(&self.nets).map_err(Failure::usage)?;
        let accelerators = config.accelerators.iter_mut().map(|shared| &mut shared.unconfined);
        for waived in accelerators.chain([&mut config.unconfined]) {
            waived.extend(&self.options.unconfined);
        }
        Ok(config)
    }
}

impl From<&StartOptionsArgs> for StartOptions {
    fn from(args: &StartOptionsArgs) -> Self {
        Self {
            with_group: args.with_group,
            accept: args.accept.clone(),
            backend: args.backend,
            no_reboot: args.no_reboot,
            unconfined: args.unconfined.clone(),
            shutdown_timeout_ms: args.shutdown_timeout.map(|time| time.as_millis() as u64),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        boot: BootArgs,
    }

    #[test]
    fn the_command_line_goes_before_the_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("guest.toml");
        let text = "name = \"a\"\nvcpus = 2\nmemory = \"4M\"\nboot.kernel = \"guest.toml\"\n";
        std::fs::write(&file, text).expect("written");
        let guest = |options: &str| {
            let line = ["run", file.to_str().expect("UTF-8")].into_iter().chain(options.split_whitespace());
            Line::parse_from(line).boot.config()
        };
        let check = |options: &str, expect: (u8, u64)| {
            let config = guest(options).expect("a guest");
            assert_eq!((config.vcpus, config.memory), expect, "{options}");
        };
        check("", (2, 4 << 20));
        check("--vcpus 255", (255, 4 << 20));
        check("--memory 16T --vcpus 1", (1, 16 << 40));
        let nets =
            |options: &str| guest(options).map(|config| config.nets.len()).map_err(|failure| failure.message);
        assert_eq!(nets("--net tap=a --net tap=b,mac=52:54:00:12:34:56"), Ok(2));
        assert_eq!(
            nets("--net tap=a --net tap=a").unwrap_err(),
            "`--net tap=a` has the tap of another; give each its own"
        );
    }

    #[test]
    fn options_are_the_same_on_the_command_line() {
        let check = |line: &str| {
            let parsed = Line::parse_from(["run", "a.toml"].into_iter().chain(line.split_whitespace()));
            let options = StartOptions::from(&parsed.boot.options);
            assert_eq!(options.arguments().join(" "), line);
            let query = serde_html_form::to_string(&options).expect("a query");
            assert_eq!(serde_html_form::from_str::<StartOptions>(&query), Ok(options), "{query}");
        };
        check("");
        check("--with-group --no-reboot");
        check("--accept=no-reset --backend=group --shutdown-timeout=90");
        check("--shutdown-timeout=0.5");
        check("--unconfined=user,files");
        check("--accept=no-reset --accept=no-reset --backend=iommufd");
    }
}
