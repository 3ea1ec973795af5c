//! `list` and `info`.

use vm_passthrough::sim::SimHost;

use super::host::workstation;
use super::{check, check_error, vm_service};

#[test]
fn lists_accelerators() {
    check(
        &workstation().plain_host(),
        "list",
        "
ADDRESS       ID         NAME                                         TYPE        GROUP  DRIVER  LINK         NUMA  READY
0000:01:00.0  10de:2684  NVIDIA Corporation AD102 [GeForce RTX 4090]  GPU NVIDIA  13     nvidia  2.5 GT/s x8  0     yes
",
    );
}

#[test]
fn lists_every_function() {
    check(
        &workstation().plain_host(),
        "list --all",
        "
ADDRESS       ID         NAME                                                                  TYPE          GROUP  DRIVER         LINK         NUMA  READY
0000:00:01.0  8086:3420  Intel Corporation 7500/5520/5500/X58 I/O Hub PCI Express Root Port 0  bridge        1      pcieport       16 GT/s x16  -     not-an-endpoint
0000:00:06.0  8086:3420  Intel Corporation 7500/5520/5500/X58 I/O Hub PCI Express Root Port 0  bridge        2      pcieport       16 GT/s x16  -     not-an-endpoint
0000:00:1c.0  8086:3420  Intel Corporation 7500/5520/5500/X58 I/O Hub PCI Express Root Port 0  bridge        3      pcieport       16 GT/s x16  -     not-an-endpoint
0000:01:00.0  10de:2684  NVIDIA Corporation AD102 [GeForce RTX 4090]                           GPU NVIDIA    13     nvidia         2.5 GT/s x8  0     yes
0000:01:00.1  10de:22ba  NVIDIA Corporation AD102 High Definition Audio Controller             Audio device  13     snd_hda_intel  -            -     yes
0000:02:00.0  144d:a80a  Samsung Electronics Co Ltd NVMe SSD Controller PM9A1/PM9A3/980PRO     NVMe          14     nvme           16 GT/s x4   -     yes
0000:03:00.0  8086:10d3  Intel Corporation 82574L Gigabit Network Connection                   network       15     igc            2.5 GT/s x1  -     yes
",
    );
}

#[test]
fn lists_nothing_where_nothing_is() {
    let sim = SimHost::new().expect("a simulated host");
    check(
        &sim.plain_host(),
        "list",
        "no accelerators found; `vm-service list --all` lists every PCI function\n",
    );
    check(&sim.plain_host(), "list --all", "no PCI functions found\n");
    check(
        &sim.plain_host(),
        "list --json",
        "{\n  \"version\": 1,\n  \"command\": \"list\",\n  \"functions\": []\n}\n",
    );
}

#[test]
fn shows_a_function_in_full() {
    check(
        &workstation().plain_host(),
        "info 0000:01:00.0",
        "
0000:01:00.0 NVIDIA Corporation AD102 [GeForce RTX 4090]
  type             GPU NVIDIA
  class            030000, VGA compatible controller
  IDs              10de:2684, revision a1
  subsystem        1043:889a
  driver           nvidia
  IOMMU group      13
    companion      0000:01:00.1 NVIDIA Corporation AD102 High Definition Audio Controller (snd_hda_intel)
  NUMA node        0
  link             2.5 GT/s x8, of 16 GT/s x16
  below            0000:00:01.0
  power            D0
  resets           flr, bus
  boot display     no
  BAR 0            16M 32-bit memory, at 0x85000000
  BAR 1            32G 64-bit memory, prefetchable, at 0x6000000000
  BAR 3            32M 64-bit memory, prefetchable, at 0x6800000000
  BAR 5            128 bytes I/O ports, at 0x5000
  ROM              512K
  capability       0x10 at 0x40, PCI Express
0000:01:00.0 NVIDIA Corporation AD102 [GeForce RTX 4090]: ready
  goes with 0000:01:00.1
  driver  vfio-pci, as no variant of it is made for this device
",
    );
}

/// The tree is made by NVIDIA's documents.
#[test]
fn parts_of_a_gpu_are_listed_below_it() {
    let sim = workstation();
    sim.write("proc/driver/nvidia/gpus/0000:01:00.0/information", "Device Minor: \t 0\n").expect("written");
    sim.write("proc/driver/nvidia/capabilities/gpu0/mig/gi1/ci0/access", "DeviceFileMinor: 3\n")
        .expect("written");
    let dir = "sys/bus/pci/devices/0000:01:00.0/nvidia";
    sim.write(&format!("{dir}/creatable_vgpu_types"), "1414 : NVIDIA H200X-1-18C\n").expect("written");
    let got = vm_service(&sim.plain_host(), "list");
    let rows: Vec<_> = got.out.lines().skip(1).collect();
    assert!(rows[0].starts_with("0000:01:00.0") && rows[0].ends_with("mig-in-use"), "{}", got.out);
    assert!(rows[1].starts_with("  gi1/ci0") && rows[1].contains("MIG instance"), "{}", got.out);
    let got = vm_service(&sim.plain_host(), "info 01:00.0 --json");
    let document: serde_json::Value = serde_json::from_str(&got.out).expect("JSON");
    let part =
        serde_json::json!({"kind": "mig", "name": "gi1/ci0", "type_name": null, "function": "0000:01:00.0"});
    assert_eq!(document["function"]["parts"], serde_json::json!([part]));
    let of = serde_json::json!({"id": "1414", "name": "NVIDIA H200X-1-18C"});
    assert_eq!(document["function"]["part_types"], serde_json::json!([of]));
}

#[test]
fn shows_a_function_in_json() {
    check(
        &workstation().plain_host(),
        "i 01:00.0 --json",
        r#"
{
  "version": 1,
  "command": "info",
  "function": {
    "address": "0000:01:00.0",
    "type": "gpu-nvidia",
    "vendor": "NVIDIA Corporation",
    "name": "AD102 [GeForce RTX 4090]",
    "vendor_id": "10de",
    "device_id": "2684",
    "subsystem_vendor_id": "1043",
    "subsystem_id": "889a",
    "revision": "a1",
    "class": "030000",
    "class_name": "VGA compatible controller",
    "iommu_group": 13,
    "companions": [
      "0000:01:00.1"
    ],
    "driver": "nvidia",
    "driver_override": null,
    "numa_node": 0,
    "link": {
      "speed": 2500,
      "width": 8,
      "max_speed": 16000,
      "max_width": 16
    },
    "power_state": "d0",
    "sriov": null,
    "resets": [
      "flr",
      "bus"
    ],
    "bars": [
      {
        "index": 0,
        "kind": "memory32",
        "prefetchable": false,
        "address": "0x85000000",
        "size_bytes": 16777216,
        "sizes_bytes": []
      },
      {
        "index": 1,
        "kind": "memory64",
        "prefetchable": true,
        "address": "0x6000000000",
        "size_bytes": 34359738368,
        "sizes_bytes": []
      },
      {
        "index": 3,
        "kind": "memory64",
        "prefetchable": true,
        "address": "0x6800000000",
        "size_bytes": 33554432,
        "sizes_bytes": []
      },
      {
        "index": 5,
        "kind": "io",
        "prefetchable": false,
        "address": "0x5000",
        "size_bytes": 128,
        "sizes_bytes": []
      }
    ],
    "rom_bytes": 524288,
    "capabilities": [
      {
        "id": 16,
        "offset": 64
      }
    ],
    "extended_capabilities": [],
    "upstream": "0000:00:01.0",
    "boot_display": false,
    "ready": true,
    "blockers": [],
    "usage": null,
    "parts": [],
    "part_types": [],
    "health": {
      "power_state": "d0",
      "link": {
        "speed": 2500,
        "width": 8,
        "possible_speed": 16000,
        "possible_width": 16
      },
      "errors": null,
      "interrupts": null
    }
  }
}
"#,
    );
}

#[test]
fn tells_that_there_is_no_such_function() {
    check_error(
        &workstation().plain_host(),
        "info 0000:07:00.0",
        1,
        "there is no PCI function 0000:07:00.0 on this host; `vm-service list --all` shows those that there are",
    );
}

#[test]
fn the_readme_shows_what_is_printed() {
    let readme = concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md");
    let readme = std::fs::read_to_string(readme).expect("README.md");
    let listed = super::vm_service(&workstation().plain_host(), "list").out;
    assert!(readme.contains(&format!("$ vm-service list\n{listed}")), "README.md does not show:\n{listed}");
    let sim = super::explain_claim::crowded();
    let explained = super::vm_service(&sim.plain_host(), "explain 0000:02:00.0").out;
    let shown = format!("$ vm-service explain 0000:02:00.0\n{explained}");
    assert!(readme.contains(&shown), "README.md does not show:\n{shown}");
}

#[test]
fn registers_tell_the_chip_when_they_are_asked_for_and_can_be_read() {
    let gpu = super::host::address("0000:01:00.0");
    let sim = workstation();
    let line = |options: &str| {
        let got = vm_service(&sim.plain_host(), &format!("info 01:00.0 {options}"));
        got.out.lines().find_map(|line| line.strip_prefix("  chip             ")).map(str::to_owned)
    };
    assert_eq!(line(""), None, "nothing is read that nobody asked for");
    let check = |expect: &str| {
        let got = line("--registers").expect("a line");
        assert!(got.contains(expect), "{got}, not {expect}");
    };
    let ad102 = [(0x0, 0x1920_00a1), (0xa00, 0x192a_1000)];
    check("AD102, by the PCI ID database; ");
    check("resource0 can't be mapped: ");
    sim.set_registers(gpu, 0, 16 << 20, &ad102).expect("registers");
    check("AD102 (Ada) revision A1, by its registers");
    sim.set_registers(gpu, 0, 16 << 20, &[(0x0, 0x1720_00a1)]).expect("registers");
    check("GA102 (Ampere) revision A1, by its registers; AD102, by the PCI ID database");
    sim.set_registers(gpu, 0, 16 << 20, &[(0x0, u32::MAX)]).expect("registers");
    check("NV_PMC_BOOT_0 reads all ones");
    sim.set_registers(gpu, 0, 16 << 20, &[(0x0, 0xbadf_1100)]).expect("registers");
    check("NV_PMC_BOOT_0 reads 0xbadf1100");
    // A BAR that is shorter than its registers would fault.
    sim.set_registers(gpu, 0, 0x800, &ad102[..1]).expect("registers");
    check("resource0 can't be mapped: ");
    sim.set_registers(gpu, 0, 16 << 20, &ad102).expect("registers");
    sim.set(gpu, "power_state", "D3hot\n").expect("written");
    check("is not in D0 (power state D3hot), and is not woken for that");
    sim.set(gpu, "power_state", "D0\n").expect("written");
    let config = sim.device_dir(gpu).expect("a directory").join("config");
    let mut bytes = std::fs::read(&config).expect("config space");
    bytes[4] = 0;
    std::fs::write(&config, &bytes).expect("written");
    check("does not decode its BARs (Command reads 0x0000)");
    bytes[4] = 6;
    std::fs::write(&config, &bytes).expect("written");
    let document = || -> serde_json::Value {
        let got = vm_service(&sim.plain_host(), "info 01:00.0 --registers --json");
        serde_json::from_str::<serde_json::Value>(&got.out).expect("JSON")["function"]["chip"].clone()
    };
    let expect = serde_json::json!({
        "name": "AD102", "architecture": "Ada", "revision": "A1", "virtual": false, "named": "AD102",
        "boot_0": "0x192000a1", "boot_42": "0x192a1000", "problem": null,
    });
    assert_eq!(document(), expect);
    sim.add_driver("vfio-pci").expect("a driver");
    sim.set_driver(gpu, Some("vfio-pci")).expect("bound");
    check("belongs to vfio-pci, so that a guest may be resetting it");
    assert_eq!(document()["name"], serde_json::Value::Null);
    let got = vm_service(&sim.plain_host(), "info 02:00.0 --registers").out;
    assert!(got.contains("chip             not known: its registers are not read"), "{got}");
}
