//! What each connection begins with where it carries no files (vsock, TLS): what it is, and of which session.
//!
//! A session's own connection is answered with a word, 0 where there is a worker, and its token; orders follow. The others name that token,
//! and are answered with a word once the worker has them.

use std::fs::File;
use std::io::{self, Read as _};

use super::{Malformed, VERSION};

/// Bytes of one.
pub const SIZE: usize = 32;
/// Bytes of a token.
pub const TOKEN: usize = 16;
const MAGIC: [u8; 8] = *b"vmbridge";

/// Names a session: who knows it may open connections of it.
pub type Token = [u8; TOKEN];

/// Bytes that nobody guesses.
///
/// # Errors
/// When the system gives none.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Preamble {
    /// A new session's orders.
    Session,
    /// A lane of a session.
    Lane(Token),
    /// A lane of a session in a part of the window, which two words behind this tell: where it begins, and its length.
    Ring(Token),
    /// Calls of a session's functions ([`CALLBACKS`](super::control::CALLBACKS)).
    Callbacks(Token),
}

impl Preamble {
    /// As it is sent.
    #[must_use]
    pub fn to_bytes(self) -> [u8; SIZE] {
        let (kind, token) = match self {
            Self::Session => (0u32, [0; TOKEN]),
            Self::Lane(token) => (1, token),
            Self::Callbacks(token) => (2, token),
            Self::Ring(token) => (3, token),
        };
        let mut bytes = [0; SIZE];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&kind.to_le_bytes());
        bytes[16..].copy_from_slice(&token);
        bytes
    }

    /// As it came.
    ///
    /// # Errors
    /// When it is none, or of another version.
    pub fn from_bytes(bytes: [u8; SIZE]) -> Result<Self, Malformed> {
        let [magic @ .., v0, v1, v2, v3, k0, k1, k2, k3] = *bytes.first_chunk::<16>().ok_or(Malformed)?;
        let token = *bytes.last_chunk::<TOKEN>().ok_or(Malformed)?;
        if magic != MAGIC || u32::from_le_bytes([v0, v1, v2, v3]) != VERSION {
            return Err(Malformed);
        }
        match u32::from_le_bytes([k0, k1, k2, k3]) {
            0 if token == [0; TOKEN] => Ok(Self::Session),
            1 => Ok(Self::Lane(token)),
            2 => Ok(Self::Callbacks(token)),
            3 => Ok(Self::Ring(token)),
            _ => Err(Malformed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_read_as_it_was_written_and_nothing_else_is() {
        for preamble in [
            Preamble::Session,
            Preamble::Lane([7; TOKEN]),
            Preamble::Callbacks([9; TOKEN]),
            Preamble::Ring([5; TOKEN]),
        ] {
            let bytes = preamble.to_bytes();
            assert_eq!(Preamble::from_bytes(bytes), Ok(preamble));
            for at in 0..16 {
                let mut other = bytes;
                other[at] ^= 0x80;
                assert_eq!(Preamble::from_bytes(other), Err(Malformed), "{at}");
            }
        }
        let mut token = Preamble::Session.to_bytes();
        token[31] = 1;
        assert_eq!(Preamble::from_bytes(token), Err(Malformed));
    }
}
