//! What NVML's library beside this one asks for. It begins no session of the program's: that takes what the program sets of its environment until
//! it first asks the driver for something, and a child that is forked until then begins one itself.

use std::io::{self, Read as _};

use vm_bridge::orders::Order;
use vm_bridge::wire::{VERSION, code, control, facts};

use crate::client;
use crate::connect::Place;
use crate::connection::Connection;

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
    let asked = short.connection.give_for_words([control::FACTS, 0, 0, 0]);
    let [len] = asked.map_err(|error| short.failed(error))??;
    let len = usize::try_from(len).ok().filter(|len| *len <= facts::MOST).ok_or(code::UNAVAILABLE)?;
    let mut bytes = vec![0; len];
    short.connection.read_exact(&mut bytes).map_err(|error| short.failed(error))?;
    Ok(bytes)
}

/// The memory of a device, how much of it is free, and whether this program has a context of it: as its own session says, if it sees the device.
pub(crate) fn memory(uuid: [u64; 2]) -> Result<[u64; control::MEMORY_WORDS], u32> {
    if let Some(client) = client::known() {
        match client.memory(uuid) {
            Err(code::NOT_FOUND | code::NOT_SUPPORTED) => {}
            result => return result,
        }
    }
    let mut short = Short::begin()?;
    let asked = short.connection.give_for_words([control::MEMORY, uuid[0], uuid[1], 0]);
    asked.map_err(|error| short.failed(error))?
}
