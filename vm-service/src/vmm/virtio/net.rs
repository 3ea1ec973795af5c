//! virtio-net (section 5.1) at a tap of the host, whose frames go with the header that virtio has (`IFF_VNET_HDR`): checksums and
//! the cutting of large TCP segments are left to whoever comes last, often nobody.
//!
//! ```text
//! guest's driver ─ queues ─┬─ vhost-net of the Linux kernel ─┬─ tap ─ bridge, routes … of the host
//!                          └─ datapath, a thread of ours ────┘
//! ```

mod datapath;
mod sys;
mod tap;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use vhost::VhostBackend as _;
use vhost::net::VhostNet as _;
use vhost::vhost_kern::net::Net;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6,
    VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_MTU,
};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;

use super::vhost_rings::{self, Transport};
use super::worker::Worker;
use super::{Activation, VirtioDevice};
use crate::config::{self, MacAddress};
use crate::deadlines::VHOST_STOP;
use crate::vmm::error::MachineError;
use tap::Tap;

/// Ethernet controller.
const CLASS: u32 = 0x02_0000;
const ID: u16 = 1;
const QUEUE_SIZE: u16 = 256;
/// The queues, by index.
const RECEIVE: u16 = 0;
const TRANSMIT: u16 = 1;
const QUEUES: u16 = 2;
/// Bytes of the header before each frame (section 5.1.6).
const HEADER: usize = 12;
/// Least MTU that may be offered (section 5.1.4.1).
const LEAST_MTU: u16 = 68;
/// What the tap does either way.
const OFFLOADS: u64 = 1 << VIRTIO_NET_F_CSUM
    | 1 << VIRTIO_NET_F_HOST_TSO4
    | 1 << VIRTIO_NET_F_HOST_TSO6
    | 1 << VIRTIO_NET_F_HOST_ECN
    | 1 << VIRTIO_NET_F_GUEST_CSUM
    | 1 << VIRTIO_NET_F_GUEST_TSO4
    | 1 << VIRTIO_NET_F_GUEST_TSO6
    | 1 << VIRTIO_NET_F_GUEST_ECN;

/// A network interface.
pub(in crate::vmm) struct NetDevice {
    tap: Arc<Tap>,
    /// What carries its frames; without it this process does.
    vhost: Option<Arc<Vhost>>,
    features: u64,
    config: [u8; 12],
}

/// The Linux kernel's vhost-net.
struct Vhost {
    vhost: Net<Arc<GuestMemoryMmap>>,
    features: u64,
    tap: Arc<Tap>,
}

impl NetDevice {
    /// Opens the tap, and vhost-net where it is to be had or demanded.
    ///
    /// # Errors
    /// When one of them can't be had.
    pub(in crate::vmm) fn open(
        net: &config::Net,
        mac: MacAddress,
        memory: &GuestMemoryMmap,
    ) -> Result<Self, MachineError> {
        let failed = |reason| MachineError::Net { tap: net.tap.clone(), reason };
        let tap = Arc::new(Tap::open(&net.tap).map_err(failed)?);
        let vhost = match net.vhost {
            Some(false) => Err("it is not wanted".to_owned()),
            _ => Vhost::open(tap.clone(), memory),
        };
        let vhost = match vhost {
            Err(reason) if net.vhost == Some(true) => return Err(failed(reason)),
            Err(reason) => {
                tracing::info!(
                    "the guest's network interface {mac} is at {}, without vhost-net: {reason}",
                    net.tap
                );
                None
            }
            Ok(vhost) => {
                tracing::info!("the guest's network interface {mac} is at {}, by vhost-net", net.tap);
                Some(Arc::new(vhost))
            }
        };
        let mergeable = vhost.as_ref().map_or(u64::MAX, |vhost| vhost.features) & 1 << VIRTIO_NET_F_MRG_RXBUF;
        let mtu = if tap.mtu() >= LEAST_MTU { 1 << VIRTIO_NET_F_MTU } else { 0 };
        let mut config = [0; 12];
        config[..6].copy_from_slice(&mac.0);
        // Behind the link's state, which is not offered: one pair of queues, and the MTU.
        config[8] = 1;
        config[10..].copy_from_slice(&tap.mtu().to_le_bytes());
        let features = OFFLOADS | 1 << VIRTIO_NET_F_MAC | mergeable | mtu;
        Ok(Self { tap, vhost, features, config })
    }
}

impl VirtioDevice for NetDevice {
    fn name(&self) -> String {
        format!("the network interface at {}", self.tap.name())
    }

    fn id(&self) -> u16 {
        ID
    }

    fn class(&self) -> u32 {
        CLASS
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE; QUEUES as usize]
    }

    fn config(&self) -> &[u8] {
        &self.config
    }

    fn stopping(&self) -> (Duration, &'static str) {
        (VHOST_STOP, "see what the Linux kernel's log says of vhost and of the tap")
    }

    fn start(&self, work: Activation) -> io::Result<Worker> {
        // What came for another driver may be larger than this one takes.
        self.tap.set_offloads(work.features)?;
        self.tap.drain();
        let name = self.name();
        if let Some(vhost) = self.vhost.clone() {
            return Worker::run("virtio-net", move |end| vhost_rings::serve(&*vhost, &name, &work, end));
        }
        let tap = self.tap.clone();
        Worker::run("virtio-net", move |end| {
            let interrupt = work.interrupt.clone();
            if let Err(error) = datapath::serve(tap, work, end) {
                tracing::warn!("{name}: its driver broke a queue: {error}");
                interrupt.give_up();
            }
        })
    }
}

impl Vhost {
    fn open(tap: Arc<Tap>, memory: &GuestMemoryMmap) -> Result<Self, String> {
        let vhost = Net::new(Arc::new(memory.clone())).map_err(|error| match error {
            vhost::Error::VhostOpen(error) => format!(
                "/dev/vhost-net can't be opened: {error}; load its module (`modprobe vhost_net`), and let this user open it"
            ),
            error => error.to_string(),
        })?;
        vhost.set_owner().map_err(|error| error.to_string())?;
        let features = vhost.get_features().map_err(|error| error.to_string())?;
        Ok(Self { vhost, features, tap })
    }
}

impl Transport for Vhost {
    fn start(&self, work: &Activation, broken: &EventFd) -> vhost::Result<()> {
        if vhost_rings::set_up(&self.vhost, self.features, work, QUEUES, broken)? {
            for queue in [RECEIVE, TRANSMIT] {
                self.vhost.set_backend(queue.into(), Some(self.tap.file()))?;
            }
        }
        Ok(())
    }

    fn stop(&self) -> vhost::Result<()> {
        self.vhost.set_backend(RECEIVE.into(), None)?;
        self.vhost.set_backend(TRANSMIT.into(), None)
    }
}

#[cfg(test)]
mod tests;
