//! The serial console: a 16550A at port 0x3f8 with interrupt line 4.
//!
//! What the guest says goes into a queue that a thread empties ([`OutputQueue`]). While the queue is full the transmitter is
//! not ready: drivers wait for it, by polling or for its interrupt. A guest that sends all the same is held for a short
//! while, and what it sends then is lost, as on a real line. So a reader who is slow makes the guest slow, and one who
//! does not read at all keeps neither the guest from running nor anybody from ending it.

mod input;

use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use vm_superio::Trigger;
use vm_superio::serial::{Error, NoEvents, Serial};
use vmm_sys_util::eventfd::EventFd;

use crate::os::output::{News, OutputQueue};
pub(super) use input::Input;

/// Bytes of output that wait for their reader.
const QUEUE: usize = 64 << 10;
/// Room for this many makes the transmitter ready: drivers then fill its FIFO without asking again.
const FIFO: usize = 64;
/// How long a guest is held that sends although the transmitter is not ready.
const HOLD: Duration = crate::deadlines::SERIAL_HOLD;
/// How often it is seen meanwhile whether the guest is to end.
const HOLD_STEP: Duration = Duration::from_millis(20);
/// How long the end of a run waits for a reader who takes nothing.
const TIMEOUT: Duration = Duration::from_secs(1);
/// How long it waits for one who takes little.
const FLUSH: Duration = Duration::from_secs(5);

/// The registers that mean something here.
mod register {
    pub(super) const DATA: u8 = 0;
    pub(super) const INTERRUPT_ENABLE: u8 = 1;
    pub(super) const INTERRUPT_IDENTITY: u8 = 2;
    pub(super) const LINE_CONTROL: u8 = 3;
    pub(super) const MODEM_CONTROL: u8 = 4;
    pub(super) const LINE_STATUS: u8 = 5;
}
/// Line control: registers 0 and 1 are the divisor.
const DIVISOR_ACCESS: u8 = 1 << 7;
/// Modem control: what is sent is received.
const LOOPBACK: u8 = 1 << 4;
/// Line status: the transmitter takes bytes, and has sent all that it took.
const TRANSMITTER_READY: u8 = 1 << 5 | 1 << 6;

/// Signals the guest's interrupt line through an irqfd.
pub(super) struct IrqTrigger(EventFd);

impl Trigger for IrqTrigger {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// The UART's end of the queue.
struct Transmitter(Arc<OutputQueue>);

impl Write for Transmitter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.push(bytes) { Ok(bytes.len()) } else { Err(io::ErrorKind::WouldBlock.into()) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

type Device = Serial<IrqTrigger, NoEvents, Transmitter>;

/// The console as the vCPUs and its threads share it.
pub(super) struct SerialConsole {
    uart: Mutex<Uart>,
    /// Notified when the guest has read from the FIFO.
    room: Condvar,
    output: Arc<OutputQueue>,
}

struct Uart {
    /// `None` only while the UART is being reset.
    serial: Option<Device>,
    /// Whether the guest was held as long as it is held, and nobody has read since.
    stalled: bool,
    /// Bytes that were lost in this run because the guest did not wait.
    lost: u64,
    /// Whether the guest is to be interrupted when the transmitter is ready.
    ready: bool,
}

impl Uart {
    /// Interrupts the guest when the transmitter is ready, as soon as its registers allow it.
    fn tell_ready(&mut self) -> io::Result<()> {
        let Some(serial) = &mut self.serial else { return Ok(()) };
        if !self.ready || serial.read(register::LINE_CONTROL) & DIVISOR_ACCESS != 0 {
            return Ok(());
        }
        self.ready = false;
        // Enabling an interrupt whose cause is there raises it, unless it is identified already; reading clears that.
        serial.read(register::INTERRUPT_IDENTITY);
        let enabled = serial.read(register::INTERRUPT_ENABLE);
        match serial.write(register::INTERRUPT_ENABLE, enabled) {
            Err(Error::Trigger(error)) => Err(error),
            _ => Ok(()),
        }
    }
}

impl Uart {
    /// Notes that a byte is lost; with `stalled`, after its guest was held for it.
    fn lose(&mut self, stalled: bool) {
        self.lost += 1;
        if stalled && !std::mem::replace(&mut self.stalled, true) && self.lost == 1 {
            tracing::warn!(
                "the guest's console output is not read: what the guest sends without waiting for that is lost"
            );
        }
    }
}

impl SerialConsole {
    /// A console that prints to `output` and signals `interrupt`.
    ///
    /// # Errors
    /// When there are no threads left.
    pub(super) fn new(interrupt: EventFd, output: Box<dyn Write + Send>) -> io::Result<Arc<Self>> {
        let queue = OutputQueue::new(QUEUE);
        let serial = Some(Serial::new(IrqTrigger(interrupt), Transmitter(queue.clone())));
        let uart = Mutex::new(Uart { serial, stalled: false, lost: 0, ready: false });
        let this = Arc::new(Self { uart, room: Condvar::new(), output: queue });
        let console = Arc::downgrade(&this);
        this.output.start("console output", output, move |news| {
            if let Some(console) = console.upgrade() {
                console.hear(news);
            }
        })?;
        Ok(this)
    }

    fn uart(&self) -> MutexGuard<'_, Uart> {
        self.uart.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hear(&self, news: News) {
        match news {
            News::Room => {
                let mut uart = self.uart();
                uart.stalled = false;
                uart.ready = true;
                if let Err(error) = uart.tell_ready() {
                    tracing::warn!(%error, "the guest can't be interrupted for its console, which takes output again");
                }
            }
            News::Failed(error) => tracing::warn!(%error, "the guest's console output is lost from here on"),
        }
    }

    /// Reads register `offset`.
    pub(super) fn read(&self, offset: u8) -> u8 {
        let mut uart = self.uart();
        let Some(serial) = &mut uart.serial else { return 0xff };
        let mut value = serial.read(offset);
        if offset == register::DATA {
            self.room.notify_one();
        }
        if offset == register::LINE_STATUS
            && !self.output.has_room(FIFO)
            && serial.read(register::MODEM_CONTROL) & LOOPBACK == 0
        {
            value &= !TRANSMITTER_READY;
        }
        value
    }

    /// Writes register `offset`. A guest that sends what there is no room for is held for a while, but not once it is
    /// `stopping`.
    pub(super) fn write(&self, offset: u8, value: u8, stopping: impl Fn() -> bool) {
        let mut held: Option<Instant> = None;
        loop {
            let mut uart = self.uart();
            let Some(serial) = &mut uart.serial else { return };
            match serial.write(offset, value) {
                Err(Error::IOError(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                    let held = held.get_or_insert_with(Instant::now).elapsed();
                    if uart.stalled || held >= HOLD || stopping() {
                        uart.lose(held >= HOLD);
                        return;
                    }
                    drop(uart);
                    self.output.wait_for_room(1, HOLD_STEP);
                }
                Err(error) => {
                    tracing::debug!(%error, "the serial console's interrupt was not signalled");
                    return;
                }
                Ok(()) => {
                    if offset == register::LINE_CONTROL
                        && let Err(error) = uart.tell_ready()
                    {
                        tracing::debug!(%error, "the serial console's interrupt was not signalled");
                    }
                    return;
                }
            }
        }
    }

    /// Puts the UART to its state after power-on.
    pub(super) fn reset(&self) {
        let mut uart = self.uart();
        if let Some(serial) = uart.serial.take() {
            match serial.interrupt_evt().0.try_clone() {
                Ok(interrupt) => {
                    uart.serial = Some(Serial::new(IrqTrigger(interrupt), serial.into_writer()));
                    uart.ready = false;
                }
                Err(error) => {
                    tracing::warn!(%error, "the serial console was not reset");
                    uart.serial = Some(serial);
                }
            }
        }
    }

    /// Waits, for a bounded time, until what the guest has said is written, and tells what is lost.
    pub(super) fn finish(&self) {
        let dropped = self.output.flush(TIMEOUT, FLUSH);
        let lost = std::mem::take(&mut self.uart().lost);
        if lost > 0 {
            tracing::warn!("{lost} bytes of the guest's console output were lost while nobody read it");
        }
        if dropped > 0 {
            tracing::warn!(
                "the last {dropped} bytes of the guest's console output are dropped: nobody reads them"
            );
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

impl Drop for SerialConsole {
    fn drop(&mut self) {
        self.output.end();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::register::*;
    use super::*;
    use crate::os::output::testing::Gate;

    fn console_to(output: impl Write + Send + 'static) -> (Arc<SerialConsole>, EventFd) {
        let interrupt = EventFd::new(EFD_NONBLOCK).unwrap();
        (SerialConsole::new(interrupt.try_clone().unwrap(), Box::new(output)).unwrap(), interrupt)
    }

    pub(super) fn console() -> (Arc<SerialConsole>, EventFd) {
        console_to(io::sink())
    }

    fn is_ready(console: &SerialConsole) -> bool {
        console.read(LINE_STATUS) & TRANSMITTER_READY == TRANSMITTER_READY
    }

    fn wait_until(done: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !done() {
            assert!(Instant::now() < deadline, "it takes too long");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_full_queue_makes_the_transmitter_wait_and_room_interrupts_the_guest() {
        let (mut reader, writer) = io::pipe().unwrap();
        let (gate, asked, opener) = Gate::shut(writer);
        let (console, interrupt) = console_to(gate);
        let send = |byte| console.write(DATA, byte, || panic!("there is room"));
        send(0);
        // The thread has that in hand, and takes no more.
        asked.recv_timeout(Duration::from_secs(30)).unwrap();
        let mut sent = 1;
        while is_ready(&console) {
            send(sent as u8);
            sent += 1;
        }
        assert!((QUEUE - FIFO..=QUEUE + 1).contains(&sent), "{sent}");
        // In loopback nothing is sent, and the transmitter needs no room.
        console.write(MODEM_CONTROL, LOOPBACK, || false);
        assert!(is_ready(&console));
        console.write(MODEM_CONTROL, 0, || false);
        // The interrupt that comes with its being enabled finds a transmitter that is not ready.
        console.write(INTERRUPT_ENABLE, 2, || false);
        assert_eq!((console.read(INTERRUPT_IDENTITY) & 0xf, is_ready(&console)), (2, false));
        let _ = interrupt.read();
        drop(opener);
        let mut got = vec![0; sent];
        reader.read_exact(&mut got).unwrap();
        assert!(got.iter().enumerate().all(|(at, &byte)| byte == at as u8));
        wait_until(|| interrupt.read().is_ok());
        assert_eq!((console.read(INTERRUPT_IDENTITY) & 0xf, is_ready(&console)), (2, true));
    }

    #[test]
    fn the_interrupt_waits_while_the_divisor_is_set() {
        let (console, interrupt) = console();
        console.write(INTERRUPT_ENABLE, 2, || false);
        console.write(LINE_CONTROL, DIVISOR_ACCESS, || false);
        console.write(DATA, 7, || false);
        let _ = (console.read(INTERRUPT_IDENTITY), interrupt.read());
        console.hear(News::Room);
        assert!(interrupt.read().is_err());
        console.write(LINE_CONTROL, 3, || false);
        assert!(interrupt.read().is_ok());
        assert_eq!((console.read(INTERRUPT_IDENTITY) & 0xf, console.read(INTERRUPT_ENABLE)), (2, 2));
        console.write(LINE_CONTROL, DIVISOR_ACCESS, || false);
        assert_eq!(console.read(DATA), 7);
    }

    #[test]
    fn a_guest_that_does_not_wait_is_held_once_and_can_be_stopped() {
        let (reader, writer) = io::pipe().unwrap();
        let (console, _interrupt) = console_to(writer);
        let flood = |stopping: bool| {
            let begin = Instant::now();
            while console.uart().lost == 0 {
                assert!(begin.elapsed() < Duration::from_secs(120));
                console.write(DATA, b'x', || stopping);
            }
            let held = Instant::now();
            for _ in 0..1000 {
                console.write(DATA, b'x', || stopping);
            }
            held.elapsed()
        };
        // Stopped, it is not held at all, but that does not count as a reader who stalls.
        flood(true);
        assert!(!console.uart().stalled);
        console.uart().lost = 0;
        let after = flood(false);
        assert!(console.uart().stalled && console.uart().lost > 1000);
        // Each of the thousand would be held otherwise.
        assert!(after < 100 * HOLD, "{after:?}");
        let begin = Instant::now();
        console.finish();
        assert!(
            begin.elapsed() >= TIMEOUT && begin.elapsed() < Duration::from_secs(120),
            "{:?}",
            begin.elapsed()
        );
        // What nobody took is dropped.
        assert!(is_ready(&console));
        assert_eq!(console.uart().lost, 0);
        drop(reader);
    }

    #[test]
    fn a_reset_forgets_input_and_settings() {
        let (console, _interrupt) = console();
        console.feed(b"abc", || false);
        console.write(7, 0x55, || false);
        assert_eq!(console.read(5) & 1, 1);
        console.reset();
        assert_eq!((console.read(5) & 1, console.read(7)), (0, 0));
    }
}
