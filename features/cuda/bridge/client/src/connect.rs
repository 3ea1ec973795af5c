//! Where the server is, and connections to it: by a Unix socket that carries files, or by streams that don't.

use std::ffi::OsString;
use std::fmt;
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;
use vm_bridge::wire::preamble::{Preamble, TOKEN, Token};
use vm_bridge::wire::{code, put};
use vm_paravirt::Takes;
use vm_paravirt_guest::linux::Device;
use vsock::{VMADDR_CID_HOST, VsockStream};

use crate::connection::Connection;
use crate::{say, tls};

/// How long the server may take to begin.
pub(crate) const BEGIN: Duration = Duration::from_secs(60);
/// Why a server answers a new connection with `CUDA_ERROR_NO_DEVICE`.
const FULL: &str = "the server cannot take another program or connection of this peer: its limit is reached; end programs, or raise the \
                    server's limit of open files";
/// The server refuses a connection.
#[derive(Debug, Error)]
#[error("the server refuses a connection: CUDA error {0}")]
pub(crate) struct Refused(pub(crate) u32);

/// What `VM_BRIDGE` may say.
const FORMS: &str = "unix:PATH, stream:PATH, vsock:[CID:]PORT or tls:HOST:PORT";

/// Where the server is.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Place {
    Unix(PathBuf),
    /// A Unix socket that something forwards, without files.
    Stream(PathBuf),
    Vsock {
        cid: u32,
        port: u32,
    },
    Tls {
        host: String,
        port: u16,
    },
}

impl fmt::Display for Place {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(to, "unix:{}", path.display()),
            Self::Stream(path) => write!(to, "stream:{}", path.display()),
            Self::Vsock { cid, port } => write!(to, "vsock:{cid}:{port}"),
            Self::Tls { host, port } if host.contains(':') => write!(to, "tls:[{host}]:{port}"),
            Self::Tls { host, port } => write!(to, "tls:{host}:{port}"),
        }
    }
}

/// Where it is if nothing says so, and this is no guest with an accelerator for CUDA programs.
const DEFAULT: &str = "/run/vm-bridge.sock";

impl Place {
    /// Where it is, as `VM_BRIDGE` says.
    pub(crate) fn named() -> Result<Self, u32> {
        let Some(named) = std::env::var_os("VM_BRIDGE") else { return Ok(Self::find()) };
        Self::parse(&named).ok_or_else(|| {
            say::once(&format!("VM_BRIDGE is {}; it must be {FORMS}", named.display()));
            code::NO_DEVICE
        })
    }

    /// A new session; where there is none the user is told why.
    pub(crate) fn session(&self) -> Result<(Connection, Option<Token>), u32> {
        self.begin().map_err(|error| {
            say::once(&format!("no server at {self}: {error}; {}", self.remedy()));
            code::NO_DEVICE
        })
    }

    /// Tells the user that the server has not taken the session.
    pub(crate) fn refused(&self, why: u32) -> u32 {
        say::once(&match why {
            code::NO_DEVICE => format!("no session at {self}: {FULL}"),
            why => format!("the server at {self} is of another version, or ended: {why}"),
        });
        code::NO_DEVICE
    }

    /// Where the server is that nobody has named.
    fn find() -> Self {
        match Device::that_takes(Takes::CudaPrograms) {
            Ok(device) => Self::Vsock { cid: VMADDR_CID_HOST, port: device.config().port },
            Err(_) => Self::Unix(DEFAULT.into()),
        }
    }

    /// The accelerator of this guest that it is, if it is one.
    pub(crate) fn device(&self) -> Option<Device> {
        let Self::Vsock { cid: VMADDR_CID_HOST, port: named } = self else { return None };
        let is_it =
            |device: &Device| device.config().takes == Takes::CudaPrograms && device.config().port == *named;
        Device::all().ok()?.into_iter().find(is_it)
    }

    /// Reads what `VM_BRIDGE` says: one of [`FORMS`].
    pub(crate) fn parse(text: &OsString) -> Option<Self> {
        let (kind, address) = text.to_str()?.split_once(':')?;
        match kind {
            "unix" => Some(Self::Unix(address.into())),
            "stream" => Some(Self::Stream(address.into())),
            "vsock" => {
                let (cid, port) = match address.split_once(':') {
                    Some((cid, port)) => (cid.parse().ok()?, port),
                    None => (VMADDR_CID_HOST, address),
                };
                Some(Self::Vsock { cid, port: port.parse().ok()? })
            }
            "tls" => {
                let (host, port) = address.rsplit_once(':')?;
                let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
                let host = inner.unwrap_or(host);
                let is_host = !host.is_empty() && (inner.is_some() || !host.contains(':'));
                is_host.then_some(Self::Tls { host: host.to_owned(), port: port.parse().ok()? })
            }
            _ => None,
        }
    }

    /// What to do where there is no server.
    pub(crate) fn remedy(&self) -> &'static str {
        match self {
            Self::Tls { .. } => {
                "start `vm-service bridge serve --tls` there, and see that VM_BRIDGE_CERTIFICATE and VM_BRIDGE_KEY name what it \
                 trusts, and VM_BRIDGE_CA who signed its certificate"
            }
            _ => "start `vm-service bridge serve` there, or set VM_BRIDGE",
        }
    }

    /// A new session: its connection, and, where files don't go over it, its token.
    fn begin(&self) -> io::Result<(Connection, Option<Token>)> {
        let Self::Unix(path) = self else {
            let mut stream = self.open(Preamble::Session).map_err(|error| {
                match error.get_ref().and_then(|inner| inner.downcast_ref()) {
                    Some(Refused(code::NO_DEVICE)) => io::Error::other(FULL),
                    _ => error,
                }
            })?;
            let mut token = [0; TOKEN];
            stream.read_exact(&mut token)?;
            return Ok((stream, Some(token)));
        };
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(BEGIN))?;
        Ok((Connection::Plain(stream), None))
    }

    /// A connection which carries no files, that the server has taken.
    pub(crate) fn open(&self, preamble: Preamble) -> io::Result<Connection> {
        self.open_with(preamble, &[])
    }

    /// The same, with words behind the preamble.
    pub(crate) fn open_with(&self, preamble: Preamble, words: &[u64]) -> io::Result<Connection> {
        let mut connection = match self {
            Self::Unix(path) | Self::Stream(path) => Connection::Plain(UnixStream::connect(path)?),
            Self::Vsock { cid, port } => {
                let socket = OwnedFd::from(VsockStream::connect_with_cid_port(*cid, *port)?);
                Connection::Plain(UnixStream::from(socket))
            }
            Self::Tls { host, port } => Connection::Tls(Box::new(tls::connect(host, *port)?)),
        };
        connection.set_read_timeout(Some(BEGIN))?;
        let mut bytes = preamble.to_bytes().to_vec();
        words.iter().for_each(|word| put(&mut bytes, *word));
        connection.write_all(&bytes)?;
        match connection.word()? {
            0 => Ok(connection),
            code => Err(io::Error::other(Refused(code as u32))),
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
            if let Some(place) = place.filter(|_| text != "vsock:7") {
                assert_eq!(place.to_string(), text);
            }
        };
        check("unix:/run/a:b", Some(Place::Unix("/run/a:b".into())));
        check("stream:/run/v.sock_7", Some(Place::Stream("/run/v.sock_7".into())));
        check("vsock:7", Some(Place::Vsock { cid: 2, port: 7 }));
        check("vsock:1:4294967295", Some(Place::Vsock { cid: 1, port: u32::MAX }));
        check("tls:gpu.example:7", Some(Place::Tls { host: "gpu.example".into(), port: 7 }));
        check("tls:[::1]:65535", Some(Place::Tls { host: "::1".into(), port: 65535 }));
        for text in ["", "vsock:", "vsock::1", "vsock:1:2:3", "vsock:-1", "tcp:a:1", "/run/vm-bridge.sock"] {
            check(text, None);
        }
        for text in ["tls:a", "tls::1", "tls:a:65536", "tls:::1:7", "tls:[]:7", "tls:a:"] {
            check(text, None);
        }
    }
}
