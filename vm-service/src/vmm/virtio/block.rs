//! virtio-blk (section 5.2) on a raw image file or a block device.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{FlockOperation, OFlags, flock};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_S_IOERR,
    VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT,
};
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT as _, QueueT as _, Reader, Writer};
use vm_memory::GuestMemoryMmap;

use super::worker::Worker;
use super::{Activation, VirtioDevice};
use crate::config::Disk;
use crate::deadlines::DISK_STOP;
use crate::vmm::Stop;
use crate::vmm::error::MachineError;

const SECTOR: u64 = 512;
const QUEUE_SIZE: u16 = 256;
/// A request's header and status take two descriptors of the queue.
const SEG_MAX: u32 = QUEUE_SIZE as u32 - 2;
/// Data goes through a buffer of this size.
const BUFFER: usize = 256 << 10;
/// Mass storage controller, other.
const CLASS: u32 = 0x01_8000;

/// A disk.
pub(in crate::vmm) struct BlockDevice {
    disk: Arc<Image>,
    config: Vec<u8>,
}

/// The storage behind a disk.
struct Image {
    file: File,
    size: u64,
    read_only: bool,
    name: String,
}

impl BlockDevice {
    /// Opens the image, and locks it: against everybody else when it will be written, against writers otherwise.
    ///
    /// # Errors
    /// When it can't be opened, is in use or not made of whole sectors.
    pub(in crate::vmm) fn open(disk: &Disk) -> Result<Self, MachineError> {
        let failed = |reason: String| MachineError::Disk { path: disk.path.clone(), reason };
        let access = if disk.read_only { OFlags::RDONLY } else { OFlags::RDWR };
        let mut file = vm_files::open(&disk.path, access, 0)
            .map_err(|error| failed(format!("it can't be opened: {error}")))?;
        let lock = if disk.read_only {
            FlockOperation::NonBlockingLockShared
        } else {
            FlockOperation::NonBlockingLockExclusive
        };
        flock(&file, lock).map_err(|error| match error {
            rustix::io::Errno::WOULDBLOCK => failed(
                "another process has locked it; end the guest that uses it, or give this one a copy".into(),
            ),
            error => failed(format!("it can't be locked: {error}")),
        })?;
        let size =
            file.seek(SeekFrom::End(0)).map_err(|error| failed(format!("its size is unknown: {error}")))?;
        if size == 0 || !size.is_multiple_of(SECTOR) {
            return Err(failed(format!(
                "it has {size} bytes, which is not a whole number of 512-byte sectors"
            )));
        }
        let name = disk.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut config = (size / SECTOR).to_le_bytes().to_vec();
        config.extend(0u32.to_le_bytes());
        config.extend(SEG_MAX.to_le_bytes());
        Ok(Self { disk: Arc::new(Image { file, size, read_only: disk.read_only, name }), config })
    }
}

impl VirtioDevice for BlockDevice {
    fn name(&self) -> String {
        format!("the disk {}", self.disk.name)
    }

    fn id(&self) -> u16 {
        2
    }

    fn class(&self) -> u32 {
        CLASS
    }

    fn features(&self) -> u64 {
        let read_only = if self.disk.read_only { 1 << VIRTIO_BLK_F_RO } else { 0 };
        1 << VIRTIO_BLK_F_SEG_MAX | 1 << VIRTIO_BLK_F_FLUSH | read_only
    }

    fn queue_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn config(&self) -> &[u8] {
        &self.config
    }

    fn stopping(&self) -> (Duration, &'static str) {
        (DISK_STOP, "see whether its storage still answers: until it does, the disk stays open and locked")
    }

    fn start(&self, work: Activation) -> io::Result<Worker> {
        let (mut queues, mut kicks) = (Vec::new(), Vec::new());
        for (index, queue, kick) in work.queues {
            queues.push((index, queue));
            kicks.push(kick);
        }
        let (disk, memory, interrupt) = (self.disk.clone(), work.memory, work.interrupt);
        let mut buffer = vec![0; BUFFER];
        // A driver that knows no flush takes what was written as safe.
        let sync = work.features >> VIRTIO_BLK_F_FLUSH & 1 == 0;
        Worker::start("virtio-blk", kicks, move |slot, stop| {
            let Some((index, queue)) = queues.get_mut(slot) else { return true };
            let served = serve(&disk, &memory, queue, sync, &mut buffer, stop, || interrupt.used(*index));
            if let Err(error) = served {
                tracing::warn!(disk = %disk.name, %error, "the guest's driver broke its queue");
                interrupt.give_up();
                return false;
            }
            true
        })
    }
}

/// Serves all requests in a queue, until there are none or it is to stop: what is under way then is left unanswered, as at a
/// reset.
fn serve(
    disk: &Image,
    memory: &GuestMemoryMmap,
    queue: &mut Queue,
    sync: bool,
    buffer: &mut [u8],
    stop: &Stop,
    notify: impl Fn(),
) -> Result<(), virtio_queue::Error> {
    loop {
        queue.disable_notification(memory)?;
        // A queue that is refilled all the time must not keep its driver waiting for the interrupt.
        while let Some(chain) = queue.iter(memory)?.next() {
            let head = chain.head_index();
            let Some(written) = request(disk, memory, chain, sync, buffer, stop)? else { return Ok(()) };
            queue.add_used(memory, head, written)?;
            if queue.needs_notification(memory)? {
                notify();
            }
        }
        if !queue.enable_notification(memory)? {
            return Ok(());
        }
    }
}

/// Does one request (section 5.2.6) and returns how many bytes the driver finds written; `None` when it is to stop. A request
/// without room for its status is an error: there is no way to answer it.
fn request(
    disk: &Image,
    memory: &GuestMemoryMmap,
    chain: DescriptorChain<&GuestMemoryMmap>,
    sync: bool,
    buffer: &mut [u8],
    stop: &Stop,
) -> Result<Option<u32>, virtio_queue::Error> {
    if stop.requested() {
        return Ok(None);
    }
    let mut reader = chain.clone().reader(memory)?;
    let mut writer = chain.writer(memory)?;
    let data_len = writer.available_bytes().checked_sub(1).ok_or(virtio_queue::Error::InvalidChain)?;
    let mut status_writer = writer.split_at(data_len).map_err(|_| virtio_queue::Error::InvalidChain)?;
    let mut header = [0; 16];
    let status = match reader.read_exact(&mut header) {
        Ok(()) => execute(disk, header, sync, &mut reader, &mut writer, buffer, stop),
        Err(_) => Err(Unmet::Status(VIRTIO_BLK_S_IOERR)),
    };
    let status = match status {
        Ok(()) => VIRTIO_BLK_S_OK,
        Err(Unmet::Status(status)) => status,
        Err(Unmet::Stopped) => return Ok(None),
    };
    status_writer.write_all(&[status as u8]).map_err(|_| virtio_queue::Error::InvalidChain)?;
    Ok(Some(u32::try_from(writer.bytes_written() + 1).unwrap_or(u32::MAX)))
}

/// Why a request was not done.
enum Unmet {
    /// It is answered with this status.
    Status(u32),
    /// The device is to stop.
    Stopped,
}

/// Does what the header asks for.
fn execute(
    disk: &Image,
    header: [u8; 16],
    sync: bool,
    reader: &mut Reader<'_>,
    writer: &mut Writer<'_>,
    buffer: &mut [u8],
    stop: &Stop,
) -> Result<(), Unmet> {
    let kind = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
    let mut sector = [0; 8];
    sector.copy_from_slice(&header[8..]);
    let sector = u64::from_le_bytes(sector);
    let failed = |error: io::Error| {
        tracing::warn!(disk = %disk.name, sector, %error, "a disk request failed");
        Unmet::Status(VIRTIO_BLK_S_IOERR)
    };
    // A request may be as long as RAM times the queue.
    let go_on = || if stop.requested() { Err(Unmet::Stopped) } else { Ok(()) };
    match kind {
        VIRTIO_BLK_T_IN => {
            let mut offset = disk.range(sector, writer.available_bytes())?;
            while writer.available_bytes() > 0 {
                go_on()?;
                let count = writer.available_bytes().min(buffer.len());
                disk.file.read_exact_at(&mut buffer[..count], offset).map_err(failed)?;
                writer.write_all(&buffer[..count]).map_err(failed)?;
                offset += count as u64;
            }
            Ok(())
        }
        VIRTIO_BLK_T_OUT if disk.read_only => Err(Unmet::Status(VIRTIO_BLK_S_IOERR)),
        VIRTIO_BLK_T_OUT => {
            let mut offset = disk.range(sector, reader.available_bytes())?;
            while reader.available_bytes() > 0 {
                go_on()?;
                let count = reader.available_bytes().min(buffer.len());
                reader.read_exact(&mut buffer[..count]).map_err(failed)?;
                disk.file.write_all_at(&buffer[..count], offset).map_err(failed)?;
                offset += count as u64;
            }
            if sync { disk.file.sync_data().map_err(failed) } else { Ok(()) }
        }
        VIRTIO_BLK_T_FLUSH if disk.read_only => Ok(()),
        VIRTIO_BLK_T_FLUSH => disk.file.sync_data().map_err(failed),
        VIRTIO_BLK_T_GET_ID => {
            let mut id = [0; VIRTIO_BLK_ID_BYTES as usize];
            for (slot, byte) in id.iter_mut().zip(disk.name.bytes()) {
                *slot = byte;
            }
            let count = writer.available_bytes().min(id.len());
            writer.write_all(&id[..count]).map_err(failed)
        }
        _ => Err(Unmet::Status(VIRTIO_BLK_S_UNSUPP)),
    }
}

impl Image {
    /// Byte offset of a request that lies on the disk and is made of whole sectors.
    fn range(&self, sector: u64, len: usize) -> Result<u64, Unmet> {
        let outside = Unmet::Status(VIRTIO_BLK_S_IOERR);
        let start_and_end =
            sector.checked_mul(SECTOR).and_then(|offset| Some((offset, offset.checked_add(len as u64)?)));
        let Some((offset, end)) = start_and_end else { return Err(outside) };
        let inside = end <= self.size && (len as u64).is_multiple_of(SECTOR);
        if inside { Ok(offset) } else { Err(outside) }
    }
}

#[cfg(test)]
pub(super) mod testing {
    //! A disk whose queue is served in the test's own thread.

    use std::cell::Cell;

    use super::{BUFFER, BlockDevice, Disk, GuestMemoryMmap, MachineError, Queue, Stop, serve};

    pub(in crate::vmm::virtio) const SECTOR: usize = super::SECTOR as usize;

    pub(in crate::vmm::virtio) struct Bench(BlockDevice);

    impl std::fmt::Debug for Bench {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("Bench")
        }
    }

    impl Bench {
        pub(in crate::vmm::virtio) fn try_open(disk: &Disk) -> Result<Self, MachineError> {
            BlockDevice::open(disk).map(Self)
        }

        pub(in crate::vmm::virtio) fn open(disk: &Disk) -> Self {
            Self::try_open(disk).unwrap()
        }

        /// Serves the queue until it is empty and returns how often the driver was notified.
        pub(in crate::vmm::virtio) fn serve(
            &self,
            memory: &GuestMemoryMmap,
            queue: &mut Queue,
        ) -> Result<u32, virtio_queue::Error> {
            self.serve_until(memory, queue, &Stop::new().unwrap())
        }

        /// As [`serve`](Self::serve), until it is to stop.
        pub(in crate::vmm::virtio) fn serve_until(
            &self,
            memory: &GuestMemoryMmap,
            queue: &mut Queue,
            stop: &Stop,
        ) -> Result<u32, virtio_queue::Error> {
            let notified = Cell::new(0);
            let mut buffer = vec![0; BUFFER];
            serve(&self.0.disk, memory, queue, true, &mut buffer, stop, || notified.set(notified.get() + 1))?;
            Ok(notified.get())
        }
    }
}
