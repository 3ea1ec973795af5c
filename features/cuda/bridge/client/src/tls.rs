//! Connections to a server of another machine: TLS 1.3, in which each side shows a certificate.

use std::io::{self, IoSlice, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::net::{SendAncillaryBuffer, SendFlags, send, sendmsg, sockopt};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

/// How long it may take until there is a connection.
const CONNECT: Duration = Duration::from_secs(20);

/// A connection.
pub(crate) type Tls = StreamOwned<ClientConnection, Socket>;

/// A socket whose other end may be gone: writes to it are errors then, and no signal, which would end the program.
pub(crate) struct Socket(TcpStream);

impl Socket {
    pub(crate) fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.set_read_timeout(timeout)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Read for Socket {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.0.read(to)
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(send(&self.0, bytes, SendFlags::NOSIGNAL)?)
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        Ok(sendmsg(&self.0, parts, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Connects, and shows who this is.
pub(crate) fn connect(host: &str, port: u16) -> io::Result<Tls> {
    static CONFIG: OnceLock<Result<Arc<ClientConfig>, String>> = OnceLock::new();
    let config = CONFIG.get_or_init(|| config().map(Arc::new)).clone().map_err(io::Error::other)?;
    let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
    let mut connection = ClientConnection::new(config, name).map_err(io::Error::other)?;
    let until = Instant::now() + CONNECT;
    let stream = reach(host, port, until)?;
    stream.set_nodelay(true)?;
    keep_alive(&stream)?;
    stream.set_write_timeout(Some(CONNECT))?;
    let mut stream = Socket(stream);
    while connection.is_handshaking() || connection.wants_write() {
        if connection.wants_write() {
            connection.write_tls(&mut stream)?;
            continue;
        }
        stream.set_read_timeout(Some(left(until)?))?;
        if connection.read_tls(&mut stream)? == 0 {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the server ended the connection before its TLS had begun",
            ));
        }
        if let Err(error) = connection.process_new_packets() {
            // The server is told why, as far as it listens.
            let _ = connection.write_tls(&mut stream);
            return Err(io::Error::other(error));
        }
    }
    stream.0.set_write_timeout(None)?;
    Ok(StreamOwned::new(connection, stream))
}

/// Connects to the first address that answers.
fn reach(host: &str, port: u16, until: Instant) -> io::Result<TcpStream> {
    let mut failed = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, left(until)?) {
            Ok(stream) => return Ok(stream),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

/// A machine that is gone without a word is noticed.
fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(30))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(10))?;
    Ok(sockopt::set_tcp_keepcnt(stream, 6)?)
}

fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// The most bytes of a file with certificates or a key.
const PEM: u64 = 4 << 20;

/// What the environment says of certificates.
fn config() -> Result<ClientConfig, String> {
    let read = |name: &str| {
        let path =
            std::env::var_os(name).map(PathBuf::from).ok_or_else(|| format!("{name} names no file"))?;
        let pem = vm_files::regular::read(&path, PEM);
        let pem =
            pem.map_err(|error| format!("cannot read {}, which {name} names: {error}", path.display()))?;
        Ok::<_, String>((path, pem))
    };
    let certificates = |name: &str| {
        let (path, pem) = read(name)?;
        let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
        match certificates {
            Ok(read) if !read.is_empty() => Ok(read),
            Ok(_) => Err(format!("{}, which {name} names, has no certificate", path.display())),
            Err(error) => {
                Err(format!("{}, which {name} names, has a wrong certificate: {error}", path.display()))
            }
        }
    };
    let mut roots = RootCertStore::empty();
    for authority in certificates("VM_BRIDGE_CA")? {
        roots.add(authority).map_err(|error| format!("VM_BRIDGE_CA names what is no authority: {error}"))?;
    }
    let (key, pem) = read("VM_BRIDGE_KEY")?;
    let key = PrivateKeyDer::from_pem_slice(&pem)
        .map_err(|error| format!("{}, which VM_BRIDGE_KEY names, is no key: {error}", key.display()))?;
    ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots)
        .with_client_auth_cert(certificates("VM_BRIDGE_CERTIFICATE")?, key)
        .map_err(|error| {
            format!(
                "cannot use VM_BRIDGE_CERTIFICATE with VM_BRIDGE_KEY: {error}; they must belong together, and the certificate \
                 must be of X.509 version 3"
            )
        })
}
