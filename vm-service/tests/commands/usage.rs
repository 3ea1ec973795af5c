//! Command lines that are wrong.

use super::host::workstation;
use super::vm_service;

#[test]
fn wrong_command_lines_have_status_2_and_say_why() {
    let host = workstation().plain_host();
    let check = |args: &str, expect: &str| {
        let got = vm_service(&host, args);
        assert_eq!((got.exit, got.out.as_str()), (2, ""), "{args}: {}", got.err);
        assert!(got.err.contains(expect), "{args}: {}", got.err);
    };
    check("", "Usage: vm-service");
    check("lisst", "some similar subcommands exist: 'claims', 'i', 'list'");
    check("list --al", "a similar argument exists: '--all'");
    check("info", "<ADDR|npu:N>");
    check("run a.toml --vcpus 0", "invalid value '0' for '--vcpus <NUMBER>': write a number from 1 to 255");
    check("run a.toml --vcpus 256", "write a number from 1 to 255");
    check(
        "run a.toml --memory 3M",
        "'--memory <SIZE>': it is not a multiple of 2M; write a size from 2M to 16T",
    );
    check("run a.toml --memory 512", "it does not end in K, M, G or T; write a size");
    check("run a.toml --memory 17T", "it is too large; write a size");
    check("run a.toml --console pty=", "write stdio, stdio=raw, none, pty, pty=LINK or file=PATH");
    check("claim", "<ADDR>...");
    check("claim --restore 65:00.0", "cannot be used with");
    check("claim --restore --persist", "cannot be used with");
    check("release", "<ADDR>...");
    check("release --all 65:00.0", "cannot be used with");
    check("completions bash --json", "prints a script for a shell, not JSON");
    check("run /\u{1b}[31m.toml", "/\u{fffd}[31m.toml");
    check(
        "info 65:00",
        "`65:00` is not a PCI address: that is a slot, whose functions have a number after a `.`",
    );
}

#[test]
fn help_and_version_are_answers() {
    let host = workstation().plain_host();
    for args in ["--help", "--version", "help", "list --help"] {
        let got = vm_service(&host, args);
        assert_eq!((got.exit, got.err.as_str()), (0, ""), "{args}");
        assert!(got.out.contains("vm-service"), "{args}: {}", got.out);
    }
}

/// VMADDR_PORT_ANY has the server listen at a port that nobody knows.
#[test]
fn the_wildcard_is_not_a_vsock_port() {
    let serve = |port: &str| {
        let args = format!("bridge serve --vsock {port} --driver /nonexistent --log-dir /nonexistent");
        vm_service(&vm_passthrough::Host::system(), &args)
    };
    for port in ["4294967295", "4294967296"] {
        let got = serve(port);
        assert!(got.exit == 2 && got.err.contains("0..=4294967294"), "{got:?}");
    }
}
