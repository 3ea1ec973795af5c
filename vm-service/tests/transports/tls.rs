//! Who is refused over TLS, and when.

use std::io::{BufRead as _, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use vm_bridge::wire::preamble::Preamble;

use crate::certificates::{Authority, PROGRAM, SERVER};
use crate::place::{Place, Way};

#[test]
fn programs_without_the_right_certificates_are_refused_and_told_why() {
    let place = Place::new();
    let stranger = Authority::new(&place.path(""), "stranger");
    stranger.sign("strange", "", PROGRAM, false);
    place.authority.sign("expired", "", PROGRAM, true);
    let check = |what: &str, environment: &[(&str, &str)], host: &str, says: &str, logs: &str| {
        let before = place.log().len();
        let mut command = place.command(Way::Tls, "add", "");
        command.env("VM_BRIDGE", format!("tls:{host}:{}", place.tls().port()));
        for (name, file) in environment {
            let name = format!("VM_BRIDGE_{name}");
            match *file {
                "" => command.env_remove(name),
                file => command.env(name, place.path(file)),
            };
        }
        let output = command.output().expect("the program");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(says), "{what}: {said}");
        if !logs.is_empty() {
            place.until(what, || place.log()[before..].contains(logs));
        }
    };
    let wrong = [("CERTIFICATE", "strange.pem"), ("KEY", "strange.key")];
    check("another authority", &wrong, "localhost", "UnknownCA", "UnknownIssuer");
    let expired = [("CERTIFICATE", "expired.pem"), ("KEY", "expired.key")];
    check("expired", &expired, "localhost", "CertificateExpired", "certificate expired");
    check("the server's authority", &[("CA", "stranger.pem")], "localhost", "UnknownIssuer", "UnknownCA");
    check("another name", &[], "127.0.0.1", "not valid for name", "refused");
    check("no certificate", &[("CERTIFICATE", "")], "localhost", "VM_BRIDGE_CERTIFICATE names no file", "");
    check("no key", &[("KEY", "add")], "localhost", "which VM_BRIDGE_KEY names, is no key", "");
    check("another key", &[("KEY", "expired.key")], "localhost", "they must belong together", "");
    check("no authority", &[("CA", "server.key")], "localhost", "has no certificate", "");
    assert!(place.run(Way::Tls, "add", "").contains("wrong: 0"));
}

#[test]
fn a_server_whose_certificate_has_expired_is_refused_by_programs() {
    let place = Place::with(&["--deadline", "2s"], true);
    let output = place.command(Way::Tls, "add", "").output().expect("the program");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("certificate expired"), "{said}");
    place.until("the server is told", || place.log().contains("CertificateExpired"));
    // Those that need none are served.
    assert!(place.run(Way::Unix, "add", "").contains("wrong: 0"));
}

#[test]
fn what_makes_no_progress_is_ended_on_all_transports() {
    let place = Place::with(&["--deadline", "1s"], false);
    scope(|scope| {
        let runs = Way::BRIDGED.map(|way| {
            let place = &place;
            (way, scope.spawn(move || place.run(way, "deadline", "free")))
        });
        for (way, run) in runs {
            let said = run.join().expect("a program");
            assert!(said.starts_with("free: 702 702 CUDA_ERROR_LAUNCH_TIMEOUT\n"), "{way:?}: {said}");
        }
    });
    place.until("all workers have ended", || place.workers().is_empty());
    assert!(place.run(Way::Tls, "add", "").contains("wrong: 0"));
}

/// A server with another certificate, and its port. Dropping this kills the server.
struct Server(Child, u16);

impl Server {
    /// Serves with `NAME.pem` and `NAME.key` of a folder, and programs of its `authority`.
    fn start(folder: &Path, name: &str, authority: &Path) -> Self {
        let driver = std::env::current_exe().expect("the test's path").with_file_name("libvm_cuda_fake.so");
        let mut command = Command::new(env!("CARGO_BIN_EXE_vm-service"));
        command.args(["--log-dir", "", "bridge", "serve", "--tls", "127.0.0.1:0", "--driver"]).arg(&driver);
        for (option, file) in [("--certificate", "pem"), ("--key", "key"), ("--socket", "socket")] {
            command.arg(option).arg(folder.join(format!("{name}.{file}")));
        }
        command.arg("--clients").arg(authority).env("RUST_LOG", "info").stderr(Stdio::piped());
        let mut server = command.spawn().expect("vm-service");
        let mut lines = BufReader::new(server.stderr.take().expect("its log")).lines();
        let mut said = String::new();
        let port = loop {
            let line = lines.next().unwrap_or_else(|| panic!("it ended: {said}")).expect("its log");
            if let Some((_, address)) = line.split_once("over TLS address=") {
                break address.trim_end().parse::<SocketAddr>().expect("an address").port();
            }
            said += &format!("{line}\n");
        };
        std::thread::spawn(move || lines.count());
        Self(server, port)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.0.kill().expect("killed");
        self.0.wait().expect("ended");
    }
}

/// The commands of docs/bridge.md that make certificates, for a server of this machine.
fn recipe() -> String {
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/bridge.md");
    let document = std::fs::read_to_string(document).expect("docs/bridge.md");
    let blocks = document.split("```console\n").filter_map(|rest| rest.split("```").next());
    let block = blocks.into_iter().find(|block| block.contains("openssl req")).expect("the recipe");
    let lines = block.lines().map(|line| line.strip_prefix("$ ").unwrap_or(line));
    lines.collect::<Vec<_>>().join("\n").replace("gpu.example", "localhost")
}

/// Makes certificates by the documented recipe. Each side rejects the certificate of the other side.
#[test]
fn the_documented_certificates_serve_and_impersonate_nobody() {
    let place = Place::new();
    let made = Command::new("sh").args(["-ec", &recipe()]).current_dir(place.path("")).output().expect("sh");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let authority = place.path("ca.pem");
    let run = |server: &Server, name: &str| {
        let mut command = place.command(Way::Tls, "add", "");
        command.env("VM_BRIDGE", format!("tls:localhost:{}", server.1)).env("VM_BRIDGE_CA", &authority);
        command.env("VM_BRIDGE_CERTIFICATE", place.path(&format!("{name}.pem")));
        command.env("VM_BRIDGE_KEY", place.path(&format!("{name}.key")));
        let output = command.output().expect("the program");
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let server = Server::start(&place.path(""), "server", &authority);
    let (is_served, said) = run(&server, "program");
    assert!(is_served, "{said}");
    let (is_served, said) = run(&server, "server");
    assert!(!is_served, "the server's certificate is no program's: {said}");
    let impostor = Server::start(&place.path(""), "program", &authority);
    let (is_served, said) = run(&impostor, "program");
    assert!(!is_served, "a program's certificate is no server's: {said}");
}

#[test]
fn a_certificate_is_taken_for_its_purpose_alone() {
    let place = Place::new();
    place.authority.sign("swapped", "localhost", PROGRAM, false);
    let run = |name: &str, port: u16| {
        let mut command = place.command(Way::Tls, "add", "");
        command.env("VM_BRIDGE", format!("tls:localhost:{port}"));
        command.env("VM_BRIDGE_CERTIFICATE", place.path(&format!("{name}.pem")));
        command.env("VM_BRIDGE_KEY", place.path(&format!("{name}.key")));
        let output = command.output().expect("the program");
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let said = run("server", place.tls().port());
    assert!(said.contains("UnsupportedCertificate"), "{said}");
    place.until("the server says why", || place.log().contains("client authentication"));
    // It has the server's name.
    let impostor = Server::start(&place.path(""), "swapped", &place.authority.file());
    let said = run("program", impostor.1);
    assert!(said.contains("server authentication"), "{said}");
}

/// A client of TLS, with a certificate or without.
fn client(place: &Place) -> ClientConnection {
    let mut roots = RootCertStore::empty();
    let authority = CertificateDer::from_pem_file(place.authority.file()).expect("a certificate");
    roots.add(authority).expect("an authority");
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("TLS")
        .with_root_certificates(roots)
        .with_no_client_auth();
    ClientConnection::new(Arc::new(config), "localhost".try_into().expect("a name")).expect("a client")
}

/// A connection with a certificate.
pub(crate) struct Connection(StreamOwned<ClientConnection, TcpStream>);

impl Connection {
    /// Opens it as the program of a certificate, and sends its preamble.
    pub(crate) fn begin(place: &Place, name: &str, preamble: Preamble) -> std::io::Result<Self> {
        let mut roots = RootCertStore::empty();
        let authority = CertificateDer::from_pem_file(place.authority.file()).expect("a certificate");
        roots.add(authority).expect("an authority");
        let certificate =
            CertificateDer::from_pem_file(place.path(&format!("{name}.pem"))).expect("a certificate");
        let key = PrivateKeyDer::from_pem_file(place.path(&format!("{name}.key"))).expect("a key");
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("TLS")
            .with_root_certificates(roots)
            .with_client_auth_cert(vec![certificate], key)
            .expect("they fit");
        let client = ClientConnection::new(Arc::new(config), "localhost".try_into().expect("a name"));
        let stream = TcpStream::connect(place.tls())?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        let mut connection = Self(StreamOwned::new(client.expect("a client"), stream));
        connection.0.write_all(&preamble.to_bytes())?;
        Ok(connection)
    }

    /// The next bytes, if they come.
    pub(crate) fn bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.0.read_exact(&mut bytes).ok().map(|()| bytes)
    }

    pub(crate) fn word(&mut self) -> Option<u64> {
        self.bytes().map(u64::from_ne_bytes)
    }
}

/// Waits until the other side has closed a connection.
fn closed(mut stream: &TcpStream, what: &str) {
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    let mut said = Vec::new();
    match stream.read_to_end(&mut said) {
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        Err(error) => panic!("{what}: {error}"),
    }
}

#[test]
fn what_is_no_client_of_tls_is_closed_in_time_and_holds_nobody_up() {
    let place = Place::new();
    let connect = || TcpStream::connect(place.tls()).expect("connected");
    let mut hello = Vec::new();
    client(&place).write_tls(&mut hello).expect("a hello");
    let half = &hello[..hello.len() / 2];
    scope(|scope| {
        let mut checks = Vec::new();
        for (what, bytes) in [
            ("plain bytes", &b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"[..]),
            ("a preamble", b"vmbridge\x02\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"),
            ("nothing", b""),
            ("half a hello", half),
            ("a hello alone", &hello),
        ] {
            checks.push(scope.spawn(move || {
                let mut stream = connect();
                stream.write_all(bytes).expect("sent");
                closed(&stream, what);
            }));
        }
        // A byte now and then: all of them together have as long.
        checks.push(scope.spawn(|| {
            let mut stream = connect();
            let until = Instant::now() + Duration::from_secs(60);
            for byte in half.iter().cycle() {
                if stream.write_all(&[*byte]).is_err() {
                    return;
                }
                assert!(Instant::now() < until, "it is listened to for ever");
                sleep(Duration::from_millis(100));
            }
        }));
        // Programs are served meanwhile.
        assert!(place.run(Way::Tls, "add", "").contains("wrong: 0"));
        checks.into_iter().for_each(|check| check.join().expect("closed"));
    });
    let mut anonymous = StreamOwned::new(client(&place), connect());
    let error = anonymous.read_to_end(&mut Vec::new()).expect_err("refused");
    assert!(error.to_string().contains("CertificateRequired"), "{error}");
    place.until("the server says of each why", || place.log().matches("over TLS is refused").count() == 7);
}

#[test]
fn files_that_are_wrong_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let authority = Authority::new(folder.path(), "authority");
    let [certificate, key] = authority.sign("server", "localhost", SERVER, false);
    let [_, other] = authority.sign("other", "localhost", SERVER, false);
    let clients = authority.file();
    let nothing = folder.path().join("nothing");
    let driver = std::env::current_exe().expect("the test's path").with_file_name("libvm_cuda_fake.so");
    let fifo = folder.path().join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).expect("a FIFO");
    let check = |files: [&std::path::Path; 3], says: &str| {
        // A server that waits for a FIFO's writer is ended.
        let mut command = std::process::Command::new("timeout");
        command.args(["300", env!("CARGO_BIN_EXE_vm-service")]);
        command.args(["bridge", "serve", "--tls", "127.0.0.1:0", "--driver"]).arg(&driver);
        command.arg("--socket").arg(folder.path().join("socket"));
        for (option, file) in ["--certificate", "--key", "--clients"].iter().zip(files) {
            command.arg(option).arg(file);
        }
        let output = command.output().expect("vm-service");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(says), "{said}");
    };
    check([&nothing, &key, &clients], "nothing, which --certificate names: ");
    check([&key, &key, &clients], "server.key, which --certificate names, has no certificate");
    check([&certificate, &certificate, &clients], "server.pem, which --key names, is no key");
    check([&certificate, &other, &clients], "--certificate and --key don't fit each other");
    check([&certificate, &key, &nothing], "nothing, which --clients names: ");
    check([&fifo, &key, &clients], "fifo, which --certificate names: not a regular file");
    check([&certificate, &fifo, &clients], "fifo, which --key names: not a regular file");
    check([&certificate, &key, &fifo], "fifo, which --clients names: not a regular file");
}
