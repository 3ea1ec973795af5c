//! `bridge serve --time-slice`: what programs keep the device busy for is charged, once for all of them, and owed by those that come after.

use std::fs::File;
use std::os::unix::fs::{FileExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::process::{Running, beside, until};

/// Places in the server's file: until when what is owed is paid, and all that was ever charged.
const DUE: u64 = 4 * 8;
const CHARGED: u64 = 5 * 8;

/// A server with a slice, and the program.
struct Place {
    server: Running,
    folder: tempfile::TempDir,
}

impl Place {
    fn new(driver: &str, options: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir(path("bridge")).expect("a folder");
        symlink(beside("libvm_bridge_guest.so"), path("bridge/libcuda.so.1")).expect("a link");
        for name in ["slice", "deadline"] {
            let source = format!("../features/cuda/bridge/client/tests/{name}.c");
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(source);
            let mut gcc = Command::new("gcc");
            gcc.args(["-std=gnu11", "-pthread", "-o"]).arg(path(name)).arg(source).arg("-ldl");
            assert!(gcc.status().expect("gcc").success());
        }
        let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
        command.args(["bridge", "serve", "--socket"]).arg(path("socket")).args(options);
        command.arg("--driver").arg(beside(driver)).env("VM_CUDA_CPU_SECONDS", "3600");
        let server = Running(command.stderr(Stdio::null()).spawn().expect("vm-service"));
        until("the server listens", || path("socket").exists());
        Self { server, folder }
    }

    fn command(&self, program: &str, arguments: &[&str]) -> Command {
        let path = |name: &str| self.folder.path().join(name);
        let mut command = Command::new(path(program));
        command.args(arguments).env("LD_LIBRARY_PATH", path("bridge"));
        command.env("VM_BRIDGE", format!("unix:{}", path("socket").display()));
        command
    }

    /// How many pieces of work a program has done, which goes on for a time.
    fn work(&self, case: &str, ms: &str, image: &str) -> u64 {
        let Output { stdout, stderr, status } =
            self.command("slice", &[case, ms, "1000", image]).output().expect("the program");
        let said = String::from_utf8_lossy(&stdout);
        assert!(status.success(), "{case}: {said}{}", String::from_utf8_lossy(&stderr));
        let mut words = said.split_whitespace();
        assert_eq!(words.next(), Some(case), "{said}");
        words.next().and_then(|count| count.parse().ok()).expect("a number")
    }

    /// The server's file, if it has one.
    fn file(&self) -> Option<PathBuf> {
        let files = std::fs::read_dir(format!("/proc/{}/fd", self.server.0.id())).expect("its files");
        let mut paths = files.map(|file| file.expect("a file").path());
        paths.find(|path| {
            std::fs::read_link(path).is_ok_and(|to| to.to_string_lossy().contains("bridge-time"))
        })
    }

    fn word(&self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        let file = File::open(self.file().expect("a file")).expect("opened");
        file.read_exact_at(&mut bytes, at).expect("read");
        u64::from_ne_bytes(bytes)
    }

    /// Milliseconds that were charged.
    fn charged(&self) -> u64 {
        self.word(CHARGED) / 1_000_000
    }
}

fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[test]
fn what_keeps_the_device_busy_is_charged_and_what_waits_is_not() {
    let place = Place::new("libvm_cuda_fake.so", &["--time-slice", "50ms"]);
    let begun = now();
    // Each case, and how many milliseconds a piece keeps the device busy for, in thousandths.
    for (case, piece) in [("long", 30_000), ("longs", 30_000), ("queue", 20), ("graph", 4000), ("own", 5000)]
    {
        let before = place.charged();
        let busy = place.work(case, "300", "fake") * piece / 1000;
        let charged = place.charged() - before;
        // Streams are looked at every few milliseconds. A loaded machine takes longer for the work, which is charged then.
        assert!(charged >= busy / 2, "{case}: {charged} of {busy}");
    }
    for case in ["copy", "back", "empty"] {
        assert!(place.work(case, "100", "fake") > 0);
    }
    let before = place.charged();
    let waits = place.work("waits", "400", "fake");
    let charged = place.charged() - before;
    assert!(charged < waits * 20 / 2, "{charged} of {waits} waits of 20 ms");
    // A kernel that waits for what is held up gets it.
    assert!(place.work("signal", "1", "fake") > 0);
    let passed = (now() - begun) / 1_000_000;
    assert!(place.charged() <= passed, "{} of {passed}", place.charged());
    // Nobody has waited for what is not on the device.
    until("all workers have ended", || place.server.workers().is_empty());
}

#[test]
fn programs_at_once_are_charged_once_and_have_the_slice_together() {
    let place = Place::new("libvm_cuda_cpu.so", &["--time-slice", "50ms", "--deadline", "20s"]);
    let begun = now();
    std::thread::scope(|scope| {
        let place = &place;
        let runs = ["longs", "graph", "own", "short"]
            .map(|case| scope.spawn(move || place.work(case, "300", "ptx")));
        runs.into_iter().for_each(|run| assert!(run.join().expect("a program") > 0));
    });
    let passed = (now() - begun) / 1_000_000;
    let charged = place.charged();
    assert!(charged > 0 && charged <= passed, "{charged} of {passed}");
    until("all workers have ended", || place.server.workers().is_empty());
}

#[test]
fn a_program_that_is_killed_in_debt_owes_when_it_is_started_anew() {
    let place = Place::new("libvm_cuda_fake.so", &["--time-slice", "1ms"]);
    let mut program = Running(
        place
            .command("slice", &["longs", "60000", "1000", "fake"])
            .stdout(Stdio::null())
            .spawn()
            .expect("it"),
    );
    let owed = || place.word(DUE).saturating_sub(now());
    // A kernel takes three seconds to pay. On a slow machine the first of two is charged before the second is launched.
    until("it is in debt", || owed() > 2_000_000_000);
    program.0.kill().expect("killed");
    program.0.wait().expect("ended");
    until("its worker has ended", || place.server.workers().is_empty());
    let (due, charged) = (place.word(DUE), place.word(CHARGED));
    assert!(charged >= 20_000_000);
    // Its first work comes when all but a period's is paid: by this clock, however long it has run.
    assert!(place.work("long", "1", "fake") > 0);
    assert!(now() >= due - 100_000_000, "it did not wait");
    assert!(place.word(CHARGED) > charged && place.word(DUE) > due);
}

#[test]
fn what_waits_for_its_time_ends_with_its_program_and_is_not_late() {
    let longs = |place: &Place, looks: &str| {
        let mut program = place.command("slice", &["longs", "600000", looks, "fake"]);
        Running(program.stdout(Stdio::null()).spawn().expect("it"))
    };
    let place = Place::new("libvm_cuda_fake.so", &["--time-slice", "1ms", "--deadline", "1s"]);
    let mut program = longs(&place, "1000");
    // Kernels take 30 ms each and three seconds to pay. One that comes later has waited for longer than the deadline.
    until("it goes on", || place.charged() > 100);
    assert!(program.0.try_wait().expect("asked").is_none());
    drop((program, place));
    // The worker does not wait for the debt of a program that is gone: a kernel of three seconds takes minutes to pay.
    let place = Place::new("libvm_cuda_fake.so", &["--time-slice", "1ms", "--deadline", "60s"]);
    let mut program = longs(&place, "100000");
    until("it owes more than its deadline", || place.word(DUE).saturating_sub(now()) > 200_000_000_000);
    assert!(program.0.try_wait().expect("asked").is_none());
    program.0.kill().expect("killed");
    until("its worker has ended", || place.server.workers().is_empty());
    assert!(now() < place.word(DUE), "its debt was waited for");
    drop(place);
    // What makes no progress is ended all the same.
    let place = Place::new("libvm_cuda_fake.so", &["--time-slice", "50ms", "--deadline", "1s"]);
    for case in ["free", "hidden", "own"] {
        let output = place.command("deadline", &[case]).output().expect("the program");
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(said, format!("{case}: 702 702 CUDA_ERROR_LAUNCH_TIMEOUT\n"));
    }
    for case in ["honest_waits", "honest_implicit", "honest_capture", "honest_value"] {
        let output = place.command("deadline", &[case, "50"]).output().expect("the program");
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(said, format!("{case}: 0 0 CUDA_SUCCESS\n"));
    }
}

#[test]
fn all_of_the_time_is_no_slice_and_what_is_none_is_refused() {
    let place = Place::new("libvm_cuda_fake.so", &["--time-slice", "100ms"]);
    assert!(place.work("long", "1", "fake") > 0);
    assert_eq!(place.file(), None);
    let check = |slice: &str, says: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
        let output = command.args(["bridge", "serve", "--time-slice", slice]).output().expect("vm-service");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(says), "{slice}: {said}");
    };
    check("20", "does not end in us, ms or s");
    check("999us", "is less than 1ms");
    check("101ms", "is more than 100ms");
}
