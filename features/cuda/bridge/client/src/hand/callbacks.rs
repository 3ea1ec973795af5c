//! Functions that streams call: a thread of this process calls them when the server says so. It reads and writes the program's memory, too, as graphs copy it.

use std::io::{self, Read as _, Write as _};
use std::ops::Range;
use std::sync::Arc;

use vm_bridge::wire::{CHUNK, Reader, code, control, put};

use crate::client::{Client, client, locked};
use crate::connection::Connection;
use crate::sys::{call, print, there};

/// What is answered where the program does not have the memory.
const ABSENT: u64 = 1;

/// Does what the server asks for, until it is gone.
fn serve(mut stream: Connection) {
    let (mut bytes, mut memory) = ([0; 8 * control::CALL], Vec::new());
    while stream.read_exact(&mut bytes).is_ok() {
        let mut reader = Reader(&bytes);
        let words: [u64; control::CALL] = std::array::from_fn(|_| reader.word().unwrap_or(0));
        let answered = match words[0] {
            control::FETCH => fetch(&mut stream, words, &mut memory),
            control::STORE => store(&mut stream, words, &mut memory),
            control::PRINT => print(&mut stream, words, &mut memory),
            _ => {
                print::wait();
                call::call(words);
                stream.write_all(&0u64.to_ne_bytes())
            }
        };
        if answered.is_err() {
            return;
        }
    }
}

/// Rows of the program's memory: where each is, and the place of its bytes.
fn rows(
    [_, at, width, pitch, rows]: [u64; control::CALL],
) -> io::Result<impl Iterator<Item = (usize, Range<usize>)>> {
    let all = width.checked_mul(rows).filter(|all| *all <= CHUNK as u64);
    let width = all.map(|_| width as usize).ok_or(io::ErrorKind::InvalidData)?;
    let row = move |row| (at.wrapping_add(pitch.wrapping_mul(row)) as usize, width * row as usize);
    Ok((0..if width == 0 { 0 } else { rows }).map(row).map(move |(at, from)| (at, from..from + width)))
}

/// Prints what comes.
fn print(
    stream: &mut Connection,
    [_, to, len, ..]: [u64; control::CALL],
    memory: &mut Vec<u8>,
) -> io::Result<()> {
    if len > CHUNK as u64 {
        return Err(io::ErrorKind::InvalidData.into());
    }
    memory.resize(len as usize, 0);
    stream.read_exact(memory)?;
    print::print(to, memory);
    stream.write_all(&0u64.to_ne_bytes())
}

/// Answers with the program's memory, or that it is not there.
fn fetch(stream: &mut Connection, words: [u64; control::CALL], memory: &mut Vec<u8>) -> io::Result<()> {
    memory.clear();
    memory.resize(8, 0);
    for (at, place) in rows(words)? {
        memory.resize(8 + place.end, 0);
        if !there::read(at, &mut memory[8 + place.start..]) {
            return stream.write_all(&ABSENT.to_ne_bytes());
        }
    }
    stream.write_all(memory)
}

/// Writes what comes into the program's memory, where it is there.
fn store(stream: &mut Connection, words: [u64; control::CALL], memory: &mut Vec<u8>) -> io::Result<()> {
    let rows: Vec<_> = rows(words)?.collect();
    memory.resize(rows.last().map_or(0, |(_, place)| place.end), 0);
    stream.read_exact(memory)?;
    let is_there = rows.into_iter().all(|(at, place)| there::write(at, &memory[place]));
    stream.write_all(&if is_there { 0 } else { ABSENT }.to_ne_bytes())
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
