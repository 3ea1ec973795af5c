//! The assembler's process: what it is kept from, and what is said of it. The assembler is a script, except for one
//! case with NVIDIA's.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use vm_cuda::assemble::{AssembleError, Assembler, Limits};

/// The smallest file that is taken for a cubin.
const CUBIN: &str = r#"printf '\177ELF\002\001\001\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0' >"$out"
head -c 32 /dev/zero >>"$out""#;

/// One test at a time: a process that is started while another test writes a script has that open until it runs its own
/// program, and Linux runs no file that is open for writing.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Nothing here takes so long, even where the machine is busy.
const TIMEOUT: Duration = Duration::from_secs(120);

fn limits(time: Duration) -> Limits {
    Limits { time, memory: 256 << 20, output: 1 << 20 }
}

/// An assembler that is a script; `$out` and `$in` are its files.
fn script(folder: &Path, name: &str, body: &str) -> Assembler {
    let file = folder.join(name);
    fs::write(&file, format!("#!/bin/sh\nPATH=/usr/bin:/bin\nout=$6 in=$7\n{body}\n")).unwrap();
    fs::set_permissions(&file, PermissionsExt::from_mode(0o755)).unwrap();
    Assembler::ptxas(file).limits(limits(TIMEOUT))
}

#[test]
fn it_is_confined_and_its_end_is_told() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let check = |name: &str, body: &str, right: fn(&Result<Vec<u8>, AssembleError>) -> bool| {
        let mut assembler = script(folder.path(), name, body);
        if name.starts_with("a hang") {
            assembler = assembler.limits(limits(Duration::from_secs(2)));
        }
        let ready = assembler.clone().standby(1);
        ready.prepare("sm_90a").unwrap();
        for (how, assembler) in [("started for it", assembler), ("that may have waited", ready)] {
            let begin = Instant::now();
            let result = assembler.assemble(b"text of the kernel", "sm_90a");
            assert!(right(&result), "{name}, {how}: {result:?}");
            assert!(begin.elapsed() < TIMEOUT, "{name}, {how}: {:?}", begin.elapsed());
            if let Err(error) = result {
                assert!(error.to_string().contains(name), "{error}");
            }
        }
    };
    check("a good one", CUBIN, |result| result.as_ref().is_ok_and(|cubin| cubin.len() == 64));
    let arguments = format!(
        r#"[ "$*" = "--gpu-name sm_90a --opt-level 3 --output-file $out $in" ] || exit 9
[ "$(cat "$in")" = "text of the kernel" ] || exit 8
{CUBIN}"#
    );
    check("the arguments", &arguments, |result| result.is_ok());
    check("an error", "echo 'line 7: no such instruction' >&2; exit 3", |result| {
        matches!(result, Err(AssembleError::Refused { status, messages, .. })
            if status.contains('3') && messages == "line 7: no such instruction")
    });
    check("a hang", "sleep 60", |result| matches!(result, Err(AssembleError::Late { .. })));
    check("a hang that ignores signals", "trap '' TERM INT XCPU; while :; do :; done", |result| {
        matches!(result, Err(AssembleError::Late { .. } | AssembleError::Killed { .. }))
    });
    check("a hog of memory", "x=$(head -c 1000000000 /dev/zero | tr '\\0' x) || exit 7", |result| {
        matches!(result, Err(AssembleError::Refused { .. } | AssembleError::Killed { .. }))
    });
    check("a huge cubin", r#"exec cat /dev/zero >"$out""#, |result| {
        matches!(result, Err(AssembleError::Killed { signal: libc::SIGXFSZ, .. }))
    });
    check("huge messages", "while :; do echo no; done", |result| {
        matches!(result, Err(AssembleError::Killed { messages, .. } | AssembleError::Refused { messages, .. })
            if messages.len() < 10_000 && messages.starts_with("no"))
    });
    check(
        "no cubin",
        "exit 0",
        |result| matches!(result, Err(AssembleError::NoCode { reason, .. }) if reason.contains("0 bytes")),
    );
    check("garbage", r#"echo garbage >"$out""#, |result| matches!(result, Err(AssembleError::NoCode { .. })));
    check(
        "a cut cubin",
        r#"printf '\177ELF\002\001' >"$out""#,
        |result| matches!(result, Err(AssembleError::NoCode { reason, .. }) if reason.contains("cut off")),
    );
    check("a crash", "kill -SEGV $$", |result| {
        matches!(result, Err(AssembleError::Killed { signal: libc::SIGSEGV, .. }))
    });
    check(
        "its environment",
        r#"[ -z "$HOME$CARGO_MANIFEST_DIR" ] || exit 4; exit 5"#,
        |result| matches!(result, Err(AssembleError::Refused { status, .. }) if status.contains('5')),
    );

    // A descriptor that any process started here would get.
    let secret = fs::File::open("/dev/null").unwrap();
    rustix::io::fcntl_setfd(&secret, rustix::io::FdFlags::empty()).unwrap();
    check("its descriptors", "ls -l /proc/self/fd && exit 6", |result| {
        let Err(AssembleError::Refused { messages, .. }) = result else { return false };
        let files: Vec<_> = messages.lines().filter_map(|line| Some(line.split_once(" -> ")?.1)).collect();
        let count = |what: &str| files.iter().filter(|file| file.contains(what)).count();
        // Standard input, the messages twice, input and output, the pipe that tells of the starter's end, and the folder that is listed.
        let counts = ["/dev/null", "pipe:", "memfd:", "/proc/"].map(count);
        (files.len(), counts) == (7, [1, 1, 4, 1])
    });

    // What it leaves running goes with it.
    let mark = folder.path().join("mark");
    let body = format!("(sleep 2; echo still here >{}) & exit 1", mark.display());
    script(folder.path(), "leaves a child", &body).assemble(b"", "sm_80").unwrap_err();
    std::thread::sleep(Duration::from_secs(3));
    assert!(!mark.exists(), "a process outlived its assembler");
}

#[test]
fn what_can_not_be_started_says_why() {
    let _alone = alone();
    let missing = Assembler::ptxas("/nowhere/ptxas").assemble(b"", "sm_80").unwrap_err().to_string();
    assert!(missing.contains("/nowhere/ptxas") && missing.contains("No such file"), "{missing}");
    let bare = Assembler::ptxas("ptxas").assemble(b"", "sm_80").unwrap_err().to_string();
    assert!(bare.contains("without its folder"), "{bare}");
    for architecture in ["", "sm_", "90", "sm_90 --help", "sm_90/../..", "sm_123456789"] {
        let refused = Assembler::ptxas("/bin/true").assemble(b"", architecture);
        let named = matches!(&refused, Err(AssembleError::Architecture { name, .. }) if name == architecture);
        assert!(named, "{refused:?}");
    }
}

/// An assembler that says in `log` when it waits for its input and when it has it, both with the number of its process.
/// It opens its input twice, as NVIDIA's does, and gives it back behind the cubin.
const LOGS: &str = r#"echo "waits $$" >>"$0.log"
first=$(cat "$in") && second=$(cat "$in") && [ "$first" = "$second" ] || exit 9
echo "works $$" >>"$0.log"
printf %s "$first" >>"$out""#;

fn logged(folder: &Path, name: &str, what: &str) -> Vec<String> {
    let log = fs::read_to_string(folder.join(format!("{name}.log"))).unwrap_or_default();
    log.lines().filter_map(|line| Some(line.strip_prefix(what)?.trim().to_owned())).collect()
}

fn becomes(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < TIMEOUT, "never seen: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn those_that_wait_do_the_work() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let logged = |what: &str| logged(folder.path(), "waits", what);
    let assembler = script(folder.path(), "waits", &format!("{CUBIN}\n{LOGS}")).standby(2);
    assembler.prepare("sm_90a").unwrap();
    becomes("two that wait", || logged("waits").len() == 2);
    for round in 0..5 {
        let waiting = logged("waits");
        assert_eq!(logged("works").len(), round);
        let text = format!("text of kernel {round}");
        let cubin = assembler.assemble(text.as_bytes(), "sm_90a").unwrap();
        assert_eq!(&cubin[64..], text.as_bytes());
        assert!(waiting.contains(&logged("works")[round]), "it was not one of those that waited");
        becomes("another one that waits", || logged("waits").len() == 3 + round);
    }

    // Somebody ends them: a new one does the work.
    let idle: Vec<_> =
        logged("waits").into_iter().filter(|process| !logged("works").contains(process)).collect();
    assert_eq!(idle.len(), 2);
    for process in &idle {
        let process = rustix::process::Pid::from_raw(process.parse().unwrap()).unwrap();
        rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
    }
    assert_eq!(&assembler.assemble(b"text", "sm_90a").unwrap()[64..], b"text");

    // Threads that share them get their own results.
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let assembler = assembler.clone();
            scope.spawn(move || {
                for kernel in 0..5 {
                    let text = format!("kernel {kernel} of thread {thread}");
                    let cubin = assembler.assemble(text.as_bytes(), "sm_90a").unwrap();
                    assert_eq!(String::from_utf8_lossy(&cubin[64..]), text);
                }
            });
        }
    });

    drop(assembler);
    becomes("their end with the assembler's", || {
        logged("waits").iter().all(|process| !Path::new("/proc").join(process).exists())
    });
    let left = fs::read_dir(std::env::temp_dir()).unwrap().flatten().map(|entry| entry.file_name());
    let ours = format!(".vm-cuda-{}-", std::process::id());
    let left: Vec<_> = left.filter(|name| name.to_string_lossy().starts_with(&ours)).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn one_with_other_habits_is_not_used_for_long() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    // It wants a file that it can read twice, not a FIFO.
    let body = format!(
        r#"habit() {{ cat >/dev/null; [ -p /proc/self/fd/0 ]; }}
if habit <"$in"; then echo "refused $$" >>"$0.log"; exit 1; fi
echo "works $$" >>"$0.log"
{CUBIN}"#
    );
    let assembler = script(folder.path(), "seeks", &body).standby(1);
    for round in 0..12 {
        assembler.assemble(format!("text {round}").as_bytes(), "sm_90a").unwrap();
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(logged(folder.path(), "seeks", "works").len(), 12);
    let refused = logged(folder.path(), "seeks", "refused").len();
    assert!((1..=4).contains(&refused), "{refused} were tried");
}

#[test]
fn what_makes_other_code_is_known_by_another_name() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let first = script(folder.path(), "one", CUBIN);
    let check = |other: &Assembler, same: bool| {
        assert_eq!(first.identity() == other.identity(), same, "{} {}", first.identity(), other.identity());
    };
    check(&first.clone().standby(2), true);
    check(&first.clone().level(0), false);
    check(&script(folder.path(), "another", &format!("{CUBIN} # 2")), false);
    check(&Assembler::driver(first.program(), []), false);
    let before = first.identity();
    script(folder.path(), "one", &format!("{CUBIN} # newer"));
    assert_ne!(first.identity(), before);
}

#[test]
fn one_that_waits_has_no_descriptors_but_its_own() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let body = format!(
        r#"echo waits >>"$0.log"; cat "$in" >/dev/null; list=$(ls -l /proc/self/fd)
{CUBIN}
printf %s "$list" >>"$out""#
    );
    let assembler = script(folder.path(), "lists", &body).standby(2);
    assembler.prepare("sm_90a").unwrap();
    // When the second has been started, the first can be taken.
    becomes("two that wait", || logged(folder.path(), "lists", "waits").len() == 2);
    let cubin = assembler.assemble(b"text", "sm_90a").unwrap();
    let list = String::from_utf8_lossy(&cubin[64..]);
    let files: Vec<_> = list.lines().filter_map(|line| Some(line.split_once(" -> ")?.1)).collect();
    let count = |what: &str| files.iter().filter(|file| file.contains(what)).count();
    // Standard input, the list's pipe and that which tells of the starter's end, the messages, the output, and the folder that is listed.
    let counts = ["/dev/null", "pipe:", "memfd:", "/proc/"].map(count);
    assert_eq!((files.len(), counts), (6, [1, 2, 2, 1]), "{list}");
}

/// NVIDIA's, where there is one.
fn ptxas() -> Result<Assembler, AssembleError> {
    let cache =
        std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache/vm-jit/ptxas/13.0/ptxas"));
    match cache {
        Some(file) if file.exists() => Ok(Assembler::ptxas(file)),
        _ => Assembler::find(),
    }
}

#[test]
fn the_real_one_makes_a_cubin() {
    let _alone = alone();
    let assembler = match ptxas() {
        Ok(assembler) => assembler,
        Err(error) => return println!("skipped: {error}"),
    };
    let text = ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 p) { ret; }\n";
    let cubin = assembler.assemble(text.as_bytes(), "sm_90a").unwrap();
    assert!(cubin.len() > 500 && cubin.starts_with(b"\x7fELF"));
    let ready = assembler.clone().standby(2);
    for _ in 0..5 {
        assert_eq!(ready.assemble(text.as_bytes(), "sm_90a").unwrap(), cubin);
    }
    let bad = assembler.assemble(text.replace("ret", "return").as_bytes(), "sm_90a").unwrap_err();
    assert!(matches!(&bad, AssembleError::Refused { messages, .. } if messages.contains("line 4")), "{bad}");
    let small = assembler.limits(Limits { memory: 16 << 20, ..Limits::default() });
    let small = small.assemble(text.as_bytes(), "sm_90a").unwrap_err();
    assert!(!matches!(small, AssembleError::NoCode { .. }), "{small}");
}
