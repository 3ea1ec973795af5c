//! A program of CUDA's static runtime, as nvcc builds it: runs before the driver as it is, and what its kernels compute is right.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Keeps the driver's library built.
use vm_cuda_cpu as _;

/// The folder of CUDA's compiler, or why there is none.
fn compiler() -> Result<PathBuf, String> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        return Err("the compiler's packages are for Linux on x86-64".into());
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fetch-nvcc");
    let fetched = Command::new(&script).output().map_err(|error| error.to_string())?;
    match fetched.status.success() {
        true => Ok(String::from_utf8_lossy(&fetched.stdout).trim().into()),
        false => {
            let said = String::from_utf8_lossy(&fetched.stderr);
            Err(said.trim().lines().last().unwrap_or("tests/fetch-nvcc failed").to_owned())
        }
    }
}

#[test]
fn a_program_with_the_static_runtime_computes() {
    let compiler = match compiler() {
        Ok(compiler) => compiler,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let folder = tempfile::tempdir().expect("a directory");
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let library = std::env::current_exe().expect("the test's path").with_file_name("libvm_cuda_cpu.so");
    symlink(library, folder.path().join("libcuda.so.1")).expect("a link");
    for virtual_architecture in ["75", "90"] {
        let program = folder.path().join("program");
        let mut nvcc = Command::new(compiler.join("bin/nvcc"));
        nvcc.args(["-cudart", "static", "-gencode"]);
        nvcc.arg(format!("arch=compute_{virtual_architecture},code=compute_{virtual_architecture}"));
        nvcc.arg("-L").arg(compiler.join("lib")).arg("-I").arg(own.join("../ptx/tests/kernels"));
        nvcc.arg("-o").arg(&program).arg(own.join("tests/programs.cu"));
        let built = nvcc.output().expect("nvcc");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        let output =
            Command::new(&program).env("LD_LIBRARY_PATH", folder.path()).output().expect("the program");
        let (said, wrong) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && said.ends_with("\n0 wrong\n"), "{said}{wrong}{}", output.status);
    }
}
