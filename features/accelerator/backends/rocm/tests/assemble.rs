//! LLVM's processes: what they are kept from, and what is said of them. They are scripts, except for one case with LLVM's.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use vm_rocm::assemble::{AssembleError, Assembler, Limits};

/// The smallest file that is taken for a code object of no kernels for a chip that is not known.
const CODE: &str = r"printf '\177ELF\002\001\001\100\003\0\0\0\0\0\0\0\003\0\340\0\001\0\0\0'
head -c 40 /dev/zero";

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

fn script(folder: &Path, name: &str, body: &str) -> PathBuf {
    let file = folder.join(name);
    let text = format!("#!/bin/sh\nPATH=/usr/bin:/bin\nfor in in \"$@\"; do :; done\n{body}\n");
    fs::write(&file, text).unwrap();
    fs::set_permissions(&file, PermissionsExt::from_mode(0o755)).unwrap();
    file
}

type Outcome = Result<Vec<u8>, AssembleError>;

/// That a program which is a script ends right, each time as the first of the two and as the second.
fn check(name: &str, body: &str, right: fn(&Outcome) -> bool) {
    let folder = tempfile::tempdir().unwrap();
    let good = script(folder.path(), "good", &format!("cat \"$in\" >/dev/null\n{CODE}"));
    let tried = script(folder.path(), name, body);
    let time = if name.starts_with("a hang") { Duration::from_secs(2) } else { TIMEOUT };
    for (how, assembler) in
        [("compiles", Assembler::llvm(&tried, &good)), ("links", Assembler::llvm(&good, &tried))]
    {
        let begin = Instant::now();
        let result = assembler.limits(limits(time)).assemble(b"text of the kernel", "gfx7");
        assert!(right(&result), "{name}, {how}: {result:?}");
        assert!(begin.elapsed() < TIMEOUT, "{name}, {how}: {:?}", begin.elapsed());
        if let Err(error) = result {
            assert!(error.to_string().contains(name), "{error}");
        }
    }
}

#[test]
fn they_are_confined_and_their_end_is_told() {
    let _alone = alone();
    check("a good one", CODE, |result| result.as_ref().is_ok_and(|code| code.len() == 64));
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
    check("a huge object", "exec cat /dev/zero", |result| {
        matches!(result, Err(AssembleError::Killed { signal: libc::SIGXFSZ, .. }))
    });
    check("huge messages", "while :; do echo no >&2; done", |result| {
        matches!(result, Err(AssembleError::Killed { messages, .. } | AssembleError::Refused { messages, .. })
            if messages.len() < 10_000 && messages.starts_with("no"))
    });
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
    check("its descriptors", "ls -l /proc/self/fd >&2; exit 6", |result| {
        let Err(AssembleError::Refused { messages, .. }) = result else { return false };
        let files: Vec<_> = messages.lines().filter_map(|line| Some(line.split_once(" -> ")?.1)).collect();
        let count = |what: &str| files.iter().filter(|file| file.contains(what)).count();
        // Standard input, the messages twice, the input, the pipe that tells of the starter's end, and the folder that is listed.
        let counts = ["/dev/null", "pipe:", "memfd:", "/proc/"].map(count);
        (files.len(), counts) == (6, [1, 1, 3, 1])
    });
}

#[test]
fn what_they_write_is_looked_at() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let good = script(folder.path(), "good", CODE);
    let check = |name: &str, body: &str, ir: &str, chip: &str, says: &str| {
        let linker = script(folder.path(), name, body);
        let result = Assembler::llvm(&good, linker).limits(limits(TIMEOUT)).assemble(ir.as_bytes(), chip);
        match result {
            Err(AssembleError::NoCode { reason, .. }) => assert!(reason.contains(says), "{name}: {reason}"),
            other => panic!("{name}: {other:?}"),
        }
    };
    let kernel = "define amdgpu_kernel void @k() {";
    check("nothing", "exit 0", "", "gfx7", "0 bytes");
    check("garbage", "echo garbage", "", "gfx7", "8 bytes");
    check("a cut one", r"printf '\177ELF\002\001'", "", "gfx7", "cut off");
    check("another machine's", &CODE.replace(r"\340", r"\076"), "", "gfx7", "no code object");
    check("no shared one", &CODE.replace(r"\0\003\0", r"\0\001\0"), "", "gfx7", "no code object");
    check("another chip's", CODE, "", "gfx942", "not for gfx942");
    check("one without the kernel", CODE, kernel, "gfx7", "no kernel k");
}

#[test]
fn the_arguments_are_what_llvm_takes() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let llc = format!(
        r#"[ "$*" = "-mtriple=amdgcn-amd-amdhsa -mcpu=gfx7 -O2 -filetype=obj -o - $in" ] || exit 9
[ "$(cat "$in")" = "text of the kernel" ] || exit 8
{CODE}"#
    );
    let lld = format!(
        r#"[ "$*" = "-shared --threads=1 -o - $in" ] || exit 7
[ "$(wc -c <"$in")" = 64 ] || exit 6
{CODE}"#
    );
    let (llc, lld) = (script(folder.path(), "llc", &llc), script(folder.path(), "lld", &lld));
    Assembler::llvm(llc, lld).limits(limits(TIMEOUT)).assemble(b"text of the kernel", "gfx7").unwrap();
}

#[test]
fn what_can_not_be_started_says_why() {
    let missing =
        Assembler::llvm("/nowhere/llc", "/bin/true").assemble(b"", "gfx942").unwrap_err().to_string();
    assert!(missing.contains("/nowhere/llc") && missing.contains("No such file"), "{missing}");
    for chip in ["", "gfx", "942", "gfx942 --help", "gfx942:xnack+", "gfx123456789"] {
        let refused = Assembler::llvm("/bin/true", "/bin/true").assemble(b"", chip);
        let named = matches!(&refused, Err(AssembleError::Architecture { name, .. }) if name == chip);
        assert!(named, "{refused:?}");
    }
}

#[test]
fn what_makes_other_code_is_known_by_another_name() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let (one, other) = (script(folder.path(), "one", CODE), script(folder.path(), "other", &CODE.repeat(2)));
    let first = Assembler::llvm(&one, &one);
    let check = |other: &Assembler, same: bool| {
        assert_eq!(first.identity() == other.identity(), same, "{} {}", first.identity(), other.identity());
    };
    check(&first.clone().limits(limits(TIMEOUT)), true);
    check(&first.clone().level(3), false);
    check(&Assembler::llvm(&one, &other), false);
    check(&Assembler::llvm(&other, &one), false);
    let before = first.identity();
    script(folder.path(), "one", &format!("{CODE} # newer"));
    assert_ne!(first.identity(), before);
}

#[test]
fn the_real_one_makes_a_code_object() {
    let _alone = alone();
    let assembler = match Assembler::find() {
        Ok(assembler) => assembler,
        Err(error) => return println!("skipped: {error}"),
    };
    let libraries = vm_assemble::find::libraries(assembler.program());
    assert!(libraries.iter().any(|path| path.to_string_lossy().contains("libc.so")), "{libraries:?}");
    let known =
        libraries.iter().all(|path| assembler.identity().contains(&vm_assemble::find::identity(path)));
    assert!(known, "{libraries:?}: {}", assembler.identity());
    let ir = "define amdgpu_kernel void @k(ptr addrspace(1) %p) {\n  store i32 7, ptr addrspace(1) %p\n  ret void\n}\n";
    for chip in ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "gfx1030"] {
        let code = assembler.assemble(ir.as_bytes(), chip).unwrap();
        assert!(code.len() > 500 && code.starts_with(b"\x7fELF"));
        assert_eq!(assembler.assemble(ir.as_bytes(), chip).unwrap(), code, "the same code each time");
    }
    let bad = assembler.assemble(ir.replace("ret void", "return").as_bytes(), "gfx942").unwrap_err();
    assert!(matches!(&bad, AssembleError::Refused { messages, .. } if messages.contains(":3:")), "{bad}");
    for (words, fits) in [(1000, true), (2000, false)] {
        let ir = format!(
            "define amdgpu_kernel void @k(ptr addrspace(1) %p, i32 %n) {{\n\
             %a = alloca [{words} x i32], addrspace(5)\n\
             %at = getelementptr [{words} x i32], ptr addrspace(5) %a, i32 0, i32 %n\n\
             store volatile i32 7, ptr addrspace(5) %at\n\
             %got = load volatile i32, ptr addrspace(5) %a\n\
             store i32 %got, ptr addrspace(1) %p\n  ret void\n}}\n"
        );
        for chip in ["gfx942", "gfx1201"] {
            match assembler.assemble(ir.as_bytes(), chip) {
                Ok(_) => assert!(fits, "{words} words"),
                Err(error) => assert!(!fits && error.to_string().contains("kernel k spills 80"), "{error}"),
            }
        }
    }
    let small = assembler.clone().limits(Limits { memory: 16 << 20, ..Limits::default() });
    let small = small.assemble(ir.as_bytes(), "gfx942").unwrap_err();
    assert!(!matches!(small, AssembleError::NoCode { .. }), "{small}");
    let hasty = assembler.limits(Limits { time: Duration::from_millis(1), ..Limits::default() });
    let hasty = hasty.assemble(ir.as_bytes(), "gfx942").unwrap_err();
    assert!(matches!(hasty, AssembleError::Late { .. }), "{hasty}");
}
