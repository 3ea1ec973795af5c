//! Messages of protocol buffers (<https://protobuf.dev/programming-guides/encoding/>).

use std::borrow::Cow;

/// Bytes from which on an array is taken as it lies, and copied once, into the finished message.
const LARGE: usize = 1 << 10;

/// A message, field by field.
#[derive(Clone, Debug, Default)]
pub(super) struct Message<'a> {
    parts: Vec<Cow<'a, [u8]>>,
    len: usize,
}

impl<'a> Message<'a> {
    pub(super) fn new() -> Message<'a> {
        Message::default()
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.len);
        self.parts.iter().for_each(|part| bytes.extend_from_slice(part));
        bytes
    }

    fn push(&mut self, bytes: &[u8]) {
        self.len += bytes.len();
        match self.parts.last_mut() {
            Some(Cow::Owned(last)) => last.extend_from_slice(bytes),
            _ => self.parts.push(Cow::Owned(bytes.to_vec())),
        }
    }

    fn append(&mut self, part: Cow<'a, [u8]>) {
        if part.len() < LARGE {
            return self.push(&part);
        }
        self.len += part.len();
        self.parts.push(part);
    }

    fn varint(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.push(&[number as u8 | 0x80]);
            number >>= 7;
        }
        self.push(&[number as u8]);
    }

    fn tag(&mut self, field: u64, wire: u64) {
        self.varint(field << 3 | wire);
    }

    fn length(&mut self, field: u64, len: usize) {
        self.tag(field, 2);
        self.varint(len as u64);
    }

    /// An integer; a signed one is its 64 bits.
    pub(super) fn number(&mut self, field: u64, number: u64) {
        self.tag(field, 0);
        self.varint(number);
    }

    pub(super) fn float(&mut self, field: u64, number: f32) {
        self.tag(field, 5);
        self.push(&number.to_le_bytes());
    }

    pub(super) fn bytes(&mut self, field: u64, bytes: &'a [u8]) {
        self.length(field, bytes.len());
        self.append(Cow::Borrowed(bytes));
    }

    pub(super) fn text(&mut self, field: u64, text: &str) {
        self.length(field, text.len());
        self.push(text.as_bytes());
    }

    pub(super) fn message(&mut self, field: u64, message: Message<'a>) {
        self.length(field, message.len);
        message.parts.into_iter().for_each(|part| self.append(part));
    }
}
