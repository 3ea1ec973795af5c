//! The driver's linker: what runs in the process that [`Assembler::driver`](super::Assembler::driver) starts.

use std::ffi::OsString;
use std::fs;
use std::process::ExitCode;

use crate::result;
use crate::sys::driver;

/// What a program does that [`Assembler::driver`](super::Assembler::driver) starts: call this with the arguments that
/// come behind those given there, and end with what it returns.
///
/// ```no_run
/// # fn main() -> std::process::ExitCode {
/// let mut arguments = std::env::args_os().skip(1);
/// if arguments.next().is_some_and(|first| first == "assemble-ptx") {
///     return vm_cuda::assemble::entry(arguments);
/// }
/// # std::process::ExitCode::SUCCESS
/// # }
/// ```
pub fn entry(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    match assemble(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("{reason}");
            ExitCode::FAILURE
        }
    }
}

fn assemble(arguments: &[OsString]) -> Result<(), String> {
    let [architecture, level, input, output] = arguments else {
        return Err(
            "four arguments are wanted: architecture, level of optimisation, a file of PTX, a file to write"
                .into(),
        );
    };
    let architecture = architecture.to_string_lossy();
    let number =
        architecture.trim_start_matches("sm_").trim_end_matches(|letter: char| !letter.is_ascii_digit());
    let level = level.to_str().and_then(|level| level.parse().ok()).ok_or("the level is no number")?;
    let named = |path: &OsString, error: std::io::Error| format!("{}: {error}", path.display());
    let ptx = fs::read(input).map_err(|error| named(input, error))?;
    let cubin = driver()
        .and_then(|driver| result::link(driver, number, &ptx, level))
        .map_err(|error| error.to_string())?;
    fs::write(output, cubin).map_err(|error| named(output, error))
}
