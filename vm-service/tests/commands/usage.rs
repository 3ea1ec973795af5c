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
    check("lisst", "some similar subcommands exist: 'i', 'list'");
    check("list --al", "a similar argument exists: '--all'");
    check("info", "<ADDR>");
    check("info 65:00", "`65:00` is not a PCI address: it has no function number after a `.`");
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
