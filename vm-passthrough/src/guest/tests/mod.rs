//! Tests of a whole device on a simulated function, VMM and address space.

mod accesses;
mod bars;
mod config;
mod fuzz;
mod interrupts;
mod intx;
#[cfg(feature = "kvm")]
mod kvm;
mod lifecycle;
mod peers;
mod state;

use std::sync::Arc;

use super::{MsiMessage, PassthroughDevice as _, VfioPciDevice};
use crate::sim::{SimConfig, SimDevice, SimDeviceBuilder, SimLog, SimSpace, SimVmm};

const PM: u16 = 0x40;
const MSI: u16 = 0x50;
const EXPRESS: u16 = 0x70;
const MSIX: u16 = 0xb4;
const VENDOR: u16 = 0xc0;

/// A device with all of its surroundings.
struct Rig {
    device: Arc<VfioPciDevice>,
    sim: Arc<SimDevice>,
    vmm: Arc<SimVmm>,
    space: Arc<SimSpace>,
    log: SimLog,
}

/// Config space with one of everything. BAR 0: 1 MiB, 64 bits, prefetchable. BAR 2: 64 KiB with the MSI-X table at
/// 0x2000 and the pending bits at 0x3000 (0xc000 when they are many). BAR 3: I/O. BAR 4: 256 bytes.
pub(super) fn config(msix_vectors: u16) -> SimConfig {
    let mut config = SimConfig::new(0x1234, 0x5678, 0x01_08_02);
    config
        .put(0x04, &[0x07, 0x04])
        .put(0x0d, &[0x20, 0x80, 0xff])
        .put(0x10, &[0x0c, 0, 0, 0xfe, 1, 0, 0, 0])
        .put(0x18, &[0, 0, 0, 0xfd, 1, 0xe0])
        .put(0x28, &[0xaa; 4])
        .put(0x30, &[1, 0, 0, 0xfc])
        .put(0x3c, &[11, 1, 2, 3])
        .capability(0x01, PM as u8, &[0xc3, 0xff, 0x08, 0x81])
        .capability(0x05, MSI as u8, &[0x86, 0x01])
        .capability(0x10, EXPRESS as u8, &express(0x02))
        .capability(0x03, 0xac, &[0x11; 6])
        .capability(0x11, MSIX as u8, &[])
        .put(usize::from(MSIX) + 2, &(msix_vectors - 1).to_le_bytes())
        .put(usize::from(MSIX) + 4, &[2, 0x20, 0, 0, 2, if msix_vectors > 256 { 0xc0 } else { 0x30 }, 0, 0])
        .capability(0x09, VENDOR as u8, &[0x10, 0x22, 0x33, 0x44])
        .capability(0x13, 0xd4, &[0x06, 0x03, 0, 0])
        .extended(0x0010, 0x100, &[0x55; 0x3c])
        .extended(0x0001, 0x140, &[0x66; 0x28])
        .extended(0x000e, 0x180, &[0x55; 4])
        .extended(0x000f, 0x190, &[0x55; 4])
        .extended(0x0003, 0x1a0, &[1, 2, 3, 4, 5, 6, 7, 8])
        .extended(0x0013, 0x1b0, &[0x55; 12])
        .extended(0x001b, 0x1d0, &[0x55; 4])
        .extended(0x0015, 0x200, &[0x55; 12])
        .extended(0x000b, 0x300, &[0xcd, 0xab, 0x01, 0x01, 0x99])
        // CXL's for devices: vendor 1e98, 16 bytes, number 0, capability.
        .extended(0x0023, 0x340, &[0x98, 0x1e, 0x00, 0x01, 0x00, 0x00, 0x1e, 0x00, 0x77]);
    config
}

/// The body of a PCI Express capability of version 2 with its flags' upper byte from `kind`.
fn express(flags: u8) -> Vec<u8> {
    let mut body = vec![0xff; 0x3a];
    body[0] = flags;
    body[1] = 0;
    // Device Control, Device Status.
    body[6..10].copy_from_slice(&[0x10, 0x28, 0, 0]);
    body
}

fn builder(config: &SimConfig, msix_vectors: u32, noresize: bool) -> SimDeviceBuilder {
    SimDeviceBuilder::new(config.bytes())
        .bar(0, 1 << 20, &[(0, 1 << 20)])
        .bar(2, 1 << 16, &[(0, 1 << 16)])
        .bar(3, 32, &[])
        .bar(4, 256, &[])
        .msi(8)
        .msix(msix_vectors, noresize)
}

impl Rig {
    /// An attached device with everything.
    fn new() -> Self {
        let rig = Self::with(builder(&config(4), 4, false));
        rig.device.attach().unwrap();
        rig.log.take();
        rig
    }

    /// An attached device with N MSI-X vectors.
    fn msix(vectors: u16, noresize: bool) -> Self {
        let rig = Self::with(builder(&config(vectors), vectors.into(), noresize));
        rig.device.attach().unwrap();
        rig.log.take();
        rig
    }

    /// A device that is not attached.
    fn with(builder: SimDeviceBuilder) -> Self {
        let log = SimLog::default();
        let space = SimSpace::new(vec![0..=0xfedf_ffff, 0xfef0_0000..=u64::MAX], &log);
        let sim = builder.log(&log).build("0000:65:00.0".parse().unwrap(), space.clone()).unwrap();
        let vmm = SimVmm::new(&[(0, 0x10_0000), (0x1_0000_0000, 0x10_0000)], &log).unwrap();
        let device = VfioPciDevice::new(sim.clone(), vmm.clone()).unwrap();
        Self { device, sim, vmm, space, log }
    }

    /// Where an access that exits falls, as the VMM knows it: BAR and offset.
    fn find_bar(&self, address: u64) -> Option<(u8, u64)> {
        self.vmm.bars().find(address).map(|hit| (hit.bar, hit.offset))
    }

    fn read8(&self, offset: u16) -> u8 {
        let mut data = [0; 1];
        self.device.config_read(offset, &mut data);
        data[0]
    }

    fn read16(&self, offset: u16) -> u16 {
        let mut data = [0; 2];
        self.device.config_read(offset, &mut data);
        u16::from_le_bytes(data)
    }

    fn read32(&self, offset: u16) -> u32 {
        let mut data = [0; 4];
        self.device.config_read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn write16(&self, offset: u16, value: u16) {
        self.device.config_write(offset, &value.to_le_bytes());
    }

    fn write32(&self, offset: u16, value: u32) {
        self.device.config_write(offset, &value.to_le_bytes());
    }

    /// 16 bits of the device itself.
    fn hardware16(&self, offset: u16) -> u16 {
        let config = self.sim.config();
        u16::from_le_bytes([config[usize::from(offset)], config[usize::from(offset) + 1]])
    }

    /// Programs an entry of the MSI-X table.
    fn entry(&self, vector: u64, message: MsiMessage, masked: bool) {
        self.device.bar_write(2, 0x2000 + vector * 16, &message.address.to_le_bytes()).unwrap();
        self.device.bar_write(2, 0x2008 + vector * 16, &message.data.to_le_bytes()).unwrap();
        self.mask(vector, masked);
    }

    fn mask(&self, vector: u64, masked: bool) {
        self.device.bar_write(2, 0x200c + vector * 16, &u32::from(masked).to_le_bytes()).unwrap();
    }
}

fn message(vector: u32) -> MsiMessage {
    MsiMessage { address: 0xfee0_1000, data: 0x40 + vector }
}

/// Lets this process have as many descriptors as it may. False if that is not enough for thousands of vectors.
fn raise_descriptor_limit() -> bool {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, ..limit };
    let enough =
        setrlimit(Resource::Nofile, raised).is_ok() && limit.maximum.is_none_or(|most| most >= 20_000);
    if !enough {
        eprintln!("skipped: the limit of open files is {limit:?}");
    }
    enough
}
