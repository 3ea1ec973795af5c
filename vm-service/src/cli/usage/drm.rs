//! What uses a GPU, by the files of its DRM driver: sensors in sysfs as `amdgpu` has them, and in procfs the clients of any
//! such driver (the Linux kernel's Documentation/gpu/amdgpu and Documentation/gpu/drm-usage-stats.rst).

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use vm_passthrough::{Host, PciAddress};

use crate::api::{GpuProcess, Usage};

/// Most bytes that are read of a file.
const MAX_BYTES: u64 = 64 << 10;

/// What uses a function that `amdgpu` drives.
///
/// # Errors
/// When the driver shows neither its load nor its memory.
pub(super) fn of(host: &Host, address: PciAddress) -> Result<Usage, String> {
    let directory = host.pci_device(address);
    let number = |name: &str| read(&directory.join(name)).ok()?.trim().parse::<u64>().ok();
    let sensor = |name: &str| {
        let sensors = directories(&directory.join("hwmon")).into_iter();
        sensors.filter_map(|sensors| read(&sensors.join(name)).ok()?.trim().parse::<u64>().ok()).next()
    };
    let busy_percent = number("gpu_busy_percent").and_then(|busy| busy.try_into().ok());
    let memory_bytes = number("mem_info_vram_total");
    if busy_percent.is_none() && memory_bytes.is_none() {
        return Err(format!("amdgpu shows neither load nor memory in {}", directory.display()));
    }
    // Thousandths of a degree, and millionths of a watt; newer GPUs have the power of now and no average.
    let power = sensor("power1_average").or_else(|| sensor("power1_input"));
    Ok(Usage {
        unknown: None,
        busy_percent,
        memory_used_bytes: number("mem_info_vram_used"),
        memory_bytes,
        temperature_celsius: sensor("temp1_input").and_then(|degrees| (degrees / 1000).try_into().ok()),
        power_watts: power.map(|power| power as f64 / 1e6),
        processes: Some(processes(host, address)),
    })
}

/// The processes that have the function's DRM nodes open.
fn processes(host: &Host, address: PciAddress) -> Vec<GpuProcess> {
    let pid = |process: &PathBuf| process.file_name()?.to_str()?.parse::<u32>().ok();
    let all = directories(&host.proc).into_iter().filter_map(|process| Some((pid(&process)?, process)));
    let using = all.filter_map(|(pid, process)| {
        let memory_bytes = memory_of(&process, address)?;
        Some(GpuProcess { pid, command: None, memory_bytes })
    });
    let mut processes: Vec<_> = using.collect();
    processes.sort_by_key(|process| process.pid);
    processes
}

/// Bytes of the function's memory that a process has, if that is known; `None` for one that does not have it open.
fn memory_of(process: &Path, address: PciAddress) -> Option<Option<u64>> {
    let address = address.to_string();
    // By their IDs, as a client may be open several times.
    let mut clients = BTreeMap::new();
    for file in entries(&process.join("fd")) {
        let is_node = fs::read_link(&file).is_ok_and(|node| node.starts_with("/dev/dri"));
        let Some(name) = file.file_name().filter(|_| is_node) else { continue };
        let Ok(text) = read(&process.join("fdinfo").join(name)) else { continue };
        let field = |name: &str| {
            let fields = text.lines().filter_map(|line| line.split_once(':'));
            fields.filter(|(field, _)| *field == name).map(|(_, value)| value.trim()).next()
        };
        if field("drm-pdev") == Some(&address) {
            let memory = field("drm-total-vram").or_else(|| field("drm-memory-vram")).and_then(bytes);
            clients.insert(field("drm-client-id").map(str::to_owned), memory);
        }
    }
    let memory = clients.values().flatten().copied().reduce(u64::saturating_add);
    (!clients.is_empty()).then_some(memory)
}

/// A number of bytes, as `123`, `123 KiB` or `123 MiB`.
fn bytes(text: &str) -> Option<u64> {
    let (number, unit) = text.split_once(' ').unwrap_or((text, ""));
    let unit = match unit.trim() {
        "" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(unit)
}

fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(MAX_BYTES).read_to_string(&mut text)?;
    Ok(text)
}

fn entries(path: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(path).into_iter().flatten();
    entries.filter_map(|entry| Some(entry.ok()?.path())).collect()
}

fn directories(path: &Path) -> Vec<PathBuf> {
    entries(path).into_iter().filter(|path| path.is_dir()).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use vm_passthrough::sim::{SimFunction, SimHost};

    use super::*;

    #[test]
    fn sensors_and_clients_are_read() {
        let sim = SimHost::new().expect("a simulated host");
        let address: PciAddress = "0000:03:00.0".parse().expect("an address");
        sim.add(&SimFunction::nvme(address)).expect("added");
        let host = sim.plain_host();
        assert!(of(&host, address).is_err_and(|why| why.contains("neither load nor memory")));
        let write = |path: PathBuf, text: &str| {
            fs::create_dir_all(path.parent().expect("a directory")).expect("made");
            fs::write(path, text).expect("written");
        };
        let device = host.pci_device(address);
        write(device.join("gpu_busy_percent"), "97\n");
        write(device.join("mem_info_vram_used"), "1073741824\n");
        write(device.join("mem_info_vram_total"), "17163091968\n");
        write(device.join("hwmon/hwmon3/temp1_input"), "61000\n");
        write(device.join("hwmon/hwmon3/power1_average"), "203500000\n");
        let open = |pid: u32, fd: u32, node: &str, text: &str| {
            let process = host.proc.join(pid.to_string());
            fs::create_dir_all(process.join("fd")).expect("made");
            symlink(node, process.join(format!("fd/{fd}"))).expect("linked");
            write(process.join(format!("fdinfo/{fd}")), text);
        };
        let client = |id: u32, memory: &str| {
            format!("pos:\t0\ndrm-driver:\tamdgpu\ndrm-client-id:\t{id}\ndrm-pdev:\t{address}\n{memory}")
        };
        open(70, 4, "/dev/dri/renderD128", &client(1, "drm-memory-vram:\t2048 KiB\n"));
        open(70, 5, "/dev/dri/renderD128", &client(1, "drm-memory-vram:\t2048 KiB\n"));
        open(70, 6, "/dev/dri/card0", &client(2, "drm-total-vram:\t1 MiB\ndrm-memory-vram:\t9 MiB\n"));
        open(9, 3, "/dev/dri/renderD128", &client(3, "drm-memory-vram:\tmuch\n"));
        open(80, 3, "/dev/dri/renderD129", "drm-pdev:\t0000:04:00.0\ndrm-memory-vram:\t7 KiB\n");
        open(81, 3, "/dev/null", &client(4, "drm-memory-vram:\t7 KiB\n"));
        let process = |pid, memory_bytes| GpuProcess { pid, command: None, memory_bytes };
        let expect = Usage {
            unknown: None,
            busy_percent: Some(97),
            memory_used_bytes: Some(1 << 30),
            memory_bytes: Some(17_163_091_968),
            temperature_celsius: Some(61),
            power_watts: Some(203.5),
            processes: Some(vec![process(9, None), process(70, Some(3 << 20))]),
        };
        assert_eq!(of(&host, address), Ok(expect));
    }
}
