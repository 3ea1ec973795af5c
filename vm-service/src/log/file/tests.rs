//! What becomes of the log file under several writers, killed and stopped ones, a full disk and hostile hands.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, waitpid};

use super::*;
use crate::api::LogLevel;
use crate::log::reader::LogReader;
use crate::log::{Settings, record};

const LONG: Duration = Duration::from_secs(300);

fn log_in(folder: &Path, size: u64, kept: u32) -> LogFile {
    LogFile::new(folder.to_owned(), size, kept, LONG)
}

fn line(number: u64, text: &str) -> Vec<u8> {
    record::line(&record::make(LogLevel::Info, "EGPU", text, [("number", number.into())]))
}

/// What is in the log files, by process and thread, in their order; and how many lines are damaged.
fn read(folder: &Path) -> (BTreeMap<(u32, String), Vec<u64>>, u64) {
    let mut reader = LogReader::open(folder.to_owned()).expect("a reader");
    let mut got: BTreeMap<_, Vec<u64>> = BTreeMap::new();
    while let Some((record, _)) = reader.next().expect("read") {
        let number = record.fields["number"].as_u64().expect("a number");
        got.entry((record.pid, record.thread)).or_default().push(number);
    }
    (got, reader.damaged())
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a directory");
    let mut names: Vec<_> =
        entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("text")).collect();
    names.sort();
    names
}

/// Runs [`child`] in a process of its own.
fn spawn(folder: &Path, does: &str, threads: u64, records: u64, size: u64, text: usize) -> Child {
    let program = std::env::current_exe().expect("this program");
    let said = format!("{does} {threads} {records} {size} {text} {}", folder.display());
    Command::new(program)
        .args(["--exact", "log::file::tests::child", "--nocapture"])
        .env("LOG_FILE_CHILD", said)
        .stdout(Stdio::piped())
        .spawn()
        .expect("a process")
}

/// Waits until a child has said so.
fn wait_for(child: &mut Child, what: &str) {
    let lines = BufReader::new(child.stdout.as_mut().expect("output")).lines();
    assert!(lines.map_while(Result::ok).any(|line| line.contains(what)), "no `{what}`");
}

/// What other processes do for the tests below; by itself nothing.
#[test]
fn child() {
    let Ok(said) = std::env::var("LOG_FILE_CHILD") else { return };
    let mut words = said.splitn(6, ' ');
    let does = words.next().expect("a word").to_owned();
    let mut number = || words.next().expect("a word").parse().expect("a number");
    let (threads, records, size, text): (u64, u64, u64, u64) = (number(), number(), number(), number());
    let folder = PathBuf::from(words.next().expect("a path"));
    if does == "stop" {
        let mut log = log_in(&folder, size, 5);
        let _open = log.locked().expect("locked");
        kill_process(getpid(), Signal::STOP).expect("stopped");
        // Another thread may have taken the signal, and this one go on for a moment.
        loop {
            std::thread::park();
        }
    }
    if does == "panic" {
        crate::log::never_wait();
        crate::log::start_files(Settings { folder, size, kept: 5, simulated: false });
        std::thread::spawn(|| panic!("ouch\nand more")).join().expect_err("it panics");
        return;
    }
    let text = "x".repeat(text as usize);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (folder, text) = (&folder, &text);
            let write = move || {
                let mut log = log_in(folder, size, MOST_KEPT);
                for number in 0..records {
                    // One by one, and several at once.
                    let mut lines = line(2 * number, text);
                    if number % 3 == 0 {
                        log.append(&std::mem::take(&mut lines)).expect("written");
                    }
                    lines.extend(line(2 * number + 1, text));
                    log.append(&lines).expect("written");
                    if number == 20 {
                        println!("under way");
                    }
                }
            };
            let thread = std::thread::Builder::new().name(format!("writer {thread}"));
            thread.spawn_scoped(scope, write).expect("a thread");
        }
    });
}

#[test]
fn threads_of_processes_lose_nothing_and_tear_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    const SIZE: u64 = 80 << 10;
    let children: Vec<_> = (0..4).map(|_| spawn(folder.path(), "write", 8, 125, SIZE, 50)).collect();
    for child in children {
        assert!(child.wait_with_output().expect("its end").status.success());
    }
    let (got, damaged) = read(folder.path());
    assert_eq!((got.len(), damaged), (32, 0));
    for (writer, numbers) in got {
        assert!(numbers.iter().copied().eq(0..250), "{writer:?}: {numbers:?}");
    }
    let names = names(folder.path());
    let rotations = names.len() - 3;
    assert!((15..30).contains(&rotations), "{names:?}");
    for name in names {
        let data = fs::metadata(folder.path().join(&name)).expect("a file");
        let mode = if name == LOCK { 0o600 } else { 0o640 };
        assert!(data.len() <= SIZE && data.mode() & 0o777 & !mode == 0, "{name}: {data:?}");
    }
}

#[test]
fn killed_writers_leave_whole_records_or_one_damaged_line() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut killed = 0;
    for text in [100, 5_000, 15_000] {
        let mut children: Vec<_> =
            (0..2).map(|_| spawn(folder.path(), "write", 2, 600, 2 << 20, text)).collect();
        for child in &mut children {
            wait_for(child, "under way");
            child.kill().expect("killed");
            child.wait().expect("its end");
            killed += 1;
        }
    }
    let mut log = log_in(folder.path(), 2 << 20, MOST_KEPT);
    log.append(&line(0, "the last")).expect("nobody has the lock");
    let (got, damaged) = read(folder.path());
    assert!(damaged <= killed, "{damaged}");
    assert!(got.contains_key(&(std::process::id(), std::thread::current().name().expect("a name").into())));
    for (writer, numbers) in got {
        assert!(numbers.iter().copied().eq(0..numbers.len() as u64), "{writer:?}");
    }
}

#[test]
fn a_stopped_process_holds_others_up_no_longer_than_the_deadline() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut log = LogFile::new(folder.path().into(), 1 << 20, 5, Duration::from_millis(20));
    log.append(&line(0, "before")).expect("written");
    let mut child = spawn(folder.path(), "stop", 0, 0, 1 << 20, 0);
    let pid = Pid::from_child(&child);
    let (_, status) = waitpid(Some(pid), WaitOptions::UNTRACED).expect("waited").expect("a status");
    assert!(status.stopped(), "{status:?}");
    let two = [line(1, "lost"), line(2, "lost")].concat();
    // With a deadline that no test would outlast: it was in vain once, and is not waited for again.
    for deadline in [Duration::from_millis(20), LONG * 1000] {
        log.deadline = deadline;
        let lost = log.append(&two).expect_err("it is locked");
        assert_eq!((lost.count, lost.error.kind()), (2, io::ErrorKind::TimedOut), "{}", lost.error);
    }
    child.kill().expect("killed");
    child.wait().expect("its end");
    log.append(&line(3, "behind")).expect("nobody has the lock");
    let (got, damaged) = read(folder.path());
    assert_eq!((got.into_values().collect::<Vec<_>>(), damaged), (vec![vec![0, 3]], 0));
}

#[test]
fn a_panic_is_a_fatal_record() {
    let folder = tempfile::tempdir().expect("a folder");
    let output = spawn(folder.path(), "panic", 0, 0, 1 << 20, 0).wait_with_output().expect("its end");
    assert!(output.status.success(), "{output:?}");
    let mut reader = LogReader::open(folder.path().into()).expect("a reader");
    let (record, _) = reader.next().expect("read").expect("a record");
    assert!(record.is_fatal() && record.message.contains("ouch\nand more"), "{record:?}");
    assert_eq!(reader.next().expect("read"), None);
}

#[test]
fn a_full_disk_loses_whole_records_and_no_more() {
    let folder = tempfile::tempdir().expect("a folder");
    let mount = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs"])
        .arg(folder.path())
        .output();
    let output = match mount {
        Ok(output) if output.status.success() => output,
        other => return println!("skipped: no tmpfs can be mounted: {other:?}"),
    };
    drop(output);
    struct Mounted<'a>(&'a Path);
    impl Drop for Mounted<'_> {
        fn drop(&mut self) {
            Command::new("umount").arg("-l").arg(self.0).status().expect("unmounted");
        }
    }
    let _mounted = Mounted(folder.path());
    let mut log = log_in(folder.path(), 1 << 20, 5);
    let written = (0..1000).take_while(|number| log.append(&line(*number, &"x".repeat(700))).is_ok());
    let written = written.count() as u64;
    assert!((40..90).contains(&written), "{written}");
    let lost = log.append(&[line(0, &"x".repeat(5000)), line(1, "x")].concat()).expect_err("it is full");
    assert!(lost.count == 2 && lost.error.kind() == io::ErrorKind::StorageFull, "{lost:?}");
    let (got, damaged) = read(folder.path());
    assert_eq!(
        (got.into_values().map(|of| of.len() as u64).collect::<Vec<_>>(), damaged),
        (vec![written], 0)
    );
    fs::remove_file(folder.path().join(NAME)).expect("room again");
    log.append(&line(7, "behind")).expect("written");
    assert_eq!(read(folder.path()).0.into_values().collect::<Vec<_>>(), [[7]]);
}

#[test]
fn a_link_of_another_user_on_the_way_to_the_directory_is_not_followed() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can make another user's link");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let (aim, link) = (folder.path().join("aim"), folder.path().join("link"));
    fs::create_dir(&aim).expect("a directory");
    symlink("aim", &link).expect("a link");
    let append = || log_in(&link.join("of/log"), 1000, 5).append(&line(0, "x"));
    append().expect("root's own link");
    fs::remove_dir_all(aim.join("of")).expect("removed");
    std::os::unix::fs::lchown(&link, Some(12345), None).expect("another owner");
    let error = append().expect_err("another user's link").error.to_string();
    assert!(error.contains("link is a link that the user 12345 made"), "{error}");
    assert!(!aim.join("of").exists());
}

#[test]
fn what_others_could_have_put_there_is_refused() {
    #[track_caller]
    fn check(prepare: impl FnOnce(&Path), expect: &str) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log");
        fs::create_dir(&path).expect("a directory");
        fs::write(folder.path().join("aim"), "").expect("written");
        prepare(&path);
        let error = log_in(&path, 1000, 5).append(&line(0, "x")).expect_err(expect).error.to_string();
        assert!(error.contains(expect), "{error}");
        assert_eq!(fs::read(folder.path().join("aim")).expect("a file"), b"");
    }
    let mode = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("a mode");
    };
    check(|path| mode(path, 0o777), "can be written to by others (mode 777)");
    check(|path| mode(path, 0o1775), "can be written to by others (mode 1775)");
    for name in [NAME, LOCK] {
        check(|path| symlink("../aim", path.join(name)).expect("a link"), "is a symbolic link");
        check(|path| symlink("absent", path.join(name)).expect("a link"), "is a symbolic link");
        check(|path| fs::create_dir(path.join(name)).expect("a directory"), "directory");
        check(
            |path| {
                fs::write(path.join(name), "").expect("written");
                mode(&path.join(name), 0o666);
            },
            "can be written to by others (mode 666)",
        );
        check(
            |path| {
                let fifo = rustix::fs::FileType::Fifo;
                rustix::fs::mknodat(rustix::fs::CWD, path.join(name), fifo, 0o600.into(), 0).expect("a FIFO");
            },
            "is not a regular file",
        );
    }
    check(
        |path| {
            fs::rename(path, path.with_file_name("other")).expect("renamed");
            symlink("other", path).expect("a link");
        },
        "it is a symbolic link",
    );
    check(
        |path| {
            fs::remove_dir(path).expect("removed");
            fs::write(path, "").expect("written");
        },
        "Not a directory",
    );
}

#[test]
fn what_is_removed_or_replaced_is_made_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a/log");
    let mut logs = [log_in(&path, 1 << 20, 5), log_in(&path, 1 << 20, 5)];
    let mut both = |number| logs.iter_mut().for_each(|log| log.append(&line(number, "x")).expect("written"));
    let check = |expect: &[u64]| {
        let (got, damaged) = read(&path);
        assert_eq!((got.into_values().collect::<Vec<_>>(), damaged), (vec![expect.to_vec()], 0));
    };
    both(1);
    check(&[1, 1]);
    fs::remove_file(path.join(NAME)).expect("removed");
    both(2);
    check(&[2, 2]);
    fs::remove_file(path.join(LOCK)).expect("removed");
    both(3);
    check(&[2, 2, 3, 3]);
    fs::rename(&path, folder.path().join("b")).expect("renamed");
    both(4);
    check(&[4, 4]);
    fs::remove_dir_all(folder.path().join("a")).expect("removed");
    both(5);
    check(&[5, 5]);
    // As a rotation by another program does.
    fs::rename(path.join(NAME), path.join(name_of(1))).expect("renamed");
    both(6);
    check(&[5, 5, 6, 6]);
    // What a killed process left of a record ends in no newline.
    let torn = fs::OpenOptions::new().append(true).open(path.join(NAME));
    torn.expect("a file").write_all(b"{\"time\":\"20").expect("written");
    both(7);
    let (got, damaged) = read(&path);
    assert_eq!((got.into_values().collect::<Vec<_>>(), damaged), (vec![vec![5, 5, 6, 6, 7, 7]], 1));
}

#[test]
fn a_rotation_that_was_broken_off_loses_no_file() {
    #[track_caller]
    fn check(before: &[u32], kept: u32, expect: &[(u32, &str)]) {
        let folder = tempfile::tempdir().expect("a folder");
        for number in before {
            fs::write(folder.path().join(name_of(*number)), format!("was {number}\n")).expect("written");
        }
        log_in(folder.path(), 1, kept).append(b"new\n").expect("written");
        let mut got = Vec::new();
        for number in 0..=MOST_KEPT {
            if let Ok(text) = fs::read_to_string(folder.path().join(name_of(number))) {
                got.push((number, text.trim().to_owned()));
            }
        }
        let expect: Vec<_> = expect.iter().map(|(number, text)| (*number, (*text).to_owned())).collect();
        assert_eq!(got, expect, "{before:?}");
    }
    check(&[], 3, &[(0, "new")]);
    check(&[0], 3, &[(0, "new"), (1, "was 0")]);
    check(&[0, 1, 2], 3, &[(0, "new"), (1, "was 0"), (2, "was 1"), (3, "was 2")]);
    check(&[0, 1, 2, 3], 3, &[(0, "new"), (1, "was 0"), (2, "was 1"), (3, "was 2")]);
    check(&[0, 2, 3], 3, &[(0, "new"), (1, "was 0"), (2, "was 2"), (3, "was 3")]);
    check(&[0, 1, 3], 3, &[(0, "new"), (1, "was 0"), (2, "was 1"), (3, "was 3")]);
    check(&[1, 2, 3], 3, &[(0, "new"), (1, "was 1"), (2, "was 2"), (3, "was 3")]);
    check(&[0, 1], 1, &[(0, "new"), (1, "was 0")]);
    check(&[0, 1, 2, 5, 99], 2, &[(0, "new"), (1, "was 0"), (2, "was 1")]);
}
