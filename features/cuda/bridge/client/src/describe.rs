//! What NVML's library beside this one asks for. It begins no session of the program's: that takes what the program sets of its environment until
//! it first asks the driver for something, and a child that is forked until then begins one itself.

use std::io::{self, Read as _};
use std::sync::Mutex;
use std::time::Duration;

use vm_bridge::orders::Order;
use vm_bridge::wire::{VERSION, code, control, facts, nvml};

use crate::client::{self, locked};
use crate::connect::Place;
use crate::connection::Connection;
use crate::sys::fork::PerProcess;

/// A session for a question. Devices are as PCI has them, and all that the server has, whatever the program's environment says.
struct Short {
    connection: Connection,
    place: Place,
}

impl Short {
    fn begin() -> Result<Self, u32> {
        const ORDER: (&str, &[u8]) = ("CUDA_DEVICE_ORDER", b"PCI_BUS_ID");
        let place = Place::named()?;
        let (connection, _) = place.session()?;
        let mut short = Self { connection, place };
        short.give([control::HELLO, VERSION.into(), 0, 0], &[])?;
        if let Some(at) = control::VARIABLES.iter().position(|name| *name == ORDER.0) {
            short.give([control::VARIABLE, at as u64, ORDER.1.len() as u64, 0], ORDER.1)?;
        }
        Ok(short)
    }

    /// Gives an order that is answered with bytes, and how many these are.
    fn give_for_bytes(&mut self, order: Order, more: &[u8], most: usize) -> io::Result<Result<Vec<u8>, u32>> {
        let code = self.connection.give(order, more, &[])?;
        if code != 0 {
            return Ok(Err(code as u32));
        }
        let len = usize::try_from(self.connection.word()?).ok().filter(|len| *len <= most);
        let mut bytes = vec![0; len.ok_or(io::ErrorKind::InvalidData)?];
        self.connection.read_exact(&mut bytes)?;
        Ok(Ok(bytes))
    }

    fn give(&mut self, order: Order, more: &[u8]) -> Result<(), u32> {
        match self.connection.give(order, more, &[]) {
            Ok(0) => Ok(()),
            Ok(code) => Err(self.place.refused(code as u32)),
            Err(_) => Err(self.place.refused(code::UNAVAILABLE)),
        }
    }

    fn failed(&self, _: io::Error) -> u32 {
        self.place.refused(code::UNAVAILABLE)
    }
}

impl Drop for Short {
    fn drop(&mut self) {
        // A child that was forked meanwhile has the connection too.
        self.connection.end();
    }
}

/// What the server knows of its driver and devices: [`facts::Facts`].
pub(crate) fn facts() -> Result<Vec<u8>, u32> {
    let mut short = Short::begin()?;
    let asked = short.give_for_bytes([control::FACTS, 0, 0, 0], &[], facts::MOST);
    asked.map_err(|error| short.failed(error))?
}

/// How long NVML may take for an answer.
const ANSWER: Duration = Duration::from_secs(10);

/// The session that asks NVML, from one question to the next: it begins with the driver, which takes longer than most questions.
static ASKS: PerProcess<Mutex<Option<Short>>> = PerProcess::new();

/// Asks by that session, and by a new one if it has ended: the server ends one that asks nothing for a while.
fn ask<T>(question: impl Fn(&mut Short) -> io::Result<Result<T, u32>>) -> Result<T, u32> {
    let mut session = locked(ASKS.get());
    if let Some(mut short) = session.take() {
        match question(&mut short) {
            Ok(answer) => {
                *session = Some(short);
                return answer;
            }
            Err(error) if is_late(&error) => return Err(code::TIMEOUT),
            Err(_) => {}
        }
    }
    let mut short = Short::begin()?;
    let asked = question(&mut short);
    let answer = asked.map_err(|error| if is_late(&error) { code::TIMEOUT } else { short.failed(error) })?;
    // The driver has begun now.
    if short.connection.set_read_timeout(Some(ANSWER)).is_ok() {
        *session = Some(short);
    }
    answer
}

fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// Asks NVIDIA's NVML: the answer to a [`Question`](nvml::Question).
pub(crate) fn nvml(question: &[u8]) -> Result<Vec<u8>, u32> {
    let order = [control::NVML, question.len() as u64, 0, 0];
    ask(|short| short.give_for_bytes(order, question, nvml::MOST))
}

/// The memory of a device, how much of it is free, and whether this program has a context of it: as its own session says, if it sees the device.
pub(crate) fn memory(uuid: [u64; 2]) -> Result<[u64; control::MEMORY_WORDS], u32> {
    if let Some(client) = client::known() {
        match client.memory(uuid) {
            Err(code::NOT_FOUND | code::NOT_SUPPORTED) => {}
            result => return result,
        }
    }
    ask(|short| short.connection.give_for_words([control::MEMORY, uuid[0], uuid[1], 1]))
}
