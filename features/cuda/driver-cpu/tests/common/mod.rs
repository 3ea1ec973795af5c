//! What the tests of whole programs take: files from PyPI, and the driver as programs find it.
#![allow(dead_code)]

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// Keeps the driver's library built.
use vm_cuda_cpu as _;

/// A file of this crate.
pub(crate) fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// What a script of the tests fetches: the folder, or why there is none.
pub(crate) fn fetch(script: &str, arguments: &[&str]) -> Result<PathBuf, String> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        return Err("the packages are for Linux on x86-64".into());
    }
    let fetched =
        Command::new(file(script)).args(arguments).output().map_err(|error| format!("{script}: {error}"))?;
    match fetched.status.success() {
        true => Ok(String::from_utf8_lossy(&fetched.stdout).trim().into()),
        false => {
            let said = String::from_utf8_lossy(&fetched.stderr);
            Err(said.trim().lines().last().unwrap_or(&format!("{script} failed")).to_owned())
        }
    }
}

/// A folder in which the driver is `libcuda.so.1`.
pub(crate) fn driver() -> TempDir {
    let folder = tempfile::tempdir().expect("a directory");
    let library = std::env::current_exe().expect("the test's path").with_file_name("libvm_cuda_cpu.so");
    symlink(library, folder.path().join("libcuda.so.1")).expect("a link");
    folder
}

/// Runs a script with a set of Python's packages on the driver: what it says, or `None` where the packages can't be had. The script is to
/// succeed; it ends itself when it hangs.
#[track_caller]
pub(crate) fn python(set: &str, script: &str) -> Option<String> {
    let packages = match fetch("tests/fetch-python", &[set]) {
        Ok(packages) => packages,
        Err(reason) => {
            println!("skipped: {reason}");
            return None;
        }
    };
    let folder = driver();
    let mut python = Command::new("python3");
    python.arg("-c").arg(RUN).arg(file(script));
    // CUDA's own libraries are looked for among the linker's, as these packages are no installed ones.
    let libraries = [folder.path().to_owned(), packages.join("nvidia/cu13/lib")];
    python.env("LD_LIBRARY_PATH", std::env::join_paths(libraries).expect("paths without colons"));
    python.env("PYTHONPATH", &packages).env("PYTHONWARNINGS", "ignore").env("PYTHONDONTWRITEBYTECODE", "1");
    python.env("CUDA_PATH", packages.join("nvidia/cu13")).env("CUDA_HOME", packages.join("nvidia/cu13"));
    python.env("CUPY_COMPILE_WITH_PTX", "1").env("CUPY_CACHE_DIR", folder.path().join("cupy"));
    python.env("NUMBA_CACHE_DIR", folder.path().join("numba")).env_remove("CUPY_ACCELERATORS");
    let output = python.output().expect("python3");
    let (said, wrong) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{script}: {}\n{said}{wrong}", output.status);
    Some(said.into_owned())
}

/// Runs a script, for ten minutes at most, with what its packages have Python do when it starts.
const RUN: &str = "import faulthandler, os, runpy, site, sys\n\
                        faulthandler.dump_traceback_later(600, exit=True)\n\
                        site.addsitedir(os.environ['PYTHONPATH'])\n\
                        sys.argv.pop(0)\n\
                        runpy.run_path(sys.argv[0], run_name='__main__')";
