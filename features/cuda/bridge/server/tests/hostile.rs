//! What no program sends: frames of random words, and frames that were right and are changed. A session answers each or ends, and nothing breaks.

use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use vm_bridge::calls::{MODES, Mode};
use vm_bridge::orders;
use vm_bridge::ring::Taken;
use vm_bridge::server::{Driver, Exports, Lane, Pot, SLOT, Session, serve};
use vm_bridge::wire::{Header, VERSION, code, control, own, put};
use vm_cuda_api::{FUNCTIONS, number};

/// Keeps the driver's library built.
use vm_cuda_fake as _;

/// How many frames: all, or with a number in `SWEEP_SEED` a part that begins at another place.
const FRAMES: u64 = 1_000_000;
const PART: u64 = 100_000;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// A word as it may be: small, a handle, near an end, or anything.
    fn word(&mut self) -> u64 {
        match self.below(8) {
            0 | 1 => self.below(4),
            2 | 3 => 0x1000 + 16 * self.below(64),
            4 => u64::MAX - self.below(4),
            5 => 1 << self.below(64),
            6 => self.below(1 << 20),
            _ => self.next(),
        }
    }
}

/// What a session may have where it has a quota.
const QUOTA: u64 = 256 << 20;

fn driver() -> Arc<Driver> {
    let path: PathBuf =
        std::env::current_exe().expect("the test's path").with_file_name("libvm_cuda_fake.so");
    let driver = Driver::open(&path).expect("the driver");
    assert_eq!(driver.start(), 0);
    Arc::new(driver)
}

fn session() -> Arc<Session> {
    Arc::new(Session::new(driver()))
}

/// A session with a quota that shares with others, and the file that has what it holds.
fn session_of(bytes: u64) -> (Arc<Session>, OwnedFd) {
    let file = memfd_create("pot", MemfdFlags::ALLOW_SEALING).expect("a file");
    ftruncate(&file, SLOT).expect("its length");
    fcntl_add_seals(&file, SealFlags::SHRINK).expect("sealed");
    let pot = Pot::open(&file, 0, bytes).expect("a pot");
    let deadline = Some(Duration::from_secs(3600));
    let (near, far) = UnixStream::pair().expect("a connection");
    std::thread::spawn(move || Exports::default().serve(&far));
    (Arc::new(Session::with_limits(driver(), Some(pot), deadline, None).share_by(near)), file)
}

/// Gives an order, with a file where one goes along; what was answered, if anything.
fn order(connection: &UnixStream, words: orders::Order, file: Option<&UnixStream>) -> Option<u64> {
    let files: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
    orders::give(connection, words, &[], &files).ok()
}

#[test]
fn what_is_no_order_or_no_frame_ends_the_connection() {
    let check = |act: &dyn Fn(&UnixStream)| {
        let (near, far) = UnixStream::pair().expect("a connection");
        let session = session();
        let server = std::thread::spawn(move || serve(&far, &session).is_err());
        assert_eq!(order(&near, [control::HELLO, VERSION.into(), 0, 0], None), Some(0));
        act(&near);
        near.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
        assert_eq!({ &near }.read(&mut [0; 8]).expect("the end"), 0);
        server.join().expect("the server")
    };
    let says_nonsense = check(&|near| {
        assert_eq!(order(near, [99, 0, 0, 0], None), None);
    });
    assert!(says_nonsense);
    check(&|near| {
        let (ours, theirs) = UnixStream::pair().expect("a lane");
        assert_eq!(order(near, [control::LANE, 0, 0, 0], Some(&theirs)), Some(0));
        { &ours }.write_all(&[0xff; Header::SIZE]).expect("a frame");
    });
    check(&|near| {
        // A ticket that another call has had.
        let (ours, theirs) = UnixStream::pair().expect("a lane");
        assert_eq!(order(near, [control::LANE, 0, 0, 0], Some(&theirs)), Some(0));
        let init = number("cuInit").expect("a function") as u16;
        let frame = Header { len: 8, call: init, ticket: 0, ..Header::default() }.to_bytes();
        for _ in 0..2 {
            { &ours }.write_all(&[&frame[..], &[0; 8]].concat()).expect("a frame");
        }
    });
}

#[test]
fn a_lane_whose_file_was_dropped_is_refused_and_the_session_goes_on() {
    let (near, far) = UnixStream::pair().expect("a connection");
    let session = session();
    let server = std::thread::spawn(move || serve(&far, &session));
    for kind in [control::LANE, control::RING, control::CALLBACKS, control::WINDOW] {
        assert_eq!(order(&near, [kind, 0, 0, 0], None), Some(code::OUT_OF_MEMORY.into()));
    }
    let (_ours, theirs) = UnixStream::pair().expect("a lane");
    assert_eq!(order(&near, [control::LANE, 0, 0, 0], Some(&theirs)), Some(0));
    drop(near);
    server.join().expect("the server").expect("a session");
}

/// Calls that may take as long as the device does, or that the fake driver, which has no memory protection of its own, takes at their word.
fn is_left_out(name: &str) -> bool {
    name.contains("WaitValue")
        || name.contains("BatchMemOp")
        || name.contains("HostFunc")
        || name.contains("AddCallback")
}

#[test]
fn random_frames_break_nothing() {
    let seed =
        std::env::var("SWEEP_SEED").ok().map(|seed| seed.parse::<u64>().expect("SWEEP_SEED is a number"));
    let frames = if seed.is_some() { PART } else { FRAMES };
    let (session, file) = session_of(QUOTA);
    let mut lane = Lane::new(session.clone());
    // Zero is the one state that stays.
    let mut random = Random((0x9e37_79b9_7f4a_7c15 ^ seed.unwrap_or(0)).max(1));
    let crossing: Vec<usize> = (0..FUNCTIONS.len())
        .filter(|at| MODES[*at] != Mode::Unsupported && !is_left_out(&FUNCTIONS[*at].name))
        .collect();
    let retain = number("cuDevicePrimaryCtxRetain").expect("a function");
    let set = number("cuCtxSetCurrent").expect("a function");
    let (mut ticket, mut reply, mut payload) = (0, Vec::new(), Vec::new());
    let mut ended = 0u64;
    let mut succeeded = 0u64;
    for frame in 0..frames {
        payload.clear();
        let call = match random.below(64) {
            0 => own::LAYOUT + random.below(4) as u16,
            1 => random.next() as u16,
            _ => crossing[random.below(crossing.len() as u64) as usize] as u16,
        };
        let words = random.below(24);
        (0..words).for_each(|_| put(&mut payload, random.word()));
        payload.truncate(payload.len().saturating_sub(random.below(9) as usize));
        // A context now and then, or all that follows would fail for want of one.
        let (call, asks) = match frame % 500 {
            0 => {
                payload.clear();
                [1, 0].iter().for_each(|word| put(&mut payload, *word));
                (retain as u16, true)
            }
            1 => {
                payload.clear();
                put(&mut payload, 0x1000);
                (set as u16, true)
            }
            _ => (call, random.below(4) > 0),
        };
        let is_bulk = random.below(16) == 0;
        let header = Header { len: payload.len() as u32, call, asks, is_bulk, ticket };
        match lane.serve(Taken { header, bulk: None }, &payload, &mut reply) {
            Ok(Some(0)) => succeeded += 1,
            Ok(_) => {}
            Err(_) => {
                // The lane would end its session; this one goes on with the next lane.
                ended += 1;
                lane = Lane::new(session.clone());
            }
        }
        ticket += 1;
        let mut held = [0; 8];
        rustix::io::pread(&file, &mut held, 0).expect("what is held");
        assert!(u64::from_ne_bytes(held) <= QUOTA, "frame {frame}, seed {seed:?}");
    }
    assert!(ended > frames / 100 && succeeded > frames / 100, "{ended} ended, {succeeded} succeeded");
}
