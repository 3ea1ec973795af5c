//! LLVM's assembler and linker, by way of the `PATH`.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// Whether both are there.
///
/// # Errors
/// What is missing, and how it is installed.
pub(crate) fn there() -> Result<(), String> {
    static THERE: OnceLock<Result<(), String>> = OnceLock::new();
    let find = || {
        for program in ["llc-22", "ld.lld-22"] {
            let found = Command::new(program).arg("--version").output().is_ok_and(|got| got.status.success());
            found.then_some(()).ok_or(format!("no {program}: install llvm-22 and lld-22"))?;
        }
        Ok(())
    };
    THERE.get_or_init(find).clone()
}

/// Makes an object of LLVM IR.
///
/// # Errors
/// What LLVM says.
pub(crate) fn assemble(ir: &[u8], chip: &str, object: &Path) -> Result<(), String> {
    let mut llc = Command::new("llc-22")
        .arg(format!("-mcpu={chip}"))
        .args(["-O2", "-filetype=obj", "-o"])
        .arg(object)
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| error.to_string())?;
    // What it does not read to the end it says why.
    let _ = llc.stdin.take().map(|mut input| input.write_all(ir));
    let output = llc.wait_with_output().map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(text.lines().take(4).collect::<Vec<_>>().join("\n")) }
}

/// Links an object to what a driver loads.
///
/// # Errors
/// What the linker says.
pub(crate) fn link(object: &Path) -> Result<PathBuf, String> {
    let linked = object.with_extension("hsaco");
    let output = Command::new("ld.lld-22").arg("-shared").arg("-o").arg(&linked).arg(object).output();
    let output = output.map_err(|error| error.to_string())?;
    if output.status.success() { Ok(linked) } else { Err(String::from_utf8_lossy(&output.stderr).into()) }
}
