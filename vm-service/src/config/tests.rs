//! Every mistake in a guest file has its exact message.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::*;

fn parse(text: &str) -> Result<GuestConfig, ConfigError> {
    GuestConfig::parse(text, Path::new("/etc/guests/web1.toml"))
}

const TOKEN: &str = "2ab74924-c335-45f4-9b16-8569e5b08258";

const FULL: &str = r#"
name = "web1"
vcpus = 4
memory = "4G"
hugepages = "1G"
numa_nodes = [1, 0]
peer_to_peer = false
hot_plug_slots = 2
unconfined = ["user"]

[boot]
kernel = "/boot/vmlinuz"
initrd = "web1/initrd.img"
cmdline = "console=ttyS0 root=/dev/vda"

[[devices]]
address = "0000:65:00.0"
rom = "web1/gpu.rom"
bars = { 0 = "256M", 4 = "32G" }

[[devices]]
address = "e1:00.0"
rom = "none"
vf_token = "2ab74924-c335-45f4-9b16-8569e5b08258"

[[accelerators]]
device = "66:00.0"
memory = "2G"
deadline = "500ms"
time_slice = "20ms"
poll = "0us"
window = "8M"
trust = "driver"
driver = "libcuda.so.1"
host_memory = "1G"
unconfined = ["calls", "files"]

[[accelerators]]
device = "cpu"
memory = "64M"
window = "16M"
trust = "driver"

[[accelerators]]
device = "npu:0"
memory = "256M"
window = "2M"
trust = "kernels"

[vsock]
cid = 42

[[disks]]
path = "web1/root.raw"

[[disks]]
path = "../shared.raw"
read_only = true

[[net]]
tap = "web1"

[[net]]
tap = "br0-2"
mac = "52:54:00:12:34:56"
vhost = false
"#;

#[test]
fn reads_every_key() {
    let settings = |rom, bars: &[(u8, u64)]| DeviceSettings {
        rom: Some(rom),
        bars: bars.iter().copied().collect(),
        vf_token: bars.is_empty().then(|| TOKEN.parse().expect("a token")),
    };
    let address = |text: &str| text.parse().expect("an address");
    let expect = GuestConfig {
        name: "web1".into(),
        vcpus: 4,
        memory: 4 << 30,
        hugepages: Some(1 << 30),
        numa_nodes: Some(vec![1, 0]),
        boot: Boot {
            kernel: "/boot/vmlinuz".into(),
            initrd: Some("/etc/guests/web1/initrd.img".into()),
            cmdline: "console=ttyS0 root=/dev/vda".into(),
        },
        devices: vec![address("0000:65:00.0"), address("0000:e1:00.0")],
        settings: BTreeMap::from([
            (
                address("0000:65:00.0"),
                settings(
                    RomSetting::File("/etc/guests/web1/gpu.rom".into()),
                    &[(0, 256 << 20), (4, 32 << 30)],
                ),
            ),
            (address("0000:e1:00.0"), settings(RomSetting::Hidden, &[])),
        ]),
        peer_to_peer: false,
        hot_plug_slots: Some(2),
        accelerators: vec![
            SharedAccelerator {
                device: AcceleratorDevice::Pci(address("0000:66:00.0")),
                memory: 2 << 30,
                deadline: Duration::from_millis(500),
                time_slice: Duration::from_millis(20),
                poll: Duration::ZERO,
                window: Some(8 << 20),
                trust: Trust::Driver {
                    library: Some("/etc/guests/libcuda.so.1".into()),
                    host_memory: Some(1 << 30),
                },
                unconfined: vec![Measure::Calls, Measure::Files],
            },
            SharedAccelerator {
                device: AcceleratorDevice::Cpu,
                memory: 64 << 20,
                deadline: Duration::from_secs(2),
                time_slice: TIME_PERIOD,
                poll: Duration::from_micros(200),
                window: Some(16 << 20),
                trust: Trust::Driver { library: None, host_memory: None },
                unconfined: Vec::new(),
            },
            SharedAccelerator {
                device: AcceleratorDevice::Npu(0),
                memory: 256 << 20,
                deadline: Duration::from_secs(2),
                time_slice: TIME_PERIOD,
                poll: Duration::from_micros(200),
                window: Some(2 << 20),
                trust: Trust::Kernels,
                unconfined: Vec::new(),
            },
        ],
        vsock: Some(Vsock { cid: 42 }),
        disks: vec![
            Disk { path: "/etc/guests/web1/root.raw".into(), read_only: false },
            Disk { path: "/etc/guests/../shared.raw".into(), read_only: true },
        ],
        nets: vec![
            Net { tap: "web1".into(), mac: None, vhost: None },
            Net {
                tap: "br0-2".into(),
                mac: Some(MacAddress([0x52, 0x54, 0, 0x12, 0x34, 0x56])),
                vhost: Some(false),
            },
        ],
        unconfined: vec![Measure::User],
    };
    assert_eq!(parse(FULL).expect("a guest"), expect);
}

/// A mistake in a token, or on its line, does not show it.
#[test]
fn a_token_is_not_shown() {
    let guest = |device: &str| format!("name = \"a\"\nmemory = \"64M\"\nboot.kernel = \"k\"\n{device}");
    for (device, expect) in [
        (
            "[[devices]]\naddress = \"65:00.0\"\nvf_token = \"2ab74924-secret\"",
            "6:12: `devices[0].vf_token` is none; write a UUID",
        ),
        (
            "[[devices]]\naddress = \"65:00.0\"\nvf_token = [\"secret\"]",
            "6:12: `devices[0].vf_token` is an array;",
        ),
        ("devices = [{ address = \"secret\", vf_token = \"secret\" }]", "4:24: `devices[0].address`"),
    ] {
        let error = parse(&guest(device)).expect_err(device).to_string();
        assert!(error.contains(expect), "{error}");
        assert!(!error.contains("vf_token = "), "{error}");
    }
    let config = parse(&guest(&format!("[[devices]]\naddress = \"65:00.0\"\nvf_token = \"{TOKEN}\"")))
        .expect("a guest");
    assert!(!format!("{config:?}").contains("c335"));
    assert!(!serde_json::to_string(&config).expect("JSON").contains("c335"));
}

#[test]
fn leaves_out_what_may_be_missing() {
    let guest = parse("name = \"a\"\nmemory = \"2M\"\nboot.kernel = \"k\"").expect("a guest");
    assert_eq!(
        guest,
        GuestConfig {
            name: "a".into(),
            vcpus: 1,
            memory: 2 << 20,
            hugepages: None,
            numa_nodes: None,
            boot: Boot { kernel: PathBuf::from("/etc/guests/k"), initrd: None, cmdline: String::new() },
            devices: vec![],
            settings: BTreeMap::new(),
            peer_to_peer: true,
            hot_plug_slots: None,
            accelerators: vec![],
            vsock: None,
            disks: vec![],
            nets: vec![],
            unconfined: vec![],
        }
    );
}

/// `change` applied to a guest file in order, checked against the whole message.
fn check(text: &str, expect: &str) {
    let got = match parse(text) {
        Ok(guest) => panic!("accepted as {guest:?}:\n{text}"),
        Err(error) => error.to_string().replace("/etc/guests/", ""),
    };
    assert_eq!(got, expect.trim_matches('\n'), "\n--- got\n{got}\n--- for\n{text}");
}

/// A guest file in order, with `lines` added.
fn with(lines: &str) -> String {
    let rest = [("name", "name = \"a\""), ("memory", "memory = \"64M\""), ("boot", "boot.kernel = \"k\"")];
    let has = |key| lines.starts_with(key) || lines.starts_with(&format!("[{key}]"));
    let mut text = String::new();
    for (_, line) in rest.iter().filter(|(key, _)| !has(key)) {
        text += &format!("{line}\n");
    }
    text + lines
}

#[test]
fn every_mistake_has_its_message() {
    check(
        &with(r#"name = """#),
        r#"
web1.toml:3:8: `name` is empty; use 1 to 64 letters, digits, `-` and `_`, of which the first is not `-`
  3 | name = ""
    |        ^^
"#,
    );
    check(
        &with(r#"name = "-a""#),
        r#"
web1.toml:3:8: `name` starts with `-`; use 1 to 64 letters, digits, `-` and `_`, of which the first is not `-`
  3 | name = "-a"
    |        ^^^^
"#,
    );
    check(
        &with(r#"unconfined = ["user", "calls"]"#),
        r#"
web1.toml:4:14: `unconfined` has something else; write a list of "user", "files", each once, or leave it out
  4 | unconfined = ["user", "calls"]
    |              ^^^^^^^^^^^^^^^^^
"#,
    );
    check(
        &with(r#"name = "a b""#),
        r#"
web1.toml:3:8: `name` has a character that is not allowed; use 1 to 64 letters, digits, `-` and `_`, of which the first is not `-`
  3 | name = "a b"
    |        ^^^^^
"#,
    );
    check(
        &with(r#"name = "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx""#),
        r#"
web1.toml:3:8: `name` is too long; use 1 to 64 letters, digits, `-` and `_`, of which the first is not `-`
  3 | name = "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
    |        ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
"#,
    );
    check(
        &with("name = 3"),
        "
web1.toml:3:8: `name` is a number; use 1 to 64 letters, digits, `-` and `_`, of which the first is not `-`
  3 | name = 3
    |        ^
",
    );
    check(
        r#"memory = "64M"
boot.kernel = "k""#,
        r#"
web1.toml:1:1: `name` is missing; write name = "NAME"
"#,
    );
    check(
        &with("vcpus = 0"),
        "
web1.toml:4:9: `vcpus` is 0; write a number from 1 to 255
  4 | vcpus = 0
    |         ^
",
    );
    check(
        &with("hugepages = \"4K\""),
        r#"
web1.toml:4:13: `hugepages` is "4K"; write "2M" or "1G", or leave it out
  4 | hugepages = "4K"
    |             ^^^^
"#,
    );
    check(
        &with("hugepages = 2"),
        r#"
web1.toml:4:13: `hugepages` is a number; write "2M" or "1G", or leave it out
  4 | hugepages = 2
    |             ^
"#,
    );
    check(
        &with("hugepages = \"1G\""),
        r#"
web1.toml:2:10: `memory` is "64M", no whole number of pages of 1G; write a multiple of 1G, or other `hugepages`
  2 | memory = "64M"
    |          ^^^^^
"#,
    );
    for wrong in ["1", "[65536]", "[-1]", "[0, 0]", "[\"0\"]", "[0, 1, 2, 3, 4, 5, 6, 7, 8]"] {
        let text = with(&format!("numa_nodes = {wrong}"));
        let error = GuestConfig::parse(&text, Path::new("web1.toml")).unwrap_err().to_string();
        assert!(error.starts_with("web1.toml:4:14: `numa_nodes` is "), "{wrong}: {error}");
    }
    check(
        &with("hot_plug_slots = 17"),
        r#"
web1.toml:4:18: `hot_plug_slots` is 17; write a number from 0 to 16
  4 | hot_plug_slots = 17
    |                  ^^
"#,
    );
    check(
        &with("vcpus = 256"),
        "
web1.toml:4:9: `vcpus` is 256; write a number from 1 to 255
  4 | vcpus = 256
    |         ^^^
",
    );
    check(
        &with("vcpus = -1"),
        "
web1.toml:4:9: `vcpus` is -1; write a number from 1 to 255
  4 | vcpus = -1
    |         ^^
",
    );
    check(
        &with("vcpus = 0x1ff"),
        "
web1.toml:4:9: `vcpus` is 0x1ff; write a number from 1 to 255
  4 | vcpus = 0x1ff
    |         ^^^^^
",
    );
    check(
        &with(r#"vcpus = "4""#),
        r#"
web1.toml:4:9: `vcpus` is a string; write a number from 1 to 255
  4 | vcpus = "4"
    |         ^^^
"#,
    );
    check(
        &with("vcpus = 1.5"),
        "
web1.toml:4:9: `vcpus` is a number with a fraction; write a number from 1 to 255
  4 | vcpus = 1.5
    |         ^^^
",
    );
    check(
        r#"name = "a"
boot.kernel = "k""#,
        r#"
web1.toml:1:1: `memory` is missing; write memory = "512M"
"#,
    );
    check(
        &with("memory = 512"),
        r#"
web1.toml:3:10: `memory` is a number; write a size from 2M to 16T in steps of 2M, as in "512M" or "4G"
  3 | memory = 512
    |          ^^^
"#,
    );
    check(
        &with(r#"memory = "512""#),
        r#"
web1.toml:3:10: `memory` is "512", which does not end in K, M, G or T; write a size from 2M to 16T in steps of 2M, as in "512M" or "4G"
  3 | memory = "512"
    |          ^^^^^
"#,
    );
    check(
        &with(r#"memory = "1.5G""#),
        r#"
web1.toml:3:10: `memory` is "1.5G", which is not a whole number before its unit; write a size from 2M to 16T in steps of 2M, as in "512M" or "4G"
  3 | memory = "1.5G"
    |          ^^^^^^
"#,
    );
    check(
        &with(r#"memory = "3M""#),
        r#"
web1.toml:3:10: `memory` is "3M", which is not a multiple of 2M; write a size from 2M to 16T in steps of 2M, as in "512M" or "4G"
  3 | memory = "3M"
    |          ^^^^
"#,
    );
    check(
        &with(r#"memory = "1M""#),
        r#"
web1.toml:3:10: `memory` is "1M", which is too small; write a size from 2M to 16T in steps of 2M, as in "512M" or "4G"
  3 | memory = "1M"
    |          ^^^^
"#,
    );
    check(
        &with(r#"memory = "17T""#),
        r#"
web1.toml:3:10: `memory` is "17T", which is too large; write a size from 2M to 16T in steps of 2M, as in "512M" or "4G"
  3 | memory = "17T"
    |          ^^^^^
"#,
    );
    check(
        &with(r#"memory = "99999999999T""#),
        r#"
web1.toml:3:10: `memory` is "99999999999T", which is too large; write a size from 2M to 16T in steps of 2M, as in "512M" or "4G"
  3 | memory = "99999999999T"
    |          ^^^^^^^^^^^^^^
"#,
    );
    check(
        r#"name = "a"
memory = "64M""#,
        r#"
web1.toml:1:1: `boot` is missing; write a table [boot] with kernel = "PATH"
"#,
    );
    check(
        &with(r#"boot = "vmlinuz""#),
        r#"
web1.toml:3:8: `boot` is a string; write it as a table: [boot]
  3 | boot = "vmlinuz"
    |        ^^^^^^^^^
"#,
    );
    check(
        &with(
            r#"[boot]
cmdline = "quiet""#,
        ),
        r#"
web1.toml:3:1: `boot.kernel` is missing; write kernel = "PATH" of a bzImage, vmlinux or ELF program
  3 | [boot]
    | ^^^^^^
"#,
    );
    check(
        &with(
            r#"[boot]
kernel = """#,
        ),
        r#"
web1.toml:4:10: `boot.kernel` is empty; write a path; a relative one starts at this file's directory
  4 | kernel = ""
    |          ^^
"#,
    );
    check(
        &with(
            r#"[boot]
kernel = ["k"]"#,
        ),
        r#"
web1.toml:4:10: `boot.kernel` is an array; write a path; a relative one starts at this file's directory
  4 | kernel = ["k"]
    |          ^^^^^
"#,
    );
    check(
        &with(
            r#"[boot]
kernel = "a\u0000b""#,
        ),
        r#"
web1.toml:4:10: `boot.kernel` has a control character; write a path; a relative one starts at this file's directory
  4 | kernel = "a\u0000b"
    |          ^^^^^^^^^^
"#,
    );
    check(
        &with(
            r#"[boot]
kernel = "k"
initrd = true"#,
        ),
        "
web1.toml:5:10: `boot.initrd` is true or false; write a path; a relative one starts at this file's directory
  5 | initrd = true
    |          ^^^^
",
    );
    check(
        &with(
            r#"[boot]
kernel = "k"
cmdline = """
a
b""""#,
        ),
        r#"
web1.toml:5:11: `boot.cmdline` has a control character; write at most 2047 bytes on one line, as in "console=ttyS0"
  5 | cmdline = """
    |           ^^^
"#,
    );
    check(
        &with(
            r#"[boot]
kernel = "k"
cmdline = 2026-11-21"#,
        ),
        r#"
web1.toml:5:11: `boot.cmdline` is a date or time; write at most 2047 bytes on one line, as in "console=ttyS0"
  5 | cmdline = 2026-11-21
    |           ^^^^^^^^^^
"#,
    );
    check(
        &with(r#"devices = "0000:65:00.0""#),
        r#"
web1.toml:4:11: `devices` is a string; write [[devices]] with address = "0000:65:00.0" for each
  4 | devices = "0000:65:00.0"
    |           ^^^^^^^^^^^^^^
"#,
    );
    check(
        &with(r#"devices = ["0000:65:00.0"]"#),
        r#"
web1.toml:4:12: `devices[0]` is a string; write [[devices]] with address = "0000:65:00.0" for each
  4 | devices = ["0000:65:00.0"]
    |            ^^^^^^^^^^^^^^
"#,
    );
    check(
        &with("[[devices]]"),
        r#"
web1.toml:4:1: `devices[0].address` is missing; write address = "0000:65:00.0"
  4 | [[devices]]
    | ^^^^^^^^^^^
"#,
    );
    check(
        &with(
            r#"[[devices]]
address = "65:00""#,
        ),
        r#"
web1.toml:5:11: `devices[0].address`: `65:00` is not a PCI address: that is a slot, whose functions have a number after a `.`; write DOMAIN:BUS:DEVICE.FUNCTION in hexadecimal, as in 0000:65:00.0
  5 | address = "65:00"
    |           ^^^^^^^
"#,
    );
    check(
        &with(
            r#"[[devices]]
address = "65:00.9""#,
        ),
        r#"
web1.toml:5:11: `devices[0].address`: `65:00.9` is not a PCI address: the function is not between 0 and 7; write DOMAIN:BUS:DEVICE.FUNCTION in hexadecimal, as in 0000:65:00.0
  5 | address = "65:00.9"
    |           ^^^^^^^^^
"#,
    );
    check(
        &with(
            "[[devices]]
address = 65",
        ),
        r#"
web1.toml:5:11: `devices[0].address` is a number; write an address as in "0000:65:00.0"
  5 | address = 65
    |           ^^
"#,
    );
    check(
        &with(
            r#"[[devices]]
address = "0000:65:00.0"
[[devices]]
address = "65:00.0""#,
        ),
        r#"
web1.toml:7:11: `devices[1].address` is 0000:65:00.0, which is there already; name each device once
  7 | address = "65:00.0"
    |           ^^^^^^^^^
"#,
    );
    check(
        &with(
            r#"[[devices]]
address = "0000:65:00.0"
pci = "x""#,
        ),
        r#"
web1.toml:6:1: unknown key `devices[0].pci`; allowed here: address, rom, bars, vf_token
  6 | pci = "x"
    | ^^^
"#,
    );
    check(
        &with(
            "[[disks]]
read_only = true",
        ),
        r#"
web1.toml:4:1: `disks[0].path` is missing; write path = "PATH" of a raw disk image
  4 | [[disks]]
    | ^^^^^^^^^
"#,
    );
    check(
        &with(
            r#"[[disks]]
path = "d"
read_only = 1"#,
        ),
        "
web1.toml:6:13: `disks[0].read_only` is a number; write true or false
  6 | read_only = 1
    |             ^
",
    );
    check(
        &with(
            r#"[[net]]
tap = "a/b"
[[net]]
tap = "t"
mac = "ff:ff:ff:ff:ff:ff"
vhost = 1
[[net]]
tap = "u"
[[net]]
tap = "u""#,
        ),
        r#"
web1.toml:5:7: `net[0].tap` is "a/b"; write the name of a tap, 1 to 15 characters, none of them white space, `/`, `:` or `%`
  5 | tap = "a/b"
    |       ^^^^^
web1.toml:8:7: `net[1].mac` is "ff:ff:ff:ff:ff:ff"; write the address of one station, as in "52:54:00:12:34:56"
  8 | mac = "ff:ff:ff:ff:ff:ff"
    |       ^^^^^^^^^^^^^^^^^^^
web1.toml:9:9: `net[1].vhost` is a number; write true or false
  9 | vhost = 1
    |         ^
web1.toml:12:1: `net[3]` has the `tap` of another; give each its own
  12 | [[net]]
     | ^^^^^^^
"#,
    );
    check(
        &with(
            r#"[[disks]]
path = "d"
[[disks]]
path = "d"
read_only = true"#,
        ),
        r#"
web1.toml:7:8: `disks[1].path` is a disk of this guest already; give each disk its own file, or make both `read_only = true`
  7 | path = "d"
    |        ^^^
"#,
    );
    check(
        &with("vcpu = 4"),
        "
web1.toml:4:1: unknown key `vcpu`; did you mean `vcpus`?
  4 | vcpu = 4
    | ^^^^
",
    );
    check(
        &with("Vcpus = 4"),
        "
web1.toml:4:1: unknown key `Vcpus`; did you mean `vcpus`?
  4 | Vcpus = 4
    | ^^^^^
",
    );
    check(
        &with(r#"colour = "red""#),
        r#"
web1.toml:4:1: unknown key `colour`; allowed here: name, vcpus, memory, hugepages, numa_nodes, boot, devices, peer_to_peer, hot_plug_slots, accelerators, vsock, disks, net, unconfined
  4 | colour = "red"
    | ^^^^^^
"#,
    );
    check(
        &with(
            r#"[boot]
kernel = "k"
ramdisk = "i""#,
        ),
        r#"
web1.toml:5:1: unknown key `boot.ramdisk`; allowed here: kernel, initrd, cmdline
  5 | ramdisk = "i"
    | ^^^^^^^
"#,
    );
    check(
        &with(
            r#"[boot]
kernel = "k"
cmd_line = "i""#,
        ),
        r#"
web1.toml:5:1: unknown key `boot.cmd_line`; did you mean `cmdline`?
  5 | cmd_line = "i"
    | ^^^^^^^^
"#,
    );
    check(
        &with(
            r#"[[device]]
address = "0000:65:00.0""#,
        ),
        "
web1.toml:4:3: unknown key `device`; did you mean `devices`?
  4 | [[device]]
    |   ^^^^^^
",
    );
    check(
        r#"name = "a"
name = "b""#,
        r#"
web1.toml:2:1: `name` is given twice; keep one
  2 | name = "b"
    | ^^^^
"#,
    );
    check(
        r#"name = "a"#,
        r#"
web1.toml:1:10: this is not TOML: invalid basic string, expected `"`
  1 | name = "a
    |          ^
"#,
    );
    check(
        "name = ",
        "
web1.toml:1:8: this is not TOML: string values must be quoted, expected literal string
  1 | name =
    |        ^
",
    );
    check(
        r#"[boot
kernel = "k""#,
        "
web1.toml:1:6: this is not TOML: unclosed table, expected `]`
  1 | [boot
    |      ^
",
    );
    check(
        r#"name = "ä" vcpus = 3"#,
        r#"
web1.toml:1:12: this is not TOML: unexpected key or value, expected newline, `#`
  1 | name = "ä" vcpus = 3
    |            ^
"#,
    );
    check(
        "",
        r#"
web1.toml:1:1: `name` is missing; write name = "NAME"
web1.toml:1:1: `memory` is missing; write memory = "512M"
web1.toml:1:1: `boot` is missing; write a table [boot] with kernel = "PATH"
"#,
    );
    check(
        "vcpus = 0
memory = 3
color = 1
[boot]",
        r#"
web1.toml:1:1: `name` is missing; write name = "NAME"
web1.toml:1:9: `vcpus` is 0; write a number from 1 to 255
  1 | vcpus = 0
    |         ^
web1.toml:2:10: `memory` is a number; write a size from 2M to 16T in steps of 2M, as in "512M" or "4G"
  2 | memory = 3
    |          ^
web1.toml:3:1: unknown key `color`; allowed here: name, vcpus, memory, hugepages, numa_nodes, boot, devices, peer_to_peer, hot_plug_slots, accelerators, vsock, disks, net, unconfined
  3 | color = 1
    | ^^^^^
web1.toml:4:1: `boot.kernel` is missing; write kernel = "PATH" of a bzImage, vmlinux or ELF program
  4 | [boot]
    | ^^^^^^
"#,
    );
    check(
        &with(
            r#"[boot]
kernel = "k"
cmdline = "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\u0007yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy""#,
        ),
        r#"
web1.toml:5:11: `boot.cmdline` has a control character; write at most 2047 bytes on one line, as in "console=ttyS0"
  5 | cmdline = "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\u0007yyyyyyyyyyyyyyyyyyyyyyy
    |           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
"#,
    );
}

#[test]
fn every_mistake_in_an_accelerator_has_its_message() {
    check(
        &with("[[accelerators]]"),
        r#"
web1.toml:4:1: `accelerators[0].device` is missing; write device = "0000:65:00.0", device = "npu:0", or device = "cpu"
  4 | [[accelerators]]
    | ^^^^^^^^^^^^^^^^
web1.toml:4:1: `accelerators[0].memory` is missing; write memory = "2G"
  4 | [[accelerators]]
    | ^^^^^^^^^^^^^^^^
"#,
    );
    check(
        &with("accelerators = \"cpu\""),
        r#"
web1.toml:4:16: `accelerators` is a string; write [[accelerators]] with device = "0000:65:00.0", "npu:0" or "cpu" for each
  4 | accelerators = "cpu"
    |                ^^^^^
"#,
    );
    check(
        &with(
            "[[accelerators]]\ndevice = \"gpu\"\nmemory = \"1K\"\ndeadline = 2\ntime_slice = \"1s\"\npoll = \"1s\"",
        ),
        r#"
web1.toml:5:10: `accelerators[0].device`: `gpu` is not a PCI address: it has no function number after a `.`; write DOMAIN:BUS:DEVICE.FUNCTION in hexadecimal, as in 0000:65:00.0, or "npu:0" or "cpu"
  5 | device = "gpu"
    |          ^^^^^
web1.toml:6:10: `accelerators[0].memory` is "1K", which is too small; write a size from 2M to 16T, as in "512M" or "4G"
  6 | memory = "1K"
    |          ^^^^
web1.toml:7:12: `accelerators[0].deadline` is a number; write a time from 10ms to 3600s, as in "2s"
  7 | deadline = 2
    |            ^
web1.toml:8:14: `accelerators[0].time_slice` is "1s", which is too long; write a time from 1ms to 100ms, as in "20ms"
  8 | time_slice = "1s"
    |              ^^^^
web1.toml:9:8: `accelerators[0].poll` is "1s", which is too long; write a time from 0us to 10ms, as in "100us"
  9 | poll = "1s"
    |        ^^^^
"#,
    );
    check(
        &with(
            "[[accelerators]]\ndevice = \"cpu\"\nmemory = \"2M\"\n[[accelerators]]\ndevice = \"cpu\"\nmemory = \"2M\"\ncolour = 1",
        ),
        r#"
web1.toml:8:10: `accelerators[1].device` is cpu, which is there already; name each device once
  8 | device = "cpu"
    |          ^^^^^
web1.toml:10:1: unknown key `accelerators[1].colour`; allowed here: device, memory, deadline, time_slice, poll, window, trust, driver, host_memory, unconfined
  10 | colour = 1
     | ^^^^^^
"#,
    );
    for number in ["", "x", "-1", "01", "+1", "0 ", "4294967296"] {
        let device = format!("npu:{number}");
        let carets = "^".repeat(device.len() + 2);
        check(
            &with(&format!("[[accelerators]]\nmemory = \"2M\"\ndevice = \"{device}\"")),
            &format!(
                "
web1.toml:6:10: `accelerators[0].device` is \"{device}\", which names no NPU; write npu: and its number in `vm-service list`, as in \"npu:0\"
  6 | device = \"{device}\"
    |          {carets}
"
            ),
        );
    }
    let npu = |number| format!("[[accelerators]]\ndevice = \"npu:{number}\"\nmemory = \"2M\"\n");
    check(
        &with(&(npu(1) + &npu(0) + &npu(1))),
        r#"
web1.toml:11:10: `accelerators[2].device` is npu:1, which is there already; name each device once
  11 | device = "npu:1"
     |          ^^^^^^^
"#,
    );
    check(
        &with("[[devices]]\naddress = \"65:00.0\"\n[[accelerators]]\ndevice = \"65:00.0\"\nmemory = \"2M\""),
        "
web1.toml:6:1: `accelerators[0].device` is 0000:65:00.0, which the guest owns through `devices`; name it in one of the two
  6 | [[accelerators]]
    | ^^^^^^^^^^^^^^^^
",
    );
    let shared = |window| {
        with(&format!("hugepages = \"2M\"\n[[accelerators]]\ndevice = \"cpu\"\nmemory = \"2M\"\n{window}"))
    };
    parse(&shared("window = \"2M\"")).unwrap();
    check(
        &shared(""),
        "
web1.toml:5:1: `accelerators[0]` works on the guest's RAM in pages of 4K, and `hugepages` has it of others; give it a `window`, or leave `hugepages` out
  5 | [[accelerators]]
    | ^^^^^^^^^^^^^^^^
",
    );
}

#[test]
fn every_mistake_in_trust_has_its_message() {
    let message = |lines: &str| {
        let file = with(&format!("[[accelerators]]\nmemory = \"2M\"\n{lines}"));
        parse(&file).map_or_else(|error| error.to_string(), |_| String::new())
    };
    for (lines, says) in [
        ("device = \"cpu\"\ntrust = \"driver\"\nwindow = \"2M\"", ""),
        ("device = \"cpu\"\ntrust = \"driver\"", "`accelerators[0].trust` is \"driver\" without a window"),
        ("device = \"npu:0\"\nwindow = \"2M\"\ntrust = \"driver\"", "an NPU has no CUDA driver"),
        ("device = \"cpu\"\ntrust = \"all\"", "is \"all\"; write \"kernels\", for kernels of the IR, or"),
        ("device = \"cpu\"\ntrust = 1", "`accelerators[0].trust` is a number"),
        ("device = \"cpu\"\ndriver = \"/a\"", "`accelerators[0].driver` is there without trust"),
        ("device = \"cpu\"\nhost_memory = \"1G\"", "`accelerators[0].host_memory` is there without trust"),
        (
            "device = \"cpu\"\nwindow = \"2M\"\ntrust = \"driver\"\nhost_memory = \"2M\"",
            "`accelerators[0].host_memory` is \"2M\", which is too small; write a size from 32M to 16T",
        ),
        (
            "device = \"cpu\"\nwindow = \"2M\"\ntrust = \"driver\"\ndriver = \"\"",
            "`accelerators[0].driver` is empty",
        ),
    ] {
        let message = message(lines);
        assert!(message.contains(says) && message.is_empty() == says.is_empty(), "{lines}: {message}");
    }
}

#[test]
fn every_mistake_in_a_window_or_a_vsock_device_has_its_message() {
    let with_window =
        |window| with(&format!("[[accelerators]]\ndevice = \"cpu\"\nmemory = \"2M\"\nwindow = {window}"));
    let rule = "write a power of two from 2M to 16T, as in \"64M\" or \"1G\"";
    for (window, what) in [
        ("\"48M\"", "is \"48M\", which is not a power of two"),
        ("\"1M\"", "is \"1M\", which is too small"),
        ("\"32T\"", "is \"32T\", which is too large"),
        ("\"64\"", "is \"64\", which does not end in K, M, G or T"),
        ("64", "is a number"),
    ] {
        let line = format!("window = {window}");
        let marks = "^".repeat(window.len());
        check(
            &with_window(window),
            &format!(
                "web1.toml:7:10: `accelerators[0].window` {what}; {rule}\n  7 | {line}\n    |          {marks}"
            ),
        );
    }
    for (file, expect) in [
        (
            "vsock = 3",
            "4:9: `vsock` is a number; write it as a table: [vsock]\n  4 | vsock = 3\n    |         ^",
        ),
        (
            "[vsock]",
            "4:1: `vsock.cid` is missing; write cid = 3, or leave [vsock] out for one that is free\n  4 | [vsock]\n    | \
             ^^^^^^^",
        ),
        (
            "[vsock]\ncid = 2",
            "5:7: `vsock.cid` is 2; write a number from 3 to 4294967294\n  5 | cid = 2\n    |       ^",
        ),
        (
            "[vsock]\ncid = 4294967295",
            "5:7: `vsock.cid` is 4294967295; write a number from 3 to 4294967294\n  5 | cid = 4294967295\n    |       \
             ^^^^^^^^^^",
        ),
        (
            "[vsock]\ncid = \"3\"",
            "5:7: `vsock.cid` is a string; write a number from 3 to 4294967294\n  5 | cid = \"3\"\n    |       ^^^",
        ),
        (
            "[vsock]\ncid = 3\nport = 1",
            "6:1: unknown key `vsock.port`; allowed here: cid\n  6 | port = 1\n    | ^^^^",
        ),
    ] {
        check(&with(file), &format!("web1.toml:{expect}"));
    }
}

#[test]
fn limits_have_their_messages() {
    check(
        &with(&format!("[boot]\nkernel = \"k\"\ncmdline = \"{}\"", "x".repeat(2048))),
        &format!(
            "web1.toml:5:11: `boot.cmdline` has 2048 bytes; write at most 2047 bytes on one line, as in \
             \"console=ttyS0\"\n  5 | cmdline = \"{}\n    |           {}",
            "x".repeat(89),
            "^".repeat(90)
        ),
    );
    let devices: String = (0..17).map(|i| format!("[[devices]]\naddress = \"{i:02x}:00.0\"\n")).collect();
    check(
        &with(&devices),
        "
web1.toml:36:1: `devices` has 17 entries; a guest has at most 16
  36 | [[devices]]
     | ^^^^^^^^^^^
",
    );
    let disks: String = (0..9).map(|i| format!("[[disks]]\npath = \"{i}\"\n")).collect();
    check(
        &with(&disks),
        "
web1.toml:20:1: `disks` has 9 entries; a guest has at most 8
  20 | [[disks]]
     | ^^^^^^^^^
",
    );
}

#[test]
fn mistakes_far_into_a_long_line_are_shown() {
    check(
        &format!("name = \"a\"\nmemory = \"64M\"\nboot = {{ kernel = \"{}\", x = 1 }}", "k".repeat(300)),
        &format!(
            "web1.toml:3:323: unknown key `boot.x`; allowed here: kernel, initrd, cmdline\n  3 | {}\", x = 1 }}\n    \
             | {}^",
            "k".repeat(37),
            " ".repeat(40)
        ),
    );
}

#[test]
fn hostile_files_end_in_few_errors() {
    let list = |text: &str| match parse(text) {
        Ok(guest) => panic!("accepted as {guest:?}"),
        Err(ConfigError::Invalid(problems)) => problems.len(),
        Err(_) => 1,
    };
    // Deep nesting, thousands of unknown keys, thousands of syntax errors, one endless key, too many bytes.
    assert!(list(&format!("a = {}", "[".repeat(500_000))) <= 20);
    assert!(list(&format!("a = {}1{}", "{b=".repeat(100_000), "}".repeat(100_000))) <= 20);
    assert!(list(&format!("[{}]", "a.".repeat(200_000))) <= 20);
    assert_eq!(list(&(0..100_000).map(|i| format!("k{i}=1\n")).collect::<String>()), 20);
    assert_eq!(list(&"= = =\n".repeat(100_000)), 20);
    assert!(list(&format!("{} = 1", "k".repeat(1_000_000))) <= 20);
    assert_eq!(list(&"#".repeat(MAX_FILE + 1)), 1);
}
