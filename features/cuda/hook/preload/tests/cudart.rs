//! Programs of the CUDA runtimes of versions 11 to 13, linked with the shared and the static library: with the hook they find what they find without.
//!
//! The driver is the fake one, in versions of which the oldest has no `cuGetProcAddress`, and NVIDIA's where there is one.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Keeps the driver's library built.
use vm_cuda_fake as _;

fn beside(name: &str) -> PathBuf {
    std::env::current_exe().expect("the test's path").with_file_name(name)
}

/// The folder of the runtimes, or why there is none.
fn runtimes() -> Result<PathBuf, String> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        return Err("the runtimes are for Linux on x86-64".into());
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fetch-cudart");
    let fetched = Command::new(&script).output().map_err(|error| error.to_string())?;
    match fetched.status.success() {
        true => Ok(String::from_utf8_lossy(&fetched.stdout).trim().into()),
        false => {
            let said = String::from_utf8_lossy(&fetched.stderr);
            Err(said.trim().lines().last().unwrap_or("tests/fetch-cudart failed").to_owned())
        }
    }
}

/// The runtime's libraries in a folder: each with what it is linked with.
fn libraries(folder: &Path) -> Vec<(PathBuf, Vec<String>)> {
    let files = std::fs::read_dir(folder).expect("a runtime").map(|file| file.expect("a file").path());
    let mut files: Vec<PathBuf> = files.collect();
    files.sort();
    let linked = |file: PathBuf| {
        let arguments = match file.extension().is_some_and(|extension| extension == "a") {
            true => ["-ldl", "-lrt", "-lpthread", "-lstdc++"].map(str::to_owned).to_vec(),
            false => vec![format!("-Wl,-rpath,{}", folder.display())],
        };
        (file, arguments)
    };
    files.into_iter().map(linked).collect()
}

#[test]
fn runtimes_find_the_same() {
    let runtimes = match runtimes() {
        Ok(runtimes) => runtimes,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let folder = tempfile::tempdir().expect("a directory");
    let driver = folder.path().join("driver");
    std::fs::create_dir(&driver).expect("a directory");
    std::os::unix::fs::symlink(beside("libvm_cuda_fake.so"), driver.join("libcuda.so.1")).expect("a link");
    let program = folder.path().join("cudart");
    let log = folder.path().join("log");
    let run = |what: &str, environment: &[(&str, &str)], hook: bool| {
        let _ = std::fs::remove_file(&log);
        let mut command = Command::new(&program);
        command.envs(environment.iter().copied()).env("XDG_RUNTIME_DIR", folder.path());
        command.env("VMM_LOG_LEVEL", "INFO").env("VMM_LOG_FILE", &log);
        if hook {
            command.env("LD_PRELOAD", beside("libvmhook.so"));
        }
        let output = command.output().expect("the program");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let wrong = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{what}, hook {hook}: {}\n{said}{wrong}", output.status);
        (said, std::fs::read_to_string(&log).unwrap_or_default())
    };
    let check = |what: &str, environment: &[(&str, &str)], must_start: bool| {
        let (without, _) = run(what, environment, false);
        if without.contains("no devices") && !must_start {
            return false;
        }
        let ends = ["after a reset: 1\n", "no functions of the driver\n"];
        assert!(ends.iter().any(|end| without.ends_with(end)), "{what}: {without}");
        // A copy is put off for 1 ms at most: on a busy machine it may be made before the memory can be moved.
        let moves = (0..100).any(|_| {
            let (with, log) = run(what, environment, true);
            assert_eq!(with, without, "{what}\n{log}");
            let has = |event: &str| log.contains(&format!("\"{event}\""));
            assert!(has("pool") && has("array") && !has("unknown"), "{what}: {with}{log}");
            has("moved")
        });
        assert!(moves, "{what}: no memory is ever moved");
        true
    };
    let mut is_real = false;
    for major in ["11", "12", "13"] {
        let libraries = libraries(&runtimes.join(major));
        if libraries.len() < 2 {
            println!("skipped: NVIDIA's package of version {major} has no libcudart_static.a");
        }
        for (library, arguments) in libraries {
            let mut command = Command::new("gcc");
            command.args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-o"]).arg(&program);
            command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cudart.c"));
            assert!(command.arg(&library).args(arguments).status().expect("gcc").success(), "{library:?}");
            for version in ["11020", "11080", "12020", "13000"] {
                let what = format!("{}, fake driver {version}", library.display());
                let path = driver.to_str().expect("a path");
                let fake = [("LD_LIBRARY_PATH", path), ("VM_CUDA_FAKE_VERSION", version)];
                // A runtime takes the drivers of its own major version, and newer ones.
                let starts = check(&what, &fake, &version[..2] >= major);
                assert_eq!(starts, &version[..2] >= major, "{what}");
            }
            is_real |= check(&format!("{}, NVIDIA's driver", library.display()), &[], false);
        }
    }
    if !is_real {
        println!("skipped: there is no driver of NVIDIA's; the fake one was there");
    }
}
