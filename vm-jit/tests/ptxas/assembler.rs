//! NVIDIA's `ptxas`, of the CUDA releases that `tests/fetch-ptxas` fetches.

use super::sweep::{part, seed, taken};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use vm_ir::ValidModule;
use vm_jit::{Target, compile};

/// What is assembled for, and by which release: 13.0 no longer knows sm_70.
pub(crate) const TARGETS: [(&str, &str); 8] = [
    ("sm_70", "12.9"),
    ("sm_75", "13.0"),
    ("sm_80", "13.0"),
    ("sm_86", "13.0"),
    ("sm_89", "13.0"),
    ("sm_90a", "13.0"),
    ("sm_100", "13.0"),
    ("sm_120", "13.0"),
];

/// Where the assemblers are, or why there are none.
fn folder() -> Result<&'static Path, String> {
    static FOLDER: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let found = FOLDER.get_or_init(|| {
        let folder = match std::env::var_os("VM_JIT_PTXAS") {
            Some(folder) => PathBuf::from(folder),
            None => {
                let home = std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
                let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or(home);
                cache.ok_or("neither HOME nor VM_JIT_PTXAS is set")?.join("vm-jit/ptxas")
            }
        };
        // Tests of other crates have this file too.
        let folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
        let mut scripts = folders.map(|folder| folder.join("vm-jit/tests/fetch-ptxas"));
        let script = scripts.find(|script| script.exists()).ok_or("there is no vm-jit/tests/fetch-ptxas")?;
        match Command::new("sh").arg(script).arg(&folder).output() {
            Ok(output) if output.status.success() => Ok(folder),
            Ok(output) => {
                let reason = String::from_utf8_lossy(&output.stderr);
                Err(reason.trim().lines().last().unwrap_or("tests/fetch-ptxas failed").to_owned())
            }
            Err(error) => Err(format!("sh: {error}")),
        }
    });
    found.as_deref().map_err(Clone::clone)
}

/// Runs `work` if there are assemblers, else says why not.
pub(crate) fn with_ptxas(work: impl FnOnce(&Path)) {
    match folder() {
        Ok(folder) => work(folder),
        Err(reason) => println!("skipped: no ptxas: {reason}"),
    }
}

/// Compiles and assembles. What the assembler said, or the errors.
///
/// A spill and anything that the assembler warns of are errors too.
pub(crate) fn assemble(
    folder: &Path,
    module: &ValidModule,
    arch: &str,
    release: &str,
    level: &str,
) -> Result<String, String> {
    let target: Target = format!("ptx:{arch}").parse().unwrap();
    let artifact = compile(module, &target).map_err(|rejected| format!("{arch}: {rejected}"))?;
    let work = tempfile::tempdir().unwrap();
    let (ptx, cubin) = (work.path().join("a.ptx"), work.path().join("a.cubin"));
    std::fs::write(&ptx, &artifact.code).unwrap();
    let output = Command::new(folder.join(release).join("ptxas"))
        .args(["--verbose", "--opt-level", level, "--gpu-name", arch, "--output-file"])
        .arg(&cubin)
        .arg(&ptx)
        .output()
        .map_err(|error| format!("ptxas {release}: {error}"))?;
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    // C75..: products that are made to wait for each other.
    let bad = |line: &&str| ["error", "warning", "(C75"].iter().any(|word| line.contains(word));
    let mut wrong: Vec<&str> = said.lines().filter(bad).collect();
    let spills = |line: &&str| {
        line.contains("spill stores") && !line.contains("0 bytes spill stores, 0 bytes spill loads")
    };
    wrong.extend(said.lines().filter(spills));
    if output.status.success() && wrong.is_empty() {
        return Ok(said);
    }
    wrong.truncate(20);
    let text = artifact.text().unwrap_or_default();
    let lines: Vec<String> = wrong
        .iter()
        .map(|line| {
            let number = line
                .split("line ")
                .nth(1)
                .and_then(|n| n.split(';').next())
                .and_then(|n| n.parse::<usize>().ok());
            let source = number.and_then(|n| text.lines().nth(n - 1)).unwrap_or("");
            format!("{line}\n    {}", source.trim())
        })
        .collect();
    let names: Vec<_> = module.kernels().iter().map(|kernel| kernel.name()).take(3).collect();
    Err(format!("{arch}: {}:\n{}", names.join(", "), if lines.is_empty() { said } else { lines.join("\n") }))
}

/// Assembles modules for architectures by releases at an optimisation level, several at a time: all, or with a seed for sweeps one of
/// those whose first kernels have one name, and of many names half.
pub(crate) fn assemble_for_all(folder: &Path, level: &str, modules: &[(&str, &str, &ValidModule)]) {
    let mut by_name = BTreeMap::<_, Vec<_>>::new();
    for module in modules {
        by_name.entry(module.2.kernels()[0].name()).or_default().push(module);
    }
    let is_half = seed().is_some() && by_name.len() > 8;
    by_name.retain(|name, _| !is_half || part(&format!("whether {name}"), 2));
    let modules: Vec<_> = by_name.into_iter().flat_map(|(name, alike)| taken(name, alike)).collect();
    let next = std::sync::atomic::AtomicUsize::new(0);
    let failures = std::sync::Mutex::new(Vec::new());
    let workers = std::thread::available_parallelism().map_or(2, |n| n.get());
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some((arch, release, module)) =
                    modules.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
                {
                    if let Err(error) = assemble(folder, module, arch, release, level) {
                        failures.lock().unwrap().push(error);
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
