//! A program of CUDA's static runtime, as nvcc builds it: runs before the driver as it is, and what its kernels compute is right.

mod common;

use common::{driver, fetch, file};
use std::process::Command;

#[test]
fn a_program_with_the_static_runtime_computes() {
    let compiler = match fetch("tests/fetch-nvcc", &[]) {
        Ok(compiler) => compiler,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let folder = driver();
    for virtual_architecture in ["75", "90"] {
        let program = folder.path().join("program");
        let mut nvcc = Command::new(compiler.join("bin/nvcc"));
        nvcc.args(["-cudart", "static", "-gencode"]);
        nvcc.arg(format!("arch=compute_{virtual_architecture},code=compute_{virtual_architecture}"));
        nvcc.arg("-L").arg(compiler.join("lib")).arg("-I").arg(file("../ptx/tests/kernels"));
        nvcc.arg("-o").arg(&program).arg(file("tests/programs.cu"));
        let built = nvcc.output().expect("nvcc");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        let output =
            Command::new(&program).env("LD_LIBRARY_PATH", folder.path()).output().expect("the program");
        let (said, wrong) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && said.ends_with("\n0 wrong\n"), "{said}{wrong}{}", output.status);
        let failed = ": void asserts(int): block: [0,0,0], thread: [0,0,0] Assertion `n < 4` failed.\n";
        assert!(wrong.contains(failed), "{wrong}");
    }
}
