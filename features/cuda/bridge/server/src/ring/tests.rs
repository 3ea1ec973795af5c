//! Lanes between two threads: in a file of their own, and in a part of a window.

use std::io::Read;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use super::*;

fn pair() -> (Near, Far) {
    let (near, file) = Near::make().unwrap();
    (near, Far::open(&file).unwrap())
}

/// A lane of a size in the second part of a window, where another was before.
fn pair_in_window(len: u64) -> (Near, Far) {
    const MARK: u64 = 7;
    let file = memfd_create("window", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, 2 * len).unwrap();
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    let window = std::fs::File::from(file);
    window.write_all_at(&vec![0xff; len as usize], len).unwrap();
    assert!(Near::within(&window, len, len, MARK).unwrap().is_none());
    window.write_all_at(&MARK.to_ne_bytes(), len).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut near = Near::within(&window, len, len, MARK).unwrap().unwrap();
    near.wake_by(ours);
    let window = OwnedFd::from(window);
    for (offset, other) in
        [(len + 1, len), (len + 4096, len), (len, len - 4096), (u64::MAX, len), (0, 2 * len)]
    {
        let stream = theirs.try_clone().unwrap();
        assert!(Far::within(&window, offset, other, stream).is_err(), "{offset} {other}");
    }
    (near, Far::within(&window, len, len, theirs).unwrap())
}

fn pairs() -> [(Near, Far); 3] {
    [pair(), pair_in_window(SIZES[0]), pair_in_window(SIZES[1])]
}

#[test]
fn requests_come_in_order_around_the_ring() {
    pairs().into_iter().for_each(check_order);
}

fn check_order((mut near, mut far): (Near, Far)) {
    const COUNT: u64 = 3000;
    let server = std::thread::spawn(move || {
        let mut payload = Vec::new();
        for ticket in 0..COUNT {
            let taken = far.take(&mut payload, || false).unwrap().unwrap();
            assert_eq!(taken.header.ticket, ticket);
            assert!(payload.iter().all(|byte| *byte == ticket as u8));
            if taken.header.asks {
                far.answer(7, &payload);
            }
        }
        assert!(far.take(&mut payload, || false).unwrap().is_none());
    });
    let mut reply = Vec::new();
    for ticket in 0..COUNT {
        let payload = vec![ticket as u8; (ticket as usize * 37) % 30_000];
        let asks = ticket % 5 == 0;
        let header = Header { len: payload.len() as u32, ticket, asks, ..Header::default() };
        near.send(header, [&payload, &[]], || false).unwrap();
        if asks {
            assert_eq!(near.receive(&mut reply, None, || false).unwrap(), 7);
            assert_eq!(reply, payload);
        }
    }
    drop(near);
    server.join().unwrap();
}

#[test]
fn large_answers_come_whole_wherever_they_go() {
    let (mut near, mut far) = pair();
    let payload: Vec<u8> = (0..PAYLOAD - 4000).map(|at| (at * 7 + at / 253) as u8).collect();
    let mut room = vec![0; PAYLOAD + 64];
    for (from, whole) in [0, 1, 17, 63].into_iter().flat_map(|from| [(from, 0), (from, usize::MAX)]) {
        room.fill(0);
        near.send(Header { asks: true, ..Header::default() }, [&[], &[]], || false).unwrap();
        far.answer(0, &payload);
        let to = &mut room[from..from + payload.len()];
        assert_eq!(near.receive_in(to, whole, None, || false).unwrap(), 0);
        assert!(*to == payload[..], "{from} {whole}");
        assert!(
            room[..from].iter().chain(&room[from + payload.len()..]).all(|byte| *byte == 0),
            "{from} {whole}"
        );
    }
}

#[test]
fn who_waits_for_nobody_is_told() {
    pairs().into_iter().for_each(check_end);
}

fn check_end((mut near, far): (Near, Far)) {
    drop(far);
    near.send(Header { asks: true, ..Header::default() }, [&[], &[]], || true).unwrap();
    let error = near.receive(&mut Vec::new(), None, || true).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    let part = vec![0; 1 << 20];
    let header = Header { len: 1 << 20, ..Header::default() };
    let error = (0..20).find_map(|_| near.send(header, [&part, &[]], || true).err()).unwrap();
    assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
}

#[test]
fn who_sleeps_in_a_window_is_woken_by_the_stream_and_sees_its_end() {
    let (mut near, mut far) = pair_in_window(SIZES[1]);
    let server = std::thread::spawn(move || {
        let mut taken = 0;
        while far.take(&mut Vec::new(), || false).unwrap().is_some() {
            // The program sleeps by then.
            std::thread::sleep(Duration::from_millis(20));
            far.answer(taken, &[]);
            taken += 1;
        }
        taken
    });
    for expect in 0..5 {
        // The server sleeps by then.
        std::thread::sleep(Duration::from_millis(20));
        near.send(Header { asks: true, ..Header::default() }, [&[], &[]], || false).unwrap();
        assert_eq!(near.receive(&mut Vec::new(), None, || false).unwrap(), expect);
    }
    let mut stream = near.close().expect("a stream");
    drop(near);
    assert_eq!(server.join().unwrap(), 5);
    // What is left are bytes that were to wake this side.
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.read_to_end(&mut Vec::new()).expect("the end");
}

#[test]
fn a_program_that_is_gone_ends_its_lane_in_a_window() {
    let (near, mut far) = pair_in_window(SIZES[1]);
    let server = std::thread::spawn(move || far.take(&mut Vec::new(), || false).unwrap().is_none());
    // As a process's end does: nothing is said.
    let mut near = std::mem::ManuallyDrop::new(near);
    drop(std::mem::replace(&mut near.memory.wake, Wake::Futex));
    assert!(server.join().unwrap());
}

#[test]
fn what_is_no_request_is_refused() {
    let check = |head: u64, bytes: &[u8]| {
        let (near, mut far) = pair();
        near.memory.write(HEADS, bytes);
        near.memory.long(HEAD).store(head, Ordering::SeqCst);
        assert_eq!(far.take(&mut Vec::new(), || false).err(), Some(Malformed), "{head} {bytes:?}");
    };
    check(u64::MAX, &[0; 16]);
    check(8, &[0; 16]);
    check(16, &[0xff; 16]);
    check(16, &Header { len: 100, ..Header::default() }.to_bytes());
    check(1 << 22, &Header { len: PAYLOAD as u32 + 1, ..Header::default() }.to_bytes());
}
