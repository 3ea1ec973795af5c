//! Telemetry of simulated GPUs.

use std::time::Duration;

use super::*;
use crate::sim::{SimFunction, SimHost};

const GPU: &str = "0000:03:00.0";

fn address(text: &str) -> PciAddress {
    text.parse().expect("an address")
}

fn reader(sim: &SimHost) -> Reader {
    let host = sim.plain_host();
    let functions = pci::scan(&host).expect("functions");
    let domains = usb4::scan(&host).expect("domains");
    let tunnels = usb4::tunnels(&host, &functions, &domains);
    let function = functions.iter().find(|function| function.address == address(GPU)).expect("the GPU");
    Reader::new(&host, function, tunnels.iter().find(|tunnel| tunnel.function == address(GPU)))
}

fn amd(sim: &SimHost) {
    let link = Link { speed: 8_000, width: 4, max_speed: 16_000, max_width: 16 };
    let gpu = SimFunction::new(address(GPU), 0x1002, 0x744c, 0x03_0000).express(0).group(3);
    sim.add(&gpu.degraded_link(link).driver("amdgpu")).expect("a function");
}

fn read(sim: &SimHost) -> Telemetry {
    reader(sim).read().expect("it is there")
}

#[test]
fn amdgpu_tells_all_that_it_has() {
    let sim = SimHost::new().expect("a host");
    amd(&sim);
    assert!(matches!(read(&sim).source, Source::None(why) if why.contains("neither sensors nor load")));
    sim.add_amdgpu(address(GPU)).expect("files");
    let told = read(&sim);
    let expect = Telemetry {
        source: Source::Amdgpu,
        temperature: Some(52.0),
        hot_spot: Some(63.0),
        memory_temperature: Some(58.0),
        power: Some(87.0),
        power_limit: Some(303.0),
        fan_percent: Some(25),
        fan_speed: Some(1180),
        core_clock: Clock { now: Some(1725), max: Some(2500) },
        memory_clock: Clock { now: Some(1249), max: Some(1249) },
        performance_state: Some("auto".into()),
        busy: Some(41),
        memory_used: Some(3 << 30),
        memory_total: Some(24 << 30),
        link: Some(GpuLink::Pcie(Link { speed: 8_000, width: 4, max_speed: 16_000, max_width: 16 })),
        errors: Some(AerCounters::default()),
        replays: Some(0),
        throttle: Some(Vec::new()),
    };
    assert_eq!(told, expect);
    // What is missing, or no number, is not known; the rest is.
    for (file, text) in
        [("gpu_busy_percent", ""), ("mem_info_vram_used", "much\n"), ("pcie_replay_count", "-1\n")]
    {
        sim.set(address(GPU), file, text).expect("written");
    }
    let told = read(&sim);
    assert_eq!((told.busy, told.memory_used, told.replays, told.temperature), (None, None, None, Some(52.0)));
}

#[test]
fn who_tells_and_why_nobody_does() {
    let check = |change: &dyn Fn(&SimHost), source: &str, why: &str| {
        let sim = SimHost::new().expect("a host");
        amd(&sim);
        sim.add_amdgpu(address(GPU)).expect("files");
        change(&sim);
        let told = read(&sim);
        assert_eq!(told.source.to_string(), source, "{told:?}");
        match &told.source {
            Source::None(found) => assert!(found.contains(why), "{found}"),
            _ => assert_eq!(told.temperature, Some(52.0), "{told:?}"),
        }
    };
    let driver = |name: &'static str| {
        move |sim: &SimHost| {
            sim.add_driver(name).expect("a driver");
            sim.set_driver(address(GPU), Some(name)).expect("bound");
        }
    };
    check(&|_| (), "amdgpu", "");
    check(&driver("xe"), "hwmon of xe", "");
    check(&driver("vfio-pci"), "none", "vfio-pci has it: only its guest can ask");
    check(&driver("nvidia"), "none", "NVML");
    check(&|sim| sim.set_driver(address(GPU), None).expect("unbound"), "none", "no driver has it");
    let asleep =
        |sim: &SimHost| sim.set(address(GPU), "power/runtime_status", "suspended\n").expect("written");
    check(&asleep, "none", "asleep, and is not woken");
    let bare = |sim: &SimHost| {
        driver("xe")(sim);
        std::fs::remove_dir_all(sim.device_dir(address(GPU)).expect("its directory").join("hwmon"))
            .expect("removed");
    };
    check(&bare, "none", "the driver xe shows no sensors");
}

#[test]
fn the_link_of_a_tunnel_is_its_routers() {
    let sim = SimHost::new().expect("a host");
    sim.write("proc/sys/kernel/osrelease", "6.13.0\n").expect("a release");
    sim.add(&SimFunction::root_port(address("00:07.0"))).expect("a port");
    let gpu = SimFunction::new(address(GPU), 0x1002, 0x744c, 0x03_0000).express(0).group(3);
    sim.add(&gpu.link(2_500, 1).driver("amdgpu").below(address("00:07.0"))).expect("a function");
    sim.add_amdgpu(address(GPU)).expect("files");
    sim.set(address(GPU), "removable", "removable\n").expect("written");
    sim.add_domain(0, None, &[("security", "user\n")]).expect("a domain");
    let link = || read(&sim).link.expect("a link");
    assert_eq!(link(), GpuLink::Tunnel { router: None, rates: None, authorization: None });
    assert!(!link().is_down(), "that it is not known which router it is says nothing");
    let speeds =
        [("rx_speed", "20.0 Gb/s\n"), ("rx_lanes", "2\n"), ("tx_speed", "20.0 Gb/s\n"), ("tx_lanes", "1\n")];
    let route: Route = "0-1".parse().expect("a route");
    sim.add_router(route, &[&speeds[..], &[("authorized", "1\n")]].concat()).expect("a router");
    let reader = reader(&sim);
    let link = || reader.read().and_then(|told| told.link).expect("a link");
    let GpuLink::Tunnel { router: Some(found), rates: Some(rates), authorization: Some(Authorization::Yes) } =
        link()
    else {
        panic!("{:?}", link())
    };
    assert_eq!((found, rates.receive.rate(), rates.transmit.rate()), (route, 40_000, 20_000));
    sim.add_router(route, &[("authorized", "0\n")]).expect_err("it is there");
    let dir = std::fs::canonicalize(sim.path("sys/bus/thunderbolt/devices/0-1")).expect("the router");
    std::fs::write(dir.join("authorized"), "0\n").expect("written");
    assert!(link().is_down());
    sim.delete("sys/bus/thunderbolt/devices/0-1").expect("gone");
    assert!(link().is_down());
}

#[test]
fn one_that_comes_and_goes() {
    let sim = SimHost::new().expect("a host");
    amd(&sim);
    sim.add_amdgpu(address(GPU)).expect("files");
    let mut watch = Watch::new();
    assert!(watch.read(Duration::ZERO).is_empty());
    watch.watch([reader(&sim)]).expect("a thread");
    let mut look = || watch.read(Duration::from_secs(60)).remove(&address(GPU)).expect("an answer");
    assert!(matches!(look(), Answer::Told(_, told) if told.busy == Some(41)));
    sim.remove(address(GPU)).expect("removed");
    assert_eq!(look(), Answer::Gone);
    amd(&sim);
    sim.add_amdgpu(address(GPU)).expect("files");
    sim.set(address(GPU), "gpu_busy_percent", "7\n").expect("written");
    assert!(matches!(look(), Answer::Told(_, told) if told.busy == Some(7)));
}
