//! The accelerator.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use vm_accel::{Accelerator, DeviceInfo, Error, MAX_PARAMETER_BYTES, QueueOptions, Result};
use vm_paravirt_guest::linux::{Device, Stream, Window};
use vm_paravirt_guest::protocol::{Info, VERSION};
use vm_paravirt_guest::{Error as Client, Transport as _};

use crate::connection::Connection;
use crate::error::{Limits, host};
use crate::queue::GuestQueue;

/// Makes streams to the device.
type Connect = dyn Fn() -> Result<Stream, Client> + Send + Sync;

/// An accelerator that the host shares with this guest. Kernels are compiled for it by the host: their image is the IR's binary form.
pub struct GuestAccelerator {
    info: Arc<DeviceInfo>,
    limits: Limits,
    window: Window,
    connect: Box<Connect>,
    /// What its queues share, as long as there is one.
    connection: Mutex<Weak<Connection>>,
}

impl fmt::Debug for GuestAccelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuestAccelerator").field("info", &self.info).finish_non_exhaustive()
    }
}

impl GuestAccelerator {
    /// The first that this guest has. It takes root's rights to find it.
    ///
    /// # Errors
    /// [`Error::Host`] where there is none, or this program can't reach it; as [`over`](Self::over).
    pub fn new() -> Result<Self> {
        Self::on(Device::find().map_err(host("finding the accelerator that the host shares"))?)
    }

    /// The one that a device is.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn on(device: Device) -> Result<Self> {
        let window = device.window().map_err(host("mapping the accelerator's window"))?;
        Self::over(window, move || device.connect())
    }

    /// The one whose window this is, over streams that `connect` makes.
    ///
    /// # Errors
    /// [`Error::Host`] where it can't be reached, [`Error::Unsupported`] for an NPU.
    pub fn over(
        window: Window,
        connect: impl Fn() -> Result<Stream, Client> + Send + Sync + 'static,
    ) -> Result<Self> {
        let asking = host("asking the host what its accelerator is");
        let mut stream = connect().map_err(&asking)?;
        let mut frame = stream.frame();
        let mut batch = frame.batch().map_err(&asking)?;
        batch.query().map_err(|error| asking(error.into()))?;
        let bytes = batch.finish();
        let frame = stream.call(frame, bytes).map_err(&asking)?;
        let reply = frame.reply().map_err(&asking)?;
        reply.check().map_err(|(operation, status)| asking(Client::Status { operation, status }))?;
        let answer = reply.results().flatten().next().map(|(_, answer)| answer);
        let info = Info::decode(answer.unwrap_or_default()).map_err(|error| asking(error.into()))?;
        if info.target.starts_with("onnx:") {
            let what = "kernels: it is an NPU, which runs the models of `vm_paravirt_guest::linux::Model`";
            return Err(Error::Unsupported { what: what.into(), device: info.name.into() });
        }
        let limits = Limits { fuel: info.fuel, time: Duration::from_micros(info.deadline_us) };
        let info = DeviceInfo {
            name: info.name.into(),
            backend: "guest",
            target: info.target.into(),
            address: None,
            driver: format!("vm-paravirt {VERSION}"),
            memory_bytes: info.memory_bytes,
            compute_units: info.units,
            warp_size: info.lanes,
            block_threads: info.block_threads,
            // The host says what of it the device does not take along z.
            block: [info.block_threads; 3],
            grid: info.grid,
            shared_bytes: info.shared_bytes,
            parameter_bytes: MAX_PARAMETER_BYTES,
            unified: false,
            host_registration: false,
            guards: false,
        };
        Ok(Self {
            info: Arc::new(info),
            limits,
            window,
            connect: Box::new(connect),
            connection: Mutex::default(),
        })
    }
}

impl Accelerator for GuestAccelerator {
    type Queue = GuestQueue;

    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Opens a context. All of an accelerator's share a connection, and so an order; one that is lost is replaced.
    fn open(&self, options: &QueueOptions) -> Result<GuestQueue> {
        let mut kept = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let connection = match kept.upgrade().filter(|connection| connection.shared().check().is_ok()) {
            Some(connection) => connection,
            None => {
                let stream = (self.connect)().map_err(host("connecting to the host's accelerator"))?;
                let connection = Arc::new(Connection::open(stream, self.window.clone(), self.limits)?);
                *kept = Arc::downgrade(&connection);
                connection
            }
        };
        Ok(GuestQueue::open(connection, Arc::clone(&self.info), options))
    }
}
