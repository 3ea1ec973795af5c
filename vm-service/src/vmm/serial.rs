//! The serial console: a 16550A at port 0x3f8 with interrupt line 4.

use std::fs::File;
use std::io::{self, Read as _, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vm_superio::Trigger;
use vm_superio::serial::{NoEvents, Serial};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Signals the guest's interrupt line through an irqfd.
pub(super) struct IrqTrigger(EventFd);

impl Trigger for IrqTrigger {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

type Output = Box<dyn Write + Send>;

/// The console as the vCPUs and the input thread share it.
pub(super) struct SerialConsole {
    uart: Mutex<Uart>,
    /// Notified when the guest has read from the FIFO.
    room: Condvar,
}

struct Uart {
    /// `None` only while the UART is being reset.
    serial: Option<Serial<IrqTrigger, NoEvents, Output>>,
    /// Whether the loss of output was reported.
    lossy: bool,
}

impl SerialConsole {
    /// A console that prints to `output` and signals `interrupt`.
    pub(super) fn new(interrupt: EventFd, output: Output) -> Self {
        let serial = Some(Serial::new(IrqTrigger(interrupt), output));
        Self { uart: Mutex::new(Uart { serial, lossy: false }), room: Condvar::new() }
    }

    fn uart(&self) -> MutexGuard<'_, Uart> {
        self.uart.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads register `offset`.
    pub(super) fn read(&self, offset: u8) -> u8 {
        let mut uart = self.uart();
        let Some(serial) = &mut uart.serial else { return 0xff };
        let value = serial.read(offset);
        if offset == 0 {
            self.room.notify_one();
        }
        value
    }

    /// Writes register `offset`. What can't be printed is lost, as on a line that nobody listens to.
    pub(super) fn write(&self, offset: u8, value: u8) {
        let mut uart = self.uart();
        let Some(serial) = &mut uart.serial else { return };
        if let Err(error) = serial.write(offset, value)
            && !std::mem::replace(&mut uart.lossy, true)
        {
            tracing::warn!(%error, "the guest's console output is lost from here on");
        }
    }

    /// Puts the UART to its state after power-on.
    pub(super) fn reset(&self) {
        let mut uart = self.uart();
        if let Some(serial) = uart.serial.take() {
            match serial.interrupt_evt().0.try_clone() {
                Ok(interrupt) => {
                    uart.serial = Some(Serial::new(IrqTrigger(interrupt), serial.into_writer()));
                }
                Err(error) => {
                    tracing::warn!(%error, "the serial console was not reset");
                    uart.serial = Some(serial);
                }
            }
        }
    }

    /// Gives `bytes` to the guest as fast as it reads them; returns early when `stopped` says so.
    fn feed(&self, mut bytes: &[u8], stopped: impl Fn() -> bool) {
        let mut uart = self.uart();
        while !bytes.is_empty() && !stopped() {
            let taken = match &mut uart.serial {
                Some(serial) if serial.fifo_capacity() > 0 => serial.enqueue_raw_bytes(bytes).unwrap_or(0),
                _ => 0,
            };
            bytes = &bytes[taken..];
            if taken == 0 {
                // The FIFO is full (or looped back): wait until the guest reads; look at `stopped` now and then.
                let waited = self.room.wait_timeout(uart, Duration::from_millis(100));
                uart = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }
}

/// The thread that carries input to the console. Dropping it ends the thread.
pub(super) struct Input {
    end: EventFd,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Input {
    /// Carries what can be read from `source` to `console` until the end of file.
    ///
    /// # Errors
    /// When there are no file descriptors or threads left.
    pub(super) fn start(console: Arc<SerialConsole>, source: OwnedFd) -> io::Result<Self> {
        let end = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?;
        let watch = end.try_clone()?;
        let thread = std::thread::Builder::new()
            .name("console input".into())
            .spawn(move || carry(&console, File::from(source), &watch))?;
        Ok(Self { end, thread: Some(thread) })
    }
}

impl Drop for Input {
    fn drop(&mut self) {
        // It fails only when the counter is full, and then it is readable.
        let _ = self.end.write(1);
        // The thread waits for nothing but this event and a tenth of a second at most.
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the console input thread panicked");
        }
    }
}

fn readable(fd: &impl AsFd, timeout: Option<&Timespec>) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    poll(&mut fds, timeout).is_ok_and(|count| count > 0)
}

fn carry(console: &SerialConsole, mut source: File, end: &EventFd) {
    let ended = sys_fd(end);
    let mut buffer = [0; 256];
    loop {
        let mut fds = [PollFd::new(&source, PollFlags::IN), PollFd::new(&ended, PollFlags::IN)];
        match poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => {
                tracing::warn!(%error, "the console takes no more input");
                return;
            }
            Ok(_) => {}
        }
        if !fds[1].revents().is_empty() {
            return;
        }
        match source.read(&mut buffer) {
            Ok(0) => return,
            Ok(count) => console.feed(&buffer[..count], || readable(&ended, Some(&Timespec::default()))),
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
            Err(error) => {
                tracing::warn!(%error, "the console takes no more input");
                return;
            }
        }
    }
}

fn sys_fd(event: &EventFd) -> std::os::fd::BorrowedFd<'_> {
    super::sys::borrow(event)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn console() -> (Arc<SerialConsole>, EventFd) {
        let interrupt = EventFd::new(EFD_NONBLOCK).unwrap();
        (Arc::new(SerialConsole::new(interrupt.try_clone().unwrap(), Box::new(io::sink()))), interrupt)
    }

    #[test]
    fn input_waits_for_the_guest_and_nothing_is_lost() {
        let (console, _interrupt) = console();
        let (reader, mut writer) = io::pipe().unwrap();
        let sent: Vec<u8> = (0..1000u32).map(|n| n as u8).collect();
        let expect = sent.clone();
        let writing = std::thread::spawn(move || writer.write_all(&sent));
        let input = Input::start(console.clone(), reader.into()).unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        let mut got = Vec::new();
        while got.len() < 1000 && std::time::Instant::now() < deadline {
            if console.read(5) & 1 != 0 {
                got.push(console.read(0));
            }
        }
        assert_eq!(got, expect);
        writing.join().unwrap().unwrap();
        drop(input);
    }

    #[test]
    fn dropping_the_input_ends_a_thread_whose_guest_never_reads() {
        let (console, _interrupt) = console();
        let (reader, mut writer) = io::pipe().unwrap();
        writer.write_all(&[b'x'; 200]).unwrap();
        let input = Input::start(console, reader.into()).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        drop(input);
    }

    #[test]
    fn a_reset_forgets_input_and_settings() {
        let (console, _interrupt) = console();
        console.feed(b"abc", || false);
        console.write(7, 0x55);
        assert_eq!(console.read(5) & 1, 1);
        console.reset();
        assert_eq!((console.read(5) & 1, console.read(7)), (0, 0));
    }
}
