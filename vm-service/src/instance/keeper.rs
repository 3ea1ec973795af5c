//! A device's keeper: the thread that does with it what takes a path or rights, which vCPUs have not.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::thread::{Builder, JoinHandle};

use vm_passthrough::PciAddress;
use vm_passthrough::vfio::{DeviceFile, Keeper, Presence, ResetReport, Result, Space, VfioDevice, VfioError};

type Order = Box<dyn FnOnce(&VfioDevice) + Send>;

/// Hands on what is asked for to the thread, which has the device open. Dropping it closes the device.
#[derive(Debug)]
struct KeeperThread {
    address: PciAddress,
    /// `None` once the thread is to end.
    orders: Option<Sender<Order>>,
    thread: Option<JoinHandle<()>>,
}

/// The device as its guest's machine has it, in `space`, which is shared by the one that it was opened in.
///
/// # Errors
/// When this process has no threads or descriptors left.
pub(super) fn entrust(
    device: Arc<VfioDevice>,
    space: &Arc<Space>,
) -> std::result::Result<Arc<VfioDevice>, String> {
    let failed = |error: &dyn std::fmt::Display| {
        format!("{} can't be kept open: {error}; raise `ulimit -n` and `ulimit -u`", device.address())
    };
    let parts = device.share().map_err(|error| failed(&error))?;
    let address = device.address();
    let (orders, received) = channel::<Order>();
    let kept = device.clone();
    let serve = move || received.into_iter().for_each(|order| order(&kept));
    let thread = Builder::new().name("keeper".into()).spawn(serve).map_err(|error| failed(&error))?;
    let keeper = KeeperThread { address, orders: Some(orders), thread: Some(thread) };
    VfioDevice::receive(parts, space, Arc::new(keeper)).map_err(|error| error.to_string())
}

impl KeeperThread {
    /// Has the thread do something with the device, which has deadlines of its own, and waits for that.
    fn ask<T: Send + 'static>(&self, work: impl FnOnce(&VfioDevice) -> T + Send + 'static) -> Result<T> {
        let (answer, answered) = sync_channel(1);
        // Whoever asked waits for it.
        let order: Order = Box::new(move |device| drop(answer.send(work(device))));
        let sent = self.orders.as_ref().and_then(|orders| orders.send(order).ok());
        let gone = || VfioError::Unavailable {
            address: self.address,
            reason: "the thread that keeps it open has ended, which is a bug of this program".into(),
        };
        sent.and_then(|()| answered.recv().ok()).ok_or_else(gone)
    }
}

impl Keeper for KeeperThread {
    fn wake(&self) -> Result<()> {
        self.ask(DeviceFile::wake)?
    }

    fn reset_and_prove(&self) -> Result<ResetReport> {
        self.ask(DeviceFile::reset_and_prove)?
    }

    fn set_at_rest(&self, at_rest: bool) {
        // A device without its keeper is not reset, along with another or by itself.
        let _ = self.ask(move |device| DeviceFile::set_at_rest(device, at_rest));
    }

    fn presence(&self) -> Presence {
        self.ask(VfioDevice::presence).unwrap_or_else(|error| Presence::Gone(error.to_string()))
    }
}

impl Drop for KeeperThread {
    fn drop(&mut self) {
        drop(self.orders.take());
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that kept {} open panicked", self.address);
        }
    }
}
