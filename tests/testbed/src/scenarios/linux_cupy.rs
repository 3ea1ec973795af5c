//! A stock Linux guest with CPython and CuPy, where there is no GPU: CuPy compiles its kernels in the guest, and they run on the host's processor.

use std::fs::{self, File};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::mount::{MountFlags, mount};

use crate::agent::{Guest, GuestPlan, L1, L2, Program, wait_until};
use crate::scenario::{Contents, Scenario, Variant, Variants};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "linux-cupy",
    about: "CuPy in a stock Linux guest, where no GPU is anywhere, computes on the host's processor as numpy does",
    // The self-built Linux kernel has no vsock, and no device is passed.
    variants: Variants::Only(Variant::Group),
    ports: 0,
    devices: &[
        "-drive",
        "file={cupy},if=none,id=drive0,format=raw,readonly=on",
        "-device",
        "virtio-blk-pci,drive=drive0",
    ],
    disks: &[],
    memory_mib: 1536,
    deadline: Duration::from_secs(1800),
    contents: Contents { accelerators: true, linux_guest: true, cuda: true, cupy: true, ..Contents::NONE },
    l1,
    l2: Some(l2),
};

const SHARED: &str = "[[accelerators]]\ndevice = \"cpu\"\nmemory = \"64M\"\ndeadline = \"600s\"\nwindow = \"32M\"\n\
                      trust = \"driver\"\n\n[[disks]]\npath = \"/dev/vda\"\nread_only = true\n";
const TIMEOUT: Duration = Duration::from_secs(1500);
/// What the guest runs. It says what holds, a line each.
const PROGRAM: &str = include_str!("linux_cupy.py");
/// The disk.
const DISK: &str = "/dev/vda";
/// Where the guest has its files.
const PLACE: &str = "/cupy";

fn l1(l1: &mut L1) -> Result<()> {
    let plan =
        GuestPlan { program: Program::Linux, memory_mib: 768, ..GuestPlan::sharing("cupy", "", SHARED) };
    let ended = Guest::start(l1, &plan)?.end(TIMEOUT)?.succeeded(l1)?;
    l1.figure("run of the guest, from start to its end", ended.process.took.as_secs_f64(), "s");
    Ok(())
}

fn l2(l2: &mut L2) -> Result<()> {
    const FILE: &str = "/tmp/program.py";
    fs::create_dir_all(PLACE)?;
    wait_until("the disk with CuPy", Duration::from_secs(30), || File::open(DISK).is_ok().then_some(()))?;
    mount(DISK, PLACE, "ext4", MountFlags::RDONLY, None).context("can't mount the disk with CuPy")?;
    fs::write(FILE, PROGRAM).context("can't write the program")?;
    let site = format!("{PLACE}/site");
    let mut command = Command::new(format!("{PLACE}/bin/python3"));
    command.arg(FILE).env("PYTHONHOME", PLACE).env("PYTHONPATH", &site);
    command.env("LD_LIBRARY_PATH", format!("/cuda:{PLACE}/libraries"));
    command.env("PYTHONFAULTHANDLER", "1").env("PYTHONUNBUFFERED", "1").env("PYTHONWARNINGS", "ignore");
    command.env("CUDA_PATH", format!("{site}/nvidia/cu13")).env("CUPY_CACHE_DIR", "/tmp/cupy");
    // The driver takes PTX, and not what CUB's templates become.
    command.env("CUPY_COMPILE_WITH_PTX", "1").env("CUPY_ACCELERATORS", "");
    let since = Instant::now();
    let output = command.output().context("can't run Python")?;
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        l2.prove(true, line.to_owned())?;
    }
    let wrong = String::from_utf8_lossy(&output.stderr);
    let took = since.elapsed().as_secs();
    l2.prove(
        output.status.success(),
        format!("the program ends well after {took} s ({}) {}", output.status, wrong.trim()),
    )
}
