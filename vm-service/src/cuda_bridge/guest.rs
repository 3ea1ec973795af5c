//! The server of a guest's CUDA programs: a process that the guest's VMM hands their connections to, in the place of an accelerator's worker.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::capacity::{Capacity, Peer, SESSION_FILES};
use super::gateway::Gateway;
use super::limits::Limits;
use super::waiting::WAITING;
use super::window::Window;
use super::workers::Workers;
use crate::accelerators::{Open, Order, Report};
use crate::config::Trust;
use crate::os::process::packets;

/// The driver whose device is the processor.
const CPU_DRIVER: &str = "libvm_cuda_cpu.so";
/// Where it is beside the directory of the program, where it is not in that.
const LIBRARIES: &str = "../lib/vm-service";

/// Serves programs until the VMM ends. `files` has the window, then the file that keeps the guest's time.
///
/// # Errors
/// When the driver does not open, or the VMM gives another order than it may.
pub(crate) fn serve(socket: &OwnedFd, open: &Open, mut files: Vec<OwnedFd>) -> Result<(), String> {
    let program = std::env::current_exe().map_err(|error| format!("this program has no path: {error}"))?;
    let driver = match &open.trust {
        Trust::Driver { library: Some(driver), .. } => driver.clone(),
        _ if open.device == "cpu" => cpu_driver(&program)?,
        _ => "libcuda.so.1".into(),
    };
    let seconds = open.deadline_us.div_ceil(1_000_000).max(1);
    let variables = match open.device.as_str() {
        "cpu" => vec![
            ("VM_CUDA_CPU_MEMORY", open.memory.to_string()),
            ("VM_CUDA_CPU_SECONDS", seconds.to_string()),
        ],
        address => vec![("CUDA_VISIBLE_DEVICES", uuid(Path::new("/"), address)?)],
    };
    let name = format!("the CUDA driver {}", driver.display());
    let deadline = match open.device.as_str() {
        // That driver ends a kernel by itself, and its program gets the same error.
        "cpu" => Duration::from_secs(seconds.saturating_add(1)),
        _ => Duration::from_micros(open.deadline_us),
    };
    let limits = Limits {
        memory: Some(open.memory),
        host_memory: match open.trust {
            Trust::Driver { host_memory, .. } => host_memory,
            Trust::Kernels => None,
        },
        deadline: Some(deadline),
        time_slice: Some(Duration::from_micros(open.time_slice_us)),
    };
    let time = files.pop();
    let workers = Workers::new(program, driver, variables, &open.unconfined, &limits, time, None)
        .map_err(|error| error.to_string())?;
    let window = match (files.pop(), open.ram.first()) {
        (Some(file), Some((_, bytes))) => Window::new(file, *bytes),
        _ => return Err("there is no window".into()),
    };
    let capacity = Capacity::new(WAITING, SESSION_FILES).map_err(|error| error.to_string())?;
    let confinement = workers.confinement().clone();
    let gateway = Gateway::new(Arc::new(workers), capacity, Some(window));
    let gone = |error: std::io::Error| format!("nothing can be said to the VMM: {error}");
    packets::send(socket, &Report::Ready { name, target: "ptx".into(), confinement }, &[]).map_err(gone)?;
    loop {
        match packets::receive::<Order>(socket).map_err(gone)? {
            None => return Ok(()),
            Some((Order::Ping, _)) => packets::send(socket, &Report::Here, &[]).map_err(gone)?,
            Some((Order::Connect, files)) => {
                // The VMM has closed those of other guests.
                files.into_iter().for_each(|socket| gateway.accept(socket, Peer::Guest(0)));
            }
            Some((Order::Open(_) | Order::Start(_), _)) => {
                return Err("the VMM gives an order that is for a worker of kernels".into());
            }
        }
    }
}

fn cpu_driver(program: &Path) -> Result<PathBuf, String> {
    let folder = program.parent().unwrap_or(Path::new("/"));
    let places = [folder.join(CPU_DRIVER), folder.join(LIBRARIES).join(CPU_DRIVER)];
    places.iter().find(|place| place.exists()).cloned().ok_or_else(|| {
        format!(
            "there is neither {} nor {}: build it by `cargo build --release --package vm-cuda-cpu`, or name it as \
             `accelerators[].driver`",
            places[0].display(),
            places[1].display()
        )
    })
}

/// How the driver names the GPU at an address.
fn uuid(root: &Path, address: &str) -> Result<String, String> {
    let path = root.join("proc/driver/nvidia/gpus").join(address).join("information");
    let text = std::fs::read_to_string(&path).map_err(|error| {
        format!(
            "{address} is no GPU that NVIDIA's driver has ({}: {error}); `trust = \"driver\"` takes one of those, or \"cpu\"",
            path.display()
        )
    })?;
    let uuid = text.lines().find_map(|line| line.strip_prefix("GPU UUID:")).map(str::trim);
    uuid.filter(|uuid| uuid.starts_with("GPU-"))
        .map(str::to_owned)
        .ok_or_else(|| format!("{} tells no UUID of the GPU", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_of_the_processor_is_looked_for_beside_the_program_first() {
        let root = tempfile::tempdir().expect("a folder");
        let at = |place: &str| root.path().join(place);
        for folder in ["bin", "lib/vm-service"] {
            std::fs::create_dir_all(at(folder)).expect("a folder");
        }
        let found = || cpu_driver(&at("bin/vm-service"));
        let error = found().unwrap_err();
        assert!(error.contains(CPU_DRIVER) && error.contains("accelerators[].driver"), "{error}");
        for place in ["bin/../lib/vm-service", "bin"] {
            let driver = at(place).join(CPU_DRIVER);
            std::fs::write(&driver, "").expect("written");
            assert_eq!(found(), Ok(driver));
        }
    }

    #[test]
    fn a_gpu_is_named_as_its_driver_does() {
        let root = tempfile::tempdir().expect("a folder");
        let gpu = root.path().join("proc/driver/nvidia/gpus/0000:65:00.0");
        std::fs::create_dir_all(&gpu).expect("a folder");
        let check = |text: &str, expect: Result<&str, &str>| {
            std::fs::write(gpu.join("information"), text).expect("written");
            match (uuid(root.path(), "0000:65:00.0"), expect) {
                (Ok(found), Ok(expect)) => assert_eq!(found, expect),
                (Err(error), Err(says)) => assert!(error.contains(says), "{error}"),
                (found, _) => panic!("{text}: {found:?}"),
            }
        };
        let uuid_line = "Model: \t\t NVIDIA H100\nIRQ:   \t\t 0\nGPU UUID: \t GPU-4c7ed8d6-1c2d\n";
        check(uuid_line, Ok("GPU-4c7ed8d6-1c2d"));
        check("GPU UUID: \t GPU-????\n", Ok("GPU-????"));
        check("Model: x\n", Err("tells no UUID"));
        check("GPU UUID: 0,1\n", Err("tells no UUID"));
        let error = uuid(root.path(), "0000:66:00.0").unwrap_err();
        assert!(error.contains("no GPU that NVIDIA's driver has"), "{error}");
    }
}
