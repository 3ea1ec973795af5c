//! Lanes, checked with loom: the two sides in every order, up to a bound on preemptions.
//!
//! `RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test -p vm-bridge --profile loom --lib interleavings`

use loom::thread;

use super::*;

fn check(ring: usize, f: impl Fn(Near, Far) + Send + Sync + Copy + 'static) {
    for by_bytes in [false, true] {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(2);
        builder.check(move || {
            let [near, far] = Memory::pair(ring, by_bytes);
            f(Near::over(near), Far::over(far));
        });
    }
}

fn header(ticket: u64, asks: bool) -> Header {
    Header { ticket, asks, ..Header::default() }
}

#[test]
fn interleavings_of_answers() {
    check(4 * Header::SIZE, |mut near, mut far| {
        let server = thread::spawn(move || {
            let mut payload = Vec::new();
            while let Some(taken) = far.take(&mut payload, || false).unwrap() {
                far.answer(taken.header.ticket as u32, &payload);
            }
        });
        let mut reply = Vec::new();
        for ticket in 1..=3 {
            let header = Header { len: 8, ..header(ticket, true) };
            near.send(header, [&[ticket as u8; 8], &[]], || false).unwrap();
            assert_eq!(near.receive(&mut reply, None, || false).unwrap(), ticket as u32);
            assert_eq!(reply, [ticket as u8; 8]);
        }
        drop(near);
        server.join().unwrap();
    });
}

#[test]
fn interleavings_of_a_full_ring() {
    check(3 * Header::SIZE, |mut near, mut far| {
        let server = thread::spawn(move || {
            let mut payload = Vec::new();
            for ticket in 0..5 {
                assert_eq!(far.take(&mut payload, || false).unwrap().unwrap().header.ticket, ticket);
            }
            assert!(far.take(&mut payload, || false).unwrap().is_none());
        });
        for ticket in 0..5 {
            near.send(header(ticket, false), [&[], &[]], || false).unwrap();
        }
        drop(near);
        server.join().unwrap();
    });
}
