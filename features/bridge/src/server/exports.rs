//! Memory and events that programs of one server share: what a worker exports, another finds by a token that nobody guesses.
//!
//! The driver's own handles are numbers that whoever knows of processes makes up. They stay between workers and their server: a program has the token,
//! and what it makes up reaches no driver. A worker that was taken over finds what its program could find. What it exports is gone with it.

use std::collections::HashMap;
use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use super::session::locked;
use crate::wire::code;
use crate::wire::preamble::{TOKEN, Token, random};

/// Bytes of a `CUipcMemHandle`, and of a `CUipcEventHandle`.
pub(super) const HANDLE: usize = 64;
/// The most that a worker exports.
const MOST: usize = 1 << 12;

/// What is shared.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Kind {
    Memory,
    Event,
}

/// A handle of either side.
pub(super) type Handle = [u8; HANDLE];

/// What a worker asks: 0 to export and 2 to find, and 1 more for events.
fn question(kind: Kind, finds: bool) -> u8 {
    u8::from(kind == Kind::Event) + if finds { 2 } else { 0 }
}

/// What all workers of a server export.
#[derive(Clone, Debug, Default)]
pub struct Exports(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    workers: u64,
    exported: HashMap<Token, (u64, Kind, Handle)>,
    /// What each worker exports.
    tokens: HashMap<u64, HashMap<(Kind, Handle), Token>>,
}

impl Exports {
    /// Answers what a worker asks, until it ends; what it exported is found no more then.
    ///
    /// # Errors
    /// When the connection fails, or a worker asks for something else.
    pub fn serve(&self, mut worker: &UnixStream) -> io::Result<()> {
        let number = {
            let mut table = locked(&self.0);
            table.workers += 1;
            table.workers
        };
        let result = loop {
            let mut asked = [0; 1 + HANDLE];
            match worker.read_exact(&mut asked) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break Ok(()),
                Err(error) => break Err(error),
                Ok(()) => {}
            }
            let [question, handle @ ..] = asked;
            let kind = if question & 1 == 0 { Kind::Memory } else { Kind::Event };
            let answer = match question {
                0 | 1 => self.export(number, kind, handle),
                2 | 3 => self.find(kind, handle),
                _ => break Err(io::ErrorKind::InvalidData.into()),
            };
            let (code, handle) = answer.map_or_else(|code| (code, [0; HANDLE]), |handle| (0, handle));
            if let Err(error) = worker.write_all(&[&code.to_ne_bytes()[..], &handle].concat()) {
                break Err(error);
            }
        };
        let mut table = locked(&self.0);
        table.exported.retain(|_, (by, ..)| *by != number);
        table.tokens.remove(&number);
        result
    }

    /// The token of what a worker exports: always the same of the same.
    fn export(&self, by: u64, kind: Kind, handle: Handle) -> Result<Handle, u32> {
        let table = &mut *locked(&self.0);
        let tokens = table.tokens.entry(by).or_default();
        let token = match tokens.get(&(kind, handle)) {
            Some(token) => *token,
            None if tokens.len() >= MOST => return Err(code::OUT_OF_MEMORY),
            None => {
                let token = random().map_err(|_| code::OUT_OF_MEMORY)?;
                table.exported.insert(token, (by, kind, handle));
                tokens.insert((kind, handle), token);
                token
            }
        };
        let mut given = [0; HANDLE];
        given[..TOKEN].copy_from_slice(&token);
        Ok(given)
    }

    fn find(&self, kind: Kind, given: Handle) -> Result<Handle, u32> {
        let (token, rest) = given.split_first_chunk().ok_or(code::INVALID_VALUE)?;
        let table = locked(&self.0);
        let found = table.exported.get(token).filter(|(_, known, _)| *known == kind);
        let is_whole = rest.iter().all(|byte| *byte == 0);
        found.filter(|_| is_whole).map(|(.., handle)| *handle).ok_or(code::INVALID_VALUE)
    }
}

/// A worker's connection for them.
#[derive(Debug)]
pub(super) struct Sharing(Mutex<UnixStream>);

impl Sharing {
    pub(super) fn new(server: UnixStream) -> Self {
        Self(Mutex::new(server))
    }

    /// What a program is given for a handle of the driver.
    pub(super) fn export(&self, kind: Kind, handle: Handle) -> Result<Handle, u32> {
        self.ask(question(kind, false), handle)
    }

    /// The driver's handle for what a program was given.
    pub(super) fn find(&self, kind: Kind, given: Handle) -> Result<Handle, u32> {
        self.ask(question(kind, true), given)
    }

    fn ask(&self, question: u8, handle: Handle) -> Result<Handle, u32> {
        let mut server = locked(&self.0);
        let mut answer = [0; 4 + HANDLE];
        let asked = server
            .write_all(&[&[question][..], &handle].concat())
            .and_then(|()| server.read_exact(&mut answer));
        if let Err(error) = asked {
            tracing::warn!(%error, "the server says no more what programs share");
            // Nobody knows what the next answer would be of. It may have been closed already.
            let _ = server.shutdown(Shutdown::Both);
            return Err(code::NOT_SUPPORTED);
        }
        let [a, b, c, d, handle @ ..] = answer;
        match u32::from_ne_bytes([a, b, c, d]) {
            0 => Ok(handle),
            code => Err(code),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A worker's connection, and what it does when it has ended.
    fn worker(exports: &Exports) -> (Sharing, std::thread::JoinHandle<io::Result<()>>) {
        let (near, far) = UnixStream::pair().unwrap();
        let exports = exports.clone();
        (Sharing::new(near), std::thread::spawn(move || exports.serve(&far)))
    }

    #[test]
    fn a_token_is_good_for_what_it_was_given_for_as_long_as_its_worker_lives() {
        let (exports, others) = (Exports::default(), Exports::default());
        let (one, ended) = worker(&exports);
        let (two, _) = worker(&exports);
        let (three, _) = worker(&others);
        let given = one.export(Kind::Memory, [7; HANDLE]).unwrap();
        assert_eq!(one.export(Kind::Memory, [7; HANDLE]), Ok(given));
        assert_ne!(two.export(Kind::Memory, [7; HANDLE]), Ok(given));
        assert_ne!(one.export(Kind::Event, [7; HANDLE]), Ok(given));
        assert_eq!(two.find(Kind::Memory, given), Ok([7; HANDLE]));
        let mut forged = given;
        forged[3] ^= 1;
        let mut longer = given;
        longer[HANDLE - 1] = 1;
        let refused = Err(code::INVALID_VALUE);
        assert_eq!(two.find(Kind::Memory, forged), refused);
        assert_eq!(two.find(Kind::Memory, longer), refused);
        assert_eq!(two.find(Kind::Event, given), refused);
        // The driver's own handle.
        assert_eq!(two.find(Kind::Memory, [7; HANDLE]), refused);
        assert_eq!(three.find(Kind::Memory, given), refused);
        drop(one);
        ended.join().unwrap().unwrap();
        assert_eq!(two.find(Kind::Memory, given), refused);
    }

    #[test]
    fn a_worker_exports_no_more_than_it_may_and_asks_for_nothing_else() {
        let exports = Exports::default();
        let (one, _) = worker(&exports);
        for number in 0..MOST as u64 {
            let mut handle = [0; HANDLE];
            handle[..8].copy_from_slice(&number.to_ne_bytes());
            exports.export(1, Kind::Memory, handle).unwrap();
        }
        assert_eq!(exports.export(1, Kind::Memory, [9; HANDLE]), Err(code::OUT_OF_MEMORY));
        assert_eq!(one.ask(9, [0; HANDLE]), Err(code::NOT_SUPPORTED));
        assert_eq!(one.find(Kind::Memory, [0; HANDLE]), Err(code::NOT_SUPPORTED));
    }
}
