//! `vfs`: virtual functions, from the one that has none to the one that is removed.

use vm_passthrough::sim::{SimDrivers, SimFunction, SimHost};

use super::host::address;
use super::{check, vm_service};

#[test]
fn lists_creates_and_removes_virtual_functions() {
    let sim = SimHost::new().expect("a host");
    let host = SimDrivers::new(&sim).host();
    check(&host, "vfs list", "no function of this host supports SR-IOV\n");
    sim.add(&SimFunction::nvme(address("01:00.0")).group(1).sriov(4).driver("nvme")).expect("a function");
    check(
        &host,
        "vfs list",
        "\
PHYSICAL      VFS     VIRTUAL  GROUP  DRIVER
0000:01:00.0  0 of 4  -        -      -
",
    );
    let refused = |args: &str, exit: u8, expect: &str| {
        let got = vm_service(&host, args);
        assert!(got.exit == exit && got.out.is_empty() && got.err.contains(expect), "{args}: {got:?}");
    };
    refused("vfs create 01:00.0 5", 1, "from 1 to 4 virtual functions, not 5");
    refused("vfs create 01:00.0 70000", 2, "70000");
    refused("vfs", 2, "create");
    let two = "\
PHYSICAL      VFS     VIRTUAL       GROUP  DRIVER
0000:01:00.0  2 of 4  0000:01:00.1  65793  -
0000:01:00.0  2 of 4  0000:01:00.2  65794  -
";
    check(&host, "vfs create 01:00.0 2", two);
    check(&host, "vfs list", two);
    let json = vm_service(&host, "vfs create 01:00.0 2 --json").out;
    let got: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    let expect = serde_json::json!([{
        "address": "0000:01:00.0", "total_vfs": 4, "functions": ["0000:01:00.1", "0000:01:00.2"]
    }]);
    assert_eq!(got["physical"], expect, "{json}");

    assert_eq!(vm_service(&host, "claim 01:00.2").exit, 0);
    refused("vfs remove 01:00.0 --force", 1, "0000:01:00.2 is claimed already by process");
    assert_eq!(vm_service(&host, "release 01:00.2").exit, 0);
    check(
        &host,
        "vfs remove 01:00.0",
        "\
PHYSICAL      VFS     VIRTUAL  GROUP  DRIVER
0000:01:00.0  0 of 4  -        -      -
",
    );
}
