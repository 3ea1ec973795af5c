//! What is printed on a terminal.

use std::fs::File;
use std::io::Read as _;
use std::process::{Command, Stdio};

use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use vm_passthrough::sim::{SimFunction, SimHost};

use super::host::{address, workstation};

/// What `vm-service ARGS` prints, both streams together, on a terminal with lines of `columns` characters.
fn on_terminal(sim: Option<&SimHost>, args: &str, columns: u16, environment: &[(&str, &str)]) -> String {
    let controller = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a pseudo-terminal");
    unlockpt(&controller).expect("unlocked");
    let name = ptsname(&controller, Vec::new()).expect("a name");
    let terminal =
        rustix::fs::open(name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).expect("the terminal");
    tcsetwinsize(&terminal, Winsize { ws_row: 25, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 })
        .expect("a size");
    let mut child = Command::new(env!("CARGO_BIN_EXE_vm-service"))
        .args(args.split_whitespace())
        .args(sim.into_iter().flat_map(|sim| ["--root".as_ref(), sim.root().as_os_str()]))
        .env_remove("RUST_LOG")
        .env_remove("NO_COLOR")
        .env("TERM", "xterm")
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .stdout(terminal.try_clone().expect("a descriptor"))
        .stderr(terminal)
        .spawn()
        .expect("vm-service");
    // It ends in an error once nobody has the terminal.
    let mut bytes = Vec::new();
    let _ = File::from(controller).read_to_end(&mut bytes);
    child.wait().expect("its end");
    String::from_utf8(bytes).expect("text").replace("\r\n", "\n")
}

#[test]
fn lines_fit_the_terminal() {
    let sim = workstation();
    sim.add_driver("e1000e").expect("a driver");
    sim.add(&SimFunction::network(address("0000:04:00.0")).group(14).driver("e1000e")).expect("a function");
    for args in ["list", "list --all", "explain 0000:02:00.0", "info 0000:01:00.0"] {
        let piped = super::vm_service(&sim.plain_host(), args).out;
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        for columns in [60, 80] {
            let shown = on_terminal(Some(&sim), args, columns, &[]);
            // A path of the simulated host is longer than one of `/sys`, and not broken.
            let root = sim.root().display().to_string();
            let longest = shown.lines().filter(|line| !line.contains(&root));
            let longest = longest.map(|line| line.chars().count()).max();
            assert!(longest <= Some(columns.into()), "{args} at {columns}:\n{shown}");
            if args == "explain 0000:02:00.0" {
                assert_eq!(words(&shown), words(&piped), "{columns}");
            }
        }
        // One that is wide enough, or does not say how wide it is, shows what a pipe gets.
        for columns in [0, 300] {
            assert_eq!(
                words(&on_terminal(Some(&sim), args, columns, &[])),
                words(&piped),
                "{args} at {columns}"
            );
        }
    }
    let shown = on_terminal(Some(&sim), "list", 60, &[]);
    assert_eq!(
        shown,
        "ADDRESS       ID\n  NAME                                         TYPE\n  GROUP  DRIVER  LINK         NUMA  READY\n\
         0000:01:00.0  10de:2684\n  NVIDIA Corporation AD102 [GeForce RTX 4090]  GPU NVIDIA\n  13     nvidia  2.5 GT/s x8  0     yes\n"
    );
}

#[test]
fn the_log_has_colours_where_they_are_wanted() {
    let sim = workstation();
    for (environment, is_coloured) in [
        (&[][..], true),
        (&[("NO_COLOR", "1")], false),
        (&[("NO_COLOR", "")], true),
        (&[("TERM", "dumb")], false),
    ] {
        let text = on_terminal(Some(&sim), "list -v", 200, environment);
        assert_eq!(text.contains('\u{1b}'), is_coloured, "{environment:?}: {text}");
    }
}

#[test]
fn verbose_commands_report_their_steps() {
    let sim = workstation();
    let check = |args: &str, environment: &[(&str, &str)], parts: &[&str], absent: &[&str]| {
        let text = on_terminal(Some(&sim), args, 300, &[&[("NO_COLOR", "1")], environment].concat());
        for part in parts {
            assert!(text.contains(part), "{args} {environment:?}: no `{part}` in {text}");
        }
        for part in absent {
            assert!(!text.contains(part), "{args} {environment:?}: `{part}` in {text}");
        }
    };
    let (debug, trace) = ("DEBUG", "TRACE");
    check("list", &[], &["ADDRESS"], &[debug]);
    check("list -v", &[], &["DEBUG 7 PCI functions found", "DEBUG 0000:01:00.0: ready, judged in"], &[trace]);
    check("list -vv", &[], &["TRACE vm_passthrough::pci::scan: read address=0000:03:00.0"], &[]);
    check("list", &[("RUST_LOG", "vm_service=debug")], &["7 PCI functions found"], &[trace]);
    check("list -vv", &[("RUST_LOG", "warn")], &["ADDRESS"], &[debug, trace]);
    let cache = tempfile::tempdir().expect("a folder");
    let environment = [("XDG_CACHE_HOME", cache.path().to_str().expect("a path")), ("NO_COLOR", "1")];
    let launch =
        "launch tests/two.vir --kernel shift --device cpu --grid 1 --arg x=i32[4]=zeros --arg by=7 -v";
    for how in [", compiled, loaded in", ", from the cache, loaded in"] {
        let text = on_terminal(None, launch, 300, &environment);
        for part in ["DEBUG the device is ", how, "16 bytes of tensors copied to the device", "DEBUG ran in "]
        {
            assert!(text.contains(part), "no `{part}` in {text}");
        }
    }
}
