use std::io::{Read as _, Seek as _};

use super::{Answer, BadRecording, Call, MAGIC, Part, Recorder, Recording, number};
use crate::wire::{Header, control, own};

fn all(bytes: &[u8]) -> Part {
    Part { len: bytes.len(), kept: bytes.to_vec(), crc: 0 }
}

/// A recording as it is written.
fn written(act: impl FnOnce(&Recorder)) -> Vec<u8> {
    limited(u64::MAX, act)
}

/// The same, in as many bytes.
fn limited(bytes: u64, act: impl FnOnce(&Recorder)) -> Vec<u8> {
    let mut file = tempfile::tempfile().expect("a file");
    let recorder = Recorder::new(file.try_clone().expect("a file"), bytes).expect("a recorder");
    act(&recorder);
    let mut bytes = Vec::new();
    file.rewind().expect("the front");
    file.read_to_end(&mut bytes).expect("the bytes");
    bytes
}

fn header(name: &str, asks: bool, ticket: u64) -> Header {
    Header { call: number(name).expect("a function"), asks, ticket, ..Header::default() }
}

fn sample() -> Vec<u8> {
    written(|recorder| {
        recorder.order([control::VARIABLE, 1, 3, 0], b"FIFO");
        recorder.order([control::WINDOW, 0x2000_0000_0000, 4096, 0], &[]);
        let (one, two) = (recorder.lane(), recorder.lane());
        recorder.call(two, header("cuMemcpyHtoDAsync_v2", false, 2), [&[7; 1000], &[1, 2, 3]], (0, &[]));
        recorder.call(one, header("cuInit", true, 0), [&[0; 8], &[]], (0, &[]));
        recorder.call(one, header("bridge:image", false, 1), [&[5; 9000], &[]], (0, &[]));
        recorder.call(one, header("cuInit", true, 3), [&[1; 8], &[]], (1, &[9; 100]));
    })
}

#[test]
fn a_recording_is_read_as_it_was_written() {
    let recording = Recording::read(&sample()).expect("a recording");
    assert_eq!(recording.orders[0], ([control::VARIABLE, 1, 3, 0], b"FIFO".to_vec()));
    let tickets: Vec<_> = recording.calls.iter().map(|call| (call.lane, call.ticket, call.number)).collect();
    let [init, copy] = ["cuInit", "cuMemcpyHtoDAsync_v2"].map(|name| number(name).expect("a function"));
    assert_eq!(tickets, [(0, 0, init), (0, 1, own::IMAGE), (1, 2, copy), (0, 3, init)]);
    let [first, image, copied, last] = &recording.calls[..] else { panic!("four calls") };
    assert_eq!(first.answer, Some(Answer { code: 0, reply: all(&[]) }));
    assert_eq!((&image.payload, &image.answer), (&all(&[5; 9000]), &None));
    assert_eq!((copied.payload.len, &copied.payload.kept[..]), (1000, &[7; 512][..]));
    assert_eq!(copied.payload.crc, crc32fast::hash(&[7; 1000]));
    assert_eq!((copied.bulk.len, copied.bulk.kept.len()), (3, 0));
    let Answer { code, reply } = last.answer.as_ref().expect("an answer");
    assert_eq!((*code, reply.len, reply.kept.len()), (1, 100, 64));
}

#[test]
fn a_recording_ends_with_the_last_event_that_its_limit_has_room_for() {
    let calls = |count: u64| {
        move |recorder: &Recorder| {
            for ticket in 0..count {
                recorder.call(0, header("cuInit", true, ticket), [&[0; 8], &[]], (0, &[]));
            }
        }
    };
    for limit in [MAGIC.len() as u64, 40, 41, 100, 1000] {
        let bytes = limited(limit, calls(100));
        let whole =
            (0..100).map(|count| written(calls(count))).take_while(|whole| whole.len() as u64 <= limit);
        assert_eq!(Some(bytes), whole.last(), "{limit}");
    }
}

#[test]
fn a_recording_is_written_as_it_was_read() {
    let recording = Recording::read(&sample()).expect("a recording");
    assert_eq!(Recording::read(&recording.to_bytes(usize::MAX)), Ok(recording.clone()));
    let cut = Recording::read(&recording.to_bytes(100)).expect("a recording");
    let image = &cut.calls[1].payload;
    assert_eq!((image.len, &image.kept[..], image.crc), (9000, &[5; 100][..], crc32fast::hash(&[5; 9000])));
    // What is cut once more is of the same image.
    let again = Recording::read(&cut.to_bytes(10)).expect("a recording");
    assert_eq!((again.calls[1].payload.kept.len(), again.calls[1].payload.crc), (10, image.crc));
    assert_eq!(again.calls[2..], recording.calls[2..]);
}

#[test]
fn kernels_have_the_parameters_that_were_told() {
    let ask = |recorder: &Recorder, ticket, name: &str, payload: &[u64], reply: &[u64]| {
        let bytes = |words: &[u64]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>();
        recorder.call(0, header(name, true, ticket), [&bytes(payload), &[]], (0, &bytes(reply)));
    };
    let text = |name: &[u8; 8]| u64::from_ne_bytes(*name);
    let bytes = written(|recorder| {
        ask(recorder, 0, "cuLibraryGetKernel", &[1, 9, 3, text(b"add\0\0\0\0\0")], &[70]);
        ask(recorder, 1, "cuModuleGetFunction", &[1, 9, 4, text(b"fill\0\0\0\0")], &[71]);
        ask(recorder, 2, "cuKernelGetFunction", &[1, 70], &[72]);
        ask(recorder, 3, "bridge:layout", &[72], &[0, 8, 8, 4, 16, 8, 24, 8, 32, 8, 40, 8]);
        // Longer than what was sent.
        ask(recorder, 4, "cuLibraryGetKernel", &[1, 9, 999, 0], &[73]);
        ask(recorder, 5, "bridge:layout", &[99], &[0, 8]);
    });
    let kernels = Recording::read(&bytes).expect("a recording").kernels();
    let kernels: Vec<_> = kernels.into_iter().collect();
    let add = vec![(0, 8), (8, 4), (16, 8), (24, 8), (32, 8), (40, 8)];
    assert_eq!(kernels, [("add".to_owned(), add), ("fill".to_owned(), vec![])]);
}

#[test]
fn what_is_no_recording_is_told() {
    let check = |bytes: &[u8], what: &str| {
        let BadRecording { what: told, .. } = Recording::read(bytes).expect_err(what);
        assert_eq!(told, what);
    };
    let with = |event: &[u8]| [&MAGIC[..], event].concat();
    check(b"", "it ends within an event");
    check(b"something", "it is no recording of this form");
    check(&with(&[9]), "there is no such event");
    check(&with(&[0, 2, b'c', b'u']), "there is no such function");
    check(&with(&[1, 0, 0, 0]), "a function has no name");
    check(&with(&[1, 0xff, 0xff, 1]), "there are too many lanes");
    check(&with(&[2, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2]), "a number is too large");
    let named = |call: &[u8]| with(&[&[0, 6][..], b"cuInit", &[1], call].concat());
    check(&named(&[0, 0, 0, 2]), "a call has unknown flags");
    check(&named(&[0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 1]), "a part is too long");
    check(&named(&[0, 0, 0, 0, 1, 2]), "more is kept than there was");
    let call = [1, 0, 5, 0, 0, 0, 0, 0, 0];
    check(&with(&[&[0, 6][..], b"cuInit", &call, &call].concat()), "two calls have one ticket");
}

#[test]
fn what_is_cut_or_changed_breaks_nothing() {
    let sample = sample();
    let whole = Recording::read(&sample).expect("a recording");
    for len in MAGIC.len()..sample.len() {
        // What a worker that was killed leaves: fewer calls.
        let recording = Recording::read(&sample[..len]).expect("a recording");
        assert!(recording.calls.iter().all(|call| whole.calls.contains(call)), "{len}");
    }
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as usize
    };
    let (mut read, mut refused) = (0, 0);
    for _ in 0..20_000 {
        let mut bytes = sample.clone();
        for _ in 0..=random() % 4 {
            let at = random() % bytes.len();
            bytes[at] = random() as u8;
        }
        match Recording::read(&bytes) {
            Ok(recording) => {
                read += 1;
                let fits = |call: &Call| call.payload.len + call.bulk.len <= crate::wire::PAYLOAD;
                assert!(recording.calls.iter().all(fits));
            }
            Err(BadRecording { at, .. }) => {
                refused += 1;
                assert!(at <= bytes.len());
            }
        }
    }
    assert!(read > 100 && refused > 100, "{read} read, {refused} refused");
}
