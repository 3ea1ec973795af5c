use super::*;
use crate::pci::{Bar, BarKind, DeviceType, PciClass, PciIds, ResetMethod, Rom};
use crate::sim::{SimFunction, SimHost};

fn address(text: &str) -> PciAddress {
    text.parse().unwrap()
}

fn read_one(function: &SimFunction) -> PciFunction {
    let sim = SimHost::new().unwrap();
    sim.add(function).unwrap();
    read_function(&sim.plain_host(), function.address()).unwrap()
}

#[test]
fn reads_every_field() {
    let sim = SimHost::new().unwrap();
    let port = address("0000:00:01.0");
    let gpu = address("0000:65:00.0");
    sim.add(&SimFunction::root_port(port)).unwrap();
    sim.add(
        &SimFunction::gpu(gpu)
            .below(port)
            .revision(0xa1)
            .driver("nvidia")
            .numa_node(1)
            .degraded_link(Link { speed: 2_500, width: 8, max_speed: 16_000, max_width: 16 })
            .resets("flr bus")
            .extended_capability(0x0001, 2, &[0; 44])
            .extended_capability(0x0019, 1, &[0; 8])
            .sriov(16)
            .boot_display(true),
    )
    .unwrap();
    let functions = scan(&sim.plain_host()).unwrap();
    assert_eq!(functions.iter().map(|f| f.address).collect::<Vec<_>>(), [port, gpu]);
    let found = &functions[1];
    assert_eq!(
        found.ids,
        PciIds {
            vendor: 0x10de,
            device: 0x2684,
            subsystem_vendor: 0x10de,
            subsystem_device: 0x16f3,
            revision: 0xa1
        }
    );
    assert_eq!(found.class, PciClass(0x03_0000));
    assert_eq!(found.device_type, DeviceType::GpuNvidia);
    assert_eq!(found.header_type, 0);
    assert_eq!(found.upstream, Some(port));
    let bar = |index, kind, prefetchable, address, size| Bar { index, kind, prefetchable, address, size };
    assert_eq!(
        found.bars,
        [
            bar(0, BarKind::Memory32, false, 0xe500_0000, 16 << 20),
            bar(1, BarKind::Memory64, true, 0x1980_0000_0000, 16 << 30),
            bar(3, BarKind::Memory64, true, 0x1984_0000_0000, 32 << 20),
        ]
        .map(|mut bar: Bar| {
            if bar.index > 0 {
                bar.address = 0x40_0000_0000 + (0x65 << 38) + (u64::from(bar.index / 2 + 1) << 34);
            }
            bar
        })
    );
    assert_eq!(found.rom, Some(Rom { size: 512 << 10 }));
    assert_eq!(found.iommu_group, Some(0x65));
    assert_eq!(found.driver.as_deref(), Some("nvidia"));
    assert_eq!(found.numa_node, Some(1));
    assert_eq!(found.link, Some(Link { speed: 2_500, width: 8, max_speed: 16_000, max_width: 16 }));
    assert_eq!(found.power_state, PowerState::D0);
    assert_eq!(found.sriov, Some(Sriov::Physical { total_vfs: 16, num_vfs: 0 }));
    assert_eq!(found.resets, [ResetMethod::Flr, ResetMethod::Bus]);
    assert_eq!(
        found.capabilities.iter().map(|cap| (cap.id, cap.offset)).collect::<Vec<_>>(),
        [(0x01, 0x40), (0x11, 0x48), (0x10, 0x54)]
    );
    assert_eq!(
        found.extended_capabilities.iter().map(|c| (c.id, c.version, c.offset)).collect::<Vec<_>>(),
        [(0x0001, 2, 0x100), (0x0019, 1, 0x130), (0x0010, 1, 0x13c)]
    );
    assert!(found.boot_display);
    assert_eq!(found.vendor_name(), Some("NVIDIA Corporation"));

    let bridge = &functions[0];
    assert_eq!((bridge.header_type, bridge.device_type), (1, DeviceType::Bridge));
    assert_eq!((bridge.upstream, bridge.numa_node, bridge.rom), (None, None, None));
    assert_eq!(bridge.driver.as_deref(), Some("pcieport"));
}

#[test]
fn reads_virtual_functions() {
    let sim = SimHost::new().unwrap();
    let (physical, first) = (address("0000:02:00.0"), address("0000:02:10.0"));
    sim.add(&SimFunction::network(physical).sriov(8)).unwrap();
    sim.add(&SimFunction::network(first).virtual_of(physical)).unwrap();
    let functions = scan(&sim.plain_host()).unwrap();
    assert_eq!(functions[0].sriov, Some(Sriov::Physical { total_vfs: 8, num_vfs: 1 }));
    assert_eq!(functions[1].sriov, Some(Sriov::Virtual { physical }));
    // Its config space has no IDs; Linux knows them.
    assert_eq!((functions[1].ids.vendor, functions[1].ids.device), (0x8086, 0x10d3));
}

/// What a caller that is not root sees: config space ends after the header.
#[test]
fn reads_without_config_space() {
    let nvme = SimFunction::nvme(address("0000:01:00.0")).revision(3);
    let header = nvme.config_space()[..64].to_vec();
    // A retry, which would read as a bridge, zeros, and ones in part.
    let mut retry = vec![0xff; 4096];
    retry[..2].copy_from_slice(&[1, 0]);
    let mut part = nvme.config_space();
    part[4..].fill(0xff);
    for config in [header, Vec::new(), vec![0xff; 4096], retry, vec![0; 4096], part] {
        let all_ones = config.len() == 4096;
        let found = read_one(&nvme.clone().config(config.clone()));
        assert_eq!((found.capabilities.len(), found.extended_capabilities.len()), (0, 0));
        assert_eq!(found.ids.vendor, 0x144d);
        assert!(!found.is_bridge());
        assert_eq!(found.ids.revision, 3, "{}", config.len());
        assert_eq!(found.link.map(|link| (link.speed, link.width)), Some((16_000, 4)), "{all_ones}");
    }
}

#[test]
fn leaves_a_sleeping_function_asleep() {
    let nvme = SimFunction::nvme(address("0000:01:00.0"));
    let sim = SimHost::new().unwrap();
    sim.add(&nvme).unwrap();
    let found = |state: &str| {
        sim.set(nvme.address(), "power_state", state).unwrap();
        scan(&sim.plain_host()).unwrap().remove(0)
    };
    // Config space, which the simulated function has all the while, is not read.
    let asleep = found("D3cold\n");
    assert_eq!((asleep.power_state, asleep.capabilities.len()), (PowerState::D3Cold, 0));
    assert_eq!(asleep.link, None);
    let awake = found("D3hot\n");
    assert_eq!((awake.power_state, awake.capabilities.len()), (PowerState::D3Hot, 3));
}

#[test]
fn a_scan_is_of_what_is_there_now() {
    let sim = SimHost::new().unwrap();
    let at = address("0000:01:00.0");
    let host = sim.plain_host();
    sim.add(&SimFunction::nvme(at)).unwrap();
    let found = scan(&host).unwrap();
    assert_eq!((found[0].device_type, found[0].capabilities.len()), (DeviceType::Nvme, 3));
    sim.remove(at).unwrap();
    sim.add(&SimFunction::new(at, 0x1002, 0x5159, 0x03_0000)).unwrap();
    let found = scan(&host).unwrap();
    assert_eq!((found[0].device_type, found[0].capabilities.len()), (DeviceType::GpuAmd, 0));
    sim.remove(at).unwrap();
    assert!(scan(&host).unwrap().is_empty());
}

#[test]
fn skips_what_vanishes_or_makes_no_sense() {
    let sim = SimHost::new().unwrap();
    let (good, dangling, malformed) =
        (address("0000:01:00.0"), address("0000:02:00.0"), address("0000:03:00.0"));
    for at in [good, dangling, malformed] {
        sim.add(&SimFunction::nvme(at)).unwrap();
    }
    std::fs::remove_dir_all(sim.device_dir(dangling).unwrap()).unwrap();
    sim.set(malformed, "uevent", "PCI_CLASS=zzz\n").unwrap();
    sim.write("sys/bus/pci/devices/not-an-address", "").unwrap();
    let host = sim.plain_host();
    assert_eq!(scan(&host).unwrap().iter().map(|f| f.address).collect::<Vec<_>>(), [good]);
    let error = |at| read_function(&host, at).unwrap_err().to_string();
    assert!(error(dangling).contains("there is no PCI function 0000:02:00.0"), "{}", error(dangling));
    assert!(error(malformed).contains("0000:03:00.0/uevent"), "{}", error(malformed));
}

#[test]
fn functions_that_come_and_go_meanwhile() {
    let sim = SimHost::new().unwrap();
    let stays = address("0000:01:00.0");
    let flaps = address("0000:02:00.0");
    sim.add(&SimFunction::nvme(stays)).unwrap();
    let host = sim.plain_host();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                sim.add(&SimFunction::gpu(flaps)).unwrap();
                sim.remove(flaps).unwrap();
            }
        });
        for _ in 0..200 {
            let found = scan(&host).unwrap();
            assert!(found.iter().any(|function| function.address == stays));
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn without_sysfs_it_says_where_it_looked() {
    let sim = SimHost::new().unwrap();
    sim.delete("sys").unwrap();
    let error = scan(&sim.plain_host()).unwrap_err().to_string();
    assert!(error.contains("sys/bus/pci/devices"), "{error}");
}

#[test]
fn many_functions_in_order() {
    let sim = SimHost::new().unwrap();
    for bus in (0..=255).rev() {
        sim.add(&SimFunction::nvme(PciAddress::new(0, bus, 0, 0).unwrap())).unwrap();
    }
    let found = scan(&sim.plain_host()).unwrap();
    let buses: Vec<_> = found.iter().map(|function| function.address.bus()).collect();
    assert_eq!(buses, (0..=255).collect::<Vec<_>>());
    assert!(found.iter().all(|f| f.iommu_group == Some(u32::from(f.address.bus()))));
}

#[test]
fn this_machine() {
    let host = Host::system();
    if !host.sys.join(DEVICES).exists() {
        return;
    }
    for function in scan(&host).unwrap() {
        assert_ne!(function.ids.vendor, 0xffff, "{}", function.address);
        assert!(function.bars.iter().all(|bar| bar.size.is_power_of_two()), "{function:?}");
    }
}

/// A FIFO in the place of an attribute; the thread ends once it is opened for reading.
fn fifo(sim: &SimHost, at: PciAddress, attribute: &str) -> (PathBuf, std::thread::JoinHandle<()>) {
    let path = sim.device_dir(at).unwrap().join(attribute);
    let _ = std::fs::remove_file(&path);
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let writer = path.clone();
    (path, std::thread::spawn(move || drop(std::fs::OpenOptions::new().write(true).open(writer).unwrap())))
}

/// What a scan and `explain` make of a host, unless they take half a minute.
fn in_time(sim: &SimHost, at: PciAddress) -> (Vec<PciFunction>, crate::readiness::Readiness) {
    let (done, scanned) = std::sync::mpsc::channel();
    let host = sim.plain_host();
    std::thread::spawn(move || {
        let readiness = crate::readiness::explain(&host, at, &crate::readiness::ExplainOptions::default());
        done.send((scan(&host), readiness)).unwrap();
    });
    let (functions, readiness) = scanned.recv_timeout(Duration::from_secs(30)).unwrap();
    (functions.unwrap(), readiness.unwrap())
}

/// Reading these attributes waits while an unbind is stuck.
#[test]
fn a_scan_does_not_read_what_waits_for_a_function_s_lock() {
    let sim = SimHost::new().unwrap();
    let at = address("0000:01:00.0");
    sim.add(&SimFunction::network(at).sriov(4).driver("igb")).unwrap();
    let fifos = ["driver_override", "sriov_numvfs"].map(|attribute| fifo(&sim, at, attribute));
    let (functions, readiness) = in_time(&sim, at);
    assert_eq!(functions[0].driver.as_deref(), Some("igb"));
    assert_eq!(readiness.address, at);
    for (path, writer) in fifos {
        assert!(!writer.is_finished(), "{} was opened", path.display());
        drop(std::fs::File::open(path).unwrap());
        writer.join().unwrap();
    }
}

/// A captured tree may hold anything, and one function that makes no sense hides no other.
#[test]
fn what_can_t_be_read_is_left_out_and_not_waited_for() {
    type Spoil = fn(&SimHost, PciAddress);
    fn replaced(sim: &SimHost, at: PciAddress, attribute: &str) -> PathBuf {
        let path = sim.device_dir(at).unwrap().join(attribute);
        std::fs::remove_file(&path).unwrap();
        path
    }
    fn check(spoil: Spoil, stays: bool) {
        let sim = SimHost::new().unwrap();
        let (bad, good) = (address("0000:01:00.0"), address("0000:02:00.0"));
        sim.add(&SimFunction::nvme(bad).group(1)).unwrap();
        sim.add(&SimFunction::nvme(good).group(2)).unwrap();
        spoil(&sim, bad);
        let (functions, readiness) = in_time(&sim, good);
        let found: Vec<_> = functions.iter().map(|function| function.address).collect();
        assert_eq!(found, if stays { vec![bad, good] } else { vec![good] });
        assert_eq!(readiness.address, good);
        sim.remove(good).unwrap();
        assert_eq!(scan(&sim.plain_host()).is_ok(), stays);
    }
    check(|sim, at| drop(fifo(sim, at, "config")), true);
    check(|sim, at| drop(fifo(sim, at, "reset_method")), true);
    check(|sim, at| std::fs::create_dir(replaced(sim, at, "uevent")).unwrap(), false);
    check(|sim, at| std::os::unix::fs::symlink("resource", replaced(sim, at, "resource")).unwrap(), false);
}

#[test]
fn enabled_virtual_functions_are_counted() {
    let sim = SimHost::new().unwrap();
    let at = address("0000:01:00.0");
    sim.add(&SimFunction::network(at).sriov(9)).unwrap();
    for enabled in 0..=9 {
        let found = scan(&sim.plain_host()).unwrap().remove(0);
        assert_eq!(found.sriov, Some(Sriov::Physical { total_vfs: 9, num_vfs: enabled }));
        sim.set(at, &format!("virtfn{enabled}"), "").unwrap();
    }
    // More than there can be are not believed.
    assert_eq!(scan(&sim.plain_host()).unwrap()[0].sriov, Some(Sriov::Physical { total_vfs: 9, num_vfs: 9 }));
}

#[test]
fn an_override_is_read_when_asked_for() {
    let sim = SimHost::new().unwrap();
    let at = address("0000:01:00.0");
    sim.add(&SimFunction::nvme(at)).unwrap();
    let read =
        || crate::pci::driver_override(&sim.plain_host(), at, std::time::Duration::from_secs(1)).unwrap();
    assert_eq!(read(), None);
    sim.set(at, "driver_override", "vfio-pci\n").unwrap();
    assert_eq!(read().as_deref(), Some("vfio-pci"));
}
