//! The program of bare guests.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// What bare guests are compiled for: it uses no vector registers, which not every KVM knows.
const TARGET: &str = "x86_64-unknown-none";

/// The guests' program, built once.
pub(crate) fn program() -> Result<PathBuf, String> {
    static PROGRAM: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    PROGRAM.get_or_init(build).clone()
}

fn build() -> Result<PathBuf, String> {
    let guests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/testbed/guests/Cargo.toml");
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../guests");
    let run = |what: &str, command: &mut Command| {
        let output = command.stdin(Stdio::null()).output().map_err(|error| format!("{what}: {error}"))?;
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned()),
            false => Err(format!("{what}: {}", String::from_utf8_lossy(&output.stderr))),
        }
    };
    let libraries =
        run("rustc", Command::new("rustc").args(["--print", "target-libdir", "--target", TARGET]))?;
    if !Path::new(&libraries).exists() {
        run("rustup", Command::new("rustup").args(["target", "add", TARGET])).map_err(|error| {
            format!("the target {TARGET} can't be installed, run `rustup target add {TARGET}`: {error}")
        })?;
    }
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env("CARGO_TARGET_X86_64_UNKNOWN_NONE_RUSTFLAGS", "-C relocation-model=static")
        .args(["build", "--release", "--target", TARGET, "--manifest-path"])
        .arg(guests)
        .arg("--target-dir")
        .arg(&target);
    // A guest that does not compile is a mistake, not a machine that lacks something.
    run("building the guests", &mut build).unwrap_or_else(|error| panic!("{error}"));
    Ok(target.join(TARGET).join("release/bare"))
}
