//! Where the server is, and connections to it: by a Unix socket, which carries files, or by vsock, which doesn't.

use std::ffi::OsString;
use std::fmt;
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use vm_bridge::wire::preamble::{Preamble, TOKEN, Token};
use vm_paravirt::Takes;
use vm_paravirt_guest::linux::Device;
use vsock::{VMADDR_CID_HOST, VsockStream};

/// How long the server may take to begin.
pub(crate) const BEGIN: Duration = Duration::from_secs(60);

/// Where the server is.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Place {
    Unix(PathBuf),
    Vsock { cid: u32, port: u32 },
}

impl fmt::Display for Place {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(to, "unix:{}", path.display()),
            Self::Vsock { cid, port } => write!(to, "vsock:{cid}:{port}"),
        }
    }
}

/// Where it is if nothing says so, and this is no guest with an accelerator for CUDA programs.
const DEFAULT: &str = "/run/vm-bridge.sock";

impl Place {
    /// Where the server is that nobody has named.
    pub(crate) fn find() -> Self {
        match Device::that_takes(Takes::CudaPrograms) {
            Ok(device) => Self::Vsock { cid: VMADDR_CID_HOST, port: device.config().port },
            Err(_) => Self::Unix(DEFAULT.into()),
        }
    }

    /// Reads what `VM_BRIDGE` says: `unix:PATH`, `vsock:PORT` or `vsock:CID:PORT`.
    pub(crate) fn parse(text: &OsString) -> Option<Self> {
        let text = text.to_str()?;
        if let Some(path) = text.strip_prefix("unix:") {
            return Some(Self::Unix(path.into()));
        }
        let address = text.strip_prefix("vsock:")?;
        let (cid, port) = match address.split_once(':') {
            Some((cid, port)) => (cid.parse().ok()?, port),
            None => (VMADDR_CID_HOST, address),
        };
        Some(Self::Vsock { cid, port: port.parse().ok()? })
    }

    /// A new session: its connection, and, where files don't go over it, its token.
    pub(crate) fn begin(&self) -> io::Result<(UnixStream, Option<Token>)> {
        let Self::Unix(path) = self else {
            let mut stream = self.open(Preamble::Session)?;
            let mut token = [0; TOKEN];
            stream.read_exact(&mut token)?;
            return Ok((stream, Some(token)));
        };
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(BEGIN))?;
        Ok((stream, None))
    }

    /// A connection which carries no files, that the server has taken.
    pub(crate) fn open(&self, preamble: Preamble) -> io::Result<UnixStream> {
        let Self::Vsock { cid, port } = self else { return Err(io::ErrorKind::Unsupported.into()) };
        let socket = OwnedFd::from(VsockStream::connect_with_cid_port(*cid, *port)?);
        // Of any stream socket: only what all of them have is used.
        let mut stream = UnixStream::from(socket);
        stream.set_read_timeout(Some(BEGIN))?;
        stream.write_all(&preamble.to_bytes())?;
        let mut answer = [0; 8];
        stream.read_exact(&mut answer)?;
        match u64::from_ne_bytes(answer) {
            0 => Ok(stream),
            code => Err(io::Error::other(format!("the server refuses: CUDA's error {code}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_as_they_are_written() {
        let check = |text: &str, place: Option<Place>| {
            assert_eq!(Place::parse(&text.into()), place, "{text}");
            if let Some(place) = place.filter(|_| text.matches(':').count() != 1 || text.starts_with("unix"))
            {
                assert_eq!(place.to_string(), text);
            }
        };
        check("unix:/run/a:b", Some(Place::Unix("/run/a:b".into())));
        check("vsock:7", Some(Place::Vsock { cid: 2, port: 7 }));
        check("vsock:1:4294967295", Some(Place::Vsock { cid: 1, port: u32::MAX }));
        for text in ["", "vsock:", "vsock::1", "vsock:1:2:3", "vsock:-1", "tcp:a:1", "/run/vm-bridge.sock"] {
            check(text, None);
        }
    }
}
