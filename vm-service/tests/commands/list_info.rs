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
    let explained = explained.replace(&sim.root().display().to_string(), "");
    let shown = format!("$ vm-service explain 0000:02:00.0\n{explained}");
    assert!(readme.contains(&shown), "README.md does not show:\n{shown}");
}
