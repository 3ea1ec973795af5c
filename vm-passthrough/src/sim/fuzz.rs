//! Hostile values in sysfs and procfs: what a fuzzer and a brief test feed to the scan and to explain.

use std::cell::OnceCell;
use std::fs;
use std::io;
use std::path::PathBuf;

use super::{SimFunction, SimHost};
use crate::PciAddress;
use crate::pci::{self, PciFunction};
use crate::readiness::{ExplainOptions, Explainer};
use crate::usb4::{self, Route};

/// The files that are overwritten, below the simulated host's root. `ADDRESS` is the function's directory.
const FILES: &[&str] = &[
    "ADDRESS/config",
    "ADDRESS/resource",
    "ADDRESS/uevent",
    "ADDRESS/numa_node",
    "ADDRESS/power_state",
    "ADDRESS/reset_method",
    "ADDRESS/current_link_speed",
    "ADDRESS/current_link_width",
    "ADDRESS/max_link_speed",
    "ADDRESS/max_link_width",
    "ADDRESS/sriov_totalvfs",
    "ADDRESS/boot_vga",
    "ADDRESS/revision",
    "ADDRESS/power/runtime_status",
    "ADDRESS/net/eth0/address",
    "ADDRESS/block/sda/dev",
    "PORT/config",
    "PORT/uevent",
    "sys/kernel/iommu_groups/1/reserved_regions",
    "sys/kernel/iommu_groups/1/type",
    "sys/kernel/iommu_groups/1/name",
    "sys/devices/virtual/iommu/dmar0/intel-iommu/cap",
    "sys/devices/virtual/iommu/dmar0/intel-iommu/ecap",
    "proc/cpuinfo",
    "proc/meminfo",
    "proc/interrupts",
    "proc/iomem",
    "proc/self/mountinfo",
    "proc/self/cgroup",
    "proc/self/limits",
    "proc/self/status",
    "proc/swaps",
    "proc/net/route",
    "proc/net/ipv6_route",
    "proc/sys/kernel/osrelease",
    "ADDRESS/removable",
    "PORT/removable",
    "sys/bus/thunderbolt/devices/domain0/security",
    "sys/bus/thunderbolt/devices/domain0/iommu_dma_protection",
    "sys/bus/thunderbolt/devices/0-1/authorized",
    "sys/bus/thunderbolt/devices/0-1/unique_id",
    "sys/bus/thunderbolt/devices/0-1/vendor",
    "sys/bus/thunderbolt/devices/0-1/device_name",
    "sys/bus/thunderbolt/devices/0-1/generation",
    "sys/bus/thunderbolt/devices/0-1/rx_speed",
    "sys/bus/thunderbolt/devices/0-1/rx_lanes",
    "sys/bus/thunderbolt/devices/0-1/usb4_port1/link",
];

/// A host with one function whose files are overwritten, and what they were before.
struct Target {
    sim: SimHost,
    address: PciAddress,
    files: Vec<(PathBuf, Vec<u8>)>,
}

impl Target {
    fn new() -> io::Result<Self> {
        let sim = SimHost::new()?;
        let (Some(port), Some(address)) = (PciAddress::new(0, 0, 1, 0), PciAddress::new(0, 1, 0, 0)) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let neighbour = PciAddress::new(0, 2, 0, 0).unwrap_or(address);
        sim.add(&SimFunction::root_port(port))?;
        sim.add(&SimFunction::gpu(address).below(port).sriov(4).driver("amdgpu"))?;
        sim.add(&SimFunction::nvme(neighbour).group(1).driver("nvme"))?;
        sim.add_domain(0, Some(neighbour), &[])?;
        let router = [
            ("authorized", "1\n"),
            ("tx_speed", "20.0 Gb/s\n"),
            ("tx_lanes", "255\n"),
            ("usb4_port1/link", "tbt\n"),
        ];
        sim.add_router(Route { domain: 0, path: 1 }, &router)?;
        sim.add_child(address, "block", "block/sda", &[])?;
        sim.add_child(address, "net", "net/eth0", &[])?;
        let (function, bridge) = (sim.device_dir(address)?, sim.device_dir(port)?);
        let mut files = Vec::new();
        for name in FILES {
            let path = match (name.strip_prefix("ADDRESS/"), name.strip_prefix("PORT/")) {
                (Some(name), _) => function.join(name),
                (_, Some(name)) => bridge.join(name),
                _ => sim.path(name),
            };
            let before = fs::read(&path).unwrap_or_default();
            files.push((path, before));
        }
        Ok(Self { sim, address, files })
    }

    /// Overwrites files as `data` says: an index into [`FILES`], a length of two bytes, and as many bytes, again and
    /// again.
    fn run(&self, mut data: &[u8]) -> io::Result<()> {
        for (path, before) in &self.files {
            fs::write(path, before)?;
        }
        while let [index, low, high, rest @ ..] = data {
            let len = usize::from(u16::from_le_bytes([*low, *high])).min(rest.len());
            let (bytes, rest) = rest.split_at(len);
            if let Some((path, _)) = self.files.get(usize::from(*index)) {
                fs::write(path, bytes)?;
            }
            data = rest;
        }
        let host = self.sim.plain_host();
        let functions = pci::scan(&host).unwrap_or_default();
        functions.iter().for_each(check);
        let domains = usb4::scan(&host).unwrap_or_default();
        let names = domains
            .iter()
            .flat_map(|domain| &domain.routers)
            .filter_map(|router| router.device_name.as_ref());
        assert!(names.clone().all(|name| name.chars().count() <= 64 && !name.contains(char::is_control)));
        for tunnel in usb4::tunnels(&host, &functions, &domains) {
            assert!(functions.iter().any(|function| function.address == tunnel.function));
        }
        let options = ExplainOptions { check_open_files: false, ..ExplainOptions::default() };
        if let Ok(readiness) = Explainer::new(&host).explain(self.address, &options) {
            assert!(readiness.to_string().len() < 1 << 20, "an explanation without bounds");
        }
        if let Ok(config) = pci::read_config(&host, self.address) {
            assert!(config.len() <= pci::config::EXTENDED_CONFIG_SIZE);
        }
        Ok(())
    }
}

/// Scans and explains a simulated host whose files hold `data`.
///
/// # Panics
/// When what is found breaks a promise, which is what the fuzzer looks for.
#[doc(hidden)]
pub fn fuzz_sysfs(data: &[u8]) {
    thread_local!(static TARGET: OnceCell<Option<Target>> = const { OnceCell::new() });
    TARGET.with(|target| {
        let target = target.get_or_init(|| Target::new().ok());
        let result = target.as_ref().map(|target| target.run(data));
        assert!(matches!(result, Some(Ok(()))), "the simulated host can't be made: {result:?}");
    });
}

/// What holds of every function, whatever the files say.
fn check(function: &PciFunction) {
    assert!(function.bars.len() <= 6 && function.bars.iter().all(|bar| bar.size > 0 && bar.index < 6));
    assert!(function.class.0 < 1 << 24 && function.header_type < 0x80);
    let mut offsets: Vec<u16> = function.capabilities.iter().map(|cap| cap.offset.into()).collect();
    assert!(offsets.iter().all(|&offset| (0x40..0x100).contains(&offset) && offset % 4 == 0));
    let extended = function.extended_capabilities.iter().map(|cap| cap.offset);
    assert!(extended.clone().all(|offset| (0x100..0x1000).contains(&offset) && offset % 4 == 0));
    offsets.extend(extended);
    let count = offsets.len();
    offsets.sort_unstable();
    offsets.dedup();
    assert_eq!(offsets.len(), count, "an offset was visited twice");
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// One overwritten file in the form that [`fuzz_sysfs`] takes.
    fn entry(index: usize, bytes: &[u8]) -> Vec<u8> {
        let len = u16::try_from(bytes.len()).unwrap().to_le_bytes();
        [&[u8::try_from(index).unwrap()][..], &len, bytes].concat()
    }

    fn values() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![
            proptest::collection::vec(any::<u8>(), 0..4200),
            // Nearly what the Linux kernel writes.
            r"(0x[0-9a-f]{0,17}[ \n]){0,40}".prop_map(String::into_bytes),
            r"([A-Z_]{1,9}=[0-9A-F:]{0,12}\n){0,6}".prop_map(String::into_bytes),
            r"-?[0-9]{0,21}\n?".prop_map(String::into_bytes),
            r"([0-9a-f]{1,8}[ :/\t-]){0,30}".prop_map(String::into_bytes),
        ]
    }

    #[test]
    fn empty_and_extreme_values() {
        for index in 0..FILES.len() {
            for bytes in [&b""[..], b"\0", &[0xff; 4096], &[0x40; 5000], b"-1\n", b"18446744073709551616\n"] {
                fuzz_sysfs(&entry(index, bytes));
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]
        #[test]
        fn hostile_values(files in proptest::collection::vec((0..FILES.len(), values()), 1..6)) {
            let data: Vec<u8> = files.iter().flat_map(|(index, bytes)| entry(*index, bytes)).collect();
            fuzz_sysfs(&data);
        }
    }
}
