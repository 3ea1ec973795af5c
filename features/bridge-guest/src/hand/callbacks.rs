//! Functions that streams call: a thread of this process calls them when the server says so.

use std::io::{Read as _, Write as _};
use std::sync::Arc;

use vm_bridge::wire::{Reader, code, control, put};

use crate::client::{Client, client, locked};
use crate::connection::Connection;
use crate::sys::call;

/// Calls what the server asks for, until it is gone.
fn serve(mut stream: Connection) {
    let mut bytes = [0; 8 * control::CALL];
    while stream.read_exact(&mut bytes).is_ok() {
        let mut reader = Reader(&bytes);
        let words: [u64; control::CALL] = std::array::from_fn(|_| reader.word().unwrap_or(0));
        call::call(words);
        if stream.write_all(&0u64.to_ne_bytes()).is_err() {
            return;
        }
    }
}

/// Has the thread running that calls.
pub(super) fn begin_calls(client: &Arc<Client>) -> Result<(), u32> {
    let mut calls = locked(&client.calls);
    if *calls {
        return Ok(());
    }
    let ours = client.open(control::CALLBACKS)?;
    // The program may call nothing for as long as it likes.
    ours.set_read_timeout(None).map_err(|_| code::OUT_OF_MEMORY)?;
    let thread = std::thread::Builder::new().name("vm-bridge".into());
    thread.spawn(|| serve(ours)).map_err(|_| code::OUT_OF_MEMORY)?;
    *calls = true;
    Ok(())
}

fn add(number: usize, words: [usize; 4]) -> Result<(), u32> {
    let client = client()?;
    begin_calls(&client)?;
    let mut payload = Vec::new();
    words.iter().for_each(|word| put(&mut payload, *word as u64));
    client.ask(number, &payload, false).map(drop)
}

pub(crate) fn cuLaunchHostFunc(number: usize, words: &[usize]) -> Result<(), u32> {
    add(number, [words[0], words[1], words[2], 0])
}

pub(crate) fn cuStreamAddCallback(number: usize, words: &[usize]) -> Result<(), u32> {
    add(number, [words[0], words[1], words[2], words[3] as u32 as usize])
}
