//! Functions of the program that streams call: they are called there, and the stream waits until they have returned.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

use vm_cuda_api::Object;

use super::lane::Call;
use super::pack::Refused;
use super::sys::{self, Word};
use crate::wire::{Reader, code, control};

/// The connection for them, once the program has made one.
#[derive(Debug, Default)]
pub(super) struct Callbacks(Mutex<Option<UnixStream>>);

impl Callbacks {
    /// Calls are made over this from now on.
    pub(super) fn open(&self, stream: UnixStream) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(stream);
    }

    /// Has one called, and waits until it has returned; a program that is gone calls nothing any more.
    pub(super) fn call(&self, words: [u64; control::CALL]) {
        let mut stream = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(open) = &mut *stream else { return };
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let mut answer = [0; 8];
        // It takes as long as the program takes: its end ends it.
        if open.write_all(&bytes).and_then(|()| open.read_exact(&mut answer)).is_err() {
            *stream = None;
        }
    }
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
        return Ok(call.session.driver().make(call.number, &words, &mut []));
    }
    let callback = sys::Callback {
        callbacks: call.session.callbacks(),
        words: [kind, function, argument, id, 0],
        stays,
    };
    Ok(sys::add_callback(call.session.driver(), call.number, stream, callback, flags))
}

/// A session's.
pub(super) type Shared = Arc<Callbacks>;
