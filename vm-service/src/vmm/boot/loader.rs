//! Brings files into RAM piece by piece, and looks between pieces whether it is to stop: neither a large file nor slow storage
//! keeps an operator waiting.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek as _, SeekFrom};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use vm_memory::bitmap::BitmapSlice;
use vm_memory::{
    Bytes as _, GuestAddress, GuestMemoryError, GuestMemoryMmap, ReadVolatile, VolatileMemoryError,
    VolatileSlice,
};

use super::error::BootError;
use crate::vmm::quiesced::Quiesced;

/// What is read or zeroed between two looks.
const PIECE: u64 = 1 << 20;

/// A file that is booted from, which is open for all starts. It is a regular one: reading another may never end.
pub(super) struct BootFile {
    file: File,
    path: PathBuf,
}

impl BootFile {
    /// Opens a file, without waiting for the other end of a FIFO.
    ///
    /// # Errors
    /// When it can't be opened, or is no regular file.
    pub(super) fn open(path: &Path) -> Result<Self, BootError> {
        let read = |source| BootError::Read { path: path.to_owned(), source };
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(read)?;
        let metadata = file.metadata().map_err(read)?;
        if !metadata.is_file() {
            return Err(read(io::Error::other("it is not a regular file; name the file itself")));
        }
        Ok(Self { file, path: path.to_owned() })
    }

    /// What the user calls it.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes that it has.
    ///
    /// # Errors
    /// The Linux kernel's.
    pub(super) fn len(&self) -> Result<u64, BootError> {
        (&self.file).seek(SeekFrom::End(0)).map_err(|source| self.failed(source))
    }

    /// At most `most` bytes of its beginning.
    ///
    /// # Errors
    /// The Linux kernel's.
    pub(super) fn beginning(&self, most: usize) -> Result<Vec<u8>, BootError> {
        let mut bytes = vec![0; usize::try_from(self.len()?).map_or(most, |len| len.min(most))];
        self.file.read_exact_at(&mut bytes, 0).map_err(|source| self.failed(source))?;
        Ok(bytes)
    }

    fn failed(&self, source: io::Error) -> BootError {
        BootError::Read { path: self.path.clone(), source }
    }
}

/// Writes RAM, until it is to stop.
pub(super) struct Loader<'a> {
    memory: &'a GuestMemoryMmap,
    stop: &'a dyn Fn() -> bool,
}

impl<'a> Loader<'a> {
    /// A loader into RAM that nobody else writes. It ends soon after `stop` answers with `true`.
    pub(super) fn new(memory: &'a GuestMemoryMmap, _: &Quiesced, stop: &'a dyn Fn() -> bool) -> Self {
        Self { memory, stop }
    }

    /// The RAM.
    pub(super) fn memory(&self) -> &'a GuestMemoryMmap {
        self.memory
    }

    /// Sees that it is not to stop.
    ///
    /// # Errors
    /// [`BootError::Stopped`] when it is.
    pub(super) fn go_on(&self) -> Result<(), BootError> {
        if (self.stop)() { Err(BootError::Stopped) } else { Ok(()) }
    }

    /// Copies a part of a file to `address`.
    ///
    /// # Errors
    /// When it is to stop, the part can't be read, or it does not fit RAM.
    pub(super) fn copy(&self, file: &BootFile, offset: u64, len: u64, address: u64) -> Result<(), BootError> {
        let mut source = &file.file;
        source.seek(SeekFrom::Start(offset)).map_err(|error| file.failed(error))?;
        self.fill(&mut source, address, len).map_err(|error| match error {
            Unfilled::Stopped => BootError::Stopped,
            Unfilled::Ended => file.failed(io::ErrorKind::UnexpectedEof.into()),
            Unfilled::Memory(error) => file.failed(io::Error::other(error)),
        })
    }

    /// Zeroes RAM.
    ///
    /// # Errors
    /// When it is to stop, or that is not all RAM.
    pub(super) fn zero(&self, address: u64, len: u64) -> Result<(), BootError> {
        self.fill(&mut Zeros, address, len).map_err(|error| match error {
            Unfilled::Stopped => BootError::Stopped,
            Unfilled::Ended | Unfilled::Memory(_) => BootError::TooLittleRam,
        })
    }

    fn fill(&self, source: &mut impl ReadVolatile, address: u64, len: u64) -> Result<(), Unfilled> {
        let mut done = 0;
        while done < len {
            if (self.stop)() {
                return Err(Unfilled::Stopped);
            }
            let piece = done + PIECE.min(len - done);
            while done < piece {
                let at = GuestAddress(address + done);
                match self.memory.read_volatile_from(at, source, (piece - done) as usize) {
                    Ok(0) => return Err(Unfilled::Ended),
                    Ok(count) => done += count as u64,
                    Err(error) => return Err(Unfilled::Memory(error)),
                }
            }
        }
        Ok(())
    }

    /// Reads a part of a file as a stream that ends, with an error, when it is to stop.
    ///
    /// # Errors
    /// When the file can't be read there.
    pub(super) fn stream<'b>(
        &'b self,
        file: &'b BootFile,
        offset: u64,
        len: u64,
    ) -> Result<impl Read + use<'a, 'b>, BootError> {
        (&file.file).seek(SeekFrom::Start(offset)).map_err(|error| file.failed(error))?;
        Ok(Stream { loader: self, file: &file.file }.take(len))
    }
}

/// Why RAM was not filled.
enum Unfilled {
    /// It is to stop.
    Stopped,
    /// There was no more to fill it with.
    Ended,
    /// What to fill it with can't be read, or it does not fit.
    Memory(GuestMemoryError),
}

struct Stream<'a, 'b> {
    loader: &'b Loader<'a>,
    file: &'b File,
}

impl Read for Stream<'_, '_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.loader.go_on().map_err(io::Error::other)?;
        self.file.read(buffer)
    }
}

/// Zeros without end.
struct Zeros;

impl ReadVolatile for Zeros {
    fn read_volatile<B: BitmapSlice>(
        &mut self,
        target: &mut VolatileSlice<'_, B>,
    ) -> Result<usize, VolatileMemoryError> {
        const ZEROS: [u8; 4096] = [0; 4096];
        target.write(&ZEROS, 0)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn it_stops_between_pieces() {
        const LEN: u64 = 5 * PIECE + 7;
        let source = tempfile::NamedTempFile::new().unwrap();
        source.as_file().set_len(LEN).unwrap();
        let file = BootFile::open(source.path()).unwrap();
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 8 << 20)]).unwrap();
        for looks in 0..=6 {
            for zero in [true, false] {
                memory.write_slice(&vec![0xdd; 8 << 20], GuestAddress(0)).unwrap();
                let looked = Cell::new(0);
                let stop = || looked.replace(looked.get() + 1) == looks;
                let loader = Loader::new(&memory, &Quiesced::unstarted(), &stop);
                let done = if zero { loader.zero(0, LEN) } else { loader.copy(&file, 0, LEN, 0) };
                assert_eq!(done.is_ok(), looks == 6, "{done:?}");
                let mut ram = vec![0; 8 << 20];
                memory.read_slice(&mut ram, GuestAddress(0)).unwrap();
                let written = ram.iter().position(|byte| *byte != 0).unwrap() as u64;
                assert_eq!(written, LEN.min(looks * PIECE));
            }
        }
        let mut ram = Vec::new();
        let stop = || true;
        let loader = Loader::new(&memory, &Quiesced::unstarted(), &stop);
        loader.stream(&file, 0, LEN).unwrap().read_to_end(&mut ram).unwrap_err();
    }
}
