//! Log files, and `egpu log`, which reads them.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use vm_passthrough::Host;

use super::{Answer, vm_service};

/// `vm-service ARGS`, which writes log files into this folder; `{lab}` in its arguments is a simulated host there.
fn command(folder: &Path, args: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
    command
        .args(args.replace("{lab}", &folder.join("lab").display().to_string()).split_whitespace())
        .env_remove("RUST_LOG")
        .env("VM_SERVICE_LOG_DIR", folder.join("log"))
        .stdin(Stdio::null());
    command
}

fn run(folder: &Path, args: &str) -> Output {
    let log = format!(" --log-dir {}", folder.join("log").display());
    command(folder, &(args.to_owned() + &log)).output().expect("vm-service")
}

/// What the log files have, by `egpu log ARGS --json`.
fn records(folder: &Path, args: &str) -> Vec<Value> {
    let got = vm_service(
        &Host::system(),
        &format!("egpu log {args} --json --log-dir {}", folder.join("log").display()),
    );
    assert_eq!(got.exit, 0, "{got:?}");
    got.out.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn line(time: &str, level: &str, category: &str, message: &str, fields: Value) -> String {
    let record = json!({
        "time": time, "level": level, "category": category, "target": "a::b", "pid": 7, "thread": "main",
        "message": message, "fields": fields
    });
    format!("{record}\n")
}

#[test]
fn commands_that_change_something_log_what_they_did_and_others_do_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let log = folder.path().join("log");
    for args in
        ["list --sim {lab}", "explain 01:00.0 --sim {lab}", "claims --sim {lab}", "vfs list --sim {lab}"]
    {
        run(folder.path(), args);
        assert!(!log.exists(), "{args}");
    }
    // The log of this machine says nothing of simulated hosts.
    assert!(command(folder.path(), "claim 03:00.0 --sim {lab}").status().expect("vm-service").success());
    assert!(!log.exists());

    assert_eq!(run(folder.path(), "release --all -v --sim {lab}").status.code(), Some(0));
    assert_eq!(run(folder.path(), "claim 02:00.0 --sim {lab}").status.code(), Some(3));
    assert_eq!(run(folder.path(), "release 1f:00.0 --sim {lab}").status.code(), Some(1));
    let all = records(folder.path(), "");
    let of = |message: &str| -> Vec<&Value> {
        all.iter()
            .filter(|record| record["message"].as_str().is_some_and(|of| of.starts_with(message)))
            .collect()
    };
    let exits: Vec<_> =
        of("the command ended").iter().map(|record| record["fields"]["exit"].clone()).collect();
    assert_eq!(exits, [0, 3, 1]);
    let begun: Vec<_> =
        of("the command began: ").iter().map(|record| record["message"].as_str().expect("text")).collect();
    assert!(
        begun.len() == 3 && begun[0].starts_with("the command began: release --all -v --sim /"),
        "{begun:?}"
    );
    assert!(
        records(folder.path(), "--category driver").iter().any(|record| record["level"] == "DEBUG"),
        "{all:?}"
    );
    let fatal = records(folder.path(), "--level fatal");
    assert_eq!(fatal.len(), 2, "{fatal:?}");
    assert_eq!(
        (&fatal[1]["category"], &fatal[1]["fields"]),
        (&json!("CLI"), &json!({"fatal": true, "simulated": true}))
    );
    assert!(all.iter().all(|record| record["fields"]["simulated"] == true), "{all:?}");
    let text = fatal[1]["message"].as_str().expect("text");
    assert!(text.contains("0000:1f:00.0"), "{text}");
    let shown = vm_service(&Host::system(), &format!("egpu l --level error --log-dir {}", log.display())).out;
    assert!(
        shown.contains(" FATAL CLI     [") && shown.trim_end().ends_with(&format!("{text} simulated=true")),
        "{shown}"
    );
    // By processes, and each with its time, in order.
    let times: Vec<_> = all.iter().map(|record| record["time"].as_str().expect("a time")).collect();
    assert!(times.is_sorted() && times[0].len() == 27, "{times:?}");
    assert!(all.iter().all(|record| record["command"] == "egpu-log" && record["version"] == 1), "{all:?}");
}

#[test]
fn rust_log_takes_categories() {
    let folder = tempfile::tempdir().expect("a folder");
    let check = |filter: &str, expect: &[&str]| {
        let args = format!("claim 03:00.0 --sim {{lab}} --log-dir {}", folder.path().join("log").display());
        let output = command(folder.path(), &args).env("RUST_LOG", filter).output().expect("vm-service");
        assert!(output.status.success(), "{output:?}");
        let said = String::from_utf8(output.stderr).expect("text");
        for part in ["DEBUG write path=", "PCI functions found", "INFO claimed"] {
            assert_eq!(said.contains(part), expect.contains(&part), "{filter}: {part} in {said}");
        }
        assert!(run(folder.path(), "release --all --sim {lab}").status.success());
    };
    check("DRIVER=debug", &["DEBUG write path=", "INFO claimed"]);
    check("warn,CLI=debug", &["PCI functions found"]);
    check("debug,DRIVER=off", &["PCI functions found"]);
    check("info,DRIVER=warn,vm_passthrough::claim::act=info", &["INFO claimed"]);
}

#[test]
fn records_are_chosen_by_level_category_time_and_text() {
    let folder = tempfile::tempdir().expect("a folder");
    let log = folder.path().join("log");
    fs::create_dir(&log).expect("a folder");
    let now = jiff::Timestamp::now();
    let ago = |minutes: i64| {
        let time = now.checked_sub(jiff::SignedDuration::from_mins(minutes)).expect("a time");
        format!("{time:.6}")
    };
    let write = |name: &str, lines: &[&[u8]]| fs::write(log.join(name), lines.concat()).expect("written");
    let a = line(&ago(3000), "INFO", "PCIE", "a", json!({}));
    let b = line(&ago(100), "ERROR", "EGPU", "b", json!({"fatal": true, "device": "03:00.0"}));
    let c = line(&ago(90), "ERROR", "USB4", "c", json!({"fatal": false}));
    let d = line(&ago(80), "TRACE", "FUTURE", "d \u{1b}[2J\nd", json!({"count": 3}));
    let e = line(&ago(1), "WARN", "CLI", "e", json!({}));
    write("vm-service.log.12", &[a.as_bytes()]);
    write("vm-service.log.2", &[b.as_bytes(), c.as_bytes()]);
    write("vm-service.log.1", &[d.as_bytes()]);
    write("vm-service.log", &[e.as_bytes()]);
    write("vm-service.log.lock", &[]);
    write("vm-service.log.x", &[a.as_bytes()]);
    let args = |args: &str| format!("egpu log {args} --log-dir {}", log.display());
    let check = |given: &str, expect: &str| {
        let Answer { exit, out, .. } = vm_service(&Host::system(), &args(given));
        let shown: String =
            out.lines().filter_map(|line| Some(line.split_once("[7] ")?.1[..1].to_owned())).collect();
        assert_eq!((exit, shown.as_str()), (0, expect), "{given}: {out}");
        let json = records(folder.path(), given);
        let said: String =
            json.iter().map(|record| record["message"].as_str().expect("text")[..1].to_owned()).collect();
        assert_eq!(said, expect, "{given}");
    };
    check("", "abcde");
    check("--level trace", "abcde");
    check("--level warn", "bce");
    check("--level ERROR", "bc");
    check("--level fatal", "b");
    check("--category EGPU,usb4", "bc");
    check("--category PCIE --category CLI", "ae");
    check("--category general", "d");
    check("--category python", "");
    check("--since 5m", "e");
    check("--since 95m", "cde");
    check("--since 2h", "bcde");
    check("--since 1h35m", "cde");
    check("--since 3d", "abcde");
    check(&format!("--since {}", ago(90)), "cde");
    check("--since 2000-01-01T00:00:00+02:00", "abcde");
    check("--grep count=3", "d");
    check("--grep FATAL", "b");
    check("--grep device=03:00", "b");
    check("-n 2", "de");
    check("-n 0", "");
    check("--lines 1 --level error", "c");
    check("-n 100", "abcde");
    let shown = vm_service(&Host::system(), &args("--grep count"));
    let expect = format!("{} TRACE GENERAL [7] d \u{fffd}[2J\n    d count=3\n", ago(80));
    assert_eq!(shown, Answer { exit: 0, out: expect, err: String::new() });
    write("vm-service.log.2", &[b.as_bytes(), b"\xff\x00torn\n", c.as_bytes()]);
    write("vm-service.log.1", &[d.as_bytes(), &e.as_bytes()[..40]]);
    write("vm-service.log", &[e.as_bytes(), b"{\"time\":"]);
    let output = run(folder.path(), "egpu log --json");
    let said = format!("(3 damaged lines of the log in {} are left out)\n", log.display());
    assert_eq!(String::from_utf8_lossy(&output.stderr), said);
    assert_eq!(output.stdout.iter().filter(|byte| **byte == b'\n').count(), 5);
    let check_error = |given: &str, exit, expect: &str| {
        let got = vm_service(&Host::system(), &args(given));
        assert!(got.exit == exit && got.err.contains(expect) && got.out.is_empty(), "{given}: {got:?}");
    };
    for since in ["10", "soon", "-10m", "m", "10m ago ago", "2026-99-01T00:00:00Z", "9999999999999d"] {
        check_error(&format!("--since={}", since.replace(' ', "_")), 2, "'--since <TIME>'");
    }
    check_error("--level loud", 2, "write trace, debug, info, warn, error or fatal");
    check_error("--category EGPU,NONE", 2, "write GENERAL, DRIVER");
    check_error("--lines -1", 2, "-1");
    std::os::unix::fs::symlink("/etc/passwd", log.join("vm-service.log.6")).expect("a link");
    let refused = run(folder.path(), "egpu log");
    let error = String::from_utf8_lossy(&refused.stderr);
    assert!(
        refused.status.code() == Some(1)
            && error.contains("vm-service.log.6 is a symbolic link, and is not read"),
        "{error}"
    );
    fs::remove_dir_all(&log).expect("removed");
    check_error("", 1, "there is no log in ");
    fs::write(&log, "").expect("written");
    check_error("", 1, "can't be read: Not a directory");
    let none = vm_service(&Host::system(), "egpu log");
    assert_eq!((none.exit, none.out.as_str()), (2, ""), "{none:?}");
    for other in ["--sim lab", "--root /"] {
        let got = vm_service(
            &Host::system(),
            &format!("egpu {other} log --log-dir /tmp")
                .replace("lab", &folder.path().join("lab").display().to_string()),
        );
        assert!(got.exit == 2 && got.err.contains("reads log files and no host"), "{got:?}");
    }
}

/// What a process that follows prints next.
fn next(lines: &mut impl Iterator<Item = std::io::Result<String>>) -> String {
    let line = lines.next().expect("a line").expect("text");
    let record: Value = serde_json::from_str(&line).expect("JSON");
    record["message"].as_str().expect("a message").to_owned()
}

/// `egpu log --follow` in this folder.
fn follow(folder: &Path, args: &str) -> Child {
    let mut command = command(folder, &format!("egpu log --follow --json {args}"));
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("vm-service")
}

#[test]
fn follows_across_rotations_until_a_signal_or_the_end_of_its_reader() {
    let folder = tempfile::tempdir().expect("a folder");
    let log = folder.path().join("log");
    fs::create_dir(&log).expect("a folder");
    let path = |number: u32| {
        log.join(if number == 0 { "vm-service.log".into() } else { format!("vm-service.log.{number}") })
    };
    let add = |message: &str| {
        let mut file = OpenOptions::new().append(true).create(true).open(path(0)).expect("a file");
        file.write_all(line("2026-11-23T09:30:00.000000Z", "INFO", "EGPU", message, json!({})).as_bytes())
            .expect("written");
    };
    let rotate = || (0..6).rev().for_each(|number| drop(fs::rename(path(number), path(number + 1))));
    for signal in [Signal::INT, Signal::TERM] {
        let mut child = follow(folder.path(), "-n 1");
        // Nobody knows when it begins; what it shows first is not looked at.
        let mut lines = BufReader::new(child.stdout.take().expect("output")).lines();
        add("first");
        while next(&mut lines) != "first" {}
        for message in ["1", "2", "rotate", "3", "rotate", "rotate", "4", "5", "rotate", "6"] {
            match message {
                "rotate" => rotate(),
                message => add(message),
            }
        }
        let got: Vec<_> = (0..6).map(|_| next(&mut lines)).collect();
        assert_eq!(got, ["1", "2", "3", "4", "5", "6"]);
        kill_process(Pid::from_child(&child), signal).expect("sent");
        let output = child.wait_with_output().expect("its end");
        assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]), "{output:?}");
    }
    // Whoever reads goes, and nothing more is logged.
    let mut child = follow(folder.path(), "-n 1");
    let mut reader = BufReader::new(child.stdout.take().expect("output"));
    reader.read_line(&mut String::new()).expect("a line");
    drop(reader);
    let output = child.wait_with_output().expect("its end");
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]), "{output:?}");
}

#[test]
fn processes_share_the_files() {
    let folder = tempfile::tempdir().expect("a folder");
    // The command line is in two records of 16 KiB; the files are as small as they may be.
    let long = format!("start {} --state {}", "x".repeat(50_000), folder.path().display());
    let start = || {
        let mut command = command(folder.path(), &long);
        command.env("VM_SERVICE_LOG_SIZE", "64K").env("VM_SERVICE_LOG_KEEP", "99");
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("vm-service")
    };
    for mut child in (0..24).map(|_| start()).collect::<Vec<_>>() {
        assert!(!child.wait().expect("its end").success());
    }
    let all = records(folder.path(), "");
    let mut begun: Vec<_> = all
        .iter()
        .filter(|record| record["message"].as_str().is_some_and(|text| text.starts_with("the command began")))
        .map(|record| record["pid"].as_u64())
        .collect();
    begun.sort();
    begun.dedup();
    let ended = all.iter().filter(|record| record["message"] == "the command ended").count();
    assert_eq!((begun.len(), ended), (24, 24));
    let files = fs::read_dir(folder.path().join("log")).expect("a folder").count();
    assert!(files > 8, "{files}");
}

#[test]
fn a_log_that_is_not_written_holds_no_command_up_and_is_reported_once() {
    let check = |prepare: &dyn Fn(&Path), expect: &str| {
        let folder = tempfile::tempdir().expect("a folder");
        let log = folder.path().join("log");
        fs::create_dir(&log).expect("a folder");
        prepare(&log);
        let output = run(folder.path(), "claim 03:00.0 -vv --sim {lab}");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{said}");
        let reports = said.lines().filter(|line| line.contains(" is not written: ")).collect::<Vec<_>>();
        assert!(reports.len() == 1 && reports[0].contains(expect), "{said}");
        assert_eq!(
            said.lines().filter(|line| line.contains("records are missing from the log")).count(),
            1,
            "{said}"
        );
        (folder, said)
    };
    use std::os::unix::fs::PermissionsExt as _;
    check(
        &|log| fs::set_permissions(log, fs::Permissions::from_mode(0o777)).expect("a mode"),
        "can be written to by others",
    );
    check(
        &|log| {
            fs::remove_dir(log).expect("removed");
            fs::write(log, "").expect("written");
        },
        "Not a directory",
    );
    check(
        &|log| std::os::unix::fs::symlink("/dev/full", log.join("vm-service.log")).expect("a link"),
        "is a symbolic link",
    );
    // Another process has the lock, and keeps it.
    let lock = std::cell::RefCell::new(None);
    let (folder, _) = check(
        &|log| {
            let path = log.join("vm-service.log.lock");
            let file = File::create(&path).expect("a file");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("a mode");
            flock(&file, FlockOperation::LockExclusive).expect("locked");
            lock.replace(Some(file));
        },
        "another process does not let go of",
    );
    assert!(!folder.path().join("log/vm-service.log").exists());
    drop(lock);
    assert_eq!(run(folder.path(), "release --all --sim {lab}").status.code(), Some(0));
    assert_eq!(records(folder.path(), "--grep began").len(), 1);
}

#[test]
fn a_file_that_can_not_grow_has_whole_records() {
    let folder = tempfile::tempdir().expect("a folder");
    let log = folder.path().join("log");
    // As on a full disk: a write is cut off where the file may not grow, and the next one fails.
    let script = r#"trap "" XFSZ; ulimit -f 8; "$0" "$@""#;
    assert!(run(folder.path(), "list --sim {lab}").status.success());
    let lab = folder.path().join("lab");
    for args in [&["vfs", "create", "05:00.0", "2", "-vv"][..], &["vfs", "remove", "05:00.0", "-vv"]] {
        let mut shell = Command::new("sh");
        shell.args(["-c", script, env!("CARGO_BIN_EXE_vm-service")]).args(args);
        shell.arg("--sim").arg(&lab).arg("--log-dir").arg(&log).stdin(Stdio::null()).env_remove("RUST_LOG");
        let output = shell.output().expect("a shell");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.contains(" is not written: "), "{said}");
    }
    let text = fs::read_to_string(log.join("vm-service.log")).expect("a file");
    assert!(text.ends_with("}\n") && text.len() <= 8 << 10, "{}", text.len());
    let got = run(folder.path(), "egpu log");
    assert!(got.stderr.is_empty() && got.stdout.iter().filter(|byte| **byte == b'\n').count() > 5, "{got:?}");
}

#[test]
fn names_of_guests_and_devices_break_no_line() {
    let folder = tempfile::tempdir().expect("a folder");
    let name = "a\n{\"time\":\"2026-11-23T09:30:00Z\"}\u{1b}[2J\u{9b}2J\"\\";
    let output = command(folder.path(), "start")
        .arg(folder.path().join(name))
        .arg("--state")
        .arg(folder.path())
        .output()
        .expect("vm-service");
    assert!(!output.status.success());
    let text = fs::read_to_string(folder.path().join("log/vm-service.log")).expect("a file");
    assert!(!text.chars().any(|letter| letter.is_control() && letter != '\n'), "{text:?}");
    let all = records(folder.path(), "");
    assert_eq!((text.lines().count(), all.len()), (3, 3), "{text}");
    assert!(all[1]["fields"]["fatal"] == true, "{text}");
}
