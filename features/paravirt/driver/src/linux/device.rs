//! The accelerator's PCI function, as Linux shows it in sysfs.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};
use std::vec::Vec;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use vm_paravirt::{CONFIG_BYTES, Config, PCI_ID, Takes, WINDOW_ID};
use vsock::{VMADDR_CID_HOST, VsockStream};

use super::stream::Stream;
use super::system;
use super::window::Window;
use crate::Error;
use crate::pci::{self, DEVICE, VENDOR_SPECIFIC};

const FUNCTIONS: &str = "/sys/bus/pci/devices";
/// Kinds of virtio's capabilities (section 4.1.4): access by config space, and shared memory.
const ACCESS: u8 = 5;
const SHARED: u8 = 8;
/// How long another program may take to read the registers, some milliseconds' work.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// An accelerator that programs reach over vsock.
#[derive(Clone, Debug)]
pub struct Device {
    directory: PathBuf,
    config: Config,
    /// The window's BAR.
    bar: u8,
}

impl Device {
    /// The first that takes batches.
    ///
    /// # Errors
    /// When there is none, or it can't be looked at: that takes root's rights.
    pub fn find() -> Result<Self, Error> {
        Self::that_takes(Takes::Batches)
    }

    /// The first that takes this.
    ///
    /// # Errors
    /// As for [`find`](Self::find).
    pub fn that_takes(takes: Takes) -> Result<Self, Error> {
        Self::all()?.into_iter().find(|device| device.config.takes == takes).ok_or(Error::Absent)
    }

    /// All that there are, in the order of their addresses.
    ///
    /// # Errors
    /// When one can't be looked at.
    pub fn all() -> Result<Vec<Self>, Error> {
        let entries = fs::read_dir(FUNCTIONS).map_err(system("reading /sys/bus/pci/devices"))?;
        let mut directories: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        directories.sort();
        directories.retain(|directory| is_accelerator(directory));
        directories.into_iter().map(Self::open).collect()
    }

    /// The accelerator whose function is in this directory, as in `/sys/bus/pci/devices/0000:00:01.0`.
    ///
    /// # Errors
    /// When it is another device, has another version of the protocol, or can't be looked at.
    pub fn open(directory: impl Into<PathBuf>) -> Result<Self, Error> {
        let directory = directory.into();
        let space = OpenOptions::new()
            .read(true)
            .write(true)
            .open(directory.join("config"))
            .map_err(system("opening the accelerator's config space"))?;
        let space = Space(space);
        let found = space.read(0)?;
        if (found as u16, (found >> 16) as u16) != PCI_ID {
            return Err(Error::WrongDevice { found });
        }
        let (mut access, mut device, mut shared) = (None, None, None);
        for (offset, head) in pci::capabilities(|offset| space.read(offset).unwrap_or(0)) {
            if head as u8 != VENDOR_SPECIFIC {
                continue;
            }
            let word = space.read(offset + 4)?;
            let (bar, id) = (word as u8, (word >> 8) as u8);
            match (head >> 24) as u8 {
                ACCESS => access = access.or(Some(offset)),
                DEVICE => device = device.or(Some((bar, space.read(offset + 8)?, space.read(offset + 12)?))),
                SHARED if id == WINDOW_ID => shared = shared.or(Some(bar)),
                _ => {}
            }
        }
        let (Some(access), Some((bar, start, len))) = (access, device) else {
            return Err(Error::Transport("it lacks a part of its registers"));
        };
        if (len as usize) < CONFIG_BYTES {
            return Err(Error::Transport("its configuration is too short"));
        }
        let config = Config::decode(&space.registers(access, bar, start)?)?;
        let bar = shared.filter(|_| config.window_bytes != 0);
        let bar =
            bar.ok_or(Error::Transport("it has a queue and no window: it takes a driver to reach it"))?;
        Ok(Self { directory, config, bar })
    }

    /// Its configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Maps its window. Other programs of this guest map the same memory.
    ///
    /// # Errors
    /// When this program may not.
    pub fn window(&self) -> Result<Window, Error> {
        Window::open(self.window_file(), self.config.window_bytes)
    }

    /// The file of its window in sysfs, whose first bytes are the window's.
    pub fn window_file(&self) -> PathBuf {
        let resource = |suffix: &str| self.directory.join(std::format!("resource{}{suffix}", self.bar));
        // Where there is a choice, the host's memory need not be accessed byte by byte.
        let combined = resource("_wc");
        if combined.exists() { combined } else { resource("") }
    }

    /// Where its window is in this guest's physical memory, as far as sysfs tells.
    pub fn window_address(&self) -> Option<u64> {
        let text = fs::read_to_string(self.directory.join("resource")).ok()?;
        let mut ends = text.lines().nth(self.bar.into())?.split_whitespace();
        let mut number = || u64::from_str_radix(ends.next()?.strip_prefix("0x")?, 16).ok();
        let (start, end) = (number()?, number()?);
        let fits = end.checked_sub(start)?.checked_add(1)? >= self.config.window_bytes;
        (start != 0 && fits).then_some(start)
    }

    /// Connects to it. What this program makes on it is released when the connection ends.
    ///
    /// # Errors
    /// When this guest has no vsock device, the host does not listen, or it serves as many programs as it does.
    pub fn connect(&self) -> Result<Stream, Error> {
        let socket = VsockStream::connect_with_cid_port(VMADDR_CID_HOST, self.config.port)
            .map_err(system("connecting to the host over vsock (is vmw_vsock_virtio_transport loaded?)"))?;
        Stream::new(socket.into())
    }
}

fn is_accelerator(directory: &Path) -> bool {
    let number = |name: &str| {
        let text = fs::read_to_string(directory.join(name)).ok()?;
        u16::from_str_radix(text.trim().strip_prefix("0x")?, 16).ok()
    };
    (number("vendor"), number("device")) == (Some(PCI_ID.0), Some(PCI_ID.1))
}

/// Waits until no other program has locked it; the lock ends with the file.
fn lock(file: &File, timeout: Duration) -> Result<(), Error> {
    let until = Instant::now() + timeout;
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(Errno::WOULDBLOCK) if Instant::now() < until => thread::sleep(Duration::from_millis(1)),
            Err(Errno::INTR) => {}
            Err(Errno::WOULDBLOCK) => {
                let what =
                    "locking the accelerator's config space, which another program keeps locked (`lslocks`)";
                return Err(system(what)(Errno::WOULDBLOCK.into()));
            }
            Err(error) => return Err(system("locking the accelerator's config space")(error.into())),
        }
    }
}

/// A function's config space.
struct Space(File);

impl Space {
    fn read(&self, offset: u16) -> Result<u32, Error> {
        let mut bytes = [0; 4];
        self.0
            .read_exact_at(&mut bytes, offset.into())
            .map_err(system("reading the accelerator's config space (are you root?)"))?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn write(&self, offset: u16, bytes: &[u8]) -> Result<(), Error> {
        self.0
            .write_all_at(bytes, offset.into())
            .map_err(system("writing the accelerator's config space (are you root?)"))
    }

    /// Reads registers through config space: a driver that has taken the BAR keeps programs from mapping it.
    fn registers(&self, access: u16, bar: u8, start: u32) -> Result<[u8; CONFIG_BYTES], Error> {
        // The way is narrow: one program at a time.
        lock(&self.0, LOCK_TIMEOUT)?;
        let mut bytes = [0; CONFIG_BYTES];
        self.write(access + 4, &[bar])?;
        self.write(access + 12, &4u32.to_le_bytes())?;
        for (index, word) in bytes.chunks_exact_mut(4).enumerate() {
            let at = start.wrapping_add(4 * index as u32);
            self.write(access + 8, &at.to_le_bytes())?;
            word.copy_from_slice(&self.read(access + 16)?.to_le_bytes());
        }
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_keeps_the_registers_is_not_waited_for_without_end() {
        let path = std::env::temp_dir().join(std::format!("vm-paravirt-lock-{}", std::process::id()));
        let (theirs, ours) = (File::create(&path).unwrap(), File::create(&path).unwrap());
        fs::remove_file(&path).unwrap();
        lock(&theirs, Duration::ZERO).unwrap();
        let error = lock(&ours, Duration::from_millis(20)).unwrap_err();
        assert!(std::format!("{error}").contains("another program"), "{error}");
        let waiting = thread::spawn(move || lock(&ours, Duration::from_secs(60)));
        thread::sleep(Duration::from_millis(20));
        drop(theirs);
        assert_eq!(waiting.join().unwrap(), Ok(()));
    }
}
