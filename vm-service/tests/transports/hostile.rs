//! What no program says to the gateway.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use vm_bridge::orders;
use vm_bridge::wire::preamble::{Preamble, TOKEN, Token};
use vm_bridge::wire::{VERSION, code, control};

use crate::certificates::PROGRAM;
use crate::place::{Place, Way};
use crate::raw::{begin, begin_with, connect, open, rest, take, word};
use crate::tls::Connection;

#[test]
fn connections_that_say_nothing_known_are_closed() {
    let place = Place::new();
    let (session, token) = begin_with(&place, &place.window());
    let with = |preamble: Preamble, at: usize, byte: u8| {
        let mut bytes = preamble.to_bytes();
        bytes[at] ^= byte;
        bytes
    };
    let lane = Preamble::Lane(token);
    std::thread::scope(|scope| {
        for (what, bytes) in [
            ("nothing", &[][..]),
            ("half a preamble", &lane.to_bytes()[..31]),
            ("no preamble", &[0xff; 4096]),
            ("another protocol", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
            ("another version", &with(lane, 8, 1)),
            ("another kind", &with(lane, 12, 8)),
            ("a ring that does not say where", &Preamble::Ring(token).to_bytes()),
            ("a ring that is not the session's", &[&Preamble::Ring(token).to_bytes()[..], &[0; 16]].concat()),
            ("a session with a token", &with(Preamble::Session, 31, 1)),
            ("another token", &with(lane, 31, 1)),
            ("another token for callbacks", &with(Preamble::Callbacks(token), 16, 0x80)),
            ("no token", &Preamble::Lane([0; TOKEN]).to_bytes()),
        ] {
            let (bytes, place) = (bytes.to_vec(), &place);
            scope.spawn(move || {
                let mut stream = connect(place);
                stream.write_all(&bytes).expect("sent");
                assert_eq!(rest(&stream, what), [], "{what}");
            });
        }
    });
    // The session was none of theirs.
    let mut theirs = connect(&place);
    theirs.write_all(&lane.to_bytes()).expect("sent");
    assert_eq!(word(&theirs), 0);
    assert!(take(&session, 4096, false).is_ok());
    drop(session);
    assert_eq!(rest(&theirs, "its lane ends with a session"), []);
    place.until("its worker ends", || place.workers().is_empty());
}

#[test]
fn orders_that_are_none_end_their_session() {
    let place = Place::new();
    let window = place.window();
    const AT: u64 = 0x2000_0000_0000;
    let check = |what: &str, order: orders::Order| {
        let (stream, token) = begin_with(&place, &window);
        let (offset, _mark) = take(&stream, 8192, false).expect("a part");
        assert_eq!(offset, 0, "{what}: what the one before had is free");
        let bytes: Vec<u8> = order.iter().flat_map(|word| word.to_ne_bytes()).collect();
        { &stream }.write_all(&bytes).expect("sent");
        assert_eq!(rest(&stream, what), [], "{what}");
        let mut late = connect(&place);
        late.write_all(&Preamble::Lane(token).to_bytes()).expect("sent");
        let said = rest(&late, what);
        assert!(said.is_empty() || said[..8] != [0; 8], "{what}: {said:?}");
        place.until(what, || place.workers().is_empty());
    };
    check("no order", [99, 0, 0, 0]);
    check("anything", [u64::MAX; 4]);
    check("a lane without its connection", [control::LANE, 0, 0, 0]);
    check("a ring without its file", [control::RING, 0, 0, 0]);
    check("callbacks without their connection", [control::CALLBACKS, 0, 0, 0]);
    check("a variable that is too long", [control::VARIABLE, 0, u64::MAX, 0]);
    check("a variable that there is not", [control::VARIABLE, 99, 0, 0]);
    check("a window that it has not", [control::WINDOW, AT, 4096, 8192]);
    check("a window beyond its own", [control::WINDOW, AT, 12288, 0]);
    check("a window around the end", [control::WINDOW, AT, u64::MAX - 4095, 4096]);
    check("a window of nothing", [control::WINDOW, AT, 0, 0]);
    // What is an order and can't be is answered, and the session goes on.
    let (stream, token) = begin_with(&place, &window);
    let answer = |order| orders::give(&stream, order, &[], &[]).expect("an answer") as u32;
    assert_eq!(answer([control::HELLO, 99, 0, 0]), code::NOT_SUPPORTED);
    assert_eq!(answer([control::TAKE, 65 << 20, 0, 0]), code::OUT_OF_MEMORY);
    assert_eq!(answer([control::TAKE, u64::MAX, 0, 0]), code::OUT_OF_MEMORY);
    assert_eq!(answer([control::GIVE, 0, 0, 0]), code::INVALID_VALUE);
    assert_eq!(answer([control::TAKE, 8192, 0, 0]), 0);
    let (offset, _mark) = (word(&stream), word(&stream));
    for (at, len) in
        [(AT - 4096, 4096), (AT + 1, 4096), (AT, 100), (0x2400_0000_0000, 4096), (u64::MAX, 4096)]
    {
        assert_eq!(answer([control::WINDOW, at, len, offset]), code::INVALID_VALUE, "{at:#x} {len}");
    }
    assert_eq!(answer([control::WINDOW, AT, 8192, offset]), 0);
    assert_eq!(answer([control::WINDOW, AT + 4096, 4096, offset]), code::OUT_OF_MEMORY);
    assert_eq!(answer([control::HELLO, VERSION.into(), 0, 0]), 0);
    // What is no lane by its size is answered, too.
    let mut ring = connect(&place);
    let words = [offset, 8192].map(u64::to_ne_bytes);
    ring.write_all(&[&Preamble::Ring(token).to_bytes(), words.as_flattened()].concat()).expect("sent");
    assert_eq!(word(&ring) as u32, code::INVALID_VALUE);
}

#[test]
fn a_lane_in_the_window_that_says_nonsense_ends_its_session() {
    let place = Place::new();
    let window = place.window();
    let check = |head: u64, bytes: &[u8]| {
        let (stream, token) = begin_with(&place, &window);
        let len = vm_bridge::ring::SIZES[1];
        let (offset, mark) = take(&stream, len, true).expect("a part");
        let mut found = [0; 8];
        window.read_exact_at(&mut found, offset).expect("the window");
        assert_eq!(u64::from_ne_bytes(found), mark);
        window.write_all_at(&[0; 4096], offset).expect("the window");
        window.write_all_at(bytes, offset + 4096).expect("the window");
        window.write_all_at(&head.to_ne_bytes(), offset).expect("the window");
        let mut lane = connect(&place);
        let words = [offset, len].map(u64::to_ne_bytes);
        lane.write_all(&[&Preamble::Ring(token).to_bytes(), words.as_flattened()].concat()).expect("sent");
        rest(&stream, "the session");
        rest(&lane, "the lane");
        place.until("its worker ends", || place.workers().is_empty());
    };
    check(u64::MAX, &[0; 16]);
    check(8, &[0; 16]);
    check(16, &[0xff; 16]);
    check(1 << 20, &[0xa5; 4096]);
}

#[test]
fn silent_connections_lock_nobody_out() {
    let place = Place::new();
    let (_session, token) = begin(&place);
    // More than wait at a time, each way: the oldest are closed.
    let connect = |name: &str| UnixStream::connect(place.path(name)).expect("connected");
    let silent: Vec<_> = ["stream", "socket"].into_iter().cycle().take(200).map(connect).collect();
    let without_certificate: Vec<_> =
        (0..300).map(|_| TcpStream::connect(place.tls()).expect("connected")).collect();
    for way in Way::BRIDGED {
        let said = place.run(way, "add", "");
        assert!(said.contains("wrong: 0"), "{way:?}: {said}");
    }
    // A program that runs gets further lanes.
    let (_lane, answer) = open(&place, Preamble::Lane(token), &[]);
    assert_eq!(answer, 0);
    let threads = counts(&place)[1];
    assert!(threads < 450, "{threads} threads");
    // Those that were not closed yet have no longer than they may.
    silent.iter().for_each(|stream| {
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
        assert_eq!(rest(stream, "silence"), []);
    });
    drop(without_certificate);
}

#[test]
fn connections_that_a_worker_does_not_take_count_for_their_session_alone() {
    let place = Place::new();
    let (session, token) = begin(&place);
    // Rings that never say where they are.
    let rings: Vec<_> = (0..100)
        .map(|_| {
            let mut ring = connect(&place);
            ring.write_all(&Preamble::Ring(token).to_bytes()).expect("sent");
            ring
        })
        .collect();
    let is_closed = |stream: &UnixStream| {
        stream.set_nonblocking(true).expect("a socket");
        matches!({ stream }.read(&mut [0]), Ok(0))
    };
    place.until("all but a few are closed", || rings.iter().filter(|ring| is_closed(ring)).count() >= 92);
    assert!(place.run(Way::Stream, "add", "").contains("wrong: 0"));
    drop(session);
}

#[test]
fn one_certificate_cannot_use_up_the_servers_descriptors() {
    let place = Place::limited(640);
    place.until("the log has the number of programs", || {
        place.log().contains("at most 13 programs can be served")
    });
    let mut session = Connection::begin(&place, "program", Preamble::Session).expect("connected");
    assert_eq!(session.word(), Some(0));
    let token: Token = session.bytes().expect("a token");
    let mut held = Vec::new();
    let refused = loop {
        assert!(held.len() < 300, "it may have as many as it likes");
        let mut lane = Connection::begin(&place, "program", Preamble::Lane(token)).expect("connected");
        match lane.word() {
            Some(0) => held.push(lane),
            other => break other,
        }
    };
    assert!(held.len() > 20, "{}", held.len());
    assert_eq!(refused, Some(code::NO_DEVICE.into()), "the server answers that its limit is reached");
    place.until("the log says why", || {
        place.log().contains("its certificate has as many connections as it may")
    });
    // It has no room for another session either; others have.
    let said = place.run(Way::Tls, "add", "");
    assert!(said.contains("its limit is reached"), "{said}");
    for way in [Way::Unix, Way::Stream, Way::Window] {
        let said = place.run(way, "add", "");
        assert!(said.contains("wrong: 0"), "{way:?}: {said}");
        place.until("its worker ends", || place.workers().len() == 1);
    }
    place.authority.sign("other", "", PROGRAM, false);
    let mut other = place.command(Way::Tls, "add", "");
    other.env("VM_BRIDGE_CERTIFICATE", place.path("other.pem")).env("VM_BRIDGE_KEY", place.path("other.key"));
    let said = other.output().expect("the program");
    assert!(String::from_utf8_lossy(&said.stdout).contains("wrong: 0"), "{said:?}");
    let has = std::fs::read_dir(format!("/proc/{}/fd", place.server())).expect("descriptors").count();
    assert!(has < 640 && !place.log().contains("Too many open files"), "{has}: {}", place.log());
    drop(held);
    place.until("it has room again", || place.run(Way::Tls, "add", "").contains("wrong: 0"));
}

#[test]
fn one_user_cannot_have_all_programs() {
    let place = Place::limited(640);
    let mut sessions = Vec::new();
    let refused = loop {
        assert!(sessions.len() <= 24, "it may have as many as it likes");
        let mut stream = connect(&place);
        stream.write_all(&Preamble::Session.to_bytes()).expect("sent");
        match word(&stream) {
            0 => sessions.push(stream),
            code => break code,
        }
    };
    // Of 640 descriptors peers have 192, which are enough for 13 programs over TLS.
    assert_eq!((sessions.len(), refused), (11, code::NO_DEVICE.into()));
    // By the other socket it is the same user.
    let said = place.run(Way::Unix, "add", "");
    assert!(said.contains("its limit is reached"), "{said}");
    assert!(place.run(Way::Tls, "add", "").contains("wrong: 0"), "a certificate is another");
    drop(sessions);
    place.until("it has room again", || place.run(Way::Unix, "add", "").contains("wrong: 0"));
}

#[test]
fn a_server_that_may_open_too_few_files_says_what_it_needs() {
    let folder = tempfile::tempdir().expect("a folder");
    let driver = std::env::current_exe().expect("the test's path").with_file_name("libvm_cuda_fake.so");
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "ulimit -n 400; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_vm-service")]);
    command.args(["bridge", "serve", "--driver"]).arg(&driver);
    let output = command.arg("--socket").arg(folder.path().join("socket")).output().expect("vm-service");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("may open 400 files"), "{said}");
    assert!(said.contains("LimitNOFILE=464"), "{said}");
}

/// Descriptors, threads and children of the server.
fn counts(place: &Place) -> [usize; 3] {
    let entries = |name: &str| {
        std::fs::read_dir(format!("/proc/{}/{name}", place.server())).expect("the server").count()
    };
    [entries("fd"), entries("task"), place.workers().len()]
}

#[test]
fn a_hundred_sessions_leave_nothing() {
    let place = Place::new();
    let window = place.window();
    // Once, for what stays: it may take a thread's or an allocator's time to settle.
    drop(begin(&place));
    place.until("the first has ended", || place.workers().is_empty());
    let settled = || {
        let mut before = counts(&place);
        place.until("it settles", || {
            std::thread::sleep(Duration::from_millis(50));
            let now = counts(&place);
            std::mem::replace(&mut before, now) == now
        });
        before
    };
    let before = settled();
    for round in 0..10 {
        let sessions: Vec<_> = (0..10)
            .map(|at| {
                let (stream, token) = begin_with(&place, &window);
                let mut lanes = Vec::new();
                for preamble in [Preamble::Lane(token), Preamble::Callbacks(token), Preamble::Lane(token)] {
                    let mut lane = connect(&place);
                    lane.write_all(&preamble.to_bytes()).expect("sent");
                    assert_eq!(word(&lane), 0);
                    lanes.push(lane);
                }
                assert!(take(&stream, 4096 * (at + 1), false).is_ok());
                (stream, lanes)
            })
            .collect();
        assert_eq!(place.workers().len(), 10);
        for (at, (stream, lanes)) in sessions.into_iter().enumerate() {
            // Either the session's connection goes first or its lanes do.
            if (at + round) % 2 == 0 {
                drop(stream);
                lanes.iter().for_each(|lane| assert_eq!(rest(lane, "a lane"), []));
            } else {
                drop(lanes);
                drop(stream);
            }
        }
        place.until("the workers end", || place.workers().is_empty());
    }
    place.until("all is as it was", || counts(&place) == before);
}
