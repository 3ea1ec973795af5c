//! Resources and timelines of another process, over a Unix socket.

use std::fmt;
use std::io::{IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use strum::IntoEnumIterator as _;
use vm_accel::{Accelerator, Error, ExternalKind, ExternalMemory, Layout, Pixels, Result, Shareable};

use crate::buffer::Buffer;
use crate::format::{Format, ImageOptions};
use crate::gpu::shown;
use crate::image::{Image, row_bytes};

/// `vm-gfx 1`, as a number.
const MAGIC: u64 = u64::from_le_bytes(*b"vm-gfx 1");
const WORDS: usize = 14;
/// The longest name; what is longer is cut.
const NAME: usize = 64;
const BYTES: usize = 8 * WORDS + NAME;

/// What the number of a message's kind means.
const KINDS: [ExternalKind; 3] = [ExternalKind::OpaqueFd, ExternalKind::DmaBuf, ExternalKind::HostFd];
/// That of a timeline.
const TIMELINE: u64 = KINDS.len() as u64;

fn failed(what: &'static str) -> impl Fn(&dyn fmt::Display) -> Error {
    move |cause| Error::Host { what, cause: cause.to_string() }
}

/// One message: numbers, a name and a descriptor.
pub(crate) struct Message {
    words: [u64; WORDS],
    name: String,
    fd: OwnedFd,
}

impl Message {
    fn send(self, socket: &UnixStream) -> Result<()> {
        let failed = failed("sending to another process");
        let mut bytes = [0; BYTES];
        let (numbers, name) = bytes.split_at_mut(8 * WORDS);
        for (to, word) in numbers.chunks_exact_mut(8).zip(self.words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        let end = (0..=self.name.len().min(NAME)).rev().find(|end| self.name.is_char_boundary(*end));
        let cut = &self.name.as_bytes()[..end.unwrap_or(0)];
        name[..cut.len()].copy_from_slice(cut);
        let files = [self.fd.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !ancillary.push(SendAncillaryMessage::ScmRights(&files)) {
            return Err(failed(&"no room for a descriptor"));
        }
        let sent = sendmsg(socket, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL);
        match sent.map_err(|error| failed(&error))? {
            BYTES => Ok(()),
            sent => Err(failed(&format!("{sent} of {BYTES} bytes were taken"))),
        }
    }

    /// The next message; none at the end of the connection.
    fn receive(mut socket: &UnixStream) -> Result<Option<Self>> {
        let failed = failed("receiving from another process");
        let mut bytes = [0; BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let into = &mut [IoSliceMut::new(&mut bytes)];
            match recvmsg(socket, into, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
                Err(rustix::io::Errno::INTR) => {}
                other => break other.map_err(|error| failed(&error))?,
            }
        };
        let files: Vec<OwnedFd> = ancillary
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(files) => Some(files),
                _ => None,
            })
            .flatten()
            .collect();
        if received.bytes == 0 {
            return Ok(None);
        }
        let rest = &mut bytes[received.bytes..];
        socket.read_exact(rest).map_err(|error| failed(&error))?;
        let (numbers, name) = bytes.split_at(8 * WORDS);
        let mut words = [0; WORDS];
        for (word, from) in words.iter_mut().zip(numbers.chunks_exact(8)) {
            *word = from.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        }
        if words[0] != MAGIC {
            return Err(failed(&"it sends something else"));
        }
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        let name = std::str::from_utf8(name).map_err(|error| failed(&error))?.to_owned();
        let fd = files.into_iter().next().ok_or_else(|| failed(&"a message came without its descriptor"))?;
        Ok(Some(Self { words, name, fd }))
    }
}

fn message(name: &str, memory: ExternalMemory, image: Option<(Format, Pixels)>, uuid: [u8; 16]) -> Message {
    let ExternalMemory { fd, kind, allocation, offset, bytes, dedicated } = memory;
    let kind = (0..).zip(KINDS).find(|(_, known)| *known == kind).map_or(0, |(number, _)| number);
    let number = |format: Format| (1..).zip(Format::iter()).find(|(_, known)| *known == format);
    let format = image.and_then(|(format, _)| number(format)).map_or(0, |(number, _)| number);
    let [width, height, pitch, levels, layers] = image.map_or([0; 5], |(_, pixels)| {
        let [width, height] = pixels.size.map(u64::from);
        let layers = pixels.layers.map_or(0, u64::from);
        [width, height, pixels.pitch.unwrap_or(0), pixels.levels.into(), layers]
    });
    let (low, high) = halves(uuid);
    let dedicated = u64::from(dedicated);
    let words = [
        MAGIC, kind, allocation, offset, bytes, dedicated, format, width, height, pitch, levels, layers, low,
        high,
    ];
    Message { words, name: name.to_owned(), fd }
}

fn halves(uuid: [u8; 16]) -> (u64, u64) {
    let number = u128::from_le_bytes(uuid);
    (number as u64, (number >> 64) as u64)
}

/// The message of a timeline's descriptor.
pub(crate) fn send_timeline(socket: &UnixStream, fd: OwnedFd, uuid: [u8; 16]) -> Result<()> {
    let (low, high) = halves(uuid);
    let words = [MAGIC, TIMELINE, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, low, high];
    Message { words, name: String::new(), fd }.send(socket)
}

/// A timeline's descriptor, of the device with a UUID.
pub(crate) fn receive_timeline(socket: &UnixStream, uuid: [u8; 16]) -> Result<Option<OwnedFd>> {
    let Some(message) = Message::receive(socket)? else { return Ok(None) };
    let failed = failed("receiving a timeline");
    match message.words {
        [_, TIMELINE, .., low, high] if (low, high) == halves(uuid) => Ok(Some(message.fd)),
        [_, TIMELINE, ..] => Err(failed(&"it is one of another device")),
        _ => Err(failed(&"it is none")),
    }
}

impl Buffer {
    /// Sends it to another process, which [receives](Foreign) it. Its memory is there as long as either process has it.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a private one; [`Error::Host`] when the socket fails.
    pub fn send(&self, socket: &UnixStream) -> Result<()> {
        message(self.name(), self.export()?, None, self.raw.device.physical.uuid).send(socket)
    }
}

impl Image {
    /// Sends it to another process, as [`Buffer::send`].
    ///
    /// # Errors
    /// As [`Buffer::send`].
    pub fn send(&self, socket: &UnixStream) -> Result<()> {
        let image = Some((self.format(), self.layout()));
        message(self.name(), self.export()?, image, self.device().physical.uuid).send(socket)
    }
}

/// A buffer (of so many bytes) or an image (of [`Pixels`]) of another process, for a worker to register. That process may end: the
/// memory stays as long as this, or the import of it, is there.
pub struct Foreign<L> {
    name: String,
    memory: ExternalMemory,
    layout: L,
    format: Option<Format>,
    uuid: [u8; 16],
}

impl<L: fmt::Debug> fmt::Debug for Foreign<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, memory, layout, format, .. } = self;
        f.debug_struct("Foreign")
            .field("name", name)
            .field("memory", memory)
            .field("layout", layout)
            .field("format", format)
            .finish_non_exhaustive()
    }
}

/// What another process sends next, a buffer if it has no pixels.
fn receive(socket: &UnixStream) -> Result<Option<Foreign<Option<Pixels>>>> {
    let Some(Message { words, name, fd }) = Message::receive(socket)? else { return Ok(None) };
    let failed = failed("receiving a resource");
    let [
        _,
        kind,
        allocation,
        offset,
        bytes,
        dedicated,
        format,
        width,
        height,
        pitch,
        levels,
        layers,
        low,
        high,
    ] = words;
    let kind = usize::try_from(kind).ok().and_then(|kind| KINDS.get(kind)).copied();
    let kind = kind.ok_or_else(|| failed(&"it is neither buffer nor image"))?;
    let memory = ExternalMemory { fd, kind, allocation, offset, bytes, dedicated: dedicated != 0 };
    memory.check()?;
    let format = match format {
        0 => None,
        number => {
            let at = usize::try_from(number - 1).ok().and_then(|at| Format::iter().nth(at));
            Some(at.ok_or_else(|| failed(&"its pixels have a format that is not known"))?)
        }
    };
    let told = |format| pixels(format, [width, height, levels, layers], pitch, bytes);
    let layout = format.map(|format| {
        told(format).ok_or_else(|| {
            failed(&format!(
                "{width}x{height} pixels in rows of {pitch} bytes, {levels} levels and {layers} layers are none of {bytes} bytes"
            ))
        })
    });
    let uuid = (u128::from(low) | u128::from(high) << 64).to_le_bytes();
    Ok(Some(Foreign { name, memory, layout: layout.transpose()?, format, uuid }))
}

/// Pixels that can lie in so many bytes: in rows with a pitch, or as the device likes without.
fn pixels(format: Format, numbers: [u64; 4], pitch: u64, bytes: u64) -> Option<Pixels> {
    let [width, height, levels, layers] = numbers.map(|number| u32::try_from(number).ok());
    let (levels, layers) = (levels?, Some(layers?).filter(|layers| *layers > 0));
    let options = ImageOptions { levels, layers };
    let pixels = options.pixels(format, [width?, height?])?;
    let least = match pitch {
        0 => numbers[0]
            .checked_mul(numbers[1])?
            .checked_mul(layers.unwrap_or(1).into())?
            .checked_mul(format.bytes().into())?,
        pitch => row_bytes(&pixels, pitch).filter(|_| options == ImageOptions::default())?,
    };
    (least <= bytes).then_some(Pixels { pitch: Some(pitch).filter(|pitch| *pitch > 0), ..pixels })
}

impl<L> Foreign<L> {
    fn of<M>(self, layout: M) -> Foreign<M> {
        let Self { name, memory, format, uuid, .. } = self;
        Foreign { name, memory, layout, format, uuid }
    }
}

impl Foreign<u64> {
    /// The buffer that another process sends next; none at the end of the connection. It waits as long as the socket's own timeout
    /// says.
    ///
    /// # Errors
    /// [`Error::Host`] when the socket fails, and for what is no buffer; [`Error::OutOfRange`] for one that does not lie in its memory.
    pub fn receive(socket: &UnixStream) -> Result<Option<Self>> {
        let Some(found) = receive(socket)? else { return Ok(None) };
        match found.layout {
            None => Ok(Some(Self { layout: found.memory.bytes, ..found.of(0) })),
            Some(_) => Err(failed("receiving a buffer")(&"it is an image")),
        }
    }
}

impl Foreign<Pixels> {
    /// The image that another process sends next; none at the end of the connection. It waits as long as the socket's own timeout
    /// says.
    ///
    /// # Errors
    /// [`Error::Host`] when the socket fails, and for what is no image; [`Error::OutOfRange`] for one that does not lie in its memory.
    pub fn receive(socket: &UnixStream) -> Result<Option<Self>> {
        let Some(found) = receive(socket)? else { return Ok(None) };
        match found.layout {
            Some(pixels) => Ok(Some(found.of(pixels))),
            None => Err(failed("receiving an image")(&"it is a buffer")),
        }
    }

    /// How its pixels are stored.
    pub fn format(&self) -> Option<Format> {
        self.format
    }
}

impl<L: Layout> Foreign<L> {
    /// That an accelerator is the device that it is on; host memory is on all.
    ///
    /// # Errors
    /// [`Error::Unsupported`], with both UUIDs.
    pub fn check<A: Accelerator>(&self, accelerator: &A) -> Result<()> {
        match accelerator.uuid()? {
            Some(uuid) if uuid != self.uuid && self.memory.kind != ExternalKind::HostFd => {
                let what = format!("{} of the device {}, being {}", self.name, shown(self.uuid), shown(uuid));
                Err(Error::Unsupported { what, device: accelerator.info().name.clone() })
            }
            _ => Ok(()),
        }
    }
}

impl<L: Layout> Shareable for Foreign<L> {
    type Layout = L;

    fn name(&self) -> &str {
        &self.name
    }

    fn layout(&self) -> L {
        self.layout
    }

    fn export(&self) -> Result<ExternalMemory> {
        let ExternalMemory { fd, kind, allocation, offset, bytes, dedicated } = &self.memory;
        let fd = fd.try_clone().map_err(|error| failed("sharing memory")(&error))?;
        let (kind, allocation, offset) = (*kind, *allocation, *offset);
        Ok(ExternalMemory { fd, kind, allocation, offset, bytes: *bytes, dedicated: *dedicated })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_process_sends_is_checked() {
        let image = [MAGIC, 2, 8192, 4096, 4096, 0, 1, 8, 4, 64, 1, 0, 0, 0];
        let check = |words: [u64; WORDS], name: &[u8], with_fd: bool, what: &str| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let fd = OwnedFd::from(tempfile::tempfile().unwrap());
            let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            bytes.extend_from_slice(name);
            bytes.resize(BYTES, 0);
            let files = [fd.as_fd()];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            assert!(!with_fd || ancillary.push(SendAncillaryMessage::ScmRights(&files)));
            sendmsg(&theirs, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::empty()).unwrap();
            drop(theirs);
            match receive(&ours) {
                Ok(found) => assert_eq!(found.map(|found| found.name).unwrap_or_default(), what),
                Err(error) => {
                    assert!(error.to_string().contains(what) && !what.is_empty(), "{error}, not {what}")
                }
            }
            assert!(matches!(receive(&ours), Ok(None)) || !with_fd, "the end is the end");
        };
        let with = |at: usize, word: u64| {
            let mut words = image;
            words[at] = word;
            words
        };
        check(image, b"frame", true, "frame");
        check(with(6, 0), &[b'n'; NAME], true, &"n".repeat(NAME));
        check(image, b"\xff", true, "utf-8");
        check(image, b"frame", false, "without its descriptor");
        check(with(0, 1), b"", true, "something else");
        check(with(1, TIMELINE), b"", true, "neither buffer nor image");
        check(with(1, u64::MAX), b"", true, "neither buffer nor image");
        check(with(2, 8191), b"", true, "do not lie in");
        check(with(3, u64::MAX), b"", true, "do not lie in");
        check(with(4, 0), b"", true, "do not lie in");
        check(with(6, 1000), b"", true, "a format that is not known");
        for (at, word) in [
            (7, 0),
            (8, 0),
            (7, 17),
            (8, 65),
            (9, 31),
            (9, u64::MAX),
            (7, u64::MAX),
            (8, 1 << 32),
            (10, 0),
            (10, 2),
            (11, 1),
        ] {
            check(with(at, word), b"", true, "pixels in rows");
        }
        // Of the device's own tiling: 32x16 pixels of 4 bytes, 3 levels and 2 layers.
        let tiled = [MAGIC, 0, 8192, 4096, 4096, 1, 1, 32, 16, 0, 3, 2, 0, 0];
        check(tiled, b"tiled", true, "tiled");
        for (at, word) in [(7, 33), (10, 0), (10, 7), (11, 3), (11, u64::MAX), (10, 1 << 32)] {
            let mut words = tiled;
            words[at] = word;
            check(words, b"", true, "pixels in rows");
        }
    }
}
