//! The device by its virtqueue, for programs that drive it themselves.

use core::fmt;
use core::time::Duration;

use vm_paravirt::{CONFIG_BYTES, Config, FEATURE_IMPORT, PCI_ID, QUEUE};

use crate::error::Error;
use crate::frame::Frame;
use crate::pci::{self, Layout};
use crate::platform::Platform;
use crate::queue::{Queue, QueueMemory, SIZE};
use crate::transport::{Completed, Transport, timeout};

const ACKNOWLEDGE: u8 = 1;
const DRIVER: u8 = 2;
const DRIVER_OK: u8 = 4;
const FEATURES_OK: u8 = 8;
const NEEDS_RESET: u8 = 64;

const VERSION_1: u64 = 1 << 32;
const EVENT_INDEX: u64 = 1 << 29;
const NO_VECTOR: u16 = 0xffff;

/// How long the device may take to reset: its worker on the host ends meanwhile.
const RESET_TIMEOUT: Duration = Duration::from_secs(30);

/// Looks at the queue between two looks at the clock.
const LOOKS: u32 = 64;
/// How often is looked whether the device has given up, which leaves the guest, and how long is slept at a time.
const STATUS_INTERVAL: Duration = Duration::from_millis(100);

/// Registers of the common part (section 4.1.4.3).
mod common {
    pub(super) const DEVICE_FEATURE_SELECT: usize = 0x00;
    pub(super) const DEVICE_FEATURE: usize = 0x04;
    pub(super) const DRIVER_FEATURE_SELECT: usize = 0x08;
    pub(super) const DRIVER_FEATURE: usize = 0x0c;
    pub(super) const CONFIG_VECTOR: usize = 0x10;
    pub(super) const STATUS: usize = 0x14;
    pub(super) const QUEUE_SELECT: usize = 0x16;
    pub(super) const QUEUE_SIZE: usize = 0x18;
    pub(super) const QUEUE_VECTOR: usize = 0x1a;
    pub(super) const QUEUE_ENABLE: usize = 0x1c;
    pub(super) const QUEUE_NOTIFY: usize = 0x1e;
    pub(super) const QUEUE_TABLE: usize = 0x20;
}

/// A device with a queue, and its registers. Dropping it resets the device.
pub struct Virtqueue<P: Platform> {
    platform: P,
    layout: Layout,
    config: Config,
    features: u64,
    queue: Queue,
    /// Offset of the queue's notification register.
    notify: usize,
    timeout: Duration,
    interrupts: bool,
}

impl<P: Platform> Virtqueue<P> {
    /// Opens the device behind a PCI function, with memory for its queue that nothing else uses.
    ///
    /// # Errors
    /// When the function is another device, has another version of the protocol, or does not follow virtio.
    pub fn open(platform: P, memory: &'static QueueMemory) -> Result<Self, Error> {
        let found = platform.config_read(0);
        if (found as u16, (found >> 16) as u16) != PCI_ID {
            return Err(Error::WrongDevice { found });
        }
        let layout = Layout::find(&platform)?;
        let mut bytes = [0; CONFIG_BYTES];
        for (offset, byte) in bytes.iter_mut().enumerate() {
            *byte = layout.device.read8(offset);
        }
        let config = Config::decode(&bytes)?;
        if config.window_bytes != 0 {
            return Err(Error::Transport("it has no queue: programs reach it over vsock"));
        }
        let interrupt = platform.interrupt();
        let queue = Queue::new(memory)?;
        let timeout = timeout(&config);
        let interrupts = interrupt.is_some();
        let mut this = Self { platform, layout, config, features: 0, queue, notify: 0, timeout, interrupts };
        if let Some(message) = interrupt {
            pci::set_interrupt(&this.platform, message)?;
        }
        this.start()?;
        Ok(this)
    }

    /// Negotiates features, gives the device its queue, and switches it on.
    fn start(&mut self) -> Result<(), Error> {
        self.reset()?;
        let common = self.layout.common;
        let status = |bit| common.write8(common::STATUS, common.read8(common::STATUS) | bit);
        status(ACKNOWLEDGE);
        status(DRIVER);
        let mut offered = 0;
        for half in 0..2 {
            common.write32(common::DEVICE_FEATURE_SELECT, half);
            offered |= u64::from(common.read32(common::DEVICE_FEATURE)) << (32 * half);
        }
        if offered & VERSION_1 == 0 {
            return Err(Error::Transport("it is not a modern device"));
        }
        self.features = offered & (VERSION_1 | EVENT_INDEX | FEATURE_IMPORT);
        self.queue.use_event_index(self.features & EVENT_INDEX != 0);
        for half in 0..2 {
            common.write32(common::DRIVER_FEATURE_SELECT, half);
            common.write32(common::DRIVER_FEATURE, (self.features >> (32 * half)) as u32);
        }
        status(FEATURES_OK);
        if common.read8(common::STATUS) & FEATURES_OK == 0 {
            return Err(Error::Transport("it refuses the features that it offered"));
        }
        common.write16(common::CONFIG_VECTOR, NO_VECTOR);
        common.write16(common::QUEUE_SELECT, QUEUE);
        if common.read16(common::QUEUE_SIZE) < SIZE {
            return Err(Error::Transport("its queue is too small"));
        }
        common.write16(common::QUEUE_SIZE, SIZE);
        common.write16(common::QUEUE_VECTOR, if self.interrupts { 0 } else { NO_VECTOR });
        if self.interrupts && common.read16(common::QUEUE_VECTOR) != 0 {
            return Err(Error::Transport("it has no interrupt vector left"));
        }
        let (memory, bytes) = self.queue.address();
        let physical =
            self.platform.physical(memory, bytes).ok_or(Error::Transport("its queue has no address"))?;
        for (index, address) in self.queue.addresses(physical).into_iter().enumerate() {
            common.write64(common::QUEUE_TABLE + 8 * index, address);
        }
        let offset =
            u32::from(common.read16(common::QUEUE_NOTIFY)).checked_mul(self.layout.notify_multiplier);
        self.notify = offset.ok_or(Error::Transport("its notification register is nowhere"))? as usize;
        common.write16(common::QUEUE_ENABLE, 1);
        status(DRIVER_OK);
        if self.needs_reset() { Err(Error::NeedsReset) } else { Ok(()) }
    }

    /// Resets the device, and waits until that is done.
    fn reset(&mut self) -> Result<(), Error> {
        self.layout.common.write8(common::STATUS, 0);
        let start = self.platform.now();
        while self.layout.common.read8(common::STATUS) != 0 {
            if self.platform.now().saturating_sub(start) > RESET_TIMEOUT {
                return Err(Error::Transport("it does not finish its reset"));
            }
            core::hint::spin_loop();
        }
        Ok(())
    }

    /// The machine.
    pub fn platform(&self) -> &P {
        &self.platform
    }

    /// Whether buffers over the guest's memory are used in place.
    pub fn imports(&self) -> bool {
        self.features & FEATURE_IMPORT != 0
    }

    /// Whether the device has given up and must be reset, by dropping this and opening it again.
    pub fn needs_reset(&self) -> bool {
        self.layout.common.read8(common::STATUS) & NEEDS_RESET != 0
    }
}

impl<P: Platform> Transport for Virtqueue<P> {
    type Memory = &'static mut [u8];

    fn config(&self) -> &Config {
        &self.config
    }

    fn offer(&mut self, mut frame: Frame, bytes: usize) -> Result<u16, (Error, Frame)> {
        let (request, room, reply, reply_room) = frame.parts();
        if bytes > room.min(self.config.batch_bytes as usize) || reply_room > self.config.reply_bytes as usize
        {
            return Err((Error::FrameLength, frame));
        }
        frame.set_written(0);
        let addresses = (self.platform.physical(request, bytes), self.platform.physical(reply, reply_room));
        let (Some(request), Some(reply)) = addresses else {
            return Err((Error::Transport("a frame is not contiguous in physical memory"), frame));
        };
        self.queue.offer(frame, (request, bytes as u32), (reply, reply_room as u32))
    }

    fn notify(&self) {
        if self.queue.wants_notification() {
            self.layout.notify.write16(self.notify, QUEUE);
        }
    }

    fn completed(&mut self) -> Result<Option<Completed<Self::Memory>>, Error> {
        match self.queue.used()? {
            Some((slot, mut frame, written)) => {
                frame.set_written(written as usize);
                Ok(Some((slot, frame)))
            }
            None => Ok(None),
        }
    }

    /// At first it only looks; then the platform may sleep until the interrupt.
    fn wait(&mut self) -> Result<Completed<Self::Memory>, Error> {
        let start = self.platform.now();
        let (mut looked_at_status, mut looks, mut sleepy) = (start, 0u32, false);
        while !self.queue.is_used() {
            if !sleepy {
                looks = looks.wrapping_add(1);
                if !looks.is_multiple_of(LOOKS) {
                    self.platform.relax();
                    continue;
                }
            }
            let now = self.platform.now();
            let waited = now.saturating_sub(start);
            if waited > self.timeout || self.queue.outstanding() == 0 {
                self.reset()?;
                return Err(Error::Late);
            }
            if now.saturating_sub(looked_at_status) >= STATUS_INTERVAL {
                looked_at_status = now;
                if self.needs_reset() {
                    return Err(Error::NeedsReset);
                }
            }
            if sleepy {
                self.platform.sleep(STATUS_INTERVAL, &|| self.queue.is_used());
            } else if self.interrupts && waited >= self.platform.poll() {
                // It stays wanted until it comes; from here on each turn looks before it sleeps.
                self.queue.want_interrupt();
                sleepy = true;
            }
        }
        self.queue.hold_interrupts();
        self.completed()?.ok_or(Error::NeedsReset)
    }

    fn close(mut self, mut frames: impl FnMut(Frame)) -> Result<(), Error> {
        self.reset()?;
        while let Some(frame) = self.queue.take_back() {
            frames(frame);
        }
        Ok(())
    }
}

impl<P: Platform> Drop for Virtqueue<P> {
    fn drop(&mut self) {
        // A device that does not finish its reset keeps the queue's memory.
        if self.reset().is_ok() {
            self.queue.release();
        }
    }
}

impl<P: Platform> fmt::Debug for Virtqueue<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Virtqueue")
            .field("config", &self.config)
            .field("features", &self.features)
            .field("outstanding", &self.queue.outstanding())
            .finish_non_exhaustive()
    }
}
