//! The compute driver's topology, `SYS/class/kfd/kfd/topology/nodes/N`: a directory for each CPU and each GPU.
//!
//! The format is that of the Linux kernel's `drivers/gpu/drm/amd/amdkfd/kfd_topology.c`: `gpu_id` is a number, 0 for a
//! CPU; `properties` has a name and a number on each line; `mem_banks/M/properties` too. What is read is bounded: a
//! driver gone wrong can't make a caller run out of memory or time.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use crate::{RocmDevice, RocmError, Roots};

/// Most nodes that are looked at; eight GPUs in eight partitions each and their CPUs are 66.
const MAX_NODES: usize = 1024;
/// Most memory banks of a node.
const MAX_BANKS: usize = 64;
/// Most bytes of a file; the longest has about 1.5 KiB.
const MAX_BYTES: u64 = 64 << 10;
/// Most characters of a name.
const MAX_NAME: usize = 64;
/// PCI vendor ID of AMD.
const AMD: u64 = 0x1002;

/// Every GPU that the compute driver lists, in the order of its nodes. One whose files are not what they should be is left out, and
/// logged, where there are others.
///
/// # Errors
/// [`RocmError::NoDriver`] where there is none; [`RocmError::Read`] and [`RocmError::Malformed`] where there are only such nodes.
pub fn devices(roots: &Roots) -> Result<Vec<RocmDevice>, RocmError> {
    match listed(roots)? {
        (devices, Some(error)) if devices.is_empty() => Err(error),
        (devices, _) => Ok(devices),
    }
}

/// The GPUs, and what is wrong with the first node that could not be read.
pub(crate) fn listed(roots: &Roots) -> Result<(Vec<RocmDevice>, Option<RocmError>), RocmError> {
    let topology = roots.sys.join("class/kfd/kfd/topology/nodes");
    let entries = match fs::read_dir(&topology) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(RocmError::NoDriver { path: topology });
        }
        Err(source) => return Err(RocmError::Read { path: topology, source }),
    };
    let mut nodes = Vec::new();
    for entry in entries.take(MAX_NODES) {
        let entry = entry.map_err(|source| RocmError::Read { path: topology.clone(), source })?;
        if let Some(number) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) {
            nodes.push((number, entry.path()));
        }
    }
    nodes.sort_unstable();
    let (mut devices, mut wrong) = (Vec::new(), None);
    for (number, path) in nodes {
        match device(roots, number, &path) {
            Ok(device) => devices.extend(device),
            Err(error) => {
                tracing::warn!("node {number} of the compute driver is left out: {error}");
                wrong.get_or_insert(error);
            }
        }
    }
    Ok((devices, wrong))
}

/// The GPU of a node; `None` for a CPU, for a GPU that went away while it was read, and for one that this process's
/// device group hides, which has no properties.
fn device(roots: &Roots, node: u32, path: &Path) -> Result<Option<RocmDevice>, RocmError> {
    let Some(text) = read(&path.join("gpu_id"))? else { return Ok(None) };
    let malformed = |file: &str, what: String| RocmError::Malformed { path: path.join(file), what };
    let gpu_id: u32 =
        text.trim().parse().map_err(|_| malformed("gpu_id", format!("{:?} is no number", clean(&text))))?;
    if gpu_id == 0 {
        return Ok(None);
    }
    let file = path.join("properties");
    let text = match read(&file) {
        Ok(Some(text)) if !text.trim().is_empty() => text,
        Ok(_) => return Ok(None),
        Err(RocmError::Read { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let properties = Properties { text: &text };
    let number = |name: &str, most: u64| {
        let value =
            properties.get(name).ok_or_else(|| malformed("properties", format!("{name} is missing")))?;
        match value {
            value if value <= most => Ok(value),
            value => Err(malformed("properties", format!("{name} is {value}, at most {most} is possible"))),
        }
    };
    if number("vendor_id", u64::MAX)? != AMD {
        return Ok(None);
    }
    let version = number("gfx_target_version", 999_999)?;
    let per_unit = number("simd_per_cu", 64)?.max(1);
    // The bus in the upper byte, device and function below, as the Linux kernel's PCI_DEVID; above it some kernels have the number of
    // a partition.
    let location = number("location_id", u32::MAX.into())? & 0xffff;
    let domain = properties.get("domain").unwrap_or(0);
    let domain = u32::try_from(domain).map_err(|_| malformed("properties", format!("domain is {domain}")))?;
    let render = properties.get("drm_render_minor").filter(|minor| (128..1 << 20).contains(minor));
    Ok(Some(RocmDevice {
        node,
        gpu_id,
        name: read(&path.join("name"))?.map(|name| clean(&name)).unwrap_or_default(),
        architecture: architecture(version),
        address: format!("{domain:04x}:{:02x}:{:02x}.{}", location >> 8, location >> 3 & 0x1f, location & 7),
        // Each was checked against a bound that its type holds.
        device_id: number("device_id", 0xffff)? as u16,
        compute_units: (number("simd_count", 1 << 20)? / per_unit) as u32,
        wavefront: number("wave_front_size", 128)? as u32,
        shared_bytes: (number("lds_size_in_kb", 1 << 20)? << 10) as u32,
        memory_bytes: memory(path)?,
        render_node: render.map(|minor| roots.dev.join(format!("dri/renderD{minor}"))),
    }))
}

/// LLVM's name of an architecture: major version in decimal, minor and stepping in hexadecimal.
fn architecture(version: u64) -> String {
    format!("gfx{}{:x}{:x}", version / 10_000, version / 100 % 100, version % 100)
}

/// Bytes of the node's own memory: its banks in the frame buffer, visible to the host or not.
fn memory(node: &Path) -> Result<u64, RocmError> {
    const PUBLIC: u64 = 1;
    const PRIVATE: u64 = 2;
    let Ok(banks) = fs::read_dir(node.join("mem_banks")) else { return Ok(0) };
    let mut bytes = 0u64;
    for bank in banks.take(MAX_BANKS).flatten() {
        let Some(text) = read(&bank.path().join("properties"))? else { continue };
        let properties = Properties { text: &text };
        if matches!(properties.get("heap_type"), Some(PUBLIC | PRIVATE)) {
            bytes = bytes.saturating_add(properties.get("size_in_bytes").unwrap_or(0));
        }
    }
    Ok(bytes)
}

/// Lines of a name and a number.
struct Properties<'a> {
    text: &'a str,
}

impl Properties<'_> {
    fn get(&self, name: &str) -> Option<u64> {
        self.text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
    }
}

/// The text of a small file; `None` when it is not there, or its device has gone.
fn read(path: &Path) -> Result<Option<String>, RocmError> {
    let read = || {
        let mut bytes = Vec::new();
        File::open(path)?.take(MAX_BYTES).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    match read() {
        Ok(text) => Ok(Some(text)),
        Err(error) if gone(&error) => Ok(None),
        Err(source) => Err(RocmError::Read { path: PathBuf::from(path), source }),
    }
}

fn gone(error: &io::Error) -> bool {
    const ENODEV: i32 = 19;
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
        || error.raw_os_error() == Some(ENODEV)
}

/// A name as one short line, which shows what it has: characters that control or format are replaced.
pub(crate) fn clean(text: &str) -> String {
    let formats = |c| {
        matches!(
            c,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}'
        )
    };
    let shown = |c: char| if c.is_control() || formats(c) { '\u{fffd}' } else { c };
    text.trim().chars().take(MAX_NAME).map(shown).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(crate) const MI300X: &str = "cpu_cores_count 0\nsimd_count 1216\nmem_banks_count 1\nlds_size_in_kb 64\n\
        wave_front_size 64\nsimd_per_cu 4\ngfx_target_version 90402\nvendor_id 4098\ndevice_id 29857\n\
        location_id 25856\ndomain 0\ndrm_render_minor 128\n";

    /// A fake tree: files below `topology/nodes`.
    fn list(files: &[(&str, &str)]) -> Result<Vec<RocmDevice>, RocmError> {
        let root = tempfile::tempdir().unwrap();
        let nodes = root.path().join("sys/class/kfd/kfd/topology/nodes");
        for (path, text) in files {
            let path = nodes.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let roots = Roots { sys: root.path().join("sys"), dev: "/dev".into() };
        let at = RocmDevice::at(&roots, "0000:65:00.0");
        let found = devices(&roots);
        if let Ok(found) = &found {
            assert_eq!(found.is_empty(), matches!(at, Err(RocmError::NoDevice { .. })), "{at:?}");
            assert!(found.first().is_none_or(|first| at.is_ok_and(|at| at == *first)));
        }
        found
    }

    #[test]
    fn a_gpu_is_found_between_cpus() {
        let found = list(&[
            ("0/gpu_id", "0\n"),
            ("0/properties", "cpu_cores_count 64\n"),
            ("1/gpu_id", "51110\n"),
            ("1/name", "ip discovery\n"),
            ("1/properties", MI300X),
            ("1/mem_banks/0/properties", "heap_type 1\nsize_in_bytes 205822885888\nflags 0\n"),
            ("1/mem_banks/1/properties", "heap_type 4\nsize_in_bytes 4096\n"),
            ("notes", "not a node"),
        ])
        .unwrap();
        let expect = RocmDevice {
            node: 1,
            gpu_id: 51110,
            name: "ip discovery".into(),
            architecture: "gfx942".into(),
            address: "0000:65:00.0".into(),
            device_id: 0x74a1,
            compute_units: 304,
            wavefront: 64,
            shared_bytes: 64 << 10,
            memory_bytes: 205_822_885_888,
            render_node: Some("/dev/dri/renderD128".into()),
        };
        assert_eq!(found, [expect]);
        assert_eq!(found[0].to_string(), "AMD GPU 0000:65:00.0 (gfx942, ip discovery)");
    }

    #[test]
    fn a_node_that_can_not_be_read_hides_no_other() {
        let found = list(&[
            ("1/gpu_id", "7"),
            ("1/properties", "vendor_id 4098\n"),
            ("2/gpu_id", "8"),
            ("2/name", "a\u{202e}b\u{200b}\u{2028}c\td\u{feff}"),
            ("2/properties", MI300X),
            ("3/gpu_id", "x"),
        ])
        .unwrap();
        let names: Vec<_> = found.iter().map(|device| (device.node, device.name.as_str())).collect();
        assert_eq!(names, [(2, "a\u{fffd}b\u{fffd}\u{fffd}c\u{fffd}d\u{fffd}")]);
        // Which may be the one that is asked for.
        let root = tempfile::tempdir().unwrap();
        let roots = Roots { sys: root.path().into(), dev: "/dev".into() };
        for (node, properties) in [("1", "vendor_id 4098\n"), ("2", MI300X)] {
            let node = root.path().join("class/kfd/kfd/topology/nodes").join(node);
            fs::create_dir_all(&node).unwrap();
            fs::write(node.join("gpu_id"), "7").unwrap();
            fs::write(node.join("properties"), properties).unwrap();
        }
        assert!(RocmDevice::at(&roots, "0000:65:00.0").is_ok());
        let other = RocmDevice::at(&roots, "0000:66:00.0").unwrap_err();
        assert!(other.to_string().contains("gfx_target_version is missing"), "{other}");
    }

    #[test]
    fn architectures() {
        let check = |version, expect: &str| assert_eq!(architecture(version), expect);
        check(90_010, "gfx90a");
        check(90_402, "gfx942");
        check(90_500, "gfx950");
        check(100_301, "gfx1031");
        check(110_000, "gfx1100");
        check(120_001, "gfx1201");
    }

    #[test]
    fn what_is_not_as_it_should_be_is_an_error_or_left_out() {
        let with = |line: &str, value: &str| {
            let lines = MI300X.lines().map(|own| match own.split_once(' ') {
                Some((name, _)) if name == line => value.to_owned(),
                _ => own.to_owned(),
            });
            lines.collect::<Vec<_>>().join("\n")
        };
        let check = |gpu_id: &str, properties: &str, expect: Result<usize, &str>| {
            let got = list(&[("7/gpu_id", gpu_id), ("7/properties", properties)]);
            match (got, expect) {
                (Ok(got), Ok(expect)) => assert_eq!(got.len(), expect, "{properties}"),
                (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
                (got, expect) => panic!("{got:?}, not {expect:?}"),
            }
        };
        check("1", MI300X, Ok(1));
        check("1", "", Ok(0));
        check("1", &with("vendor_id", "vendor_id 4318"), Ok(0));
        check("1", &with("drm_render_minor", "drm_render_minor -1"), Ok(1));
        check("", MI300X, Err("gpu_id: \"\" is no number"));
        check("\u{202e}7\u{1b}", MI300X, Err("gpu_id: \"\u{fffd}7\u{fffd}\" is no number"));
        check("99999999999", MI300X, Err("is no number"));
        check("1", &with("gfx_target_version", ""), Err("gfx_target_version is missing"));
        check("1", &with("gfx_target_version", "gfx_target_version 1000000"), Err("at most 999999"));
        check("1", &with("location_id", "location_id 2415944960"), Ok(1));
        check("1", &with("location_id", "location_id 4294967296"), Err("at most 4294967295"));
        check("1", &with("domain", "domain 4294967296"), Err("domain is 4294967296"));
        check("1", &with("simd_per_cu", "simd_per_cu 0"), Ok(1));
        check("1", &with("lds_size_in_kb", "lds_size_in_kb 18446744073709551615"), Err("lds_size_in_kb"));
        let nowhere = Roots { sys: "/nowhere".into(), dev: "/dev".into() };
        assert!(matches!(devices(&nowhere), Err(RocmError::NoDriver { .. })));
    }

    proptest! {
        // Each case makes a tree of files.
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn no_properties_panic(gpu_id in "[0-9x\n]{0,12}", properties in "([a-z_]{1,20} [0-9-]{0,22}\n){0,8}") {
            let _ = list(&[("0/gpu_id", gpu_id.as_str()), ("0/properties", &(MI300X.to_owned() + &properties))]);
            let _ = list(&[("0/gpu_id", "1"), ("0/properties", &(properties + MI300X))]);
        }
    }
}
