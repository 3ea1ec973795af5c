//! Programs of other machines: TLS 1.3, in which each side shows a certificate. It ends in this process: what a worker has of a connection is a
//! socket that its bytes are pumped through.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig, ServerConnection};
use vm_bridge::wire::code;

use super::BridgeError;
use super::capacity::{Amount, Capacity, Peer};
use super::gateway::Gateway;
use super::waiting::{Entered, Waiting};

/// How long a program may take to show its certificate.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long the last bytes may take when the other side has ended.
const LAST: Duration = Duration::from_secs(10);
/// The most connections of which no certificate is known yet.
pub(super) const HANDSHAKES: usize = 256;
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
pub(super) fn listen(tls: &Tls, gateway: Gateway, capacity: Capacity) -> Result<SocketAddr, BridgeError> {
    let config = Arc::new(config(tls).map_err(BridgeError::Tls)?);
    let failed = |source| BridgeError::Address { address: tls.address, source };
    let listener = TcpListener::bind(tls.address).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let server = Server { config, gateway, capacity, waiting: Waiting::new(HANDSHAKES) };
    let accept = move || {
        loop {
            match listener.accept() {
                Ok((stream, peer)) => server.accept(stream, peer),
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

/// What connections have in common.
#[derive(Clone)]
struct Server {
    config: Arc<ServerConfig>,
    gateway: Gateway,
    capacity: Capacity,
    waiting: Waiting,
}

impl Server {
    /// Serves a connection on a thread. Waits while too many connections have shown no certificate yet.
    fn accept(&self, stream: TcpStream, address: SocketAddr) {
        let stream = Arc::new(stream);
        let entered = self.waiting.enter(stream.clone(), Peer::of_address(address.ip()));
        let this = self.clone();
        let serve = move || match this.serve(entered, &stream) {
            Ok(pumped) => tracing::debug!(%address, ?pumped, "a connection over TLS has ended"),
            Err(error) => tracing::warn!(%address, %error, "a connection over TLS is refused"),
        };
        if let Err(error) = std::thread::Builder::new().name("tls-program".into()).spawn(serve) {
            tracing::error!(%error, "a CUDA program can't be served: no thread can be started");
        }
    }

    /// Returns how the connection has ended, if it was not refused.
    fn serve(&self, mut entered: Entered, stream: &TcpStream) -> io::Result<io::Result<()>> {
        let mut connection = shake_hands(stream, self.config.clone())?;
        // The peer's address counts as known as long as the connection lasts.
        entered.know();
        let certificate = connection.peer_certificates().and_then(|certificates| certificates.first());
        let peer = peer(certificate.ok_or(io::ErrorKind::PermissionDenied)?)?;
        let Some(_reserved) = self.capacity.reserve(&peer, Amount::TLS) else {
            if let Err(error) = refuse(&mut connection, stream) {
                tracing::debug!(%error, "a program does not read why it is refused");
            }
            return Err(io::Error::other(
                "its certificate has as many connections as it may, or the server has",
            ));
        };
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        self.gateway.accept(theirs.into(), peer);
        Ok(pump(&mut connection, stream, &ours))
    }
}

/// Returns who shows a certificate.
fn peer(certificate: &CertificateDer<'_>) -> io::Result<Peer> {
    let certificate = ParsedCertificate::try_from(certificate).map_err(io::Error::other)?;
    Ok(Peer::Key(certificate.subject_public_key_info().as_ref().into()))
}

/// Answers a program's first request with an error, and closes the connection.
fn refuse(connection: &mut ServerConnection, mut stream: &TcpStream) -> io::Result<()> {
    connection.writer().write_all(&u64::from(code::NO_DEVICE).to_ne_bytes())?;
    connection.send_close_notify();
    let until = Instant::now() + LAST;
    while connection.wants_write() {
        ready(&mut [PollFd::new(&stream, PollFlags::OUT)], Some(until))?;
        connection.write_tls(&mut stream)?;
    }
    // Closing a socket with unread bytes resets the connection, and the program would lose the answer.
    stream.shutdown(Shutdown::Write)?;
    while drain(stream, until)? {}
    Ok(())
}

/// Reads and drops bytes. Returns whether more may come.
fn drain(mut stream: &TcpStream, until: Instant) -> io::Result<bool> {
    ready(&mut [PollFd::new(&stream, PollFlags::IN)], Some(until))?;
    Ok(stream.read(&mut [0; 4096])? > 0)
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
    let key = PrivateKeyDer::from_pem_slice(&read(&tls.key, "--key")?)
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
    let pem = read(path, option)?;
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    match read {
        Ok(read) if !read.is_empty() => Ok(read),
        Ok(_) => Err(format!("{}, which {option} names, has no certificate", path.display())),
        Err(error) => {
            Err(format!("{}, which {option} names, has a wrong certificate: {error}", path.display()))
        }
    }
}

fn read(path: &Path, option: &str) -> Result<Vec<u8>, String> {
    /// The most bytes of a file with certificates or a key.
    const MOST: u64 = 4 << 20;
    vm_files::regular::read(path, MOST)
        .map_err(|error| format!("cannot read {}, which {option} names: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    #[test]
    fn certificates_of_one_key_are_one_peer() {
        let keys = [(); 2].map(|()| KeyPair::generate().expect("a key"));
        let of = |key: &KeyPair, name: &str| {
            let parameters = CertificateParams::new([name.to_owned()]).expect("parameters");
            peer(parameters.self_signed(key).expect("a certificate").der()).expect("a key")
        };
        assert_eq!(of(&keys[0], "one"), of(&keys[0], "two"));
        assert_ne!(of(&keys[0], "one"), of(&keys[1], "one"));
        assert!(peer(&CertificateDer::from_slice(&[0x30, 0x00])).is_err());
    }
}
