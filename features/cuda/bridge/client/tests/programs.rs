//! Programs through the bridge, before the fake driver behind a server: they find what they find before it directly.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use vm_bridge::recording::{Recording, Report};

// cargo builds both libraries. Neither is linked here: they have the same names.

/// A folder with the driver, the bridge, the programs and a server.
struct Place {
    folder: tempfile::TempDir,
    server: Child,
}

fn beside(name: &str) -> PathBuf {
    std::env::current_exe().expect("the test's path").with_file_name(name)
}

fn driver() -> PathBuf {
    beside("libvm_cuda_fake.so")
}

/// What the fake driver has, on both ways.
const DEVICES: [(&str, &str); 2] = [("VM_CUDA_FAKE_MEMORY", "4294967296"), ("VM_CUDA_FAKE_DEVICES", "2")];

impl Place {
    fn new(program: &str) -> Self {
        Self::linked(program, &[])
    }

    fn linked(program: &str, arguments: &[OsString]) -> Self {
        Self::with(program, arguments, &[])
    }

    /// With variables of the server's.
    fn with(program: &str, arguments: &[OsString], variables: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        for (name, library) in [("driver", driver()), ("bridge", beside("libvm_bridge_guest.so"))] {
            std::fs::create_dir(path(name)).expect("a folder");
            std::os::unix::fs::symlink(library, path(name).join("libcuda.so.1")).expect("a link");
        }
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(program);
        let mut gcc = Command::new("gcc");
        gcc.args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-pthread", "-o"]).arg(path("program"));
        assert!(gcc.arg(source).args(arguments).arg("-ldl").status().expect("gcc").success());
        let serve = beside("serve").parent().and_then(Path::parent).expect("a folder").join("examples/serve");
        let mut command = Command::new(serve);
        command.arg(path("socket")).arg(driver()).envs(DEVICES).stdout(Stdio::piped());
        command.envs(variables.iter().copied());
        let mut server = command.spawn().expect("the server");
        let mut line = String::new();
        let mut output = BufReader::new(server.stdout.take().expect("its output"));
        output.read_line(&mut line).expect("a line");
        assert_eq!(line, "ready\n");
        Self { folder, server }
    }

    fn command(&self, way: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.folder.path().join("program"));
        let socket = format!("unix:{}", self.folder.path().join("socket").display());
        command.args(arguments).env("LD_LIBRARY_PATH", self.folder.path().join(way)).envs(DEVICES);
        command.env("VM_BRIDGE", socket);
        command
    }

    /// What a program says, which ends well or not.
    fn run(&self, way: &str, arguments: &[&str], environment: &[(&str, &str)]) -> String {
        let output =
            self.command(way, arguments).envs(environment.iter().copied()).output().expect("the program");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let wrong = String::from_utf8_lossy(&output.stderr);
        format!("{text}{wrong}{}", output.status)
    }

    fn endless(&self) -> (Child, BufReader<std::process::ChildStdout>) {
        let mut child =
            self.command("bridge", &["endless"]).stdout(Stdio::piped()).spawn().expect("the program");
        let mut output = BufReader::new(child.stdout.take().expect("its output"));
        let mut line = String::new();
        output.read_line(&mut line).expect("a line");
        assert_eq!(line, "works\n");
        (child, output)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.server.kill().expect("killed");
        self.server.wait().expect("ended");
    }
}

/// A program says the same directly, by memory and by the stream, and what it should.
fn check(program: &str, arguments: &[&str], says: &str) {
    check_in(&Place::new(program), program, arguments, says);
}

fn check_in(place: &Place, program: &str, arguments: &[&str], says: &str) {
    let directly = place.run("driver", arguments, &[]);
    assert!(directly.contains(says), "{program} {arguments:?}: {directly}");
    for environment in [&[][..], &[("VM_BRIDGE_STREAM", "1")]] {
        assert_eq!(
            place.run("bridge", arguments, environment),
            directly,
            "{program} {arguments:?} {environment:?}"
        );
    }
}

/// The folder of NVIDIA's runtimes, or why there is none.
fn runtimes() -> Result<PathBuf, String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../hook/preload/tests/fetch-cudart");
    let fetched = Command::new(&script).output().map_err(|error| format!("{}: {error}", script.display()))?;
    match fetched.status.success() {
        true => Ok(String::from_utf8_lossy(&fetched.stdout).trim().into()),
        false => Err(String::from_utf8_lossy(&fetched.stderr).trim().to_owned()),
    }
}

#[test]
fn programs_of_the_runtimes_find_the_same() {
    let runtimes = match runtimes() {
        Ok(runtimes) => runtimes,
        Err(reason) => return println!("skipped: no CUDA runtime: {reason}"),
    };
    for version in ["11", "12", "13"] {
        let folder = runtimes.join(version);
        for library in std::fs::read_dir(&folder).expect("a runtime").map(|file| file.expect("a file").path())
        {
            let mut arguments = vec![library.clone().into_os_string()];
            if library.extension().is_some_and(|extension| extension == "a") {
                arguments.extend(["-lrt", "-lpthread", "-lstdc++"].map(OsString::from));
            } else {
                arguments.push(format!("-Wl,-rpath,{}", folder.display()).into());
            }
            let place = Place::linked("tests/runtime.c", &arguments);
            check_in(&place, &library.display().to_string(), &[], "rows: 0 wrong");
        }
    }
}

#[test]
fn programs_find_the_same() {
    check("tests/add.c", &[], "wrong: 0, time: 1");
    check("tests/ways.c", &["strided"], "two: 0 wrong, 0 outside");
    check("tests/ways.c", &["odd"], "odd: 0 wrong");
    check("tests/ways.c", &["callbacks"], "called: 12344");
    check("tests/ways.c", &["registered"], "kind 1, flags 1, copied 3000");
    check("tests/managed.c", &[], "hints: 1 0 0 -1 0 -2\nseveral: 1, -1 -2 -2\n");
    check("tests/ways.c", &["files"], "2: 0 0 1 0 1 of another, xxx, end, 712 0 713");
    check(
        "tests/ways.c",
        &["handles"],
        "child: 7, a socket: 1, none: 1\nparent: 8\nthen: 8\nended: 0, of the host: 1",
    );
    check("tests/ways.c", &["forks"], "child: 3, 3\nparent: 5");
    check("tests/ways.c", &["faults"], "fault: 700 700");
    check("tests/ways.c", &["tables"], "topology: 0, the first two: 0 0, 1 0\ngiven back: 0\nfunctions: 1 1");
}

#[test]
fn graphs_that_are_made_by_hand_are_the_same() {
    let place = Place::new("tests/graphs.c");
    check_in(&place, "tests/graphs.c", &["graphs"], "made: sum 4416, first 3, last 66, z 77");
    check_in(&place, "tests/graphs.c", &["hostmem"], "large: 0 wrong");
    check_in(&place, "tests/graphs.c", &["conditional"], "kind 2, condition 2: type 13, 0 0 102");
    check_in(&place, "tests/graphs.c", &["moved"], "recorded: 0\nprinted: 0\nmoved: 1, refused 3, z 20 5\n");
    check_in(&place, "tests/graphs.c", &["allocs"], "attributes: 1 1, refused: 1");
    let gone = place.run("bridge", &["gone"], &[]);
    assert_eq!(gone, "there: 0\nthere: 0\ngone: 700\nexit status: 0");
}

#[test]
fn what_kernels_print_is_the_programs() {
    check("tests/graphs.c", &["prints"], "behind\nsaid 5\ncalled with 6\nsaid 0\n");
    check("tests/graphs.c", &["prints"], "said 2999\nmany\nasserted: 710\nstore.c:7: fail: ");
}

#[test]
fn copies_of_arrays_logs_and_peers_are_the_same() {
    check("tests/graphs.c", &["copies"], "private: 0, last 98295");
    check("tests/graphs.c", &["copies"], "layers: 0 48 192, ");
    check("tests/graphs.c", &["mapped"], "mapped: 1, 0 77, 154 126");
    check("tests/graphs.c", &["logs"], "not linked: 1");
    check("tests/graphs.c", &["peers"], "reaches: 1 1, copied: 6, back: 8 6");
    check("tests/graphs.c", &["occupancy"], "100: ");
}

#[test]
fn what_one_thread_does_is_before_what_another_does_then() {
    check(
        "tests/ways.c",
        &["threads"],
        "failed in an ended thread: 1, and then: 0\nat its end: 77\nin turn: 1600",
    );
}

#[test]
fn what_no_program_means_is_an_error_of_that_call() {
    let place = Place::new("tests/ways.c");
    for environment in [&[][..], &[("VM_BRIDGE_STREAM", "1")]] {
        let said = place.run("bridge", &["nothing"], environment);
        let lines = "nothing: 1 1 1 1, options: 0 1, operations: 1\n\
                     named: 0 CUDA_ERROR_ILLEGAL_ADDRESS, version: 0, then: 1\n\
                     still there: 0\n";
        assert!(said.starts_with(lines), "{environment:?}: {said}");
    }
}

#[test]
fn what_ends_with_its_module_library_or_context_is_known_no_more() {
    check("tests/ways.c", &["modules"], "modules: 0 wrong");
}

#[test]
fn corrupt_images_are_errors_of_their_calls() {
    check("tests/ways.c", &["images"], "images: 0 others, machine code: 1\nnull: 1\nthen: 0\n");
}

#[test]
fn a_copys_ranges_are_checked_before_memory_is_touched() {
    let place = Place::new("tests/ways.c");
    for environment in [&[][..], &[("VM_BRIDGE_STREAM", "1")]] {
        let found = place.run("bridge", &["ranges"], environment);
        assert_eq!(found, format!("null: 0 others\n{}then: 0\nexit status: 0", "1 1 1 1 1\n".repeat(3)));
    }
}

#[test]
fn programs_of_the_hook_find_the_same() {
    check("../../hook/preload/tests/grow.c", &["dlsym"], "left: 1");
    check("../../hook/preload/tests/grow.c", &["proc"], "left: 1");
    check("../../hook/preload/tests/traps.c", &[], "replayed: 0 0 22 22");
}

#[test]
fn a_program_that_faults_or_is_killed_is_no_other_programs_matter() {
    let place = Place::new("tests/ways.c");
    let (mut other, _output) = place.endless();
    let (mut killed, _killed_output) = place.endless();
    assert!(place.run("bridge", &["faults"], &[]).contains("fault: 700 700"));
    killed.kill().expect("killed");
    killed.wait().expect("ended");
    assert!(place.run("bridge", &["threads"], &[]).contains("in turn: 1600"));
    assert!(other.try_wait().expect("asked").is_none(), "it works on");
    other.kill().expect("killed");
    other.wait().expect("ended");
}

/// Attributes of devices whose functions do not cross, each with those: it says no whatever the driver says. What of these is supported one day is to be
/// said of the device, too.
const ABSENT: [(u32, &[&str]); 27] = [
    // Access to pageable memory, and managed memory in batches.
    (88, &["cuMemPrefetchBatchAsync", "cuMemDiscardAndPrefetchBatchAsync"]),
    (100, &[]),
    (101, &[]),
    // Memory that the program registers: it is copied.
    (91, &[]),
    (99, &[]),
    (113, &[]),
    (96, &["cuLaunchCooperativeKernelMultiDevice"]),
    // Handles for others than programs of the bridge.
    (
        119,
        &["cuMemPoolExportToShareableHandle", "cuMemPoolImportFromShareableHandle", "cuMemPoolExportPointer"],
    ),
    (124, &["cuMemGetHandleForAddressRange"]),
    (128, &[]),
    (146, &[]),
    (110, &[]),
    (116, &[]),
    // Arrays that are mapped in parts.
    (112, &["cuMemMapArrayAsync"]),
    (121, &[]),
    (114, &["cuImportExternalSemaphore", "cuImportExternalMemory"]),
    (129, &["cuLibraryGetUnifiedFunction"]),
    (132, &["cuMulticastCreate", "cuMulticastAddDevice", "cuMulticastBindMem"]),
    // Graphics.
    (135, &["cuGraphicsMapResources"]),
    (138, &[]),
    (136, &["cuMemBatchDecompressAsync"]),
    (137, &[]),
    // Physical memory and pools of the host.
    (141, &[]),
    (142, &[]),
    (143, &[]),
    (144, &[]),
    (145, &[]),
];

#[test]
fn devices_say_what_their_functions_do() {
    let variables = [("VM_CUDA_FAKE_ATTRIBUTES", "7"), ("VM_CUDA_FAKE_DEVICES", "3")];
    let place = Place::with("tests/attributes.c", &[], &variables);
    let attributes =
        |way: &str| -> Vec<String> { place.run(way, &[], &variables).lines().map(str::to_owned).collect() };
    let natively = attributes("driver");
    assert_eq!(natively.len(), 3 * 160 + 5 + 2, "{natively:?}");
    assert!(natively.contains(&"reached: 1, behind it: 1, freed: 1".to_owned()), "{natively:?}");
    let expected = natively.iter().map(|line| match line.split(' ').collect::<Vec<_>>()[..] {
        [device, attribute, value] if !line.starts_with("exit") => {
            let absent = ABSENT.iter().any(|(absent, _)| absent.to_string() == attribute);
            assert_ne!(value, "0", "the driver says something of attribute {attribute}");
            format!("{device} {attribute} {}", if absent { "0" } else { value })
        }
        _ => line.clone(),
    });
    let expected: Vec<_> = expected.collect();
    assert_eq!(attributes("bridge"), expected);
    let counts = tempfile::NamedTempFile::new().expect("a file");
    place.run("bridge", &[], &[("VM_BRIDGE_COUNTS", counts.path().to_str().expect("a name"))]);
    let counted = std::fs::read_to_string(counts.path()).expect("counts");
    let asked = counted.lines().find_map(|line| line.strip_suffix(" cuPointerGetAttributes"));
    let asked: u32 = asked.and_then(|line| line.split(' ').next()?.parse().ok()).expect("a count");
    assert!(asked < 100, "the server was asked for {asked} attributes");
    assert_eq!(
        expected.iter().filter(|line| line.starts_with("managed: ") && line.ends_with(" 0")).count(),
        5
    );
    let functions: Vec<_> = ABSENT.iter().flat_map(|(_, functions)| *functions).copied().collect();
    let says: String = functions.iter().map(|name| format!("{name}: 801\n")).collect();
    let said = place.run("bridge", &functions, &[]);
    assert!(said.starts_with(&says) && said.ends_with("exit status: 0"), "{said}");
}

/// A program that is spoken to line by line.
struct Spoken {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Spoken {
    fn new(place: &Place, way: &str, arguments: &[&str]) -> Self {
        let mut command = place.command(way, arguments);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the program");
        let output = BufReader::new(child.stdout.take().expect("its output"));
        Self { child, output }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a line");
        line.trim_end().to_owned()
    }

    fn ask(&mut self, line: &str) -> String {
        self.tell(line);
        self.line()
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().expect("its input"), "{line}").expect("said");
    }

    /// Ends its input; what it still says.
    fn end(mut self) -> String {
        drop(self.child.stdin.take());
        let mut said = String::new();
        self.output.read_to_string(&mut said).expect("what it says");
        assert!(self.child.wait().expect("ended").success(), "{said}");
        said
    }
}

/// One that gives, and its handles.
fn giver(place: &Place, way: &str) -> (Spoken, [String; 2]) {
    let mut giver = Spoken::new(place, way, &["give"]);
    let handles = [giver.line(), giver.line()];
    assert_eq!(giver.line(), "wrong: 1 1");
    (giver, handles)
}

#[test]
fn programs_of_one_server_share_memory_and_events() {
    let place = Place::new("tests/share.c");
    // What is found directly is found through the bridge.
    for way in ["driver", "bridge"] {
        let (mut one, [memory, event]) = giver(&place, way);
        let mut two = Spoken::new(&place, way, &["take", &memory, &event]);
        assert_eq!([two.line(), two.line()], ["opened: 1 1234 1234", "written"], "{way}");
        assert_eq!(one.ask(""), "found: 4321", "{way}");
        assert_eq!(two.ask(""), "still: 4321 77", "{way}");
        assert_eq!(one.ask(""), "found: 77", "{way}");
        // What was freed is there for who has it.
        one.tell("free");
        assert_eq!(one.end(), "");
        assert_eq!(two.ask(""), "still: 4321 77", "{way}");
        assert_eq!(two.end(), "closed: 1 1\n", "{way}");
    }
}

#[test]
fn what_a_program_shared_is_there_for_who_has_it_when_it_is_killed() {
    let place = Place::new("tests/share.c");
    let (mut one, [memory, event]) = giver(&place, "bridge");
    let mut two = Spoken::new(&place, "bridge", &["take", &memory, &event]);
    assert_eq!([two.line(), two.line()], ["opened: 1 1234 1234", "written"]);
    one.child.kill().expect("killed");
    one.child.wait().expect("ended");
    assert_eq!(two.ask(""), "still: 4321 77");
    // Nobody else finds it once its worker has ended.
    let end = Instant::now() + Duration::from_secs(60);
    let refused = || place.run("bridge", &["forge", &memory, &event], &[]).starts_with("refused: 1 1\n");
    while !refused() {
        assert!(Instant::now() < end, "what a program that was killed shared is still found");
    }
    assert_eq!(two.ask(""), "still: 4321 77");
    assert_eq!(two.end(), "closed: 1 1\n");
}

#[test]
fn nobody_opens_what_no_program_of_its_server_shared() {
    let place = Place::new("tests/share.c");
    let (one, [memory, event]) = giver(&place, "bridge");
    // The driver would say 222: it is not asked.
    let other = Place::with(
        "tests/share.c",
        &[],
        &[("VM_CUDA_FAKE_FAIL", "cuIpcOpenMemHandle:1=222,cuIpcOpenEventHandle:1=222")],
    );
    let (two, [other_memory, other_event]) = giver(&other, "bridge");
    let check = |memory: &str, event: &str, says: &str| {
        let said = other.run("bridge", &["forge", memory, event], &[]);
        assert!(said.starts_with(says), "{memory} {event}: {said}");
    };
    check(&memory, &event, "refused: 1 1\n");
    check(&"00".repeat(64), &"ff".repeat(64), "refused: 1 1\n");
    check(&other_event, &other_memory, "refused: 1 1\n");
    // The driver's own handle.
    let (direct, [direct_memory, direct_event]) = giver(&other, "driver");
    check(&direct_memory, &direct_event, "refused: 1 1\n");
    check(&other_memory, &other_event, "refused: 222 222\n");
    for program in [one, two, direct] {
        program.end();
    }
}

/// The processes that a server started.
fn workers(server: &Child) -> Vec<i32> {
    let path = format!("/proc/{0}/task/{0}/children", server.id());
    let text = std::fs::read_to_string(path).expect("children");
    text.split_whitespace().map(|id| id.parse().expect("a number")).collect()
}

#[test]
fn a_program_whose_server_is_gone_is_told_for_ever() {
    let place = Place::new("tests/ways.c");
    let (mut program, mut output) = place.endless();
    for worker in workers(&place.server) {
        let worker = rustix::process::Pid::from_raw(worker).expect("a process");
        rustix::process::kill_process(worker, rustix::process::Signal::KILL).expect("killed");
    }
    let mut said = String::new();
    output.read_to_string(&mut said).expect("what it says");
    assert_eq!(said, "ends: 46 46 CUDA_ERROR_DEVICE_UNAVAILABLE\n");
    assert!(program.wait().expect("ended").success());
}

#[test]
fn without_a_server_there_is_no_device() {
    let place = Place::new("tests/ways.c");
    let said = place.run("bridge", &["faults"], &[("VM_BRIDGE", "unix:/nowhere/at/all")]);
    assert!(said.starts_with("cuInit: 100\n") && said.contains("vm-service bridge serve"), "{said}");
}

/// Replays a session of a program before another of the same driver: what came of it.
fn replay(recording: &Recording, variables: &[(&str, &str)]) -> Report {
    let (ours, theirs) = UnixStream::pair().expect("a connection");
    let serve = beside("serve").parent().and_then(Path::parent).expect("a folder").join("examples/serve");
    let mut command = Command::new(serve);
    command.arg(driver()).envs(DEVICES).envs(variables.iter().copied());
    // What is its standard output is its connection to a server, which a replay has none of.
    let (_nobody, none) = UnixStream::pair().expect("a connection");
    command.stdout(Stdio::from(OwnedFd::from(none)));
    let mut server = command.stdin(Stdio::from(OwnedFd::from(theirs))).spawn().expect("the server");
    let report = vm_bridge::recording::replay(&ours, recording).expect("the server answers");
    drop(ours);
    server.wait().expect("ended");
    report
}

#[test]
fn what_was_recorded_is_answered_alike_when_it_is_replayed() {
    let check = |program: &str, arguments: &[&str], least: usize| {
        let records = tempfile::tempdir().expect("a folder");
        let folder = records.path().to_str().expect("a path");
        let place = Place::with(program, &[], &[("VM_BRIDGE_RECORD", folder)]);
        for streams in [&[][..], &[("VM_BRIDGE_STREAM", "1")]] {
            place.run("bridge", arguments, streams);
        }
        let files: Vec<_> = std::fs::read_dir(folder).expect("recordings").flatten().collect();
        assert!(files.len() >= 2, "{program} {arguments:?}");
        for file in files {
            let recording =
                Recording::read(&std::fs::read(file.path()).expect("a file")).expect("a recording");
            let report = replay(&recording, &[]);
            assert_eq!(report.differences, [], "{program} {arguments:?}");
            assert_eq!(report.different, 0);
            assert!(report.calls >= least, "{program} {arguments:?}: {report:?}");
            // A driver that answers in another way is told apart.
            let fails = replay(&recording, &[("VM_CUDA_FAKE_FAIL", "cuInit:1=999")]);
            assert!(fails.differences.iter().any(|difference| difference.replayed.0 == 999), "{fails:?}");
        }
    };
    check("tests/ways.c", &["threads"], 1600);
    check("tests/ways.c", &["strided"], 20);
    check("tests/ways.c", &["callbacks"], 20);
    check("tests/ways.c", &["registered"], 5);
    check("tests/add.c", &[], 20);
}
