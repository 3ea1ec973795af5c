//! Pictures, demos, the live view and the benchmark, as one calls them, before a driver of host memory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

// Keeps the driver's library built.
use vm_cuda_fake as _;

fn beside(name: &str) -> PathBuf {
    std::env::current_exe().expect("the test's path").with_file_name(name)
}

/// A folder with the driver of host memory, of which a device has so many MiB.
fn vmhook(folder: &Path, mib: u64, arguments: &[&str]) -> Output {
    let _ = std::os::unix::fs::symlink(beside("libvm_cuda_fake.so"), folder.join("libcuda.so.1"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_vmhook"));
    command.args(arguments).current_dir(folder).stdin(Stdio::null()).env("LD_LIBRARY_PATH", folder);
    command.env("VM_CUDA_FAKE_MEMORY", (mib << 20).to_string());
    if ["demo", "bench"].contains(&arguments[0]) {
        command.arg("--library").arg(beside("libvmhook.so"));
    }
    command.output().expect("vmhook")
}

/// What it wrote; it has ended with a code.
fn said(output: &Output, code: i32) -> String {
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    said.into_owned()
}

fn contains(text: &str, says: &[&str]) {
    let lacks: Vec<_> = says.iter().filter(|says| !text.contains(**says)).collect();
    assert!(lacks.is_empty(), "{lacks:?} are not in {}", text.chars().take(2000).collect::<String>());
}

#[test]
fn demos_run_and_are_drawn() {
    let folder = tempfile::tempdir().expect("a folder");
    let check = |which: &str, mib: u64, tells: &[&str], shows: &[&str]| {
        let name = format!("{which}.svg");
        let output = vmhook(folder.path(), mib, &["demo", which, "-o", &name, "--pause", "1"]);
        contains(&said(&output, 0), tells);
        let picture = fs::read_to_string(folder.path().join(&name)).expect("a picture");
        contains(&picture, &["both on the same scales", "MONITOR", &format!("{which} with the hook")]);
        contains(&picture, shows);
    };
    check(
        "resize",
        800,
        &["| 256 MiB | 384 MiB | ", "resize.svg"],
        &["moves: 1, 256 MiB", "allocations: 2", "384 MiB"],
    );
    check(
        "fragmentation",
        256,
        &["64 blocks of 2 MiB", "| hook's | 32 | 64 MiB | given, in "],
        &["allocations: 65"],
    );
}

#[test]
fn what_a_demo_lacks_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let check = |mib: u64, arguments: &[&str], says: &str| {
        let said = said(&vmhook(folder.path(), mib, &[&["demo", "resize", "-o"], arguments].concat()), 1);
        assert!(said.contains(says) && said.lines().count() == 1, "{said}");
    };
    check(100, &["a.png"], "95 MiB are free, and the demo needs 640 MiB");
    check(4096, &["a.png", "--most", "100M"], "100 MiB are free");
    check(
        4096,
        &["a.png", "--device", "7"],
        "cuDevicePrimaryCtxRetain fails with CUDA's error 101 (CUDA_ERROR_INVALID_DEVICE)",
    );
    check(4096, &["a.gif"], "a.gif ends neither in .png nor in .svg");
    check(4096, &["no/a.png"], "can't write no/a.png: No such file");
    // A file that is no library is in the driver's place.
    fs::remove_file(folder.path().join("libcuda.so.1")).expect("removed");
    fs::write(folder.path().join("libcuda.so.1"), "").expect("written");
    check(4096, &["a.png"], "no CUDA driver: ");
}

#[test]
fn a_benchmark_measures_both() {
    let folder = tempfile::tempdir().expect("a folder");
    let calls = [
        "cuMemAlloc 512 B",
        "cuMemFree 64 MiB",
        "cuMemcpyDtoD 1 MiB",
        "cuMemGetInfo",
        "cuPointerGetAttribute",
        "cuLaunchKernel",
    ];
    let table = said(&vmhook(folder.path(), 512, &["bench", "--calls", "3"]), 0);
    contains(&table, &calls);
    contains(
        &table,
        &["| empty launches in a second | ", "| once every other block is freed | 100.0 % | 100.0 % |"],
    );
    let json = said(&vmhook(folder.path(), 512, &["bench", "--calls", "3", "--json"]), 0);
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    for of in ["without", "with"] {
        let measured = json[of]["calls"].as_array().expect("calls");
        assert_eq!(measured.len(), 10, "{json}");
        assert!(
            measured.iter().all(|call| call["p50"].as_u64() <= call["p99"].as_u64() && call["p99"] != 0),
            "{json}"
        );
    }
}

/// Lines of a log of a process.
fn log(pid: u32, lines: &[&str]) -> String {
    let line =
        |(at, line): (usize, &&str)| format!("{{\"time\":{}.5,\"pid\":{pid},\"event\":{line}}}\n", 1000 + at);
    lines.iter().enumerate().map(line).collect()
}

const START: &str = r#""start","mode":"VMM","program":"/opt/train<&>""#;
const ALLOCATED: &str = r#""allocated","address":"0x400000","bytes":4194304,"missing":2097152"#;
const FILLED: &str = r#""filled","address":"0x400000","bytes":2097152,"of":"host""#;
const NATIVE: &str = r#""native-allocated","address":"0x7f0000000000","bytes":512"#;
const FAILED: &str = r#""failed","bytes":3221225472,"code":2"#;

#[test]
fn logs_are_drawn_whatever_is_in_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let check = |text: &str, more: &[&str], code: i32, tells: &[&str], shows: &[&str]| {
        fs::write(at("a.log"), text).expect("a log");
        let output = vmhook(folder.path(), 1, &[&["plot", "a.log", "-o", "a.svg"], more].concat());
        contains(&said(&output, code), tells);
        if code == 0 {
            contains(&fs::read_to_string(at("a.svg")).expect("a picture"), shows);
        }
    };
    let endless = vmhook(folder.path(), 1, &["plot", "/dev/zero", "-o", "a.svg"]);
    contains(&said(&endless, 1), &["/dev/zero", "no regular file"]);
    let whole = log(7, &[START, ALLOCATED, FILLED, NATIVE, FAILED]);
    let kinds = [
        "train&lt;&amp;&gt; with",
        "process 7",
        "host memory",
        "the driver&apos;s own",
        "without memory yet",
        "3 GiB",
    ];
    check(&whole, &[], 0, &[], &kinds);
    let paused = log(
        7,
        &[
            START,
            ALLOCATED,
            r#""paused","bytes":2097152,"dropped":0"#,
            NATIVE,
            r#""resumed","bytes":2097152"#,
        ],
    );
    check(&paused, &[], 0, &[], &["paused: 2 MiB given back", "paused: in host memory"]);
    check(&whole[..whole.len() - 9], &[], 0, &[], &["process 7", "4 MiB"]);
    check(&log(7, &[START]), &[], 0, &[], &["nothing was allocated"]);
    let two = log(7, &[START]) + &log(8, &[ALLOCATED]);
    check(&two, &[], 0, &["a.log: this is process 7 (/opt/train<&>); it also has 8"], &["process 7"]);
    check(&two, &["--pid", "8"], 0, &["process 8"], &["process 8"]);
    check(&two, &["--pid", "9"], 1, &["a.log has nothing of process 9: it has 7"], &[]);
    check(&format!("hello\n{whole}"), &[], 0, &["a.log:1: expected value"], &["process 7"]);
    check("hello\n", &[], 1, &["a.log:1: expected value"], &[]);
    check("", &[], 1, &["a.log is no log of the hook"], &[]);
    check(&whole, &["no.log"], 1, &["can't read no.log: No such file"], &[]);
    // Thousands of allocations, and numbers at their limits.
    let mut many: Vec<String> = Vec::new();
    for block in 0..5000u64 {
        many.push(format!(
            r#""allocated","address":"{:#x}","bytes":{},"missing":0"#,
            (block + 1) << 34,
            (block % 9 + 1) << 20
        ));
        many.push(format!(r#""freed","address":"{:#x}","bytes":0"#, (block / 2 + 1) << 34));
        many.push(format!(r#""failed","bytes":{},"code":2"#, u64::MAX));
        many.push(format!(
            r#""moved","from":"{:#x}","to":"{:#x}","bytes":1"#,
            block << 34,
            (block + 1) << 34
        ));
    }
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    check(&log(7, &many), &[], 0, &[], &["allocations: 5000", "failures: 5000", "more"]);
    assert!(fs::metadata(at("a.svg")).expect("a picture").len() < 4 << 20);
}

#[test]
fn a_png_is_one_with_text() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("a.log"), log(7, &[START, ALLOCATED])).expect("a log");
    for (logs, width) in [(&["a.log"][..], 1400), (&["a.log", "a.log"], 2100)] {
        said(&vmhook(folder.path(), 1, &[&["plot", "-o", "a.png"], logs].concat()), 0);
        let decoder = png::Decoder::new(std::io::BufReader::new(
            fs::File::open(folder.path().join("a.png")).expect("a picture"),
        ));
        let mut reader = decoder.read_info().expect("a PNG");
        let mut pixels = vec![0; reader.output_buffer_size().expect("a size")];
        let info = reader.next_frame(&mut pixels).expect("pixels");
        assert_eq!((info.width, info.height), (width, 1000));
        // The title's ink, where nothing but text is.
        let title = (10..50).flat_map(|y| &pixels[y * width as usize * 3..][..600 * 3]);
        assert!(title.filter(|value| **value < 100).count() > 500);
    }
}

#[test]
fn a_log_is_watched_until_its_process_ends() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut process = Command::new("sleep").arg("600").spawn().expect("a process");
    fs::write(folder.path().join("a.log"), log(process.id(), &[START, ALLOCATED, FAILED])).expect("a log");
    let watch = Command::new(env!("CARGO_BIN_EXE_vmhook"))
        .args(["watch", "a.log", "--every", "10"])
        .current_dir(folder.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("vmhook");
    process.kill().expect("killed");
    process.wait().expect("ended");
    let output = watch.wait_with_output().expect("its words");
    let mode =
        ["/opt/train<&>), VMM", "taken        2 MiB", "failures     1", "4 MiB at 0x000000400000, virtual"];
    contains(&said(&output, 0), &mode);
    let check =
        |log: &str, says: &str| contains(&said(&vmhook(folder.path(), 1, &["watch", log]), 1), &[says]);
    check("no.log", "can't read no.log: No such file");
    check("4000000000", "can't tell which log process 4000000000 writes");
}
