//! `egpu`: what is connected by USB4 and Thunderbolt.

use vm_passthrough::sim::{SimDrivers, SimFunction, SimHost};

use super::host::address;
use super::{check, vm_service};

#[test]
fn shows_what_is_connected_and_what_is_behind_it() {
    let sim = SimHost::new().expect("a host");
    let host = SimDrivers::new(&sim).host();
    let none = "no USB4 or Thunderbolt controller found, or its module thunderbolt is not loaded\n";
    check(&host, "egpu info", none);

    let add = |function: SimFunction| sim.add(&function).expect("a function");
    add(SimFunction::new(address("00:0d.2"), 0x8086, 0x9a1b, 0x0c_0340));
    let port = add(SimFunction::root_port(address("00:07.0")));
    std::fs::create_dir(port.join("supplier:pci:0000:00:0d.2")).expect("a link");
    add(SimFunction::root_port(address("01:00.0")).below(address("00:07.0")));
    add(SimFunction::root_port(address("02:00.0")).below(address("01:00.0")));
    add(SimFunction::gpu(address("03:00.0")).below(address("02:00.0")));
    for function in ["01:00.0", "02:00.0", "03:00.0"] {
        sim.set(address(function), "removable", "removable\n").expect("an attribute");
    }
    let security = [("security", "user\n"), ("iommu_dma_protection", "1\n")];
    sim.add_domain(0, Some(address("00:0d.2")), &security).expect("a domain");
    let waits = "
domain0 at 0000:00:0d.2: security user, the IOMMU protects the host's memory
  0-0 (this host) USB4
behind a tunnel, by which router is not known
  0000:03:00.0 GPU NVIDIA NVIDIA Corporation AD102 [GeForce RTX 4090]
";
    sim.write("proc/sys/kernel/osrelease", "6.13.0\n").expect("a release");
    check(&host, "egpu i", waits);
    let enclosure = [
        ("authorized", "1\n"),
        ("vendor_name", "Razer\n"),
        ("device_name", "Core X\n"),
        ("generation", "3\n"),
        ("unique_id", "d2030000-00a0-751e-a3f4-c0e5ae7b0d30\n"),
        ("rx_speed", "20.0 Gb/s\n"),
        ("rx_lanes", "2\n"),
        ("tx_speed", "20.0 Gb/s\n"),
        ("tx_lanes", "2\n"),
    ];
    sim.add_router("0-1".parse().expect("a route"), &enclosure).expect("a router");
    let works = "
domain0 at 0000:00:0d.2: security user, the IOMMU protects the host's memory
  0-0 (this host) USB4
    0-1 Razer Core X Thunderbolt 3, 40 Gb/s, authorised, d2030000-00a0-751e-a3f4-c0e5ae7b0d30
      0000:03:00.0 GPU NVIDIA NVIDIA Corporation AD102 [GeForce RTX 4090]
";
    check(&host, "egpu info", works);
    let json = vm_service(&host, "egpu info --json").out;
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["domains"][0]["routers"][1]["receive_megabits"], 40_000);
    let gpu = json["functions"].as_array().and_then(|all| all.last()).expect("functions");
    assert_eq!((gpu["router"].as_str(), gpu["basis"].as_str()), (Some("0-1"), Some("linux")), "{gpu}");
    sim.write("proc/sys/kernel/osrelease", "6.12.0\n").expect("a release");
    let inferred = vm_service(&host, "egpu info").out;
    assert!(inferred.contains("inferred: this Linux does not say what is behind a tunnel"), "{inferred}");
}
