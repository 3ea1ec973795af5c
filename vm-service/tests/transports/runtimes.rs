//! Programs of CUDA's runtimes over each transport: before the fake driver with NVIDIA's runtimes of three versions, and as nvcc builds one
//! before the driver of the processor, which computes.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::place::{Place, Way};

/// The folder that a script fetches from NVIDIA's packages, or why there is none.
fn fetched(script: &str) -> Result<PathBuf, String> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        return Err("the packages are for Linux on x86-64".into());
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join(script);
    let fetched = Command::new(&script).output().map_err(|error| error.to_string())?;
    match fetched.status.success() {
        true => Ok(String::from_utf8_lossy(&fetched.stdout).trim().into()),
        false => Err(String::from_utf8_lossy(&fetched.stderr).trim().to_owned()),
    }
}

fn build(command: &mut Command) {
    let built = command.output().expect("the compiler");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
}

#[test]
fn programs_of_the_runtimes_find_the_same_over_each_transport() {
    let runtimes = match fetched("../features/cuda/hook/preload/tests/fetch-cudart") {
        Ok(runtimes) => runtimes,
        Err(reason) => return println!("skipped: no CUDA runtime: {reason}"),
    };
    let place = Place::new();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../features/cuda/bridge/client/tests/runtime.c");
    for version in ["11", "12", "13"] {
        let folder = runtimes.join(version);
        let libraries =
            std::fs::read_dir(&folder).expect("a runtime").map(|file| file.expect("a file").path());
        for library in libraries {
            let mut gcc = Command::new("gcc");
            gcc.args(["-std=gnu11", "-pthread", "-o"]).arg(place.path("runtime")).arg(&source).arg(&library);
            if library.extension().is_some_and(|extension| extension == "a") {
                gcc.args(["-lrt", "-lstdc++"]);
            } else {
                let mut path = OsString::from("-Wl,-rpath,");
                path.push(&folder);
                gcc.arg(path);
            }
            build(gcc.arg("-ldl"));
            let directly = place.run(Way::Driver, "runtime", "");
            assert!(directly.contains("rows: 0 wrong"), "{library:?}: {directly}");
            for way in Way::BRIDGED {
                assert_eq!(place.run(way, "runtime", ""), directly, "{library:?} {way:?}");
            }
        }
    }
}

#[test]
fn a_program_of_nvcc_computes_over_each_transport() {
    let compiler = match fetched("../features/cuda/driver-cpu/tests/fetch-nvcc") {
        Ok(compiler) => compiler,
        Err(reason) => return println!("skipped: no CUDA compiler: {reason}"),
    };
    let driver = std::env::current_exe().expect("the test's path").with_file_name("libvm_cuda_cpu.so");
    let place = Place::before(&driver);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/testbed/src/scenarios/linux_cuda.cu");
    let mut nvcc = Command::new(compiler.join("bin/nvcc"));
    nvcc.args(["-cudart", "static", "-gencode", "arch=compute_75,code=compute_75", "-L"]);
    build(nvcc.arg(compiler.join("lib")).arg("-o").arg(place.path("program")).arg(source));
    for way in Way::BRIDGED {
        for (argument, says) in [
            ("add", "1 sums of 100000 elements are right\nexit status: 0"),
            ("stray", "700, an illegal memory access was encountered\nexit status: 0"),
        ] {
            let said = place.run(way, "program", argument);
            // What the driver says on standard error is the program's, too.
            let lines: Vec<_> = said.lines().filter(|line| !line.starts_with("CUDA on the CPU: ")).collect();
            assert!(lines.join("\n").ends_with(says), "{way:?}: {said}");
        }
    }
}
