//! Address spaces of both back ends: groups, devices and mappings.

use std::os::unix::fs::symlink;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::kernel::Map;
use super::*;
use crate::iommu::IovaRange;

const RW: DmaPermission = DmaPermission::ReadWrite;

fn mapped(kernel: &Kernel, backend: Backend) -> Vec<(u64, u64, bool)> {
    let state = kernel.state();
    let maps = match backend {
        Backend::Group => Some(&state.container),
        Backend::Iommufd => state.ioases.values().next(),
    };
    let maps = maps.into_iter().flatten();
    maps.map(|(&iova, map)| (iova, map.len, map.writable)).collect()
}

#[test]
fn memory_is_mapped_while_devices_come_and_go() {
    for backend in BACKENDS {
        let mut kernel = Kernel::new();
        let gpu = kernel.add(GPU, 12, &config());
        let space = space(&kernel, backend);
        let [first, second] = [memory(0x3000), memory(0x1000)];
        space.map(0x10_0000, first.clone(), RW).unwrap();
        space.map(0x20_0000, second.clone(), DmaPermission::Read).unwrap();
        assert_eq!(space.mapped_from(0x10_0000), Some(0x3000));
        assert_eq!(space.mapped_from(0x20_0000), Some(0x1000));
        assert_eq!(space.mapped_from(0x10_1000), None);
        let all = [(0x10_0000, 0x3000, true), (0x20_0000, 0x1000, false)];
        // A container without a group has no IOMMU.
        assert_eq!(mapped(&kernel, backend), if backend == Backend::Group { &[][..] } else { &all });
        let device = open_in(&kernel, gpu, &space).unwrap();
        assert_eq!(mapped(&kernel, backend), all);
        // Once more only counts.
        space.map(0x10_0000, first.clone(), RW).unwrap();
        space.unmap(0x10_0000).unwrap();
        assert_eq!(mapped(&kernel, backend), all);
        space.unmap(0x10_0000).unwrap();
        assert_eq!(mapped(&kernel, backend), all[1..]);
        assert_eq!(space.mapped_from(0x10_0000), None);
        refused(space.unmap(0x10_0000), "nothing is mapped");
        refused(space.map(0x20_0000, first.clone(), RW), "is mapped already");
        refused(space.map(0xfee0_0000, first.clone(), RW), "0xfee00000..=0xfeefffff is reserved");
        // The Linux kernel refuses, or undoes another amount than asked.
        kernel.state().fail(number::MAP_DMA, Errno::INVAL, 1);
        kernel.state().fail(number::IOAS_MAP, Errno::INVAL, 1);
        refused(space.map(0x30_0000, first.clone(), RW), "failed: Invalid argument");
        assert_eq!(space.mapped_from(0x30_0000), None);
        space.map(0x30_0000, first.clone(), RW).unwrap();
        kernel.state().twist(number::UNMAP_DMA, |bytes, answer| {
            kernel::put64(bytes, 16, 0x1000);
            answer
        });
        kernel.state().twist(number::IOAS_UNMAP, |bytes, answer| {
            kernel::put64(bytes, 16, 0x1000);
            answer
        });
        refused(space.unmap(0x30_0000), "0x1000 bytes instead of 0x3000");
        kernel.state().untwist();
        // The fake did unmap it, so a second call fails too.
        assert!(space.unmap(0x30_0000).is_err());
        device.close().unwrap();
        let _ = space.close();
        assert!(Arc::strong_count(&second) == 1, "a space that is closed keeps no memory");
        assert!(kernel.state().container.is_empty() && kernel.state().ioases.is_empty());
        space.close().unwrap();
        refused(space.map(0x30_0000, first, RW), "the address space was closed");
        refused(open_in(&kernel, gpu, &space), "the address space was closed");
    }
}

#[test]
fn a_space_that_is_dropped_leaves_nothing() {
    for backend in BACKENDS {
        let (kernel, _, device) = opened(backend);
        device.space().map(0, memory(0x1000), RW).unwrap();
        drop(device);
        assert!(kernel.state().container.is_empty() && kernel.state().ioases.is_empty());
        assert!(!kernel.state().groups[&12].in_container);
        assert_eq!(kernel.state().count(number::UNSET_CONTAINER), usize::from(backend == Backend::Group));
    }
}

#[test]
fn what_the_iommu_can_do_is_asked() {
    let ranges = [0..=0xfedf_ffff, 0xfef0_0000..=0x7f_ffff_ffff];
    let mut kernel = Kernel::new();
    let gpu = kernel.add(GPU, 12, &config());
    kernel.state().dma_limit = 2;
    let group = space(&kernel, Backend::Group);
    assert_eq!(group.backend(), Backend::Group);
    assert_eq!(group.iova_ranges().unwrap(), [0..=u64::MAX]);
    assert_eq!(group.entries_left().unwrap(), None);
    let device = open_in(&kernel, gpu, &group).unwrap();
    assert_eq!(group.iova_ranges().unwrap(), ranges);
    assert_eq!(group.entries_left().unwrap(), Some(2));
    group.map(0, memory(0x1000), RW).unwrap();
    assert_eq!(group.entries_left().unwrap(), Some(1));
    group.map(0x1000, memory(0x1000), RW).unwrap();
    refused(group.map(0x2000, memory(0x1000), RW), "0 entries are left");
    // One that goes makes room for another.
    group.unmap(0).unwrap();
    group.map(0x2000, memory(0x1000), RW).unwrap();
    refused(group.map(0x3000, memory(0x1000), RW), "0 entries are left");
    device.close().unwrap();
    // Pages of 64 KiB.
    kernel.state().page_sizes = !0xffff;
    group.unmap(0x1000).unwrap();
    group.unmap(0x2000).unwrap();
    let device = open_in(&kernel, gpu, &group).unwrap();
    refused(group.map(0x1000, memory(0x1_0000), RW), "multiples of 0x10000");
    device.close().unwrap();

    let iommufd = space(&kernel, Backend::Iommufd);
    assert_eq!(iommufd.backend(), Backend::Iommufd);
    assert_eq!(iommufd.iova_ranges().unwrap(), ranges);
    assert_eq!(iommufd.entries_left().unwrap(), None);
    // Alignments that are none; 0 and 1 ask for nothing.
    for (alignment, expect) in [(0, true), (1, true), (2, true), (0x4000, true), (3, false), (0x3000, false)]
    {
        kernel.state().alignment = alignment;
        let answer = iommufd.iova_ranges();
        assert_eq!(answer.is_ok(), expect, "{alignment:#x}: {answer:?}");
    }
    kernel.state().alignment = 0x4000;
    refused(iommufd.map(0x1000, memory(0x4000), RW), "multiples of 0x4000");
    kernel.state().alignment = 4096;
    // The second call has room for all.
    for (count, calls) in [(1, 1), (16, 1), (17, 2), (65536, 2)] {
        let many: Vec<_> = (0..count).map(|at| (at << 20, (at << 20) + 0xffff)).collect();
        let expect: Vec<IovaRange> = many.iter().map(|&(start, end)| start..=end).collect();
        kernel.state().iova_ranges = many;
        kernel.state().log.clear();
        assert_eq!(iommufd.iova_ranges().unwrap(), expect);
        assert_eq!(kernel.state().count(number::IOVA_RANGES), calls);
    }
    kernel.state().iova_ranges.push((u64::MAX - 0xfff, u64::MAX));
    refused(iommufd.iova_ranges(), "with 65537 ranges");
    let mut count = 17;
    kernel.state().twist(number::IOVA_RANGES, move |bytes, _| {
        count += 1000;
        kernel::put32(bytes, 8, count);
        Err(Errno::MSGSIZE.into())
    });
    refused(iommufd.iova_ranges(), "a count that grows");
}

#[test]
fn a_container_must_be_one_of_type_1() {
    let kernel = Kernel::new();
    let open = || open_space(&kernel.host, &[], Some(Backend::Group));
    kernel.state().version = 1;
    refused(open(), "answered VFIO_GET_API_VERSION with version 1");
    kernel.state().version = 0;
    kernel.state().type1 = false;
    refused(open(), "load the module vfio_iommu_type1");
    kernel.state().type1 = true;
    let space = open().unwrap();
    assert_eq!(space.backend(), Backend::Group);
    space.map(0, memory(0x1000), RW).unwrap();
    space.close().unwrap();
    assert_eq!(kernel.state().count(number::UNMAP_DMA), 0, "a container without a group maps nothing");
}

#[test]
fn a_group_is_in_the_container_while_a_device_of_it_is_open() {
    let mut kernel = Kernel::new();
    let [gpu, audio] = [GPU, AUDIO].map(|address| kernel.add(address, 12, &config()));
    let nvme = kernel.add(NVME, 7, &config());
    let space = space(&kernel, Backend::Group);
    let in_container = |number| kernel.state().groups[&number].in_container;
    // A device that can't be opened takes its group out again.
    kernel.state().fail(number::DEVICE_FD, Errno::NODEV, 1);
    refused(open_in(&kernel, gpu, &space), "VFIO_GROUP_GET_DEVICE_FD on 0000:65:00.0");
    assert!(!in_container(12));
    kernel.state().fail(number::SET_IOMMU, Errno::NODEV, 1);
    refused(open_in(&kernel, gpu, &space), "VFIO_SET_IOMMU on");
    assert!(!in_container(12));

    let first = open_in(&kernel, gpu, &space).unwrap();
    refused(open_in(&kernel, gpu, &space), "it is open in this address space already");
    kernel.state().fail(number::DEVICE_FD, Errno::NODEV, 1);
    refused(open_in(&kernel, audio, &space), "VFIO_GROUP_GET_DEVICE_FD");
    assert!(in_container(12), "another device of it is open");
    let second = open_in(&kernel, audio, &space).unwrap();
    let third = open_in(&kernel, nvme, &space).unwrap();
    assert_eq!(kernel.state().count(number::SET_IOMMU), 3, "a container has one IOMMU driver");
    refused(space.close(), "open in it are 0000:01:00.0, 0000:65:00.0, 0000:65:00.1");
    refused(space.close(), &kernel.host.dev.join("vfio/vfio").display().to_string());
    first.close().unwrap();
    assert!(in_container(12) && in_container(7));
    second.close().unwrap();
    assert!(!in_container(12) && in_container(7));
    third.close().unwrap();
    assert!(!in_container(7));
    assert!(kernel.state().container.is_empty());
    space.close().unwrap();
}

#[test]
fn a_group_that_the_kernel_took_out_needs_no_leave() {
    let (kernel, _, device) = opened(Backend::Group);
    kernel.state().groups.get_mut(&12).unwrap().in_container = false;
    device.close().unwrap();
    let (kernel, _, device) = opened(Backend::Group);
    kernel.state().fail(number::UNSET_CONTAINER, Errno::BUSY, 1);
    refused(device.close(), "VFIO_GROUP_UNSET_CONTAINER on");
}

#[test]
fn a_group_that_is_not_free_is_refused() {
    let mut kernel = Kernel::new();
    let gpu = kernel.add(GPU, 12, &config());
    let audio = kernel.add(AUDIO, 12, &config());
    let space = space(&kernel, Backend::Group);
    kernel.state().groups.get_mut(&12).unwrap().in_container = true;
    refused(open_in(&kernel, gpu, &space), "group 12 is in another container");
    kernel.state().groups.get_mut(&12).unwrap().in_container = false;
    kernel.state().groups.get_mut(&12).unwrap().viable = false;
    refused(open_in(&kernel, gpu, &space), "group 12 is not viable: one of its functions is in use");
    // The error names the driver and its function.
    let members = kernel.host.sys.join("kernel/iommu_groups/12/devices");
    std::fs::create_dir_all(&members).unwrap();
    for address in [gpu, audio] {
        symlink(kernel.host.pci_device(address), members.join(address.to_string())).unwrap();
    }
    let driver = kernel.host.pci_device(audio).join("driver");
    std::fs::remove_file(&driver).unwrap();
    symlink("../../../bus/pci/drivers/snd_hda_intel", driver).unwrap();
    refused(open_in(&kernel, gpu, &space), "snd_hda_intel has 0000:65:00.1");
    assert!(!kernel.state().groups[&12].in_container);
    kernel.state().groups.get_mut(&12).unwrap().viable = true;
    open_in(&kernel, gpu, &space).unwrap();
}

#[test]
fn received_devices_of_a_group_are_counted() {
    let mut kernel = Kernel::new();
    let [gpu, audio] = [GPU, AUDIO].map(|address| kernel.add(address, 12, &config()));
    let space = space(&kernel, Backend::Group);
    let keepers = [gpu, audio].map(|address| open_in(&kernel, address, &space).unwrap());
    let other = Space::receive(space.share().unwrap());
    let [first, second] =
        keepers.clone().map(|device| VfioDevice::receive(device.share().unwrap(), &other, device).unwrap());
    first.close().unwrap();
    other.map(0x10_0000, memory(0x1000), RW).unwrap();
    assert_eq!(mapped(&kernel, Backend::Group), [(0x10_0000, 0x1000, true)]);
    second.close().unwrap();
    other.close().unwrap();
    assert!(kernel.state().groups[&12].in_container);
    drop(keepers);
}

#[test]
fn the_limit_of_locked_memory_is_told() {
    // Where there is a limit, two pieces of most of it are over it together.
    let Some(limit) = getrlimit(Resource::Memlock).current.filter(|limit| *limit < 1 << 32) else { return };
    let len = (limit / 4096 * 3 / 4 + 1).max(2) * 4096;
    for backend in BACKENDS {
        let (kernel, gpu, device) = opened(backend);
        let space = device.space().clone();
        space.map(0, memory(len as usize), RW).unwrap();
        let fail = |kernel: &Kernel| {
            kernel.state().fail(number::MAP_DMA, Errno::NOMEM, 1);
            kernel.state().fail(number::IOAS_MAP, Errno::NOMEM, 1);
        };
        fail(&kernel);
        match space.map(1 << 36, memory(len as usize), RW) {
            Err(VfioError::LockedMemory { needed, locked, limit: told }) => {
                assert_eq!((needed, locked, told), (len, len, limit));
            }
            other => panic!("{other:?}"),
        }
        if backend == Backend::Iommufd {
            continue;
        }
        // The second of those that the first device maps.
        space.map(1 << 36, memory(len as usize), RW).unwrap();
        device.close().unwrap();
        let mut calls = 0;
        kernel.state().twist(number::MAP_DMA, move |_, answer| {
            calls += 1;
            if calls == 2 { Err(Errno::NOMEM.into()) } else { answer }
        });
        match open_in(&kernel, gpu, &space) {
            Err(VfioError::LockedMemory { needed, locked, .. }) => assert_eq!((needed, locked), (len, len)),
            other => panic!("{other:?}"),
        }
        assert!(!kernel.state().groups[&12].in_container);
    }
}

#[test]
fn several_ranges_are_mapped_or_none() {
    let ranges = |iovas: &[u64]| -> Vec<(u64, Arc<dyn Mapping>)> {
        iovas.iter().map(|&iova| (iova, memory(0x1000) as Arc<dyn Mapping>)).collect()
    };
    for backend in BACKENDS {
        let (kernel, _, device) = opened(backend);
        let space = device.space().clone();
        let three = ranges(&[0, 0x1000, 0x5000]);
        space.map_all(&three, DmaPermission::Read).unwrap();
        let all = [0, 0x1000, 0x5000].map(|iova| (iova, 0x1000, false));
        assert_eq!(mapped(&kernel, backend), all);
        assert_eq!(space.mapped_from(0x5000), Some(0x1000));
        space.map_all(&ranges(&[0x9000]), RW).unwrap();
        space.unmap(0x9000).unwrap();
        // A failure also drops the count of a range that was mapped before.
        for (counted, others) in
            [(1, &[0xfee0_0000][..]), (1, &[0x7000, 0xfee0_0000]), (0, &[0x7000, 0xfee0_0000])]
        {
            let before = kernel.state().count(number::IOAS_MAP);
            let wanted: Vec<_> = three[..counted].iter().cloned().chain(ranges(others)).collect();
            refused(space.map_all(&wanted, DmaPermission::Read), "is reserved");
            assert_eq!(mapped(&kernel, backend), all);
            assert_eq!(
                kernel.state().count(number::IOAS_MAP),
                before,
                "all are checked before one is mapped"
            );
        }
        for number in [number::MAP_DMA, number::IOAS_MAP] {
            kernel.state().fail(number, Errno::NOSPC, 1);
        }
        let wanted: Vec<_> = three[..1].iter().cloned().chain(ranges(&[0x7000, 0x8000])).collect();
        refused(space.map_all(&wanted, DmaPermission::Read), "No space left on device");
        assert_eq!(mapped(&kernel, backend), all);
        assert_eq!(space.mapped_from(0x7000), None);
        space.unmap(0).unwrap();
        assert_eq!(mapped(&kernel, backend), all[1..]);
    }
    // The entries of a container are counted one by one.
    let (kernel, _, device) = opened(Backend::Group);
    kernel.state().dma_limit = 1;
    refused(device.space().map_all(&ranges(&[0, 0x1000]), RW), "0 entries are left");
    assert_eq!(mapped(&kernel, Backend::Group), []);
}

#[test]
fn iommufd_maps_a_bar_by_its_dma_buf() {
    let (kernel, _, device) = opened(Backend::Iommufd);
    let space = device.space().clone();
    let bar = device.map(0, 0x2000, 0x4000).unwrap();
    space.map(0x10_0000, bar.clone(), RW).unwrap();
    let expect = Map { len: 0x4000, start: 0, writable: true, file: true };
    assert_eq!(kernel.state().ioases[&1][&0x10_0000], expect);
    space.unmap(0x10_0000).unwrap();
    let files = kernel.state().count(number::IOAS_MAP_FILE);
    // Only for reading, it can't.
    refused(space.map(0x10_0000, bar.clone(), DmaPermission::Read), "IOMMU_IOAS_MAP on");
    // Another failure is no question of pages.
    kernel.state().fail(number::IOAS_MAP, Errno::NOSPC, 1);
    refused(space.map(0x10_0000, bar.clone(), RW), "IOMMU_IOAS_MAP on");
    kernel.state().dma_bufs = false;
    refused(space.map(0x10_0000, bar, RW), "IOMMU_IOAS_MAP on");
    assert_eq!(kernel.state().count(number::IOAS_MAP_FILE), files);
    assert_eq!(kernel.state().count(number::FEATURE), 2);
}

#[test]
fn a_virtual_function_is_opened_with_its_token() {
    let token: VfToken = "2ab74924-c335-45f4-9b16-8569e5b08258".parse().unwrap();
    let other: VfToken = "2ab74924-c335-45f4-9b16-8569e5b08259".parse().unwrap();
    for backend in BACKENDS {
        let mut kernel = Kernel::new();
        let gpu = kernel.add(GPU, 12, &config());
        kernel.state().device(gpu).token = Some(*token.bytes());
        let space = space(&kernel, backend);
        let open = |token| open_device(&kernel.host, gpu, &space, token, Arc::new(()));
        refused(open(None), "vf_token");
        refused(open(Some(&other)), "vf_token");
        open(Some(&token)).unwrap().close().unwrap();
    }
    // Before Linux 6.18 iommufd knows none: the token is left out.
    let mut kernel = Kernel::new();
    let gpu = kernel.add(GPU, 12, &config());
    kernel.state().tokens = false;
    let space = space(&kernel, Backend::Iommufd);
    open_device(&kernel.host, gpu, &space, Some(&token), Arc::new(())).unwrap().close().unwrap();
    // Without one the first refusal counts.
    kernel.state().fail(number::BIND, Errno::INVAL, 1);
    refused(open_in(&kernel, gpu, &space), "VFIO_DEVICE_BIND_IOMMUFD on");
    kernel.state().groups.get_mut(&12).unwrap().viable = false;
    refused(open_in(&kernel, gpu, &space), "its IOMMU group is not viable");
}

#[test]
fn iommufd_spaces_are_destroyed_by_their_owner() {
    let (kernel, gpu, device) = opened(Backend::Iommufd);
    let space = device.space().clone();
    assert_eq!(kernel.state().device(gpu).attached, Some(1));
    let other = Space::receive(space.share().unwrap());
    other.map(0, memory(0x1000), RW).unwrap();
    assert_eq!(mapped(&kernel, Backend::Iommufd), [(0, 0x1000, true)]);
    other.close().unwrap();
    assert_eq!(mapped(&kernel, Backend::Iommufd), []);
    assert_eq!(kernel.state().count(number::DESTROY), 0);
    refused(space.close(), &kernel.host.dev.join("iommu").display().to_string());
    kernel.state().fail(number::DESTROY, Errno::BUSY, 1);
    device.close().unwrap();
    refused(space.close(), "IOMMU_DESTROY on");
}

#[test]
fn a_directory_without_a_number_is_no_node() {
    let mut kernel = Kernel::new();
    let gpu = kernel.add(GPU, 12, &config());
    let node = kernel.host.dev.join("vfio/devices/vfio0");
    assert_eq!(iommufd::device_node(&kernel.host, gpu), Some(node));
    let entries = kernel.host.pci_device(gpu).join("vfio-dev");
    std::fs::remove_file(entries.join("vfio0/dev")).unwrap();
    assert_eq!(iommufd::device_node(&kernel.host, gpu), None);
    assert_eq!(choose_backend(&kernel.host, &[gpu]).unwrap(), Backend::Group);
    refused(open_in(&kernel, gpu, &space(&kernel, Backend::Iommufd)), "it has no node of its own");
    std::fs::remove_dir(entries.join("vfio0")).unwrap();
    // A name that is none.
    std::fs::create_dir(entries.join("vfiox")).unwrap();
    std::fs::write(entries.join("vfiox/dev"), "").unwrap();
    std::fs::write(kernel.host.dev.join("vfio/devices/vfiox"), "").unwrap();
    assert_eq!(iommufd::device_node(&kernel.host, gpu), None);
}
