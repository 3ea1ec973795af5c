//! Functions of the program that streams call: they are called there, and the stream waits until they have returned.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use vm_cuda_api::Object;

use super::host::ENTRY;
use super::lane::Call;
use super::pack::Refused;
use super::prints::Prints;
use super::sys::{self, Word};
use crate::wire::{Reader, code, control};

/// The connection for them, once the program has made one.
#[derive(Debug, Default)]
pub(super) struct Callbacks(Mutex<Option<UnixStream>>, OnceLock<Arc<Prints>>);

impl Callbacks {
    /// Calls are made over this from now on.
    pub(super) fn open(&self, stream: UnixStream) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(stream);
    }

    /// What is printed is told before each call from now on.
    pub(super) fn print(&self, prints: Arc<Prints>) {
        // A session has one.
        let _ = self.1.set(prints);
    }

    /// Has one called, and waits until it has returned; a program that is gone calls nothing any more.
    pub(super) fn call(&self, words: [u64; control::CALL]) {
        let mut stream = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(open) = &mut *stream else { return };
        if let Some(prints) = self.1.get() {
            // What was printed before is seen before.
            prints.look();
            while let Some((to, bytes)) = prints.take() {
                if ask(open, [control::PRINT, to, bytes.len() as u64, 0, 0], &bytes).is_err() {
                    *stream = None;
                    return;
                }
            }
        }
        // It takes as long as the program takes: its end ends it.
        if ask(open, words, &[]).is_err() {
            *stream = None;
        }
    }

    /// Has bytes read of the program's memory, or written there: rows, by an address, a width, a pitch and how many there are. Tells whether the program has
    /// that memory.
    pub(super) fn move_bytes(
        &self,
        [at, width, pitch, rows]: [u64; 4],
        bytes: &mut [u8],
        writes: bool,
    ) -> bool {
        let mut stream = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A recording has nobody to ask.
        let Some(open) = &mut *stream else { return true };
        let words = [if writes { control::STORE } else { control::FETCH }, at, width, pitch, rows];
        let asked = ask(open, words, if writes { bytes } else { &[] });
        let moved = asked.and_then(|result| match result {
            0 if !writes => open.read_exact(bytes).map(|()| true),
            result => Ok(result == 0),
        });
        moved.unwrap_or_else(|_| {
            *stream = None;
            false
        })
    }
}

/// Says something to the program: the word that it answers.
fn ask(stream: &mut UnixStream, words: [u64; control::CALL], more: &[u8]) -> io::Result<u64> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    stream.write_all(&bytes)?;
    stream.write_all(more)?;
    let mut answer = [0; 8];
    stream.read_exact(&mut answer)?;
    Ok(u64::from_ne_bytes(answer))
}

/// Stream, function, argument: `cuLaunchHostFunc`, and with flags `cuStreamAddCallback`.
pub(super) fn add(call: &Call<'_>, mut reader: Reader<'_>, kind: u64) -> Result<u32, Refused> {
    let id = reader.word()?;
    let stream = call.session.handles().real(Object::Stream, id)?;
    let (function, argument, flags) = (reader.word()?, reader.word()?, reader.word()?);
    if function == 0 {
        return Err(code::INVALID_VALUE.into());
    }
    if !reader.0.is_empty() {
        return Err(Refused::Malformed);
    }
    // What is recorded is called as often as its graph is launched: it is kept until the session ends.
    let stays = super::hand::records(call, stream);
    if stays && kind == control::FUNCTION {
        let [made, at] = call.session.function(function, argument)?;
        let words = [Word::Is(stream), Word::Is(made), Word::Is(at)];
        return Ok(call.make(&words, &mut [])?);
    }
    let callback = sys::Callback {
        callbacks: call.session.callbacks(),
        words: [kind, function, argument, id, 0],
        stays,
        _charge: call.session.host().charge(ENTRY),
    };
    Ok(sys::add_callback(call.session.driver(), call.number, stream, callback, flags))
}

/// A session's.
pub(super) type Shared = Arc<Callbacks>;
