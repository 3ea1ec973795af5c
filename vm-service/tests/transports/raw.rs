//! A client of the gateway that can send anything.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use vm_bridge::orders::{self, Order};
use vm_bridge::wire::preamble::{Preamble, TOKEN, Token};
use vm_bridge::wire::{Answer, Header, Reader, VERSION, control, put, put_bytes};
use vm_cuda_api::number;

use crate::place::Place;

pub(crate) fn connect(place: &Place) -> UnixStream {
    let stream = UnixStream::connect(place.path("stream")).expect("connected");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    stream
}

/// Reads until the server closes the connection.
pub(crate) fn rest(mut stream: &UnixStream, what: &str) -> Vec<u8> {
    let mut said = Vec::new();
    match stream.read_to_end(&mut said) {
        Ok(_) => said,
        // The server closed it before it had read everything.
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => said,
        Err(error) => panic!("{what}: {error}"),
    }
}

pub(crate) fn word(mut stream: &UnixStream) -> u64 {
    let mut word = [0; 8];
    stream.read_exact(&mut word).expect("a word");
    u64::from_ne_bytes(word)
}

pub(crate) fn begin(place: &Place) -> (UnixStream, Token) {
    let mut stream = connect(place);
    stream.write_all(&Preamble::Session.to_bytes()).expect("sent");
    assert_eq!(word(&stream), 0);
    let mut token = [0; TOKEN];
    stream.read_exact(&mut token).expect("a token");
    assert_eq!(give(&stream, [control::HELLO, VERSION.into(), 0, 0]), 0);
    (stream, token)
}

pub(crate) fn give(stream: &UnixStream, order: Order) -> u32 {
    orders::give(stream, order, &[], &[]).expect("an answer") as u32
}

/// Reads the words of a new challenge.
pub(crate) fn challenge(stream: &UnixStream, window: &File) -> [u64; 2] {
    assert_eq!(give(stream, [control::CHALLENGE, 0, 0, 0]), 0);
    let mut words = [[0; 8]; 2];
    window.read_exact_at(words.as_flattened_mut(), word(stream)).expect("the window");
    words.map(u64::from_ne_bytes)
}

/// Begins a session that has proven to map the window.
pub(crate) fn begin_with(place: &Place, window: &File) -> (UnixStream, Token) {
    let (stream, token) = begin(place);
    let [first, second] = challenge(&stream, window);
    assert_eq!(give(&stream, [control::PROVE, first, second, 0]), 0);
    (stream, token)
}

/// Allocates a part of the window: where it begins, and its mark.
pub(crate) fn take(stream: &UnixStream, len: u64, is_lane: bool) -> Result<(u64, u64), u32> {
    match give(stream, [control::TAKE, len, is_lane.into(), 0]) {
        0 => Ok((word(stream), word(stream))),
        code => Err(code),
    }
}

/// Opens a connection of a session, with words behind its preamble. The second is the server's answer.
pub(crate) fn open(place: &Place, preamble: Preamble, words: &[u64]) -> (UnixStream, u32) {
    let mut stream = connect(place);
    let mut bytes = preamble.to_bytes().to_vec();
    words.iter().for_each(|word| put(&mut bytes, *word));
    stream.write_all(&bytes).expect("sent");
    let answer = word(&stream) as u32;
    (stream, answer)
}

/// A lane on a stream, the only one of its session.
pub(crate) struct Lane {
    stream: UnixStream,
    ticket: u64,
}

impl Lane {
    /// Opens it, and makes the first device's context current.
    pub(crate) fn begin(place: &Place, token: Token) -> Self {
        let (stream, answer) = open(place, Preamble::Lane(token), &[]);
        assert_eq!(answer, 0);
        let mut lane = Self { stream, ticket: 0 };
        assert_eq!(lane.call("cuInit", &[0], &[]).0, 0);
        let (code, context) = lane.call("cuDevicePrimaryCtxRetain", &[1, 0], &[]);
        assert_eq!(code, 0);
        let context = Reader(&context).word().expect("a context");
        assert_eq!(lane.call("cuCtxSetCurrent", &[context], &[]).0, 0);
        lane
    }

    /// Makes a call: its result, and what it returns.
    pub(crate) fn call(&mut self, name: &str, words: &[u64], bytes: &[u8]) -> (u32, Vec<u8>) {
        let mut payload = Vec::new();
        words.iter().for_each(|word| put(&mut payload, *word));
        put_bytes(&mut payload, bytes);
        let call = number(name).expect("a function") as u16;
        let header =
            Header { len: payload.len() as u32, call, asks: true, is_bulk: false, ticket: self.ticket };
        self.ticket += 1;
        self.stream.write_all(&[&header.to_bytes()[..], &payload].concat()).expect("sent");
        let mut head = [0; Answer::SIZE];
        self.stream.read_exact(&mut head).expect("an answer");
        let answer = Answer::from_bytes(head).expect("an answer");
        let mut reply = vec![0; answer.len as usize];
        self.stream.read_exact(&mut reply).expect("an answer");
        (answer.code & !Answer::PRINTED, reply)
    }

    /// Sends what is no frame.
    pub(crate) fn break_off(&mut self) {
        self.stream.write_all(&[0xff; Header::SIZE]).expect("sent");
    }

    /// Allocates memory of the device.
    pub(crate) fn allocate(&mut self, bytes: u64) -> u64 {
        let (code, made) = self.call("cuMemAlloc_v2", &[1, bytes], &[]);
        assert_eq!(code, 0);
        Reader(&made).word().expect("an address")
    }
}
