//! What the server must do with any bytes, for fuzzing.

use std::sync::Arc;
use std::time::Duration;

use super::lane::Lane;
use super::session::Session;
use super::sys::Driver;
use crate::ring::Taken;
use crate::wire::preamble::{self, Preamble};
use crate::wire::{Header, image};

/// Feeds arbitrary bytes to what reads a program's: its preamble, its images, and its frames, which a session serves before a driver that does
/// nothing and says that it has. Each is answered or refused, without a panic. Returns how many frames were served.
pub fn frames(mut bytes: &[u8]) -> usize {
    if let Some(first) = bytes.first_chunk::<{ preamble::SIZE }>()
        && let Ok(read) = Preamble::from_bytes(*first)
    {
        assert_eq!(read.to_bytes(), *first);
    }
    assert!(image::len(bytes).is_none_or(|len| len > 0));
    let deadline = Some(Duration::from_secs(1));
    let session = Arc::new(Session::with_limits(Arc::new(Driver::that_does_nothing()), None, deadline, None));
    let mut lane = Lane::new(session.clone());
    let (mut reply, mut ticket, mut served) = (Vec::new(), 0, 0);
    while let Some((head, rest)) = bytes.split_first_chunk() {
        bytes = rest;
        let Ok(header) = Header::from_bytes(*head) else { continue };
        let (payload, rest) = rest.split_at(rest.len().min(header.len as usize));
        bytes = rest;
        // In the order in which they come: another is waited for.
        let taken = Taken { header: Header { ticket, is_bulk: false, ..header }, bulk: None };
        match lane.serve(taken, payload, &mut reply) {
            Ok(_) => served += 1,
            Err(_) => lane = Lane::new(session.clone()),
        }
        ticket += 1;
    }
    served
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::put;
    use vm_cuda_api::number;

    #[test]
    fn frames_are_served_until_one_is_none() {
        let frame = |name: &str, words: &[u64]| {
            let call = number(name).unwrap() as u16;
            let mut frame = Header { len: 8 * words.len() as u32, call, asks: true, ..Header::default() }
                .to_bytes()
                .to_vec();
            words.iter().for_each(|word| put(&mut frame, *word));
            frame
        };
        let init = frame("cuInit", &[0]);
        let short = frame("cuMemAlloc_v2", &[1]);
        assert_eq!(frames(&init), 1);
        assert_eq!(frames(&[&init[..], &short, &init].concat()), 2);
        assert_eq!(frames(&[0xff; 64]), 0);
    }
}
