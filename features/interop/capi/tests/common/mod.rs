//! What the tests share: commands, and the library as it is installed.
#![allow(dead_code)]

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::UNIX_EPOCH;

/// Runs a command that must succeed; gives what it printed.
pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let mut command = Command::new(program);
    run_command(command.args(arguments))
}

/// The same of a command that is more than its arguments.
pub(crate) fn run_command(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}\n{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    text(&output.stdout)
}

/// The library as `link` installs it, once for a run of tests.
pub(crate) fn installed() -> &'static Path {
    static INSTALLED: OnceLock<PathBuf> = OnceLock::new();
    INSTALLED.get_or_init(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..");
        let target = PathBuf::from(env!("OUT_DIR")).join("../../..");
        let mut build = Command::new(env!("CARGO"));
        // With the features that this was compiled with: another set of them compiles all that it stands on once more. `checks` is what others
        // of the workspace want.
        let all = cfg!(feature = "checks");
        let which = if all { ["--workspace", "--all-targets"] } else { ["--package=vm-capi", "--lib"] };
        build.current_dir(&root).args(["build", "--quiet"]).args(which);
        // What cargo says of this package is not said to the build before: build scripts that read it would run again, and what others
        // test meanwhile would be written once more.
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy();
            if ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_CRATE_", "OUT_DIR"]
                .iter()
                .any(|of| name.starts_with(of))
            {
                build.env_remove(&*name);
            }
        }
        if !cfg!(debug_assertions) {
            build.arg("--release");
        }
        let temporary = Path::new(env!("CARGO_TARGET_TMPDIR"));
        // Each test is a process. The first one installs the library for all.
        let lock = File::create(temporary.join("installed.lock")).expect("a file in the target directory");
        lock.lock().expect("a lock");
        run_command(&mut build);
        let modified = |file: &Path| {
            let modified = file.metadata().and_then(|metadata| metadata.modified());
            modified.unwrap_or_else(|error| panic!("{}: {error}", file.display()))
        };
        let script = root.join("features/interop/capi/link");
        let headers = ["vmkernels.h", "vmaccel.h"]
            .map(|name| modified(&root.join("features/interop/capi/include").join(name)));
        let newest = headers
            .into_iter()
            .fold(modified(&target.join("libvmkernels.a")).max(modified(&script)), Ord::max);
        let age = newest.duration_since(UNIX_EPOCH).expect("a time after 1970").as_nanos();
        let prefix = temporary.join(format!("installed-{age}"));
        let whole = prefix.join("whole");
        if !whole.exists() {
            for old in std::fs::read_dir(temporary).into_iter().flatten().flatten() {
                if old.file_name().to_string_lossy().starts_with("installed-") {
                    let _ = std::fs::remove_dir_all(old.path());
                }
            }
            run_command(Command::new(&script).arg(&target).arg(&prefix));
            File::create(&whole).expect("a file in the target directory");
        }
        prefix
    })
}
