//! What mapping memory for DMA costs over the bare ioctl: time to map and unmap a GiB through an address space, beside a
//! loop of nothing but ioctls over the same memory and ranges.
//!
//! ```text
//! dma_map ADDRESS [--backend iommufd|group] [--mib MIB] [--ranges N] [--rounds N]
//! ```
//!
//! The function is claimed, or its claim taken up. The two take turns, in pairs whose order alternates, each with its own opened device; what
//! is timed is mapping and unmapping only. In an emulated machine let time follow the instructions (QEMU's
//! `-icount shift=0,sleep=off`): the figures then do not depend on what else the host does. Without an address it says so and measures nothing: it needs a real IOMMU.

#![allow(unsafe_code)]

use std::error::Error;
use std::fs::{File, OpenOptions};
use std::mem::{offset_of, size_of};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use iommufd_bindings::iommufd as iommu;
use vfio_bindings::bindings::vfio as uapi;
use vm_passthrough::claim::ClaimOptions;
use vm_passthrough::manager::Claimed;
use vm_passthrough::vfio::{self, AddressSpace as _, Backend, DmaPermission, HostMemory, Mapping};
use vm_passthrough::{Host, PassthroughManager, PciAddress};

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

const IOVA: u64 = 1 << 32;

fn main() -> Result {
    let mut arguments = std::env::args().skip(1);
    let (mut address, mut backend, mut mib, mut ranges, mut rounds) = (None, None, 256usize, 1usize, 15usize);
    while let Some(argument) = arguments.next() {
        let mut number = || -> Result<usize> { Ok(arguments.next().ok_or("a number is missing")?.parse()?) };
        match argument.as_str() {
            // What `cargo bench` passes.
            "--bench" => {}
            "--mib" => mib = number()?,
            "--ranges" => ranges = number()?.max(1),
            "--rounds" => rounds = number()?.max(1),
            "--backend" => {
                backend = match arguments.next().as_deref() {
                    Some("iommufd") => Some(Backend::Iommufd),
                    Some("group") => Some(Backend::Group),
                    other => return Err(format!("--backend takes iommufd or group, not {other:?}").into()),
                };
            }
            text => address = Some(text.parse::<PciAddress>()?),
        }
    }
    let Some(address) = address else {
        println!("dma_map: nothing measured: it needs the address of a claimed function");
        return Ok(());
    };
    let mut manager = PassthroughManager::new()?;
    let claimed = manager.claim(address, &ClaimOptions::default())?;
    let host = manager.host().clone();
    let backend = match backend {
        Some(backend) => backend,
        None => vfio::choose_backend(&host, &[address])?,
    };

    // One allocation per range, touched, so that no page fault is timed.
    let pieces: Vec<Arc<HostMemory>> = (0..ranges)
        .map(|_| {
            let piece = HostMemory::new((mib << 20) / ranges)?;
            for offset in (0..piece.len() as usize).step_by(4096) {
                piece.write(offset, &[1])?;
            }
            Ok(Arc::new(piece))
        })
        .collect::<std::io::Result<_>>()?;
    let bytes: u64 = pieces.iter().map(|piece| piece.len()).sum();

    let (mut ours, mut bare) = (Vec::new(), Vec::new());
    through_space(&host, &claimed, backend, &pieces)?;
    bare_ioctls(&host, address, backend, &pieces)?;
    for round in 0..rounds {
        if round % 2 == 0 {
            ours.push(through_space(&host, &claimed, backend, &pieces)?);
            bare.push(bare_ioctls(&host, address, backend, &pieces)?);
        } else {
            bare.push(bare_ioctls(&host, address, backend, &pieces)?);
            ours.push(through_space(&host, &claimed, backend, &pieces)?);
        }
    }
    let mut ratios: Vec<f64> =
        ours.iter().zip(&bare).map(|(ours, bare)| ours.as_secs_f64() / bare.as_secs_f64()).collect();
    ratios.sort_by(f64::total_cmp);
    let [ours, bare] = [ours, bare].map(|times| {
        let mut times: Vec<f64> = times
            .iter()
            .map(|time: &Duration| time.as_secs_f64() * 1e3 * (1u64 << 30) as f64 / bytes as f64)
            .collect();
        times.sort_by(f64::total_cmp);
        times
    });
    let [median_ours, median_bare] = [&ours, &bare].map(|times| times[times.len() / 2]);
    println!("{backend}, {mib} MiB in {ranges} ranges, {rounds} rounds; map and unmap, ms per GiB:");
    for (name, times) in [("address space", &ours), ("bare ioctls", &bare)] {
        println!(
            "  {name:14} median {:8.3}   fastest {:8.3}   slowest {:8.3}",
            times[times.len() / 2],
            times[0],
            times[times.len() - 1]
        );
    }
    println!(
        "  ratio of medians {:.3}, of pairs: median {:.3}, quartiles {:.3} and {:.3}",
        median_ours / median_bare,
        ratios[ratios.len() / 2],
        ratios[ratios.len() / 4],
        ratios[ratios.len() * 3 / 4]
    );
    Ok(())
}

fn through_space(
    host: &Host,
    claimed: &Claimed,
    backend: Backend,
    pieces: &[Arc<HostMemory>],
) -> Result<Duration> {
    let space = vfio::open_space(host, &[claimed.address()], Some(backend))?;
    let device = claimed.open(&space)?;
    let start = Instant::now();
    let mut iova = IOVA;
    for piece in pieces {
        space.map(iova, piece.clone(), DmaPermission::ReadWrite)?;
        iova += piece.len();
    }
    let mut iova = IOVA;
    for piece in pieces {
        space.unmap(iova)?;
        iova += piece.len();
    }
    let time = start.elapsed();
    device.close()?;
    space.close()?;
    Ok(time)
}

/// An ioctl of VFIO or iommufd with a pointer or a number.
fn ioctl(file: RawFd, number: u32, argument: usize) -> Result<i32> {
    // SAFETY: every caller passes what the request of that number takes: a number, or a pointer to a structure of the
    // right type that lives until the call returns.
    let answer = unsafe { libc::ioctl(file, (0x3b00 | number) as _, argument) };
    if answer < 0 { Err(std::io::Error::last_os_error().into()) } else { Ok(answer) }
}

fn open(path: std::path::PathBuf) -> Result<File> {
    Ok(OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .map_err(|error| format!("{}: {error}", path.display()))?)
}

fn bare_ioctls(
    host: &Host,
    address: PciAddress,
    backend: Backend,
    pieces: &[Arc<HostMemory>],
) -> Result<Duration> {
    let sysfs = host.pci_device(address);
    match backend {
        Backend::Group => {
            let container = open(host.dev.join("vfio/vfio"))?;
            let group = std::fs::read_link(sysfs.join("iommu_group"))?;
            let group = open(host.dev.join("vfio").join(group.file_name().ok_or("no group")?))?;
            let fd = container.as_raw_fd();
            ioctl(group.as_raw_fd(), 104, (&raw const fd) as usize)?;
            ioctl(fd, 102, uapi::VFIO_TYPE1v2_IOMMU as usize)?;
            let name = std::ffi::CString::new(address.to_string())?;
            let device = ioctl(group.as_raw_fd(), 106, name.as_ptr() as usize)?;
            // SAFETY: the Linux kernel just made the file descriptor for us.
            let device = unsafe { OwnedFd::from_raw_fd(device) };
            let start = Instant::now();
            let mut iova = IOVA;
            for piece in pieces {
                let map = uapi::vfio_iommu_type1_dma_map {
                    argsz: size_of::<uapi::vfio_iommu_type1_dma_map>() as u32,
                    flags: uapi::VFIO_DMA_MAP_FLAG_READ | uapi::VFIO_DMA_MAP_FLAG_WRITE,
                    vaddr: piece.address(),
                    iova,
                    size: piece.len(),
                };
                ioctl(fd, 113, (&raw const map) as usize)?;
                iova += piece.len();
            }
            let mut iova = IOVA;
            for piece in pieces {
                let mut unmap = uapi::vfio_iommu_type1_dma_unmap {
                    argsz: offset_of!(uapi::vfio_iommu_type1_dma_unmap, data) as u32,
                    iova,
                    size: piece.len(),
                    ..Default::default()
                };
                ioctl(fd, 114, (&raw mut unmap) as usize)?;
                iova += piece.len();
            }
            let time = start.elapsed();
            drop(device);
            ioctl(group.as_raw_fd(), 105, 0)?;
            Ok(time)
        }
        Backend::Iommufd => {
            let iommufd = open(host.dev.join("iommu"))?;
            let fd = iommufd.as_raw_fd();
            let mut alloc = iommu::iommu_ioas_alloc {
                size: size_of::<iommu::iommu_ioas_alloc>() as u32,
                ..Default::default()
            };
            ioctl(fd, iommu::IOMMUFD_CMD_IOAS_ALLOC, (&raw mut alloc) as usize)?;
            let node = std::fs::read_dir(sysfs.join("vfio-dev"))?.next().ok_or("no vfio-dev")??.file_name();
            let device = open(host.dev.join("vfio/devices").join(node))?;
            let mut bind = uapi::vfio_device_bind_iommufd {
                argsz: size_of::<uapi::vfio_device_bind_iommufd>() as u32,
                iommufd: fd,
                ..Default::default()
            };
            ioctl(device.as_raw_fd(), 118, (&raw mut bind) as usize)?;
            let mut attach = uapi::vfio_device_attach_iommufd_pt {
                argsz: size_of::<uapi::vfio_device_attach_iommufd_pt>() as u32,
                pt_id: alloc.out_ioas_id,
                ..Default::default()
            };
            ioctl(device.as_raw_fd(), 119, (&raw mut attach) as usize)?;
            let start = Instant::now();
            let mut iova = IOVA;
            for piece in pieces {
                let mut map = iommu::iommu_ioas_map {
                    size: size_of::<iommu::iommu_ioas_map>() as u32,
                    flags: 7,
                    ioas_id: alloc.out_ioas_id,
                    user_va: piece.address(),
                    length: piece.len(),
                    iova,
                    ..Default::default()
                };
                ioctl(fd, iommu::IOMMUFD_CMD_IOAS_MAP, (&raw mut map) as usize)?;
                iova += piece.len();
            }
            let mut iova = IOVA;
            for piece in pieces {
                let mut unmap = iommu::iommu_ioas_unmap {
                    size: size_of::<iommu::iommu_ioas_unmap>() as u32,
                    ioas_id: alloc.out_ioas_id,
                    iova,
                    length: piece.len(),
                };
                ioctl(fd, iommu::IOMMUFD_CMD_IOAS_UNMAP, (&raw mut unmap) as usize)?;
                iova += piece.len();
            }
            Ok(start.elapsed())
        }
    }
}
