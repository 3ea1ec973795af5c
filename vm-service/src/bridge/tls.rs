//! Programs of other machines: TLS 1.3, in which each side shows a certificate. It ends in this process: what a worker has of a connection is a
//! socket that its bytes are pumped through.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig, ServerConnection};

use super::BridgeError;
use super::gateway::Gateway;

/// How long a program may take to show its certificate.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long the last bytes may take when the other side has ended.
const LAST: Duration = Duration::from_secs(10);
/// The most connections of which no certificate is known yet.
const UNKNOWN: usize = 64;
/// The most connections.
const CONNECTIONS: usize = 4096;
/// Bytes that are on their way, each way.
const BUFFER: usize = 256 << 10;
/// Nothing is tried for as long when something could not be had.
const PAUSE: Duration = Duration::from_millis(100);

/// Where programs connect, and who may.
#[derive(Clone, Debug)]
pub(crate) struct Tls {
    /// An address with its port.
    pub(crate) address: SocketAddr,
    /// The server's certificate, and those between it and an authority's.
    pub(crate) certificate: PathBuf,
    /// The key of that.
    pub(crate) key: PathBuf,
    /// Certificates of the authorities that sign those of programs.
    pub(crate) clients: PathBuf,
}

/// Takes connections on a thread.
///
/// # Errors
/// When the address or the files are wrong.
pub(super) fn listen(tls: &Tls, gateway: Gateway) -> Result<SocketAddr, BridgeError> {
    let config = Arc::new(config(tls).map_err(BridgeError::Tls)?);
    let failed = |source| BridgeError::Address { address: tls.address, source };
    let listener = TcpListener::bind(tls.address).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let counts = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
    let accept = move || {
        loop {
            match listener.accept() {
                Ok((stream, peer)) => take(stream, peer, &config, &gateway, &counts),
                Err(error) => {
                    tracing::error!(%error, "a CUDA program can't be served");
                    sleep(PAUSE);
                }
            }
        }
    };
    std::thread::Builder::new().name("tls".into()).spawn(accept).map_err(failed)?;
    Ok(address)
}

/// What is counted goes down when this is dropped.
struct Counted(Arc<[AtomicUsize; 2]>, usize);

impl Counted {
    fn new(counts: &Arc<[AtomicUsize; 2]>, of: usize, most: usize) -> Option<Self> {
        let counted = Self(counts.clone(), of);
        (counts[of].fetch_add(1, Ordering::SeqCst) < most).then_some(counted)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0[self.1].fetch_sub(1, Ordering::SeqCst);
    }
}

/// Serves a connection on a thread of its own, or closes it.
fn take(
    stream: TcpStream,
    peer: SocketAddr,
    config: &Arc<ServerConfig>,
    gateway: &Gateway,
    counts: &Arc<[AtomicUsize; 2]>,
) {
    let counted = Counted::new(counts, 0, CONNECTIONS).zip(Counted::new(counts, 1, UNKNOWN));
    let Some((connected, unknown)) = counted else {
        tracing::warn!(%peer, "a connection over TLS is closed: there are too many");
        return;
    };
    let (config, gateway) = (config.clone(), gateway.clone());
    let serve = move || {
        let _connected = connected;
        let mut connection = match shake_hands(&stream, config) {
            Ok(connection) => connection,
            Err(error) => return tracing::warn!(%peer, %error, "a connection over TLS is refused"),
        };
        drop(unknown);
        let pumped = UnixStream::pair().and_then(|(ours, theirs)| {
            ours.set_nonblocking(true)?;
            gateway.accept(theirs.into());
            pump(&mut connection, &stream, &ours)
        });
        tracing::debug!(%peer, ?pumped, "a connection over TLS has ended");
    };
    if let Err(error) = std::thread::Builder::new().name("tls-program".into()).spawn(serve) {
        tracing::error!(%error, "a CUDA program can't be served: no thread can be started");
    }
}

/// Waits until one of some descriptors is ready, or until a time.
fn ready(fds: &mut [PollFd<'_>], until: Option<Instant>) -> io::Result<()> {
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let timeout = left.map(Timespec::try_from).transpose().map_err(io::Error::other)?;
        match poll(fds, timeout.as_ref()) {
            Err(rustix::io::Errno::INTR) => {}
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            other => return Ok(other.map(drop)?),
        }
    }
}

/// Has the program show its certificate, in time. The stream is not waited for by reads and writes from then on.
fn shake_hands(mut stream: &TcpStream, config: Arc<ServerConfig>) -> io::Result<ServerConnection> {
    let until = Instant::now() + HANDSHAKE;
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    // A machine that is gone without a word is noticed.
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(30))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(10))?;
    sockopt::set_tcp_keepcnt(stream, 6)?;
    let mut connection = ServerConnection::new(config).map_err(io::Error::other)?;
    while connection.is_handshaking() || connection.wants_write() {
        let writes = connection.wants_write();
        let wanted = if writes { PollFlags::OUT } else { PollFlags::IN };
        ready(&mut [PollFd::new(&stream, wanted)], Some(until))?;
        if writes {
            connection.write_tls(&mut stream)?;
            continue;
        }
        if connection.read_tls(&mut stream)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if let Err(error) = connection.process_new_packets() {
            // The program is told why, as far as it listens.
            let _ = connection.write_tls(&mut stream);
            return Err(io::Error::other(error));
        }
    }
    Ok(connection)
}

fn would_block(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Moves bytes between a program and who serves it, until one of them ends.
fn pump(connection: &mut ServerConnection, mut stream: &TcpStream, mut inner: &UnixStream) -> io::Result<()> {
    connection.set_buffer_limit(None);
    let mut buffer = vec![0; BUFFER];
    // What came of the program, and how much of it has gone on.
    let (mut came, mut gone) = (Vec::new(), 0);
    let (mut outer_ended, mut inner_ended) = (false, false);
    let mut until = None;
    // What came with the end of the handshake is there already.
    outer_ended |= take_plain(connection, &mut came)?;
    loop {
        if (outer_ended && gone == came.len()) || (inner_ended && !connection.wants_write()) {
            return Ok(());
        }
        let mut outer_wants = PollFlags::empty();
        outer_wants.set(PollFlags::IN, !outer_ended && gone == came.len());
        outer_wants.set(PollFlags::OUT, connection.wants_write());
        let mut inner_wants = PollFlags::empty();
        inner_wants.set(PollFlags::IN, !inner_ended && !connection.wants_write());
        inner_wants.set(PollFlags::OUT, gone < came.len());
        let mut fds = [PollFd::new(&stream, outer_wants), PollFd::new(&inner, inner_wants)];
        // Who has hung up is always ready: there is nothing to wait for but the last bytes of the other.
        let count = if inner_ended { 1 } else { 2 };
        if outer_ended || inner_ended {
            until = until.or_else(|| Some(Instant::now() + LAST));
        }
        ready(&mut fds[..count], until)?;
        let [outer, inner_is] = [fds[0].revents(), fds[1].revents()];
        if outer.intersects(PollFlags::ERR | PollFlags::HUP) && !outer.contains(PollFlags::IN) {
            return Ok(());
        }
        if outer.contains(PollFlags::IN) {
            outer_ended |= receive(connection, stream, &mut came)?;
        }
        if inner_is.contains(PollFlags::IN) {
            match inner.read(&mut buffer) {
                Ok(0) => inner_ended = true,
                Ok(len) => connection.writer().write_all(&buffer[..len])?,
                Err(error) if would_block(&error) => {}
                Err(_) => inner_ended = true,
            }
        } else if inner_is.intersects(PollFlags::HUP | PollFlags::ERR) {
            inner_ended = true;
        }
        if inner_ended {
            connection.send_close_notify();
            came.clear();
            gone = 0;
        }
        if gone < came.len() {
            match inner.write(&came[gone..]) {
                Ok(len) => gone += len,
                Err(error) if would_block(&error) => {}
                Err(_) => inner_ended = true,
            }
            if gone == came.len() {
                came.clear();
                gone = 0;
            }
        }
        while connection.wants_write() {
            match connection.write_tls(&mut stream) {
                Ok(_) => {}
                Err(error) if would_block(&error) => break,
                Err(error) => return Err(error),
            }
        }
    }
}

/// Takes what a program has sent. Answers with whether it has ended.
fn receive(
    connection: &mut ServerConnection,
    mut stream: &TcpStream,
    came: &mut Vec<u8>,
) -> io::Result<bool> {
    while came.len() < BUFFER {
        match connection.read_tls(&mut stream) {
            Ok(0) => return Ok(true),
            Ok(_) => {}
            Err(error) if would_block(&error) => break,
            Err(error) => return Err(error),
        }
        connection.process_new_packets().map_err(io::Error::other)?;
        if take_plain(connection, came)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Takes what was decrypted. Answers with whether it was the last.
fn take_plain(connection: &mut ServerConnection, came: &mut Vec<u8>) -> io::Result<bool> {
    match connection.reader().read_to_end(came) {
        Ok(_) => Ok(true),
        Err(error) if would_block(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

fn config(tls: &Tls) -> Result<ServerConfig, String> {
    let mut roots = RootCertStore::empty();
    for authority in certificates(&tls.clients, "--clients")? {
        roots.add(authority).map_err(|error| {
            format!("{}, which --clients names, has what is no authority: {error}", tls.clients.display())
        })?;
    }
    let provider = Arc::new(ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone());
    let verifier = verifier.build().map_err(|error| format!("--clients: {error}"))?;
    let key = PrivateKeyDer::from_pem_file(&tls.key)
        .map_err(|error| format!("{}, which --key names, is no key: {error}", tls.key.display()))?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| error.to_string())?
        .with_client_cert_verifier(verifier)
        .with_single_cert(certificates(&tls.certificate, "--certificate")?, key)
        .map_err(|error| format!("--certificate and --key don't fit each other: {error}"))?;
    // Each connection shows a certificate that is valid when it is made.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

fn certificates(path: &Path, option: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(read) if !read.is_empty() => Ok(read),
        Ok(_) => Err(format!("{}, which {option} names, has no certificate", path.display())),
        Err(error) => Err(format!("{}, which {option} names, can't be read: {error}", path.display())),
    }
}
