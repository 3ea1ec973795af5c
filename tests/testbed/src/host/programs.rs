//! Builds the programs that go into L1: programs for Linux, and bare guests.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::agent::{DMA_BUF, MAP_RAM, OWN_VMM, VFIO_EDU};
use crate::provision::{Step, libraries_of, make_disk, say};
use crate::scenario::Contents;

/// Bare guests are for no operating system, and use no vector registers: not every KVM knows them.
const BARE_TARGET: &str = "x86_64-unknown-none";

/// What a run is for, and so how its programs are built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To check: with debug assertions, as `cargo test` builds them.
    Test,
    /// To measure: optimised.
    Benchmark,
}

/// The programs.
#[derive(Clone, Debug)]
pub struct Programs {
    /// `vm-service`.
    pub vm_service: PathBuf,
    /// `testbed-agent`.
    pub agent: PathBuf,
    /// The bare guest, if it was asked for.
    pub bare_guest: Option<PathBuf>,
    /// The examples of Linux programs that use a shared accelerator, by the names that they have in the guest; none if they were not
    /// asked for.
    pub examples: Vec<(&'static str, PathBuf)>,
    /// Python with numpy and the package, if it was asked for.
    pub python: Option<PathBuf>,
    /// What CUDA programs take, if it was asked for.
    pub cuda: Option<Cuda>,
    /// The image of the disk with CuPy, if it was asked for.
    pub cupy: Option<PathBuf>,
    /// The library's examples, by the names that they have in L1; none if they were not asked for.
    pub library_examples: Vec<(&'static str, PathBuf)>,
    /// cloud-hypervisor, static, where there is one to compare with.
    pub cloud_hypervisor: Option<PathBuf>,
}

/// What CUDA programs take where there is no GPU.
#[derive(Clone, Debug)]
pub struct Cuda {
    /// The driver for the processor.
    pub driver: PathBuf,
    /// The library that programs of guests load as `libcuda.so.1`.
    pub bridge: PathBuf,
    /// A program with the static runtime.
    pub program: PathBuf,
}

/// The root of the checkout.
pub fn workspace() -> &'static Path {
    const MANIFEST: &str = env!("CARGO_MANIFEST_DIR");
    // The manifest lies in tests/testbed.
    Path::new(MANIFEST).ancestors().nth(2).unwrap_or(Path::new(MANIFEST))
}

impl Programs {
    /// Builds what `contents` needs. Debug information stays behind: it is most of a program's size.
    ///
    /// # Errors
    /// When one does not compile.
    pub fn build(logs: &Path, purpose: Purpose, contents: Contents) -> Result<Self> {
        std::fs::create_dir_all(logs).with_context(|| format!("can't make {}", logs.display()))?;
        let target =
            std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace().join("target"), PathBuf::from);
        let (profile, directory) = match purpose {
            Purpose::Test => ("dev", "debug"),
            Purpose::Benchmark => ("quick", "quick"),
        };
        let library_examples: &[&str] =
            if contents.library_examples { &[OWN_VMM, VFIO_EDU, MAP_RAM, DMA_BUF] } else { &[] };
        let examples: &[(&str, &str)] = match contents.examples {
            true => &[("bin/softmax", "examples/linux"), ("bin/worker", "examples/guest")],
            false => &[],
        };
        say("building vm-service and the agent");
        cargo(logs, "build-programs.log", "building the programs", |command| {
            command.args(["--profile", profile, "--bin", "vm-service", "--bin", "testbed-agent"]);
            if contents.accelerators {
                // All of the workspace, with examples, so that cargo chooses the same features of other crates as for
                // `cargo test --workspace`, and what it has compiled for either serves both.
                command.args(["--workspace", "--example", "linux", "--example", "guest"]);
                if contents.python || contents.cuda {
                    command.arg("--lib");
                }
            } else {
                command.args([
                    "--package",
                    "vm-service",
                    "--package",
                    "testbed",
                    "--package",
                    "vm-passthrough",
                ]);
                if contents.library_examples {
                    command.args(["--package", "vm-cpu"]);
                }
                command.arg("--no-default-features");
            }
            for program in library_examples {
                command.args(["--example", program.trim_start_matches("/bin/")]);
            }
            command
        })?;
        let built = target.join(directory);
        let stripped = |name: &str| {
            let from = built.join(name);
            let to = logs.join(from.file_name().unwrap_or_default());
            let step = Step { what: "stripping a program", log: logs.join("strip.log"), deadline: STRIP };
            step.run(Command::new("strip").arg("-o").arg(&to).arg(&from))?;
            Ok::<_, anyhow::Error>(to)
        };
        Ok(Self {
            vm_service: stripped("vm-service")?,
            agent: stripped("testbed-agent")?,
            examples: examples
                .iter()
                .map(|&(place, name)| Ok((place, stripped(name)?)))
                .collect::<Result<_>>()?,
            python: contents.python.then(|| python(logs, &built)).transpose()?,
            cuda: match contents.cuda {
                true => Some(Cuda {
                    driver: stripped("libvm_cuda_cpu.so")?,
                    bridge: stripped("libvm_bridge_guest.so")?,
                    program: cuda_program(logs)?,
                }),
                false => None,
            },
            cupy: contents.cupy.then(|| cupy(logs)).transpose()?,
            library_examples: library_examples
                .iter()
                .map(|&name| Ok((name, stripped(&name.replace("/bin/", "examples/"))?)))
                .collect::<Result<_>>()?,
            bare_guest: contents.bare_guest.then(|| bare_guest(logs, &target)).transpose()?,
            cloud_hypervisor: None,
        })
    }
}

/// Makes the tree of Python, with the package's wheel installed by pip.
fn python(logs: &Path, built: &Path) -> Result<PathBuf> {
    say("installing the Python package for a guest");
    let (log, deadline) = (logs.join("python.log"), Duration::from_secs(10 * 60));
    let tree = logs.join("python");
    let mut command = Command::new("python3");
    command.arg(workspace().join("bindings/python/stage")).arg("tree");
    command.arg(built.join("lib_vmaccel.so")).arg(&tree);
    Step { what: "installing the Python package", log, deadline }.run(&mut command)?;
    Ok(tree)
}

/// What a script fetches that tests of the driver on the processor share: a folder.
fn fetched(script: &str, arguments: &[&str]) -> Result<PathBuf> {
    let script = workspace().join("features/cuda/driver-cpu/tests").join(script);
    let run = || format!("can't run {}", script.display());
    let fetched = Command::new(&script).args(arguments).output().with_context(run)?;
    let said = String::from_utf8_lossy(&fetched.stderr);
    ensure!(fetched.status.success(), "{} failed: {}", script.display(), said.trim());
    Ok(PathBuf::from(String::from_utf8_lossy(&fetched.stdout).trim()))
}

/// Makes the disk with Python and CuPy.
fn cupy(logs: &Path) -> Result<PathBuf> {
    say("making a disk with CuPy for a guest: some 450 MB");
    let (tree, image) = (logs.join("cupy"), logs.join("cupy.img"));
    let mut command = Command::new("python3");
    command.arg(workspace().join("bindings/python/stage")).arg("packages").arg(&tree);
    command.arg(fetched("fetch-python", &["cupy"])?);
    let (log, deadline) = (logs.join("cupy.log"), Duration::from_secs(10 * 60));
    Step { what: "installing CuPy", log, deadline }.run(&mut command)?;
    let mut libraries = BTreeSet::new();
    libraries_below(&tree, &mut libraries)?;
    let place = tree.join("libraries");
    std::fs::create_dir(&place)?;
    for library in libraries.iter().map(Path::new).filter(|library| !library.starts_with(&tree)) {
        let to = place.join(library.file_name().unwrap_or_default());
        std::fs::copy(library, to).with_context(|| format!("can't copy {}", library.display()))?;
    }
    make_disk(&image, &tree, logs.join("mke2fs.log"))?;
    std::fs::remove_dir_all(&tree).with_context(|| format!("can't remove {}", tree.display()))?;
    Ok(image)
}

/// The libraries that programs and libraries below a directory are linked with.
fn libraries_below(directory: &Path, libraries: &mut BTreeSet<String>) -> Result<()> {
    let read = || format!("can't read {}", directory.display());
    for entry in std::fs::read_dir(directory).with_context(read)? {
        let path = entry?.path();
        if path.is_dir() {
            libraries_below(&path, libraries)?;
        } else if directory.ends_with("bin") || path.to_string_lossy().contains(".so") {
            libraries.extend(libraries_of(&path.display().to_string())?);
        }
    }
    Ok(())
}

/// Compiles the CUDA program of scenarios, by NVIDIA's compiler from PyPI. It has PTX, and no machine code.
fn cuda_program(logs: &Path) -> Result<PathBuf> {
    say("compiling a CUDA program");
    let compiler = fetched("fetch-nvcc", &[])?;
    let program = logs.join("cuda-program");
    let mut command = Command::new(compiler.join("bin/nvcc"));
    command.args(["-cudart", "static", "-gencode", "arch=compute_75,code=compute_75", "-L"]);
    command.arg(compiler.join("lib")).arg("-o").arg(&program);
    command.arg(workspace().join("tests/testbed/src/scenarios/linux_cuda.cu"));
    let (log, deadline) = (logs.join("nvcc.log"), Duration::from_secs(10 * 60));
    Step { what: "compiling a CUDA program", log, deadline }.run(&mut command)?;
    Ok(program)
}

/// Builds the bare guest.
fn bare_guest(logs: &Path, target: &Path) -> Result<PathBuf> {
    say("building the bare guest");
    add_target(logs);
    let guests = target.join("guests");
    cargo(logs, "build-guests.log", "building the bare guest", |command| {
        command
            .env_remove("RUSTFLAGS")
            .env_remove("CARGO_ENCODED_RUSTFLAGS")
            .env("CARGO_TARGET_X86_64_UNKNOWN_NONE_RUSTFLAGS", "-C relocation-model=static")
            .args(["--release", "--manifest-path", "tests/testbed/guests/Cargo.toml"])
            .args(["--target", BARE_TARGET, "--target-dir"])
            .arg(&guests)
    })?;
    Ok(guests.join(BARE_TARGET).join("release/bare"))
}

/// How long stripping a program may take.
const STRIP: Duration = Duration::from_secs(60);

/// Installs what compiles for bare guests, where rustup can. Where it can't, the compiler says what is missing.
fn add_target(logs: &Path) {
    let step = Step {
        what: "adding the target of bare guests",
        log: logs.join("add-target.log"),
        deadline: Duration::from_secs(5 * 60),
    };
    if let Err(error) = step.run(Command::new("rustup").args(["target", "add", BARE_TARGET])) {
        say(format!("{error:#}; it may be installed without rustup"));
    }
}

fn cargo(
    logs: &Path,
    log: &str,
    what: &str,
    arguments: impl FnOnce(&mut Command) -> &mut Command,
) -> Result<()> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace()).arg("build");
    // What `cargo run` says of this package: build scripts that read it would run again.
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_CRATE_", "OUT_DIR"].iter().any(|of| name.starts_with(of))
        {
            command.env_remove(&*name);
        }
    }
    arguments(&mut command);
    Step { what, log: logs.join(log), deadline: Duration::from_secs(20 * 60) }.run(&mut command)
}
